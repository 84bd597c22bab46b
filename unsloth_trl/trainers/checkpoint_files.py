"""The files of a checkpoint: which of them were cut off, and which are missing that a run needs to go on."""

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from transformers.trainer import (
    OPTIMIZER_NAME,
    OPTIMIZER_NAME_BIN,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from .resuming import PROGRESS_NAME


# the mark of transformers' `enable_jit_checkpoint`
_MARK = "checkpoint-is-incomplete.txt"
_OPTIMIZER, _RNG = OPTIMIZER_NAME.partition(".")[0], "rng_state"
_INDEXES = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
_ADAPTERS = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
_OF_TORCH = (
    "pytorch_model*.bin",
    ADAPTER_WEIGHTS_NAME,
    "completions_*.pt",
    OPTIMIZER_NAME,
    OPTIMIZER_NAME_BIN,
    SCHEDULER_NAME,
    "scaler.pt",
    f"{_RNG}*.pth",
)
# of DeepSpeed, which has all in folders of its own; of FSDP
_OF_DEEPSPEED, _OF_FSDP = "global_step*", "pytorch_model_fsdp*"


def find_damage(checkpoint: Path) -> str | None:
    """
    What of a checkpoint was not written to its end. Only beginnings and ends of files are read.

    Args:
        checkpoint (`Path`): The folder.

    Returns:
        `str` or `None`: The rest of a sentence about the folder.
    """
    if (checkpoint / _MARK).exists():
        return f"is marked by {_MARK}"
    if not _is_json(checkpoint / TRAINER_STATE_NAME):
        return f"has no complete {TRAINER_STATE_NAME}"
    for path in _some(checkpoint, "*.safetensors"):
        if not _is_whole_safetensors(path):
            return f"has only a part of {path.relative_to(checkpoint)}"
    for pattern in _OF_TORCH:
        for path in _some(checkpoint, pattern):
            if not _is_whole_torch(path):
                return f"has only a part of {path.relative_to(checkpoint)}"
    for name in (PROGRESS_NAME, *_INDEXES):
        if (checkpoint / name).is_file() and not _is_json(checkpoint / name):
            return f"has only a part of {name}"
    return None


def find_missing(checkpoint: Path) -> list[str]:
    """
    What a run needs to go on from an undamaged checkpoint and does not find in it, by the names of files.

    The Trainer begins with a new optimizer, schedule and random state where these are not there, and says nothing.

    Args:
        checkpoint (`Path`): The folder.

    Returns:
        `list[str]`: Names; `model.safetensors` stands for weights of any kind.
    """
    return [*_missing_weights(checkpoint), *find_missing_state(checkpoint)]


def find_missing_state(checkpoint: Path) -> list[str]:
    """As `find_missing`, of what `save_only_model=True` leaves out: optimizer, schedule and random state."""
    found = [path.name for path in checkpoint.iterdir()]
    missing = [] if any(name.startswith(_RNG) for name in found) else [f"{_RNG}.pth"]
    if any(checkpoint.glob(_OF_DEEPSPEED)):
        return missing
    # one file, one for each process, or a folder
    if not any(_OPTIMIZER in name for name in found):
        missing.append(OPTIMIZER_NAME)
    if SCHEDULER_NAME not in found:
        missing.append(SCHEDULER_NAME)
    return sorted(missing)


def _missing_weights(checkpoint: Path) -> list[str]:
    missing = []
    for name in _INDEXES:
        if (checkpoint / name).is_file():
            shards = set(json.loads((checkpoint / name).read_text(encoding="utf-8"))["weight_map"].values())
            missing += sorted(shard for shard in shards if not (checkpoint / shard).is_file())
    found = _some(checkpoint, *_ADAPTERS, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, *_INDEXES, _OF_FSDP, _OF_DEEPSPEED)
    return missing if any(found) else [*missing, SAFE_WEIGHTS_NAME]


def _some(checkpoint: Path, *patterns: str) -> Iterator[Path]:
    """Files in the folder, and in folders of further adapters in it."""
    for pattern in patterns:
        yield from checkpoint.glob(pattern)
        yield from checkpoint.glob(f"*/{pattern}")


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _is_whole_safetensors(path: Path) -> bool:
    """The header is at the beginning, and says how long the file is."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= size else None
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, AttributeError, KeyError, TypeError):
        return False
    return size == 8 + length + max(ends, default=0)


def _is_whole_torch(path: Path) -> bool:
    """What `torch.save` writes is a zip file, whose directory is at the end; before 1.6 it was a bare pickle."""
    if path.is_dir():  # sharded, in files of its own
        return True
    with open(path, "rb") as file:
        first = file.read(1)
    return first == b"\x80" or (os.path.getsize(path) > 0 and zipfile.is_zipfile(path))
