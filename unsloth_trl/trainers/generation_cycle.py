"""The place of a GRPO run in its generation cycle, and the completions in use there, as a checkpoint has them."""

import pickle
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device

from .saving import Saving


logger = get_logger(__name__)


class GenerationCycle(Saving):
    """
    `Saving` for `GRPOTrainer`. Completions serve `steps_per_generation * num_iterations` micro-batches; a checkpoint
    may fall between. TRL begins a new cycle on resuming, out of step with the order of prompts from then on; here the
    cycle goes on with the completions, advantages and old log-probabilities that were in use.
    """

    _steps_done = 0  # micro-batches at the end of the last optimizer step

    def _end_step(self) -> None:
        self._steps_done = self._step

    @property
    def _cycle(self) -> int:
        return self.args.steps_per_generation * self.num_iterations

    def _shape(self) -> dict[str, int]:
        """What has to be the same for buffered micro-batches to be of use."""
        return {
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "steps_per_generation": self.args.steps_per_generation,
            "num_generations": self.num_generations,
            "num_iterations": self.num_iterations,
            "processes": self.accelerator.num_processes,
        }

    def _completions_file(self, checkpoint: Path) -> Path:
        return checkpoint / f"completions_{self.accelerator.process_index}.pt"

    def _save_progress(self, checkpoint: Path) -> None:
        super()._save_progress(checkpoint)
        done, now = self._steps_done, self._step
        # a checkpoint in the middle of a step may come after the next generation
        in_use = now > 0 and done // self._cycle == (now - 1) // self._cycle
        if done % self._cycle and in_use and self._buffered_inputs is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)
            saved = {"micro_batches": done, "shape": self._shape(), "inputs": self._buffered_inputs}
            torch.save(saved, self._completions_file(checkpoint))

    def _load_progress(self, checkpoint: Path, train_dataloader: Any) -> None:
        super()._load_progress(checkpoint, train_dataloader)
        self._step, self._buffered_inputs = self._micro_batches_before(train_dataloader), None
        if getattr(self.args, "sync_ref_model", False):
            logger.warning(
                "sync_ref_model=True: checkpoints do not have the reference model, which begins again from "
                "the one that the trainer was given."
            )
        if self._step % self._cycle == 0:
            return
        reason = self._load_completions(checkpoint)
        if reason is not None:
            logger.warning(
                f"{checkpoint} is in the middle of a generation cycle, {self._step % self._cycle} of {self._cycle} "
                f"micro-batches after its start, and {reason}: completions of the same prompts are generated anew for "
                "the rest of the cycle. Make save_steps a multiple of "
                f"{self._steps_per_cycle}, the optimizer steps of a cycle, to save between cycles."
            )

    def _load_completions(self, checkpoint: Path) -> str | None:
        """Take the buffered micro-batches of a checkpoint, or say why they cannot be taken."""
        path = self._completions_file(checkpoint)
        if not path.is_file():
            return f"has no {path.name}"
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            return f"has more than tensors and plain values in {path.name}"
        for name, value in self._shape().items():
            if saved["shape"][name] != value:
                return f"was saved with {name}={saved['shape'][name]}, which is {value} now"
        if saved["micro_batches"] != self._step:
            return f"was saved after {saved['micro_batches']} micro-batches, where {self._step} are expected"
        self._buffered_inputs = send_to_device(saved["inputs"], self.accelerator.device)
        return None

    def _micro_batches_before(self, train_dataloader: Any) -> int:
        """Micro-batches of the data that come before the step to go on with: as the Trainer skips them."""
        window, steps = self.args.gradient_accumulation_steps, self.state.global_step
        try:
            per_epoch = len(train_dataloader)
        except TypeError:  # a stream
            per_epoch = self.state.max_steps * window
        steps_per_epoch = max(-(-per_epoch // window), 1)
        skipped = 0 if self.args.ignore_data_skip else steps % steps_per_epoch * window
        return steps // steps_per_epoch * per_epoch + skipped
