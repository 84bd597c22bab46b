"""What kind of model a folder or a repository holds: whoever loads one with two kinds gets one of them unasked."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi

from .checkpoints import ADAPTER_FILES


MERGED_FOLDER = "merged_16bit"  # in a folder of GGUF files, the model that they were made of
# By kind, the files that make transformers, PEFT or llama.cpp take a folder for it.
FILES = {
    "adapter": ADAPTER_FILES,
    "merged": ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin"),
    "gguf": ("*.gguf",),
}
_NAMES = {"adapter": "an adapter", "merged": "whole weights", "gguf": "GGUF files"}


def kinds_among(files: Iterable[str]) -> dict[str, list[str]]:
    """Each kind that file names of one folder stand for, with these names."""
    files = sorted(files)
    found = {kind: [f for f in files if any(fnmatch(f, p) for p in patterns)] for kind, patterns in FILES.items()}
    return {kind: names for kind, names in found.items() if names}


def refuse_other_kinds(folder: str | Path, kind: str) -> None:
    """
    Args:
        folder (`str` or `Path`): Will be pushed; may not exist yet.
        kind (`str`): What is going to be in it: "adapter", "merged" or "gguf".

    Raises:
        ValueError: If it holds files of another kind, with their names.
    """
    folder = Path(folder)
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    _refuse(f"the folder {folder}", names, kind, "remove them, or use another folder")


def refuse_other_kinds_on_hub(repo_id: str, kind: str, token: str | None, revision: str | None = None) -> None:
    """
    Args:
        repo_id (`str`): A repository that exists.
        kind (`str`): What is going to be pushed to it.
        token (`str`, *optional*): Of the Hub.
        revision (`str`, *optional*): Branch that is pushed to.

    Raises:
        ValueError: If it holds files of another kind, with their names.
    """
    files = HfApi(token=token).list_repo_files(repo_id, revision=revision)
    _refuse(f"the repository {repo_id}", files, kind, "delete them there, or push to another repository")


def _refuse(where: str, files: Iterable[str], kind: str, advice: str) -> None:
    for other, names in kinds_among(files).items():
        if other != kind:
            raise ValueError(
                f"{where} holds {_NAMES[other]} ({', '.join(names)}) and is to get {_NAMES[kind]}: loading it would "
                f"take one of them without a word; {advice}"
            )
