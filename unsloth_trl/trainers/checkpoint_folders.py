"""Checkpoints on disk: which of them are complete, and how one gets its name only when it is."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checkpoint_files import find_damage


# Beside the checkpoints. Pushes of the output folder leave out names that begin with an underscore, and neither
# rotation nor `resume_from_checkpoint=True` looks into it.
ASIDE = "_incomplete"
_REPLACED = "replaced"
_PUT_ASIDE = "_interrupted-"
# what file systems say that have no rename of folders, or no fsync
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: the state of the Trainer is the last file of it."""
    return find_damage(checkpoint) is None


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders `checkpoint-N` of an output folder, by step."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def last_complete(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or `None`."""
    return next((path for path in reversed(list_checkpoints(folder)) if is_complete(path)), None)


def set_incomplete_aside(folder: Path) -> list[tuple[Path, str]]:
    """
    Rename checkpoints whose save was interrupted, so that they are neither resumed from nor counted.

    Args:
        folder (`Path`): The output folder.

    Returns:
        `list[tuple[Path, str]]`: Their new names, and what was wrong with each.
    """
    renamed = []
    for checkpoint in list_checkpoints(folder):
        if (damage := find_damage(checkpoint)) is not None:
            target = folder / f"{_PUT_ASIDE}{checkpoint.name}"
            _remove(target)
            _move(checkpoint, target)
            renamed.append((target, damage))
    return renamed


def clear_aside(folder: Path) -> list[str]:
    """
    Remove what an interrupted save has left. A checkpoint that was about to be replaced gets its name back.

    Args:
        folder (`Path`): The output folder.

    Returns:
        `list[str]`: Names of the checkpoints that were incomplete.
    """
    aside = folder / ASIDE
    if not aside.is_dir():
        return []
    for replaced in list_checkpoints(aside / _REPLACED):
        if not (folder / replaced.name).exists():
            _move(replaced, folder / replaced.name)
    incomplete = [path.name for path in list_checkpoints(aside)]
    _remove(aside)
    return incomplete


def put_in_place(checkpoint: Path, folder: Path) -> Path:
    """
    Give a complete checkpoint its name: what was written is on the disk before, and the rename is atomic.

    Args:
        checkpoint (`Path`): The folder in `ASIDE`.
        folder (`Path`): The output folder.

    Returns:
        `Path`: Its new place. A folder of that name is replaced.
    """
    _flush([*checkpoint.rglob("*"), checkpoint])
    target = folder / checkpoint.name
    if target.exists():
        replaced = checkpoint.parent / _REPLACED
        replaced.mkdir(exist_ok=True)
        _move(target, replaced / target.name)
    _move(checkpoint, target)
    _flush([folder])
    return target


def _move(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        # mounted object stores: the file that says that a checkpoint is complete comes last
        state = source / TRAINER_STATE_NAME
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(TRAINER_STATE_NAME))
        if state.exists():
            shutil.copy2(state, target)
        _remove(source)


def _remove(folder: Path) -> None:
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:  # another process of this run is at it too
            continue


def _flush(paths: list[Path]) -> None:
    """Wait until files and folders are on the disk; a disk that is full may say so only now."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    for path in paths:
        with _opened(path) as descriptor:
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
