"""Leaves out what a plain LoRA layer of PEFT does twice.

PEFT casts a layer's bf16 input to the fp32 of its adapter, and autocast casts the copy back for the product: going up
and down again changes no bit, but moves the widest activations of the model twice. And it scales the adapter's product
in one pass over the layer's output and adds it in another: one `torch.add` does both, with one rounding less.
"""

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import PatchConfig
from ..owner import OwnForward
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


class PlainLoraForward(OwnForward[Linear]):
    """
    The `forward` of a patched LoRA layer: PEFT's own for anything but one active, unmerged adapter without dropout.

    Args:
        layer (`Linear`): The layer.
        adapter_first (`bool`): Compute the adapter's product before the base's. A checkpoint runs a decoder layer
            again up to the last thing that was saved for the backward, and a frozen base saves nothing: of the last
            linear layer its product is left out then. Elsewhere PEFT's order is kept, in which autograd sums.
    """

    def __init__(self, layer: Linear, adapter_first: bool = False):
        super().__init__(layer)
        self.adapter_first = adapter_first

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        layer = self.owner
        adapters = layer.active_adapters
        name = adapters[0] if len(adapters) == 1 else None
        # read at every call: an adapter added since may have dropout or a variant
        plain = name in layer.lora_A and name not in layer.lora_variant and _is_identity(layer.lora_dropout[name])
        if args or kwargs or not plain or layer.disable_adapters or layer.merged:
            return self.before(x, *args, **kwargs)
        lora_A, lora_B = layer.lora_A[name], layer.lora_B[name]
        result = None if self.adapter_first else layer.base_layer(x)
        product = lora_B(lora_A(layer._cast_input_dtype(x, lora_A.weight.dtype)))
        if result is None:
            result = layer.base_layer(x)
        return torch.add(result, product, alpha=layer.scaling[name]).to(result.dtype)


def _is_plain(layer: nn.Module) -> bool:
    """A LoRA on a linear layer without a variant (DoRA and others do their own arithmetic on the cast input)."""
    return isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear) and not layer.lora_variant


def _adds_its_product(layer: LoraLayer) -> bool:
    """
    Whether the forward is base output plus scaled product, as `PlainLoraForward` has it.

    PEFT's layer over NF4 weights copies the base output first, for fear of a view that is changed in place; nothing
    here is.
    """
    kind = type(layer)
    return kind is Linear or (kind.__module__ == "peft.tuners.lora.bnb" and kind.__name__ == "Linear4bit")


def _has_dropout(layer: LoraLayer) -> bool:
    # dropout draws another mask on another dtype
    return not all(_is_identity(dropout) for dropout in layer.lora_dropout.values())


def _is_identity(dropout: nn.Module) -> bool:
    return isinstance(dropout, nn.Identity)


def _last_of_each_checkpoint(model: PreTrainedModel) -> set[nn.Module]:
    """The last LoRA layer in each layer that transformers can checkpoint."""
    checkpointed = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    inner = ([m for m in layer.modules() if isinstance(m, LoraLayer)] for layer in checkpointed)
    return {layers[-1] for layers in inner if layers}


def apply(model: PreTrainedModel, config: PatchConfig) -> PatchEntry:
    """Give each plain LoRA layer an instance's own `_cast_input_dtype`, and those in bf16 or NF4 a `forward`."""
    if not config.lean_lora:
        return PatchEntry("lora", (), "lean_lora=False")
    plain = [module for module in model.modules() if _is_plain(module)]
    if not plain:
        return PatchEntry("lora", (), "the model has no LoRA on a linear layer")
    layers = [layer for layer in plain if not _has_dropout(layer) and getattr(layer, "cast_input_dtype_enabled", True)]
    if not layers:
        return PatchEntry("lora", (), "LoRA dropout draws its mask on the cast input; set lora_dropout=0")
    # to a compiler, a forward of a layer's own is other code in each layer; it fuses PEFT's itself
    compiled = config.compile_layers == "on"
    last = _last_of_each_checkpoint(model)
    for layer in layers:
        layer._cast_input_dtype = cast_input
        if _adds_its_product(layer) and "forward" not in layer.__dict__ and not compiled:
            layer.forward = PlainLoraForward(layer, adapter_first=layer in last)

    def undo(model: PreTrainedModel) -> None:
        for module in model.modules():
            if module.__dict__.get("_cast_input_dtype") is cast_input:
                del module._cast_input_dtype
            if isinstance(forward := module.__dict__.get("forward"), PlainLoraForward):
                forward.take_off()

    rest = f"; {len(plain) - len(layers)} with dropout stay as they are" if len(plain) > len(layers) else ""
    detail = f"no casts that autocast undoes, scaling inside the addition{rest}"
    return PatchEntry("lora", (f"{len(layers)} LoRA layers",), detail, undo=undo)
