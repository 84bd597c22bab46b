"""The wheel has everything, wherever it is built: from a checkout, without symbolic links, from the sdist."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from unsloth_trl import __version__


ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", "unsloth_trl", "patches", "tests")
PACKED = (*FOLDERS, "README.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", ".gitignore")


def build(kind: str, source: Path, folder: Path) -> Path:
    """The wheel or sdist that the build backend makes of `source`, which is not written to."""
    code = f"import sys; from hatchling.build import build_{kind} as build; print(build(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is in the repository, its link as a link."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in PACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    assert (folder / "unsloth_trl" / "patches").is_symlink()
    return folder


@pytest.fixture(scope="module")
def linkless_checkout(checkout, tmp_path_factory):
    """What git makes with core.symlinks=false, as on Windows: a text file that says where the link would lead."""
    folder = tmp_path_factory.mktemp("linkless") / "checkout"
    shutil.copytree(checkout, folder, symlinks=True)
    link = folder / "unsloth_trl" / "patches"
    target = os.readlink(link)
    link.unlink()
    link.write_text(target)
    return folder


@pytest.fixture(scope="module")
def unpacked_sdist(checkout, tmp_path_factory):
    sdist = build("sdist", checkout, tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder)  # tarfile's filter= is not in every Python 3.11
    return folder / f"unsloth_trl-{__version__}"


@pytest.fixture(scope="module", params=["checkout", "linkless_checkout", "unpacked_sdist"])
def wheel(request, tmp_path_factory):
    return build("wheel", request.getfixturevalue(request.param), tmp_path_factory.mktemp("wheel"))


def sources(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py") if "__pycache__" not in path.parts}


def test_wheel_has_each_source_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    expected = {f"unsloth_trl/{name}" for name in sources(ROOT / "unsloth_trl") if not name.startswith("patches/")}
    expected |= {f"unsloth_trl/patches/{name}" for name in sources(ROOT / "patches")}
    assert sorted(name for name in names if name.endswith(".py")) == sorted(expected)
    assert "unsloth_trl/patches/layout.py" in names and "unsloth_trl/py.typed" in names
    templates = {f"unsloth_trl/hub/templates/{path.name}" for path in (ROOT / "unsloth_trl/hub/templates").iterdir()}
    assert len(templates) > 1 and templates <= set(names)
    assert {name.split("/")[0] for name in names} == {"unsloth_trl", f"unsloth_trl-{__version__}.dist-info"}


def test_wheel_metadata(wheel):
    info = f"unsloth_trl-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        assert "unsloth-trl = unsloth_trl.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert wheel.name == f"unsloth_trl-{__version__}-py3-none-any.whl"
    assert (metadata["Name"], metadata["Version"]) == ("unsloth_trl", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"demo", "test", "dev", "quant", "gguf"} <= set(metadata.get_all("Provides-Extra"))


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run_unpacked(site: Path, code: str) -> list[str]:
    """What code prints, line by line, that has the package from there."""
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=site.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_unpacked_wheel_imports(wheel, tmp_path):
    site = unpack(wheel, tmp_path)
    code = (
        "import unsloth_trl\n"
        "from unsloth_trl import PackedLayout, PatchConfig\n"
        "import unsloth_trl.patches.layout as layout\n"
        "assert PackedLayout([3, 2]).cu_seqlens.tolist() == [0, 3, 5]\n"
        "print(unsloth_trl.__file__)\nprint(layout.__file__)"
    )
    package = site / "unsloth_trl"
    assert run_unpacked(site, code) == [str(package / "__init__.py"), str(package / "patches" / "layout.py")]


def test_all_of_the_wheel_imports_outside_of_the_checkout(checkout, tmp_path):
    """Every module, with warnings of the package itself as errors."""
    site = unpack(build("wheel", checkout, tmp_path), tmp_path)
    code = (
        "import warnings\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('error')\n"
        "    import unsloth_trl\n"
        "import importlib, pkgutil\n"
        "for name in unsloth_trl.__all__:\n"
        "    getattr(unsloth_trl, name)\n"
        "found = [m.name for m in pkgutil.walk_packages(unsloth_trl.__path__, 'unsloth_trl.')]\n"
        "for name in found:\n"
        "    assert importlib.import_module(name).__file__.startswith(unsloth_trl.__path__[0]), name\n"
        "print(unsloth_trl.__file__)\nprint(*found)"
    )
    where, found = run_unpacked(site, code)[-2:]
    assert where == str(site / "unsloth_trl" / "__init__.py")
    assert {"unsloth_trl.hub.merge", "unsloth_trl.trainers.saving", "unsloth_trl.patches.moe.op"} <= set(found.split())


def test_sdist_has_what_its_tests_need(unpacked_sdist):
    for name in ("patches/layout.py", "unsloth_trl/py.typed", "tests/conftest.py", ".ci/oldest.txt", "README.md"):
        assert (unpacked_sdist / name).is_file(), name
