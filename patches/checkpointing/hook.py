"""Checkpoint policies for models outside transformers: an `accelerate.hooks.ModelHook` on each layer."""

import functools
from collections.abc import Iterable
from typing import Any

from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from torch import nn

from ..config import CheckpointPolicy
from .checkpoint import LayerCheckpoint
from .policy import Plan


class CheckpointHook(ModelHook):
    """
    Checkpoints the forward of the module it is attached to.

    Args:
        checkpoint (`LayerCheckpoint`): What the forward is called through.
    """

    def __init__(self, checkpoint: LayerCheckpoint):
        self.checkpoint = checkpoint

    def init_hook(self, module: nn.Module) -> nn.Module:
        # accelerate calls `_old_forward` between its own hooks, and puts it back in the end
        self.forward = module._old_forward
        module._old_forward = self
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # keyword arguments go with the function; positional tensors are what is offloaded
        return self.checkpoint(functools.partial(self.forward, **kwargs), *args)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        module._old_forward = self.forward
        return module


def add_checkpointing(
    layers: Iterable[nn.Module],
    policy: CheckpointPolicy = "offload",
    *,
    max_pinned_gb: float | None = None,
    staging_buffers: int = 2,
) -> Plan:
    """
    Checkpoint layers of any model, for instance of a bare accelerate loop.

    Args:
        layers (`Iterable[nn.Module]`): The layers, in the order of the forward. Each takes its input as a positional
            tensor. A hook that accelerate has put there stays, around this one.
        policy (`str`, *optional*, defaults to `"offload"`): `"keep"`, `"recompute"` or `"offload"`; `"auto"` is
            `"recompute"` here, since nobody says where a step ends.
        max_pinned_gb (`float`, *optional*), staging_buffers (`int`): See `PatchConfig`.

    Returns:
        `Plan`: Its `notch` says what happens to the layers.

    Raises:
        ValueError: If there is no layer, one is checkpointed already, or accelerate takes a layer's weights away after
            its forward.
    """
    layers = list(layers)
    if not layers:
        raise ValueError("layers is empty: pass the modules to checkpoint, such as model.layers")
    for layer in layers:
        for hook in _hooks(layer):
            if isinstance(hook, CheckpointHook):
                raise ValueError(f"{type(layer).__name__} is checkpointed already; call remove_checkpointing first")
            if isinstance(hook, AlignDevicesHook) and hook.offload:
                raise ValueError(
                    f"accelerate offloads the weights of {type(layer).__name__}, which are gone when the backward "
                    "recomputes it; load the model without cpu_offload or a device_map with 'cpu' or 'disk'"
                )
    devices = {p.device for layer in layers for p in layer.parameters()}
    plan = Plan(
        policy,
        len(layers),
        max_pinned_gb=max_pinned_gb,
        staging_buffers=staging_buffers,
        num_devices=max(1, len(devices)),
    )
    for index, layer in enumerate(layers):
        add_hook_to_module(layer, CheckpointHook(LayerCheckpoint(plan, index)), append=True)
    return plan


def remove_checkpointing(layers: Iterable[nn.Module]) -> None:
    """Take the hooks off again, and leave accelerate's own."""
    for layer in layers:
        hooks = _hooks(layer)
        if any(isinstance(hook, CheckpointHook) for hook in hooks):
            remove_hook_from_module(layer)
            for hook in hooks:
                if not isinstance(hook, CheckpointHook):
                    add_hook_to_module(layer, hook, append=True)


def _hooks(layer: nn.Module) -> list[ModelHook]:
    """The hooks on a layer, one by one; accelerate nests what is appended."""

    def flat(hook: ModelHook) -> list[ModelHook]:
        return [h for inner in hook.hooks for h in flat(inner)] if isinstance(hook, SequentialHook) else [hook]

    hook = getattr(layer, "_hf_hook", None)
    return [] if hook is None else flat(hook)
