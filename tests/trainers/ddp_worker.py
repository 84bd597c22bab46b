"""One rank of `test_ddp.py`: trains each case and saves its logs and updates. Started by torchrun, not by pytest."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import trl

import unsloth_trl
from tests.numerics import run_sft
from tests.trainers.grpo_runs import run_oracle, run_ours
from tests.trainers.ranks import leave
from unsloth_trl.patches.checkpointing import offload, settings


RUNS = {
    ("sft", "trl"): lambda **case: run_sft(trl, **case),
    ("sft", "unsloth_trl"): lambda **case: run_sft(unsloth_trl, **case),
    ("grpo", "trl"): lambda model_type, **case: run_oracle(model_type, **case),
    ("grpo", "unsloth_trl"): lambda model_type, **case: run_ours(model_type, **case),
}


def main(cases_file: str, folder: str) -> None:
    offload.MIN_BYTES, settings.ON_DEVICE = 1, 0  # everything that can leaves
    results = {}
    for name, case in torch.load(cases_file, weights_only=False).items():
        train = RUNS[case.pop("task", "sft"), case.pop("library")]
        run = train(ddp_backend="gloo", output_dir=str(Path(folder) / name), **case)
        assert run.trainer.accelerator.num_processes == 2
        updates = {key.removeprefix("module."): value for key, value in run.updates.items()}
        results[name] = (run.logs, updates)
    torch.save(results, Path(folder) / f"rank{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
