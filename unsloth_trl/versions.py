"""The oldest versions of the libraries underneath that this package works with, and errors that name them."""

import importlib.metadata
import re


# as in pyproject.toml; a test compares them
MINIMUM = {
    "torch": "2.11",
    "transformers": "5.17",
    "trl": "1.16",
    "peft": "0.21",
}


def check_versions() -> None:
    """
    Compare the installed libraries with `MINIMUM`. Reads their metadata and imports none of them.

    Raises:
        ImportError: If one is missing or too old, naming it, the version found and what to do.
    """
    for name, minimum in MINIMUM.items():
        found = _installed(name)
        if found is None or _release(found) < _release(minimum):
            what = "it is not installed" if found is None else f"found {found}"
            raise ImportError(f'unsloth_trl needs {name}>={minimum}, {what}: pip install -U "{name}>={minimum}"')


def found_and_supported() -> str:
    """The versions found beside those supported, in one line; for an error about a name that a library lacks."""
    found = (f"{name} {_installed(name) or 'missing'} (>={minimum})" for name, minimum in MINIMUM.items())
    return f"found (supported): {', '.join(found)}"


def _release(version: str) -> tuple[int, ...]:
    # major and minor alone: a build made shortly before a release has what the release has
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
