"""Plugs the experts op into a transformers model, and Split-LoRA into PEFT's wrappers around its experts.

The experts function is registered through `ExpertsInterface`. PEFT wraps each stacked parameter in a `ParamWrapper`,
whose forward puts `W + B @ A` in the parameter's place. Here that forward leaves the factors with the experts module
for the length of the call instead, and the experts function takes them from there.
"""

import functools
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from ..config import PatchConfig
from ..owner import OwnForward
from ..report import PatchEntry
from .backends import choose_backend, requested_backend
from .composed import composed_experts
from .op import Gate, Projection, moe_experts
from .rows import MAX_RANK
from .rows_reference import gate_forward_reference
from .weights import add_scratch, read_stacked, remove_scratch, stacked_shape


NAMES = {
    "auto": "unsloth_trl",
    "grouped_mm": "unsloth_trl_grouped_mm",
    "triton": "unsloth_trl_triton",
    "native_torch": "unsloth_trl_native_torch",
}
STACKED = ("gate_up_proj", "up_proj", "down_proj")
FACTORS, GATE = "_unsloth_trl_factors", "_unsloth_trl_gate"


class Factors(NamedTuple):
    """
    LoRA of one stacked parameter, all active adapters side by side.

    Args:
        a (`torch.Tensor` of shape `(num_experts, rank, in)`): First factor.
        b (`torch.Tensor` of shape `(num_experts, rank, out)`): Second factor, scaled.
        used (`list[bool]`): Not empty once the experts function has taken them.
    """

    a: torch.Tensor
    b: torch.Tensor
    used: list[bool]


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is a stack of experts that transformers runs through `ExpertsInterface`."""
    return (
        hasattr(module, "has_gate") and hasattr(module, "is_transposed") and bool(stacked_shape(module, "down_proj"))
    )


def recognise_gate(module: nn.Module) -> Gate | None:
    """
    The activation of an experts module, or `None` if it is none of those that the op has.

    Found by trying: names and layouts of activations differ between models, their values do not lie.
    """
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        return None
    known = [Gate("silu"), Gate("gelu_tanh")]
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, int | float) and isinstance(limit, int | float):
        known.append(Gate("gpt_oss", float(alpha), float(limit)))
    probe = torch.linspace(-12, 12, 64, dtype=torch.float64).roll(5).view(4, 16)
    try:
        with torch.no_grad():
            found = module._apply_gate(probe)
    except Exception:  # an activation with weights of its own, or one that wants other inputs
        return None
    return next((gate for gate in known if torch.allclose(_activate(probe, gate), found, rtol=1e-9)), None)


def _activate(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    return gate_forward_reference(gate_up, None, gate.kind, None, None, None, gate.alpha, gate.limit)[0]


def _gate_of(module: nn.Module) -> Gate | None:
    if GATE not in module.__dict__:
        module.__dict__[GATE] = recognise_gate(module)
    return module.__dict__[GATE]


def _projection(module: nn.Module, name: str) -> Projection:
    factors = module.__dict__.get(FACTORS, {}).get(name)
    a = b = None
    if factors is not None:
        factors.used.append(True)
        a, b = factors.a, factors.b
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return Projection(read_stacked(module, name), a, b, bias)


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
    if _is_sharded(module):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    first = _projection(module, "gate_up_proj" if module.has_gate else "up_proj")
    down = _projection(module, "down_proj")
    x = hidden_states.to(first.weight.dtype)
    widths = (*first.weight.shape[1:], *down.weight.shape[1:])
    chosen = choose_backend(backend, x.device, first.weight.dtype, widths)
    gate = _gate_of(module)
    high = any(p.b is not None and p.b.shape[1] + (p.bias is not None) > MAX_RANK for p in (first, down))
    # stacked weights are multiplied in their own dtype, with autocast or without, as transformers does
    with torch.autocast(x.device.type, enabled=False):
        if gate is None or high:
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


def _is_sharded(module: nn.Module) -> bool:
    """Whether another process has some of the experts, or some of each."""
    stored = module._parameters.get("down_proj")
    return bool(getattr(module, "_is_expert_parallel", False)) or isinstance(stored, DTensor)


def register() -> None:
    """Register the experts functions with transformers. Idempotent."""
    for backend, name in NAMES.items():
        if name not in ExpertsInterface._global_mapping:
            ExpertsInterface.register(name, functools.partial(experts_forward, backend=backend))


def _takes_factors(experts: nn.Module) -> bool:
    return experts.config._experts_implementation in NAMES.values() and not _is_sharded(experts)


def stacked_factors(
    wrapper: ParamWrapper, adapters: list[str], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The LoRA factors of PEFT's layout, one matrix of rank `r` per expert and factor.

    PEFT has the experts outermost in the rows of `lora_A`, and innermost in the columns of `lora_B`.

    Args:
        wrapper (`ParamWrapper`): Around a parameter of three dimensions.
        adapters (`list[str]`): Adapters, side by side in the result.
        dtype (`torch.dtype`): Of the result.

    Returns:
        `a` of shape `(num_experts, rank, in)` and `b` of shape `(num_experts, rank, out)`, scaled.
    """
    firsts, seconds = [], []
    for name in adapters:
        a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        firsts.append(a.view(wrapper.num_experts, -1, a.shape[1]).to(dtype))
        wide = b.to(torch.promote_types(b.dtype, torch.float32)) if wrapper.scaling[name] != 1 else b
        scaled = wide.view(b.shape[0], -1, wrapper.num_experts).permute(2, 1, 0) * wrapper.scaling[name]
        seconds.append(scaled.to(dtype).contiguous())
    return (firsts[0], seconds[0]) if len(adapters) == 1 else (torch.cat(firsts, 1), torch.cat(seconds, 1))


class SplitLoraForward(OwnForward[ParamWrapper]):
    """The `forward` of a wrapper around stacked experts: the parameter stays as it is, and its LoRA beside it."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrapper = self.owner
        experts = wrapper.get_base_layer()
        adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        off = wrapper.disable_adapters or wrapper.merged or not adapters or kwargs.get("adapter_names") is not None
        if off or not _takes_factors(experts):
            return self.before(x, *args, **kwargs)
        a, b = stacked_factors(wrapper, adapters, read_stacked(experts, wrapper.parameter_name).dtype)
        factors = Factors(a, b, [])
        waiting = experts.__dict__.setdefault(FACTORS, {})
        waiting[wrapper.parameter_name] = factors
        try:
            out = wrapper.base_layer(x, *args, **kwargs)
        finally:
            del waiting[wrapper.parameter_name]
            if not waiting:
                del experts.__dict__[FACTORS]
        if not factors.used:
            raise RuntimeError(
                f"the LoRA of {wrapper.parameter_name} was left out: something replaced the forward of "
                f"{type(experts).__name__}. Set split_lora=False"
            )
        return out


def _splits(wrapper: nn.Module) -> bool:
    """Whether this wrapper is around stacked weights of experts, and not around a bias or a router."""
    if not isinstance(wrapper, ParamWrapper) or not is_experts(wrapper.get_base_layer()):
        return False
    return (
        wrapper.parameter_name in STACKED and len(stacked_shape(wrapper.get_base_layer(), wrapper.parameter_name)) == 3
    )


def _text_key(model: PreTrainedModel) -> str:
    """The key of the text model in `set_experts_implementation`."""
    config, text = model.config, model.config.get_text_config()
    return "" if text is config else next(k for k in config.sub_configs if getattr(config, k, None) is text)


def apply(model: PreTrainedModel, config: PatchConfig) -> PatchEntry:
    """Run the experts of `model` through the op, and their LoRA beside the products."""
    experts = [module for module in model.modules() if is_experts(module)]
    if not experts:
        return PatchEntry("moe", (), "the model has no stacked experts")
    requested, source = requested_backend(config.moe_backend)
    register()
    key, text = _text_key(model), model.config.get_text_config()
    before = text._experts_implementation
    model.set_experts_implementation({key: NAMES[requested]})
    add_scratch(model, experts)
    wrappers = [module for module in model.modules() if _splits(module)] if config.split_lora else []
    for wrapper in wrappers:
        wrapper.forward = SplitLoraForward(wrapper)

    def undo(model: PreTrainedModel) -> None:
        for module in model.modules():
            if isinstance(forward := module.__dict__.get("forward"), SplitLoraForward):
                forward.take_off()
            module.__dict__.pop(GATE, None)
        model.set_experts_implementation({key: before})
        remove_scratch([module for module in model.modules() if is_experts(module)])

    down = read_stacked(experts[0], "down_proj")
    widths = (*stacked_shape(experts[0], _first(experts[0]))[1:], *down.shape[1:])
    chosen = choose_backend(requested, down.tensor.device, down.dtype, widths)
    if any(_is_sharded(module) for module in experts):
        lora = "experts of other processes: transformers' grouped product"
    elif wrappers:
        lora = f"LoRA of {len(wrappers)} stacked weights as two thin products"
    else:
        lora = "no LoRA on experts" if config.split_lora else "split_lora=False"
    bits = " in 4 bits" if down.scales else ""
    if getattr(model, "is_loaded_in_4bit", False) and not bits:
        lora += "; the experts are not in 4 bits, as transformers leaves them: load with unsloth_trl.load_in_4bit"
    gates = "" if all(_gate_of(module) for module in experts) else "; activation of the model's own"
    return PatchEntry(
        "moe",
        (f"{len(experts)} layers of {down.shape[0]} experts{bits}",),
        f"{chosen} ({source}); {lora}{gates} (was {before!r})",
        undo=undo,
    )


def _first(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"
