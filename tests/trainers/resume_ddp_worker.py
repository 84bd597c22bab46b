"""One rank of `test_resume_ddp.py`: runs in one piece and in two, and one that one rank interrupts."""

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from tests.numerics import snapshot
from tests.trainers.ranks import leave
from tests.trainers.resume_runs import log_of, make


class PressOnOneRank(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and dist.get_rank() == 1:
            # twice at once: from the terminal and from the launcher
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)


def run(trainer, **arguments):
    """The logs of process 0, and the weights of both."""
    trainer.train(**arguments)
    return log_of(trainer), {name.removeprefix("module."): value for name, value in snapshot(trainer.model).items()}


def main(cases_file: str, folder: str) -> None:
    results = {}
    for name, case in torch.load(cases_file, weights_only=False).items():
        until = case.pop("until")
        case |= {"ddp_backend": "gloo"}
        own = Path(folder) / name
        results[name, "whole"] = run(make(folder=own / "whole", **case))
        run(make(folder=own / "parts", **(case | {"max_steps": until})))
        trainer = make(folder=own / "parts", **case)
        assert trainer.accelerator.num_processes == 2
        results[name, "resumed"] = run(trainer, resume_from_checkpoint=True)
        interrupted = make(folder=own / "interrupted", **(case | {"save_on_interrupt": True, "save_strategy": "no"}))
        interrupted.add_callback(PressOnOneRank())
        try:
            interrupted.train()
        except KeyboardInterrupt as stop:
            results[name, "stopped"] = (str(stop), interrupted.state.global_step)
        results[name, "after"] = run(make(folder=own / "interrupted", **case), resume_from_checkpoint=True)
    torch.save(results, Path(folder) / f"rank{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
