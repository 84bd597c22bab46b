"""LoRA on stacked experts beside the product: what PEFT's wrappers do instead of adding factors to all weights.

PEFT wraps each stacked parameter in a `ParamWrapper`, whose forward puts `W + B @ A` in the parameter's place. Here
that forward leaves the factors with the experts module for the length of the call, and the experts function takes them
from there.
"""

from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from ..owner import OwnForward
from ..quantization.experts import is_experts, stacked_shape
from .factors import factors_by_expert
from .weights import is_sharded, read_stacked


STACKED = ("gate_up_proj", "up_proj", "down_proj")
# names of the experts functions of this package, the choice of backend in each
NAMES = {
    "auto": "unsloth_trl",
    "grouped_mm": "unsloth_trl_grouped_mm",
    "triton": "unsloth_trl_triton",
    "native_torch": "unsloth_trl_native_torch",
}
_WAITING = "_unsloth_trl_factors"


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


def runs_here(experts: nn.Module) -> bool:
    """Whether this package's experts function runs these experts, all of which are on this process."""
    return experts.config._experts_implementation in NAMES.values() and not is_sharded(experts)


def take_factors(experts: nn.Module, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The factors that wait for the stacked weight `name`, marked as used; `None` twice if none do."""
    factors = experts.__dict__.get(_WAITING, {}).get(name)
    if factors is None:
        return None, None
    factors.used.append(True)
    return factors.a, factors.b


def stacked_factors(
    wrapper: ParamWrapper, adapters: list[str], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The LoRA factors of PEFT's layout, one matrix of rank `r` per expert and factor.

    Args:
        wrapper (`ParamWrapper`): Around a parameter of three dimensions.
        adapters (`list[str]`): Adapters, side by side in the result.
        dtype (`torch.dtype`): Of the result.

    Returns:
        `a` of shape `(num_experts, rank, in)` and `b` of shape `(num_experts, rank, out)`, scaled.
    """
    pairs = [
        factors_by_expert(
            wrapper.lora_A[name].weight,
            wrapper.lora_B[name].weight,
            wrapper.num_experts,
            wrapper.scaling[name],
            dtype,
        )
        for name in adapters
    ]
    if len(pairs) == 1:
        return pairs[0]
    firsts, seconds = zip(*pairs, strict=True)
    return torch.cat(firsts, 1), torch.cat(seconds, 1)


class SplitLoraForward(OwnForward[ParamWrapper]):
    """The `forward` of a wrapper around stacked experts: the parameter stays as it is, and its LoRA beside it."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrapper = self.owner
        experts = wrapper.get_base_layer()
        adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        off = wrapper.disable_adapters or wrapper.merged or not adapters or kwargs.get("adapter_names") is not None
        if off or not runs_here(experts):
            return self.before(x, *args, **kwargs)
        # hooks of a model that is offloaded bring weights for the forward of their own layer, and not for this one
        device = next((p.device for n in adapters for p in (wrapper.lora_A[n].weight,) if p.device != x.device), None)
        if device is not None:
            raise RuntimeError(
                f"the LoRA of {wrapper.parameter_name} is on {device} and its tokens are on {x.device}; experts with "
                "LoRA cannot be offloaded: keep them on one device"
            )
        a, b = stacked_factors(wrapper, adapters, read_stacked(experts, wrapper.parameter_name).dtype)
        factors = Factors(a, b, [])
        waiting = experts.__dict__.setdefault(_WAITING, {})
        waiting[wrapper.parameter_name] = factors
        try:
            out = wrapper.base_layer(x, *args, **kwargs)
        finally:
            del waiting[wrapper.parameter_name]
            if not waiting:
                del experts.__dict__[_WAITING]
        if not factors.used:
            raise RuntimeError(
                f"the LoRA of {wrapper.parameter_name} was left out: something replaced the forward of "
                f"{type(experts).__name__}. Set split_lora=False"
            )
        return out


def can_split(wrapper: nn.Module) -> bool:
    """Whether this wrapper is around stacked weights of experts, and not around a bias or a router."""
    if not isinstance(wrapper, ParamWrapper) or not is_experts(wrapper.get_base_layer()):
        return False
    shape = stacked_shape(wrapper.get_base_layer(), wrapper.parameter_name)
    return wrapper.parameter_name in STACKED and len(shape) == 3
