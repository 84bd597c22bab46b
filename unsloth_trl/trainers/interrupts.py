"""Ctrl-C that saves: the first one finishes the step and writes a checkpoint, the second one stops at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback


logger = get_logger(__name__)

# seconds: a launcher sends Ctrl-C on to its processes, which have had it from the terminal already
_SAME_PRESS = 1.0


class SaveOnInterrupt(TrainerCallback):
    """
    Stops a run after the step in which SIGINT came, with a checkpoint.

    Args:
        accelerator (`accelerate.Accelerator`): Of the trainer; processes agree after each step on whether one of them
            was interrupted.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.since: float | None = None  # when the first one came
        self.stopped_at: int | None = None
        self._before: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle SIGINT; what handled it before does so again afterwards."""
        self.since = self.stopped_at = None
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "save_on_interrupt=True has no effect here: Python hands Ctrl-C to the main thread, and train() was "
                "called in another one. Call train() in the main thread."
            )
            yield
            return
        self._before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._before or signal.default_int_handler)

    def _handle(self, signum: int, frame: Any) -> None:
        now = time.monotonic()
        if self.since is None:
            self.since = now
            # not print: the interrupted code may be in the middle of one
            with contextlib.suppress(OSError):
                os.write(2, b"\nInterrupted: finishing this step, then saving. Ctrl-C again stops at once.\n")
        elif self.accelerator.num_processes == 1 or now - self.since > _SAME_PRESS:
            if callable(self._before):
                self._before(signum, frame)
            raise KeyboardInterrupt

    def on_step_end(self, args, state, control, **kwargs):
        interrupted = self.since is not None
        if self.accelerator.num_processes > 1:
            count = torch.tensor(float(interrupted), device=self.accelerator.device)
            interrupted = self.accelerator.reduce(count).item() > 0
        if interrupted:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True

    def stop(self, checkpoint: str | None) -> None:
        """
        Called after training.

        Args:
            checkpoint (`str`, *optional*): Where the last step is saved.

        Raises:
            KeyboardInterrupt: If it was interrupted: what a script does after `train` is for a run that is over.
        """
        if self.stopped_at is None and self.since is None:
            return
        if checkpoint is None:
            raise KeyboardInterrupt("training was over, and its last step is in no checkpoint")
        raise KeyboardInterrupt(
            f"interrupted and saved in {checkpoint}; resume_from_checkpoint=True goes on from there"
        )
