"""Two GPUs of one host, DDP and FSDP2 through `accelerate launch`: one GPU's losses, and a resumed run's."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.trainers.ranks import ROOT, free_port


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

KINDS = {
    "one": (1, []),
    "ddp": (2, ["--multi_gpu"]),
    "fsdp2": (
        2,
        [
            "--use_fsdp",
            "--fsdp_version=2",
            "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
            "--fsdp_state_dict_type=FULL_STATE_DICT",
        ],
    ),
}


def launch(task, kind, folder, until=6, resume=0):
    processes, options = KINDS[kind]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines=1", "--dynamo_backend=no"]
    command += [f"--num_processes={processes}", "--mixed_precision=bf16", f"--main_process_port={free_port()}"]
    command += [*options, str(ROOT / "tests" / "gpu" / "two_gpus_worker.py"), task, folder, str(until), str(resume)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((Path(folder) / "result.json").read_text())


@functools.cache
def run(task, kind):
    return launch(task, kind, tempfile.mkdtemp())


def noise(task):
    """What two orders of a sum in bf16 make of a logged number: some roundings, more in gradients and later steps."""
    return {"loss": 2e-2, "grad_norm": 5e-2} if task == "sft" else {"loss": 5e-2, "grad_norm": 1e-1}


def assert_close(logs, expected, task):
    assert [entry["step"] for entry in logs] == [entry["step"] for entry in expected]
    assert len(logs) > 1
    for found, right in zip(logs, expected, strict=True):
        for key, tolerance in noise(task).items():
            assert found[key] == pytest.approx(right[key], rel=tolerance, abs=1e-2), (key, found["step"])
        assert found["num_tokens"] == right["num_tokens"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_losses_are_those_of_one(task, kind):
    one, two = run(task, "one"), run(task, kind)
    assert two["kind"] == {"ddp": "DistributedType.MULTI_GPU", "fsdp2": "DistributedType.FSDP"}[kind]
    assert (two["sharded"] > 0) == (kind == "fsdp2")
    losses = [entry["loss"] for entry in one["logs"]]
    assert max(losses) - min(losses) > 0.05, "nothing was learnt: every run would be the same"
    assert_close(two["logs"], one["logs"], task)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_a_resumed_run_goes_on(task, kind, tmp_path):
    stopped = launch(task, kind, str(tmp_path), until=4)  # one step after the checkpoint
    resumed = launch(task, kind, str(tmp_path), resume=1)
    assert (stopped["made"], resumed["made"]) == (4, 3)  # a run from the start has the same losses
    assert_close(resumed["logs"][3:], run(task, kind)["logs"][3:], task)
