import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from unsloth_trl import versions


ROOT = Path(__file__).parents[2]


@pytest.fixture
def install(monkeypatch):
    """Pretend that other versions are installed; `None` is a library that is not there."""

    def pretend(**found):
        real = importlib.metadata.version

        def version(name):
            if name not in found:
                return real(name)
            if found[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_installed_versions_are_supported():
    versions.check_versions()


def test_minimums_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [requirement.split(",")[0] for requirement in project["dependencies"]]
    for name, minimum in versions.MINIMUM.items():
        assert f"{name}>={minimum}" in required


@pytest.mark.parametrize("name", versions.MINIMUM)
def test_too_old_is_named_with_both_versions(install, name):
    install(**{name: "1.10.0" if name != "peft" else "0.20.9"})
    with pytest.raises(ImportError) as error:
        versions.check_versions()
    found, minimum = importlib.metadata.version(name), versions.MINIMUM[name]
    assert str(error.value) == (
        f'unsloth_trl needs {name}>={minimum}, found {found}: pip install -U "{name}>={minimum}"'
    )


def test_missing_library_is_named(install):
    install(peft=None)
    with pytest.raises(ImportError, match=r"needs peft>=0\.21, it is not installed: pip install -U"):
        versions.check_versions()


@pytest.mark.parametrize(
    "found", ["1.16.0", "1.16", "1.16.0.dev0", "1.16.0rc1", "1.100.2", "2.0.0", "1.17.0a0+git1a2b3"]
)
def test_new_enough(install, found):
    install(trl=found)
    versions.check_versions()


@pytest.mark.parametrize("found", ["1.9.3", "1.15.9+cpu", "0.29"])
def test_compared_as_numbers(install, found):
    install(trl=found)
    with pytest.raises(ImportError, match="needs trl"):
        versions.check_versions()


def test_found_and_supported(install):
    install(torch="2.13.0+cpu", transformers="5.24.0", trl="1.16.0", peft=None)
    assert versions.found_and_supported() == (
        "found (supported): torch 2.13.0+cpu (>=2.11), transformers 5.24.0 (>=5.17), trl 1.16.0 (>=1.16), "
        "peft missing (>=0.21)"
    )


def test_the_quick_part_runs_on_the_oldest():
    """What `.ci/versions oldest` installs is what is required, and the files that it runs are there."""
    lines = (ROOT / ".ci" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pinned.keys() == {"transformers", "trl", "peft"}
    for name, version in pinned.items():
        assert version == f"{versions.MINIMUM[name]}.0"
    files = (ROOT / ".ci" / "quick.txt").read_text(encoding="utf-8").splitlines()
    assert len(files) == len(set(files)) > 10
    assert [name for name in files if not (ROOT / name).is_file()] == []
