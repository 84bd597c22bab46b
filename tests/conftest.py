"""What holds for every test: one thread per worker, quiet libraries, a working directory that nothing writes to."""

import gc
import os


# before the libraries read them; subprocesses of tests inherit them
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.smollm2 import smollm2  # noqa: E402, F401


def pytest_addoption(parser):
    parser.addoption(
        "--require-smollm2", action="store_true", help="fail instead of skipping where SmolLM2 cannot be had"
    )


def pytest_configure(config):
    torch.set_num_threads(1)


def leave_to_itself():
    """accelerate collects garbage for every trainer; walking through all that stays is most of that time."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    leave_to_itself()


@pytest.hookimpl(trylast=True)  # when the module's fixtures are gone
def pytest_runtest_teardown(item, nextitem):
    """What a module of tests leaves, as compiled graphs and imports, is no garbage of the next one's."""
    if nextitem is None or nextitem.path != item.path:
        leave_to_itself()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(tryfirst=True)  # before the fixtures of its module, too
def pytest_runtest_setup(item):
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def empty_cwd(tmp_path_factory, monkeypatch):
    """Run the test in an empty folder, and fail if something is in it afterwards: output belongs in `output_dir`."""
    folder: Path = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(folder)
    yield folder
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert not left, f"the test wrote to the working directory: {', '.join(left)}"
