"""Folders with models in them: what kind they hold, where a base model lies, and replacing one in a single step."""

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_WEIGHTS
from peft.utils import WEIGHTS_NAME as ADAPTER_WEIGHTS_BIN
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_BIN)
# what would be read instead of new weights, or together with them
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "*.bin.index.json")
_MARK = ".saving-"
_SPARE = 64 * 2**20  # bytes for tokenizer, configuration and file system


def is_another_process() -> bool:
    """Whether this is a process of a run whose main one saves and pushes."""
    return (
        torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() != 0
    )


def adapter_files(folder: str | Path) -> list[str]:
    """The names of an adapter's files in `folder`, those of PEFT."""
    return [name for name in ADAPTER_FILES if (Path(folder) / name).is_file()]


def weight_files(folder: str | Path) -> list[str]:
    """The names of a whole model's weights and indexes in `folder`, sorted; none of an adapter."""
    found = {path.name for pattern in _WEIGHTS for path in Path(folder).glob(pattern) if path.is_file()}
    return sorted(found - set(ADAPTER_FILES))


def check_one_kind(folder: str | Path) -> None:
    """
    Refuse a folder that holds an adapter and a whole model, of which loaders take one without asking.

    Args:
        folder (`str` or `Path`): Folder to load from.

    Raises:
        ValueError: Naming the files of both kinds and what to remove.
    """
    adapter, whole = adapter_files(folder), weight_files(folder)
    if adapter and whole:
        raise ValueError(
            f"{folder} holds an adapter ({', '.join(adapter)}) and a whole model ({', '.join(whole[:3])}): remove "
            f"{' and '.join(adapter)} to load the whole model, or {' and '.join(whole[:3])} and config.json to load "
            "the adapter"
        )


def local_folder(name_or_path: str | None) -> Path | None:
    """
    The folder of a model, without asking the Hub.

    Args:
        name_or_path (`str`, *optional*): A folder, or a name on the Hub that may be in the local cache.

    Returns:
        `Path` or `None`: The folder or the snapshot in the cache; `None` if there is neither.
    """
    if not name_or_path:
        return None
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    try:
        config = try_to_load_from_cache(name_or_path, "config.json")
    except ValueError:  # a path that is not there is no name of a repository
        return None
    return Path(config).parent if isinstance(config, str) else None


def check_target(target: Path, bases: list[Path], save_method: str) -> None:
    """
    Refuse a folder where saving would destroy or mix up something.

    Args:
        target (`Path`): Where to save, resolved.
        bases (`list[Path]`): Folders of the model that was trained.
        save_method (`str`): `"lora"`, or one that writes a whole model.

    Raises:
        ValueError: If it is a base's own folder, holds the other kind of model, or cannot be replaced.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"save_directory={str(target)!r} is a file: name a folder")
    if (file := next((path for path in target.parents if path.is_file()), None)) is not None:
        raise ValueError(f"save_directory={str(target)!r}: {file} is a file: name another folder")
    for base in bases:
        if target == base.resolve():
            raise ValueError(
                f"save_directory={str(target)!r} is the folder of the base model, which would be lost: name another "
                "folder"
            )
    if target == Path.cwd().resolve() or target.is_mount() or target == target.parent:
        raise ValueError(
            f"save_directory={str(target)!r} is the working directory or a mount point, which cannot be replaced in "
            "one step: name a folder in it"
        )
    if save_method == "lora" and (found := weight_files(target)):
        raise ValueError(
            f"save_directory={str(target)!r} holds a whole model, and loaders would take one of the two: name another "
            f"folder, or remove {', '.join(found[:4])} first"
        )
    if save_method != "lora" and (found := adapter_files(target)):
        raise ValueError(
            f"save_directory={str(target)!r} holds an adapter, and loaders would take one of the two: name another "
            f"folder, or remove {', '.join(found)} first"
        )


def check_disk(target: Path, num_bytes: int) -> None:
    """
    Refuse to start what will not fit.

    Args:
        target (`Path`): Where to save; it need not exist.
        num_bytes (`int`): Of all files. What is there already goes only after the new files are complete.

    Raises:
        OSError: With what is needed and what is free.
    """
    place = existing_part(target.parent)
    free, needed = shutil.disk_usage(place).free, num_bytes + _SPARE
    if free >= needed:
        return
    left = [path.name for path in target.parent.glob(f".{target.name}{_MARK}*")] if target.parent.is_dir() else []
    more = f" Left over from a save that was killed, and safe to remove: {', '.join(left)}." if left else ""
    raise OSError(
        f"not enough disk for save_directory={str(target)!r}: {needed / 2**30:.2f} GiB are needed, {free / 2**30:.2f} "
        f"GiB are free in {place}. Nothing was written; free some space or name a folder on another disk.{more}"
    )


def existing_part(path: Path) -> Path:
    """`path`, or the closest of the folders that it is to be in that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


@contextlib.contextmanager
def taking_folders_back(folder: Path) -> Iterator[None]:
    """What is made of a folder, and of those that it is in, goes again if that fails before something is in it."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in made:  # innermost first
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                path.rmdir()
        raise


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """
    A folder beside `target` to write to, which takes the place of `target` at the end.

    What fails or is interrupted before that leaves `target` as it was, and no new folder. Weights, indexes and files
    of the same name that `target` had are gone afterwards; all else in it, checkpoints for one, stays.

    Args:
        target (`Path`): Where the files belong in the end, resolved.

    Yields:
        `Path`: An empty folder.
    """
    mark = uuid.uuid4().hex[:8]
    fresh, old = (target.with_name(f".{target.name}{_MARK}{mark}{end}") for end in ("", "-old"))
    with taking_folders_back(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.mkdir()  # with the user's own permissions, unlike a folder of tempfile
            yield fresh
            _swap(target, fresh, old)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise


def _swap(target: Path, fresh: Path, old: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    gone = {*weight_files(target), *(path.name for path in fresh.iterdir())}
    if gone.intersection(ADAPTER_FILES):
        gone.update(ADAPTER_FILES)  # weights in another format
    kept = [path.name for path in target.iterdir() if path.name not in gone]
    target.rename(old)
    try:
        fresh.rename(target)
    except BaseException:
        old.rename(target)
        raise
    for name in kept:
        (old / name).rename(target / name)
    shutil.rmtree(old)


class Checkpoint:
    """
    The tensors of a model's folder, read one by one.

    Args:
        folder (`str` or `Path`): With `model.safetensors`, or its shards and their index.

    Raises:
        ValueError: If there are none.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = self.folder / SAFE_WEIGHTS_INDEX_NAME
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            files = [SAFE_WEIGHTS_NAME]
        if missing := [name for name in files if not (self.folder / name).is_file()]:
            raise ValueError(f"{self.folder} has no {missing[0]}: a checkpoint in safetensors is needed")
        self._file = {}
        for name in files:
            with safe_open(self.folder / name, framework="pt") as file:
                self._file |= dict.fromkeys(file.keys(), name)

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the CPU."""
        with safe_open(self.folder / self._file[name], framework="pt") as file:
            return file.get_tensor(name)
