"""What every measured row says about where it comes from."""

import datetime
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch


PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate")
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF",)  # environment variables that change what is measured
OWN = {"trl_liger": ("liger-kernel",), "unsloth": ("unsloth",)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    known = os.environ.get("BENCH_COMMIT")  # where git is not installed
    if known:
        return known
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def _settings() -> list[str]:
    return [f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)]


def provenance(mode: str, script: str) -> dict[str, Any]:
    """GPU, commit, date, versions and command of the row that `script` measures in `mode`."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: _version(name) for name in (*PACKAGES, *OWN.get(mode, ()))},
        "command": " ".join([*_settings(), "python", f"tests/benchmarks/{script}", *sys.argv[1:]]),
    }


def timed(run: Callable[[], Any], head_start: int = 20_000_000) -> tuple[float, float, Any]:
    """
    Milliseconds of `run` on the device, GiB above what was there before, and what it returned.

    The device first waits for `head_start` cycles, so that the host gets ahead and launches are not what is timed.
    """
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(head_start)
    start.record()
    found = run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), (torch.cuda.max_memory_allocated() - before) / 2**30, found
