"""Leaves out the two copies that a LoRA layer makes of its input under autocast.

PEFT casts a layer's bf16 input to the fp32 of its adapter, and autocast casts the copy back for the product. Going up
and down again changes no bit, in the forward or in the gradient, but moves the widest activations of the model twice.
"""

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from ..config import PatchConfig
from ..report import PatchEntry


def cast_input(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """
    What `BaseTunerLayer._cast_input_dtype` does, except where autocast is about to undo it.

    Args:
        x (`torch.Tensor`, any shape, or `None`): Input of the layer.
        dtype (`torch.dtype`): Dtype of the adapter's weight.

    Returns:
        `x` itself if autocast is on and `x` already has its dtype, else `x` in `dtype`.
    """
    if x is None or x.dtype == dtype:
        return x
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype == torch.get_autocast_dtype(device_type):
        return x
    return x.to(dtype)


def _is_plain(layer: nn.Module) -> bool:
    """A LoRA on a linear layer without a variant (DoRA and others do their own arithmetic on the cast input)."""
    return isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear) and not layer.lora_variant


def _has_dropout(layer: LoraLayer) -> bool:
    # dropout draws another mask on another dtype
    return any(not isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())


def apply(model: PreTrainedModel, config: PatchConfig) -> PatchEntry:
    """Give each plain LoRA layer an instance's own `_cast_input_dtype`."""
    if not config.skip_lora_casts:
        return PatchEntry("lora casts", (), "skip_lora_casts=False")
    plain = [module for module in model.modules() if _is_plain(module)]
    if not plain:
        return PatchEntry("lora casts", (), "the model has no LoRA on a linear layer")
    layers = [layer for layer in plain if not _has_dropout(layer) and getattr(layer, "cast_input_dtype_enabled", True)]
    if not layers:
        return PatchEntry("lora casts", (), "LoRA dropout draws its mask on the cast input; set lora_dropout=0")
    for layer in layers:
        layer._cast_input_dtype = cast_input

    def undo(model: PreTrainedModel) -> None:
        for module in model.modules():
            if module.__dict__.get("_cast_input_dtype") is cast_input:
                del module._cast_input_dtype

    rest = f"; {len(plain) - len(layers)} with dropout keep them" if len(plain) > len(layers) else ""
    return PatchEntry("lora casts", (f"{len(layers)} LoRA layers",), f"left out under autocast{rest}", undo=undo)
