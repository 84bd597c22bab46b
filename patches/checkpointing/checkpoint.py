"""The checkpoint of one layer: torch's non-reentrant one, whose saved input may wait in host memory."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..compilation.layers import compiler_errors, through_own_forward
from .offload import Offloader, Saved, can_leave
from .policy import Plan
from .slab import HostMemoryError


# Layers that a plan measures where a checkpoint can be within a compiled layer: the backward comes to them last, so
# that the peak of the step is that of the others. The first two may be compiled, which is no time of theirs.
MEASURED = 5


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """
    Inside this context, what autograd saves waits in host memory, bit for bit.

    Around a checkpoint these are the inputs of the checkpointed function: what the function itself saves is taken by
    the checkpoint's own hooks.

    Args:
        offloader (`Offloader`): Where to put it.
        hold (`bool`): Leave it on the device, so that its loading fetches what was offloaded before it.
        on_refusal (`Callable`, *optional*): Called with the error when host memory is refused; the tensor then stays
            on its device.
    """

    def __init__(
        self,
        offloader: Offloader,
        hold: bool = False,
        on_refusal: Callable[[HostMemoryError], None] | None = None,
    ):
        def pack(tensor: torch.Tensor) -> Saved | torch.Tensor:
            if not can_leave(tensor):
                return tensor
            if hold:
                return offloader.hold(tensor)
            try:
                return offloader.save(tensor)
            except HostMemoryError as error:
                if on_refusal is None:
                    raise
                on_refusal(error)
                return tensor

        super().__init__(pack, _unpack)


def _unpack(saved: Saved | torch.Tensor) -> torch.Tensor:
    return saved.mover.load(saved) if isinstance(saved, Saved) else saved


class LayerCheckpoint:
    """
    What a layer calls to be checkpointed, in place of `torch.utils.checkpoint.checkpoint` and with its arguments.

    Args:
        plan (`Plan`): Decides what becomes of the layer.
        index (`int`): The layer's place in the forward, from 0.
        options (`dict`, *optional*): Keyword arguments for torch's checkpoint.
    """

    def __init__(self, plan: Plan, index: int, options: dict[str, Any] | None = None):
        self.plan = plan
        self.index = index
        self.options = {"use_reentrant": False, **(options or {})}

    # Under torch.compile the layers are compiled one by one, and what decides between them runs as it is.
    @torch.compiler.disable(recursive=False)
    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True: this checkpoint is non-reentrant, which works with DDP, keyword arguments and "
                "inputs that need no gradient; leave the option out, or set checkpoint_policy='recompute' and "
                "patches='none' for torch's own"
            )
        plan = self.plan
        if not torch.is_grad_enabled():
            return _retried(through_own_forward(function), lambda run: run(*args, **_of_the_function(kwargs)))
        action = plan.layer(self.index, args)
        function = through_own_forward(function)
        if action == "keep":
            return _retried(function, lambda run: run(*args, **_of_the_function(kwargs)))
        if not plan.notch.offload:
            measured = plan.watch is not None and self.index < MEASURED  # around a layer's second run
            if not measured and hasattr(function, "goes_inside") and function.goes_inside(args):
                try:
                    return function(*args, **_of_the_function(kwargs))
                except compiler_errors():
                    function.comes_apart()
            options = self.options | kwargs
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                options["preserve_rng_state"] = False  # a graph has no random state to read, and nothing that draws
            return _retried(function, lambda run: torch_checkpoint(plan.watched(run), *args, **options))
        options = self.options | kwargs
        with Offload(plan.offloader, action == "recompute", plan.refused):
            return _retried(function, lambda run: torch_checkpoint(plan.watched(run), *args, **options))

    def torch_checkpoint(self) -> Callable:
        """What transformers would have put in this place."""
        return functools.partial(torch_checkpoint, **self.options)


_TORCH_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def _retried(function: Callable, call: Callable[[Callable], Any]) -> Any:
    """`call(function)`, once more without the compiler if that fails: a checkpoint cannot go on in the middle."""
    try:
        return call(function)
    except compiler_errors() as error:
        if not hasattr(function, "give_up"):
            raise
        function.give_up(error)
    # behind the handler: what the error holds keeps the failed checkpoint's hooks on, with torch 2.11
    gc.collect()
    return call(function)


def _of_the_function(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _TORCH_OPTIONS}
