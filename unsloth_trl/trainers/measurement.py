"""Speed and memory of a run, as its model card states them."""

import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback


WARM_UP = 12  # steps, in which layers are compiled and graphs captured


@dataclass
class Measured:
    """
    What was measured in one call of `train`.

    Args:
        tokens (`int`): Tokens of the measured steps, of all processes.
        seconds (`float`): Their wall time, without evaluations and checkpoints.
        steps (`int`): How many steps that were.
        warm_up (`int`): Steps before them that were not measured.
        peak_memory (`int`, *optional*): Most bytes of device memory that tensors of this process had; `None` without
            a device.
        peak_is_earlier (`bool`): Whether the peak may have been before this call, so that the run's is at most that.
        device (`str`, *optional*): Name of the device.
        num_processes (`int`): Processes that trained together.
    """

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    warm_up: int = 0
    peak_memory: int | None = None
    peak_is_earlier: bool = False
    device: str | None = None
    num_processes: int = 1

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all processes a second, or `None` if no step was measured."""
        return self.tokens / self.seconds if self.steps and self.tokens and self.seconds > 0 else None

    def lines(self, what: str) -> list[str]:
        """
        Args:
            what (`str`): Which tokens are counted.

        Returns:
            `list[str]`: One sentence for each number that was measured.
        """
        made = []
        where = self.device or "CPU"
        where += f", {self.num_processes} processes" if self.num_processes > 1 else ""
        if (speed := self.tokens_per_second) is not None:
            steps = f"{self.steps} step{'' if self.steps == 1 else 's'} after {self.warm_up} to warm up"
            made.append(
                f"{speed:,.0f} tokens a second on {where}: {what}, over {steps}, without evaluations and checkpoints"
            )
        if self.peak_memory is not None:
            gib = f"{self.peak_memory / 2**30:.2f} GiB"
            rest = "in this process, before this run or in it" if self.peak_is_earlier else "allocated"
            made.append(f"peak device memory{' at most' if self.peak_is_earlier else ''}: {gib} {rest}")
        return made


@dataclass(frozen=True)
class _Mark:
    seconds: float
    tokens: int
    steps: int


class RunMeasurement(TrainerCallback):
    """
    Times the stretches between two log lines, where the host waits for the device anyway.

    A stretch with an evaluation or a checkpoint in it is dropped, and so are the first steps.

    Args:
        trainer: The trainer, of which no reference is kept that would hold it in memory. `_tokens_trained()` gives the
            tokens so far, and waits for the device.
        cycle (`int`, *optional*, defaults to 1): Steps after which the work repeats: a stretch has whole cycles only.
    """

    def __init__(self, trainer: Any, cycle: int = 1):
        self.trainer = weakref.ref(trainer)
        self.cycle = cycle
        self.measured = Measured()
        self.steps = 0
        self._mark: _Mark | None = None
        self._peak_before = 0

    @property
    def _on_device(self) -> bool:
        trainer = self.trainer()
        return trainer is not None and trainer.args.device.type == "cuda"

    def _now(self) -> _Mark:
        tokens = self.trainer()._tokens_trained()
        if self._on_device:
            torch.cuda.synchronize(self.trainer().args.device)
        return _Mark(time.perf_counter(), tokens, self.steps)

    def _start(self) -> None:
        """Begin a stretch, if the run is warm and at the end of a cycle."""
        ready = self.steps >= self.measured.warm_up and self.steps % self.cycle == 0
        self._mark = self._now() if ready and self.trainer() is not None else None

    def _end(self) -> None:
        """Count the stretch so far and begin the next one; one that is in the middle of a cycle goes on."""
        if self._mark is None or self.steps == self._mark.steps or self.steps % self.cycle or self.trainer() is None:
            return
        now, begun = self._now(), self._mark
        self.measured.tokens += now.tokens - begun.tokens
        self.measured.seconds += now.seconds - begun.seconds
        self.measured.steps += now.steps - begun.steps
        self._mark = now
        self._note_memory()

    def _note_memory(self) -> None:
        if self._on_device:
            device = self.trainer().args.device
            self.measured.peak_memory = torch.cuda.max_memory_allocated(device)
            self.measured.peak_is_earlier = self.measured.peak_memory <= self._peak_before
            self.measured.device = torch.cuda.get_device_name(device)

    def on_train_begin(self, args, state, control, **kwargs):
        left = max(state.max_steps - state.global_step, 1)
        # a few steps for compilation and graphs where the run is long enough, and never all of it
        warm_up = max(min(WARM_UP, left // 4), 1)
        warm_up = -(-warm_up // self.cycle) * self.cycle
        self.measured = Measured(warm_up=warm_up, num_processes=args.world_size)
        self.steps, self._mark = 0, None
        self._peak_before = torch.cuda.max_memory_allocated(args.device) if self._on_device else 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        if self._mark is None:
            self._start()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and "loss" in logs:  # of training
            self._end()

    def on_evaluate(self, args, state, control, **kwargs):
        self._mark = None
        if state.global_step < state.max_steps:
            self._start()

    def on_save(self, args, state, control, **kwargs):
        self.on_evaluate(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        self._end()
        self._note_memory()
        self._mark = None
