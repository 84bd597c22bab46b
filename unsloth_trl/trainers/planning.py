"""What both trainers do for the checkpoint plan: measure steps, and run a micro-batch again that ran out of memory."""

import copy
import dataclasses
import gc
import random
import re
import traceback
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from ..patches.checkpointing.patch import current_plan, foreign_options
from ..patches.checkpointing.policy import Plan
from ..patches.checkpointing.settings import RESERVE_OF_RANKS
from ..patches.config import PatchConfig
from ..patches.registry import base_model
from .construction import widen_adapters
from .ram import warn_of_host_memory


logger = get_logger(__name__)

GRADIENT_SHARE = 0.05  # of the device's memory: gradients larger than this are not copied before a micro-batch

ADVICE = (
    "lower per_device_train_batch_size and raise gradient_accumulation_steps by as much, lower max_length or "
    "max_completion_length, or load the model in 4 bits"
)


_WORDS = ("out of memory", "can't allocate memory")
_SIZE = r"([\d.]+) (MiB|GiB)"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that device or host memory has run out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def about_pieces(error: str) -> str:
    """A sentence on memory that lies in pieces, if an error of PyTorch's allocator says that there is enough of it."""
    asked = re.search(rf"Tried to allocate {_SIZE}", error)
    pieces = re.search(rf"{_SIZE} is reserved by PyTorch but unallocated", error)
    if asked is None or pieces is None or _gib(pieces) < _gib(asked):
        return ""
    return (
        f" {_gib(pieces):.2f} GiB are free in pieces that are each too small: set the environment variable "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and start again."
    )


def _gib(size: re.Match) -> float:
    return float(size[1]) / (1024 if size[2] == "MiB" else 1)


def why_not_checkpoint(args: Any, accelerator: Any) -> str | None:
    """Why the layers keep the checkpoint that TRL gives them, or `None`."""
    if not args.gradient_checkpointing:
        return "gradient_checkpointing=False"
    if (reason := foreign_options(args.gradient_checkpointing_kwargs)) is not None:
        return reason
    if getattr(args, "activation_offloading", False):
        return "activation_offloading=True moves activations in TRL's way; checkpoint_policy='offload' is faster"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "DeepSpeed has its own way with a layer's weights"
    return None


def settle_policy(config: PatchConfig, trainer: Any) -> PatchConfig:
    """`config`, with `"recompute"` for `"auto"` where free memory is not the trainer's to plan with."""
    if config.checkpoint_policy != "auto":
        return config
    # vLLM wakes up between two steps and takes its memory back
    colocated = getattr(trainer, "use_vllm", False) and trainer.vllm_mode == "colocate"
    # layers that gather their weights have to do so equally often on all ranks
    sharded = trainer.accelerator.distributed_type == DistributedType.FSDP
    # what is free on one card says nothing of the others
    cards = {p.device for p in trainer.model.parameters() if p.device.type == "cuda"}
    if colocated or sharded or len(cards) > 1:
        return dataclasses.replace(config, checkpoint_policy="recompute")
    return config


def _error(kind: type[Exception], message: str) -> Exception:
    """An error of the kind that was raised, so that whoever looks for it, such as `auto_find_batch_size`, finds it."""
    try:
        return kind(message)
    except TypeError:  # kinds of torch's that are made from an error code
        return RuntimeError(message)


class _Signals(TrainerCallback):
    """
    Tells the plan where steps end. Holds no trainer, so that the trainer can be freed.

    Attributes:
        has_gradients (`bool`): Whether a micro-batch has been run since the optimizer stepped.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.has_gradients = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.has_gradients = False
        self.plan.restart()
        warn_of_host_memory(self.plan)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.plan.before_optimizer_step()

    def on_substep_end(self, args, state, control, **kwargs):
        self.has_gradients = True

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.has_gradients = False
        self.plan.after_optimizer_step()


class MicroBatchState:
    """
    What a micro-batch changes before it is over: gradients, random states, and the trainer's own counts.

    Args:
        trainer: The trainer, after it has prepared the micro-batch's inputs.
        inputs (`dict`): These inputs.
        has_gradients (`bool`): Whether earlier micro-batches have left gradients.
    """

    def __init__(self, trainer: Any, inputs: dict[str, Any], has_gradients: bool):
        self.inputs = inputs
        self.device = trainer.args.device
        self.rng, self.python_rng, self.numpy_rng = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.device_rng = {device: torch.cuda.get_rng_state(device) for device in trainer._cards}
        self.counts = {name: copy.copy(value) for name, value in vars(trainer).items() if _is_number(value)}
        self.counts |= {name: copy.copy(getattr(trainer, name)) for name in trainer._counted}
        self.metrics = {
            mode: {name: list(values) for name, values in metrics.items()}
            for mode, metrics in trainer._metrics.items()
        }
        self.gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.versions: dict[torch.nn.Parameter, int] = {}
        if has_gradients:
            self._keep_gradients([p for p in trainer.model.parameters() if p.grad is not None])

    def _keep_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        if self._can_copy(parameters):
            self.gradients = {p: p.grad.detach().clone() for p in parameters}
        else:
            self.versions = {p: p.grad._version for p in parameters}

    def _can_copy(self, parameters: list[torch.nn.Parameter]) -> bool:
        if self.device.type != "cuda":
            return True
        nbytes = sum(p.grad.numel() * p.grad.element_size() for p in parameters)
        return nbytes <= GRADIENT_SHARE * torch.cuda.get_device_properties(self.device).total_memory

    def restore(self, trainer: Any) -> str | None:
        """
        Put everything back.

        Returns:
            `str`, *optional*: Why that cannot be done.
        """
        parameters = list(trainer.model.parameters())
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
            return "An optimizer that steps during the backward may have changed weights already"
        for parameter in parameters:
            if parameter in self.gradients:
                if parameter.grad is None:
                    parameter.grad = self.gradients[parameter].clone()
                else:
                    parameter.grad.copy_(self.gradients[parameter])
            elif parameter not in self.versions:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad._version != self.versions[parameter]:
                return "The gradients of earlier micro-batches are too large to be kept twice"
        torch.set_rng_state(self.rng)
        random.setstate(self.python_rng)
        np.random.set_state(self.numpy_rng)
        for device, state in self.device_rng.items():
            torch.cuda.set_rng_state(state, device)
        for name, value in self.counts.items():
            setattr(trainer, name, copy.copy(value))
        for mode, metrics in trainer._metrics.items():
            metrics.clear()
            for name, values in self.metrics[mode].items():
                metrics[name] = list(values)
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class MemoryPlanning:
    """
    A part of the trainers, before TRL's in the order of classes.

    The trainer calls `_start_planning` when its model is patched, and in `_prepare_inputs` asks `_inputs_again` first
    and hands what it returns to `_before_micro_batch`.
    """

    _counted: tuple[str, ...] = ()  # attributes beside numbers and TRL's metrics that a micro-batch adds to
    _plan: Plan | None = None
    _state: MicroBatchState | None = None
    _again: dict[str, Any] | None = None
    _stepping = False
    _cards: list[torch.device] = []

    def _start_planning(self) -> None:
        if (widened := widen_adapters(self.model, self.args)) is not None:
            self.patch_report.add(widened)
        self._take_plan()
        if self._plan is not None:
            self._cards = [d for d in {p.device for p in self.model.parameters()} if d.type == "cuda"]
            if self.args.device.type == "cuda" and not self._cards:
                self._cards = [self.args.device]  # the model is moved there later
            self._signals = _Signals(self._plan)
            self.callback_handler.callbacks.insert(0, self._signals)

    def _take_plan(self) -> None:
        """Follow the plan that is on the model now."""
        earlier = self._plan
        self._plan = current_plan(base_model(self.model)) if self.args.gradient_checkpointing else None
        if self._plan is None:
            return
        self._plan.measures = True
        if self._num_processes > 1:
            self._plan.reserve = RESERVE_OF_RANKS
        if earlier is not None:
            self._plan.follow(earlier)
            self._signals.plan = self._plan

    @property
    def _num_processes(self) -> int:
        return self.accelerator.num_processes

    def _inputs_again(self) -> dict[str, Any] | None:
        """The inputs of the micro-batch that is run again, or `None`."""
        return None if self._again is None or not self._stepping else dict(self._again)

    def _before_micro_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self._stepping and self._plan is not None and self._num_processes == 1:
            self._state = MicroBatchState(self, dict(inputs), self._signals.has_gradients)
        return inputs

    def training_step(self, model, *args, **kwargs):
        self._stepping, self._state, self._again = True, None, None
        try:
            while True:
                try:
                    return super().training_step(model, *args, **kwargs)
                except (RuntimeError, MemoryError) as error:
                    if not self._can_step_down() or not is_out_of_memory(error):
                        raise
                    message = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
                    kind, where, pieces = type(error), traceback.format_exc(), about_pieces(str(error))
                # after the handler, whose traceback holds the tensors of the failed micro-batch
                try:
                    self._step_down(message, kind, pieces)
                except (RuntimeError, MemoryError) as error:
                    error.add_note(f"It ran out of memory here:\n{where}")
                    raise
        finally:
            self._stepping, self._state, self._again = False, None, None

    def _can_step_down(self) -> bool:
        """Whether the plan is on the model still: it was removed with the report, or another trainer took over."""
        return self._plan is not None and current_plan(base_model(self.model)) is self._plan

    def _step_down(self, message: str, kind: type[Exception], pieces: str) -> None:
        """
        Put the trainer back to where the micro-batch began, with a plan that needs less memory.

        Raises:
            RuntimeError: Of the kind of the original error, if that cannot be done, with what to change.
        """
        plan, state = self._plan, self._state
        plan.reset()
        if self._num_processes > 1:
            raise _error(
                kind,
                f"{message} One of {self._num_processes} processes ran out of memory, and the others are "
                f"already ahead; set checkpoint_policy='offload', or {ADVICE}.{pieces}",
            )
        if state is None:
            raise _error(
                kind, f"{message} This was outside of a micro-batch's forward and backward; {ADVICE}.{pieces}"
            )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if (reason := state.restore(self)) is not None:
            raise _error(
                kind,
                f"{message} {reason}, so this one cannot be run again; set checkpoint_policy='offload', or "
                f"{ADVICE}.{pieces}",
            )
        if not plan.step_down():
            raise _error(kind, f"{message} The checkpoint plan has no lower setting; {ADVICE}.{pieces}")
        self._again = state.inputs
