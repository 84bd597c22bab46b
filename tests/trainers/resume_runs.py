"""Runs that are killed in another process, and what they have to come to once resumed."""

import multiprocessing
import os
import random
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

import unsloth_trl
from tests.numerics import make_trainer, snapshot
from tests.trainers.grpo_runs import make_grpo


ROOT = Path(__file__).parents[2]
TIMINGS = ("runtime", "per_second", "step_time", "flos")
MOMENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end", "on_log")


def make(task: str, folder: str | Path, **case: Any):
    """The trainer of a case; a checkpoint after every step unless it says otherwise."""
    saving = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    if task == "sft":
        return make_trainer(unsloth_trl, **(saving | case))
    return make_grpo(unsloth_trl, **(saving | case))


def log_of(trainer) -> list[dict[str, Any]]:
    """All that was logged, without timings; the last line of `train` is of one call, not of the run."""
    return [
        {key: value for key, value in entry.items() if not key.endswith(TIMINGS)}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]


def train_whole(task: str, folder: Path, **case: Any) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Logs and trained weights of a run that nothing interrupts."""
    trainer = make(task, folder, **case)
    before = snapshot(trainer.model)
    trainer.train()
    after = snapshot(trainer.model)
    assert sum(not torch.equal(after[name], before[name]) for name in after) >= 0.9 * len(after)
    return log_of(trainer), after


def resume(task: str, folder: Path, **case: Any):
    """A new trainer, in this process, that goes on from the last checkpoint to the end."""
    trainer = make(task, folder, **case)
    trainer.train(resume_from_checkpoint=True)
    return trainer


def assert_same(trainer, whole: tuple[list[dict], dict[str, torch.Tensor]]) -> None:
    """To the bit: logs of all steps (those before the checkpoint come from it) and weights."""
    logs, weights = whole
    assert log_of(trainer) == logs
    assert any(entry["grad_norm"] > 0 for entry in logs)
    after = snapshot(trainer.model)
    assert after.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(after[name], value), name


class StopAt(TrainerCallback):
    """Tells the other process that the moment has come, and waits to be killed."""

    def __init__(self, step: int, moment: str, connection):
        self.step, self.connection = step, connection
        setattr(self, moment, self._stop)

    def _stop(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            wait_for_the_end(self.connection, state.global_step)


def wait_for_the_end(connection, message: Any) -> None:
    connection.send(message)
    time.sleep(600)


def draw_moment(seed: int, last: int) -> tuple[int, str]:
    """A step with at least one checkpoint before it, and where in it."""
    rng = random.Random(seed)
    return rng.randrange(2, last - 1), rng.choice(MOMENTS)


def train_until(connection, step: int, moment: str, task: str, folder: str, case: dict[str, Any]) -> None:
    trainer = make(task, folder, **case)
    trainer.add_callback(StopAt(step, moment, connection))
    trainer.train()


class Killer:
    """Starts functions of this file in processes that have imported everything already, and kills them."""

    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.trainers.resume_runs", "unsloth_trl.trainers.grpo"])
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with mock.patch.dict(os.environ, PYTHONPATH=path):
            forkserver.ensure_running()

    def run(self, function, *arguments: Any) -> Any:
        """
        Start a function, wait for what it sends, and kill it with SIGKILL.

        Returns:
            What it sent.
        """
        mine, theirs = self.context.Pipe()
        process = self.context.Process(target=function, args=(theirs, *arguments))
        process.start()
        theirs.close()
        try:
            assert mine.poll(300), "the process did not come that far"
            message = mine.recv()  # EOFError: it ended before
        finally:
            process.kill()
            process.join()
        assert process.exitcode == -9
        return message
