"""What both trainers restore from a checkpoint beside what the Trainer does: the order of the data, and counts."""

import json
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler


PROGRESS_NAME = "unsloth_trl_progress.json"


class _Progress(TrainerCallback):
    """
    Tells the trainer where a run begins and where its steps end. Keeps no reference that would hold it in memory.
    """

    def __init__(self, trainer: Any):
        self.trainer = weakref.ref(trainer)

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        trainer = self.trainer()
        if trainer is None:
            return
        if trainer._resumed_from is not None:
            go_to_epoch(train_dataloader, int(state.epoch or 0))
            trainer._load_progress(Path(trainer._resumed_from), train_dataloader)
        trainer._end_step()

    def on_step_end(self, args, state, control, **kwargs):
        if (trainer := self.trainer()) is not None:
            trainer._end_step()


class Resuming:
    """A part of the trainers; see `Saving`, which it belongs to."""

    _resumed_from: str | None = None

    def _start_resuming(self) -> None:
        self.callback_handler.callbacks.insert(0, _Progress(self))

    def _progress(self) -> dict[str, Any]:
        """What of the trainer's own state the Trainer does not save; the same on all processes."""
        return {}

    def _set_progress(self, progress: dict[str, Any]) -> None:
        pass

    def _end_step(self) -> None:
        pass

    def _save_progress(self, checkpoint: Path) -> None:
        progress = self._progress()
        if progress and self.args.should_save:
            (checkpoint / PROGRESS_NAME).write_text(json.dumps(progress), encoding="utf-8")

    def _load_progress(self, checkpoint: Path, train_dataloader: Any) -> None:
        path = checkpoint / PROGRESS_NAME
        if path.is_file():  # plain TRL writes none
            self._set_progress(json.loads(path.read_text(encoding="utf-8")))


def go_to_epoch(loader: Any, epoch: int) -> None:
    """
    Let TRL's `RepeatSampler` draw the order of an epoch that is not its first, as a run without interruption does. It
    draws one order after the other and has no `set_epoch`, with which the Trainer reaches other samplers.

    Args:
        loader: A new train data loader.
        epoch (`int`): From 0.
    """
    batches = getattr(loader, "batch_sampler", None)
    while getattr(batches, "batch_sampler", None) is not None:  # those of one process of several
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RepeatSampler) and sampler.shuffle and sampler.seed is not None:
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
