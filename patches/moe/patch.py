"""Plugs the experts op into a transformers model: an experts function, registered through `ExpertsInterface`."""

import functools
import weakref

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from ..config import PatchConfig
from ..quantization.experts import is_experts, stacked_shape
from ..report import PatchEntry
from .backends import choose_backend, requested_backend
from .composed import composed_experts
from .gates import forget_gate, gate_of
from .op import Projection, moe_experts
from .rows import MAX_RANK
from .split_lora import NAMES, SplitLoraForward, can_split, runs_here, take_factors
from .weights import ScratchNumber, is_sharded, read_stacked


def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    The experts function that transformers calls in each layer.

    Args:
        module (`nn.Module`): The experts.
        hidden_states (`torch.Tensor` of shape `(num_tokens, hidden)`): Tokens.
        top_k_index (`torch.Tensor` of shape `(num_tokens, top_k)`): The experts of each.
        top_k_weights (`torch.Tensor` of shape `(num_tokens, top_k)`): The weights of their outputs.
        backend (`str`, *optional*, defaults to `"auto"`): See `choose_backend`.

    Returns:
        `torch.Tensor` of shape `(num_tokens, hidden)`, in the dtype of `hidden_states`.
    """
    if is_sharded(module):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    first, down = _projection(module, _first(module)), _projection(module, "down_proj")
    dtype = first.weight.dtype
    x = hidden_states.to(dtype)
    widths = (*first.weight.shape[1:], *down.weight.shape[1:])
    chosen = choose_backend(backend, x.device, dtype, widths)
    gate = gate_of(module)
    high = any(p.b is not None and p.b.shape[1] + (p.bias is not None) > MAX_RANK for p in (first, down))
    # stacked weights are multiplied in their own dtype, with autocast or without, as transformers does
    with torch.autocast(x.device.type, enabled=False):
        if gate is None or high or down.weight.dtype != dtype:
            out = composed_experts(module, x, top_k_index, top_k_weights, first, down, chosen)
        else:
            out = moe_experts(
                x,
                top_k_index,
                top_k_weights,
                first,
                down,
                gate=gate,
                transposed=module.is_transposed,
                backend=chosen,
            )
    return out.to(hidden_states.dtype)


def _first(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _projection(module: nn.Module, name: str) -> Projection:
    weight = read_stacked(module, name)
    a, b = take_factors(module, name)
    # biases can be wider than weights: `prepare_model_for_kbit_training` makes them fp32
    bias = getattr(module, f"{name}_bias").to(weight.dtype) if module.has_bias else None
    return Projection(weight, a, b, bias)


def register() -> None:
    """Register the experts functions with transformers. Idempotent."""
    for backend, name in NAMES.items():
        if name not in ExpertsInterface._global_mapping:
            ExpertsInterface.register(name, functools.partial(experts_forward, backend=backend))


# Models can share a config, and with it the name of the experts function: what was there before the first was patched,
# and how many of them are.
_BEFORE: dict[int, tuple[weakref.ref, str | None, int]] = {}


def _enter(config: PreTrainedConfig) -> str | None:
    known, before, number = _BEFORE.get(id(config), (None, None, 0))
    if known is None or known() is not config or config._experts_implementation not in NAMES.values():
        before, number = config._experts_implementation, 0
    _BEFORE[id(config)] = (weakref.ref(config), before, number + 1)
    return before


def _leave(config: PreTrainedConfig) -> bool:
    """Whether the config is to get its own experts function back."""
    known, before, number = _BEFORE.get(id(config), (None, None, 1))
    if number > 1:
        _BEFORE[id(config)] = (known, before, number - 1)
        return False
    _BEFORE.pop(id(config), None)
    # the user may have set another one since
    return config._experts_implementation in NAMES.values()


def _text_key(model: PreTrainedModel) -> str:
    """The key of the text model in `set_experts_implementation`."""
    config, text = model.config, model.config.get_text_config()
    return "" if text is config else next((k for k in config.sub_configs if getattr(config, k, None) is text), "")


def apply(model: PreTrainedModel, config: PatchConfig) -> PatchEntry:
    """Run the experts of `model` through the op, and their LoRA beside the products."""
    experts = [module for module in model.modules() if is_experts(module)]
    if not experts:
        return PatchEntry("moe", (), "the model has no stacked experts")
    requested, source = requested_backend(config.moe_backend)
    down = read_stacked(experts[0], "down_proj")
    widths = (*stacked_shape(experts[0], _first(experts[0]))[1:], *down.shape[1:])
    chosen = choose_backend(requested, down.tensor.device, down.dtype, widths)  # raises before anything is changed
    register()
    key, text = _text_key(model), model.config.get_text_config()
    before = _enter(text)
    model.set_experts_implementation({key: NAMES[requested]})
    number = ScratchNumber()
    for module in experts:
        number.give(module)
    wrappers = [module for module in model.modules() if can_split(module)] if config.split_lora else []
    for wrapper in wrappers:
        wrapper.forward = SplitLoraForward(wrapper)

    def undo(model: PreTrainedModel) -> None:
        for module in model.modules():
            if isinstance(forward := module.__dict__.get("forward"), SplitLoraForward):
                forward.take_off()
            forget_gate(module)
            ScratchNumber.take(module)
        if _leave(text):
            model.set_experts_implementation({key: before})

    reached = [module for module in experts if runs_here(module)]
    if any(is_sharded(module) for module in experts):
        lora = "experts of other processes: transformers' grouped product"
    elif wrappers:
        lora = f"LoRA of {len(wrappers)} stacked weights as two thin products"
    else:
        lora = "no LoRA on experts" if config.split_lora else "split_lora=False"
    bits = " in 4 bits" if down.scales else ""
    if getattr(model, "is_loaded_in_4bit", False) and not bits:
        lora += "; the experts are not in 4 bits, as transformers leaves them: load with unsloth_trl.load_in_4bit"
    if len(reached) < len(experts):
        lora += f"; {len(experts) - len(reached)} others keep their own"
    gates = "" if all(gate_of(module) for module in experts) else "; activation of the model's own"
    return PatchEntry(
        "moe",
        (f"{len(reached)} layers of {down.shape[0]} experts{bits}",),
        f"{chosen} ({source}); {lora}{gates} (was {before!r})",
        undo=undo,
    )
