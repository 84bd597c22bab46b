"""What a model's name can be."""

from pathlib import Path


def is_path(name: str) -> bool:
    """Whether a name that is neither a folder nor a file was meant as one, and is none on the Hub ("owner/model")."""
    return Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1
