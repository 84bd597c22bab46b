"""The folder that a demo writes to."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from unsloth_trl.hub.checkpoints import adapter_files, taking_folders_back


class DemoError(RuntimeError):
    """The demo cannot go on; the message names the option and says what to change."""


@contextlib.contextmanager
def output_folder(output_dir: str | None) -> Iterator[Path]:
    """
    The folder to write to, made and tried out before anything is trained. What was made is taken away again if the
    run fails, or is stopped, before something is in it.

    Args:
        output_dir (`str`, *optional*): Its path. By default the first of `unsloth_trl_demo`, `unsloth_trl_demo-2`, ...
            that is free.

    Raises:
        DemoError: If it holds an adapter, or cannot be written.
    """
    folder = _choose(output_dir)
    with taking_folders_back(folder):
        _try_out(folder)
        yield folder


def _choose(output_dir: str | None) -> Path:
    if output_dir is None:
        numbers = iter(range(2, 10_000))
        folder = Path("unsloth_trl_demo")
        while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            folder = Path(f"unsloth_trl_demo-{next(numbers)}")
    else:
        folder = Path(output_dir)
    if present := adapter_files(folder):
        raise DemoError(
            f"--output_dir {folder} holds the adapter of another run ({present[0]}); pass another folder or delete it"
        )
    return folder


def _try_out(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DemoError(f"--output_dir {folder} cannot be written ({error}); pass a folder that can") from error
