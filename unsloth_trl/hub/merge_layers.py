"""A live model as the plain one that its adapters make of it: every weight by its plain name, read when asked for.

Where PEFT has a layer of its own, PEFT merges it: into a copy of that one layer whose base weight and factors are
fp32, so that the live model is untouched, 4-bit weights are not rounded again, and the only rounding is the last one.
LoRA on stacked experts is added expert by expert: a stack in fp32 is several times what a checkpoint's file holds.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_bnb_weight
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..patches.moe.factors import factors_by_expert
from ..patches.quantization.experts import packed_weight
from ..patches.quantization.loading import METHOD
from ..patches.quantization.op import dequantize_nf4


# Prompt tuning changes no weight; these two change them for some tokens or by the row.
_UNMERGEABLE = ("XLORA", "MIXED")
# Of a GGUF file the weights are in memory as they were dequantised; of these two they are if they were asked to be.
_READABLE = ("bitsandbytes", METHOD, "gguf")
_MAYBE_DEQUANTIZED = ("mxfp4", "fp8")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class MergedWeight:
    """
    One weight or buffer of the plain model.

    Args:
        name (`str`): In the plain model's state dict.
        shape (`tuple[int, ...]`): Of the weight.
        dtype (`torch.dtype`): Of the live weight, or of the one that was quantised.
        read (`Callable[[torch.dtype], torch.Tensor]`): The weight in that dtype, with its adapters, rounded once; on
            the live model's device, and the live tensor itself where nothing is to be done. What is not floating
            point keeps its dtype.
        stored (`torch.Tensor`, *optional*): The live tensor, where no adapter and no quantisation changes it.
        quantized (`bool`): Whether the live model holds it in 4 or 8 bits.
        delta (`Callable[[], torch.Tensor]`, *optional*): What adapters add to it, in fp32; `None` without one, and
            for adapters whose sum depends on the base weight (`not_additive` says which).
        not_additive (`str`, *optional*): The kind of such an adapter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[torch.dtype], torch.Tensor]
    stored: torch.Tensor | None = None
    quantized: bool = False
    delta: Callable[[], torch.Tensor] | None = None
    not_additive: str | None = None


def plain_model(model: nn.Module) -> PreTrainedModel:
    """
    The transformers model inside `model`.

    Args:
        model (`nn.Module`): A transformers model, with PEFT around it or not; not a wrapper of DDP or a compiler.

    Raises:
        TypeError: If there is none.
        ValueError: If its adapter is of a kind that is no weight.
    """
    if isinstance(model, PeftModel):
        for name in model.active_adapters:
            config = model.peft_config[name]
            kind = getattr(config.peft_type, "value", config.peft_type)
            if config.is_prompt_learning or kind in _UNMERGEABLE:
                raise ValueError(
                    f"adapter {name!r} is {kind}, which cannot be merged into weights: save it with save_method='lora'"
                )
            if getattr(config, "alora_invocation_tokens", None):
                raise ValueError(
                    f"adapter {name!r} has alora_invocation_tokens and acts on some tokens only, so it cannot be "
                    "merged into weights: save it with save_method='lora'"
                )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"a transformers model or a PeftModel around one is needed, got {type(model).__name__}")
    return model


def merged_weights(model: PreTrainedModel) -> list[MergedWeight]:
    """
    All weights and persistent buffers of the plain model, in the order of the live one.

    Args:
        model (`PreTrainedModel`): With layers of PEFT in it or not (see `plain_model`).

    Raises:
        ValueError: If something in it cannot be merged or read; the message names it.
    """
    _check_quantizer(model)
    return list(_walk(model, ""))


def _check_quantizer(live: PreTrainedModel) -> None:
    quantizer = getattr(live, "hf_quantizer", None)
    if quantizer is None:
        return
    config = quantizer.quantization_config
    method = getattr(config.quant_method, "value", config.quant_method)
    if method in _READABLE or (method in _MAYBE_DEQUANTIZED and getattr(config, "dequantize", False)):
        return
    raise ValueError(
        f"the model is quantised with {method}, which cannot be merged here: load it in 16 bits or with bitsandbytes, "
        "or save the adapter with save_method='lora'"
    )


def _walk(module: nn.Module, prefix: str) -> Iterator[MergedWeight]:
    if isinstance(module, ModulesToSaveWrapper):
        active = [name for name in _active(module, prefix) if name in module.modules_to_save]
        yield from _walk(module.modules_to_save[active[0]] if active else module.original_module, prefix)
    elif isinstance(module, TrainableTokensWrapper):
        yield from _adapted(module.token_adapter, prefix)
    elif isinstance(module, AuxiliaryTrainingWrapper):
        raise ValueError(f"{prefix} is a {type(module).__name__} of PEFT, which is not supported here")
    elif isinstance(module, ParamWrapper):
        yield from _stacked(module, prefix)
    elif isinstance(module, BaseTunerLayer) and hasattr(module, "base_layer"):
        yield from _adapted(module, prefix)
    else:
        yield from _own(module, prefix)
        for name, child in module._modules.items():
            if child is not None:
                yield from _walk(child, _join(prefix, name))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _own(module: nn.Module, prefix: str, skip: tuple[str, ...] = ()) -> Iterator[MergedWeight]:
    """What `module` itself holds, as it is."""
    persistent = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
    for key, value in {**module._parameters, **persistent}.items():
        if value is not None and key not in skip:
            yield _unchanged(module, key, _join(prefix, key))


def _unchanged(module: nn.Module, key: str, name: str) -> MergedWeight:
    shape, dtype, quantized = _describe(module, key, name)
    if quantized:
        return MergedWeight(name, shape, dtype, lambda wanted: _dense(module, key).to(wanted), quantized=True)
    value = module._parameters[key] if key in module._parameters else module._buffers[key]
    value = value.detach()

    def read(wanted: torch.dtype) -> torch.Tensor:
        return value.to(wanted) if value.is_floating_point() else value

    return MergedWeight(name, shape, dtype, read, stored=value)


def _describe(module: nn.Module, key: str, name: str) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Shape and dtype of a tensor of `module`, those from before it was quantised, and whether it is."""
    value = module._parameters.get(key)
    kind = type(value).__name__
    if isinstance(value, DTensor) or hasattr(value, "ds_shape"):
        raise ValueError(
            f"{name} is split over processes (FSDP, ZeRO-3 or tensor parallelism): save from one process that has the "
            "whole model, for instance after loading the trainer's last checkpoint"
        )
    if value is not None and value.is_meta:
        raise ValueError(
            f"{name} is offloaded by device_map: load the model without offloading, on the CPU if need be"
        )
    if kind == "Params4bit":
        state = value.quant_state
        if state is None:
            raise ValueError(
                f"{name} is a 4-bit weight that was not quantised yet: move the model to its device first"
            )
        return tuple(state.shape), state.dtype, True
    if kind == "Int8Params":
        # what bitsandbytes dequantises to; what it was before is not kept
        return tuple(value.shape), torch.float32, True
    if value is not None and value.dtype not in _FLOATS:
        raise ValueError(
            f"{name} is stored as {value.dtype}, a quantisation that cannot be merged here: load the model in 16 "
            "bits, or call model.dequantize() first"
        )
    value = module._buffers[key] if value is None else value
    return tuple(value.shape), value.dtype, False


@torch.no_grad()
def _dense(module: nn.Module, key: str) -> torch.Tensor:
    """A weight as the forward of the live model sees it: dequantised, in the dtype that it had."""
    value = module._parameters[key]
    kind = type(value).__name__
    if kind == "Params4bit":
        if len(value.quant_state.shape) == 3:
            return dequantize_nf4(packed_weight(module, key))
        if getattr(value.quant_state, "packing_format_for_cpu", False):
            # a forward on a CPU with AVX-512 reorders the digits; bitsandbytes puts them back when asked for a state
            module.state_dict()
        return dequantize_bnb_weight(module._parameters[key])
    if kind == "Int8Params":
        return dequantize_bnb_weight(value, state=module.state)
    return value.detach()


def _active(layer: Any, name: str) -> list[str]:
    """The adapters that are active on a layer; what would make the live model another one is an error."""
    if layer.disable_adapters:
        raise ValueError(
            f"the adapters of {name} are disabled, and would be lost: call model.enable_adapter_layers(), or save the "
            "base model without PEFT (model.unload())"
        )
    active = layer.active_adapters
    foreign = [adapter for adapter in getattr(layer, "merged_adapters", []) if adapter not in active]
    if foreign:
        raise ValueError(
            f"adapter {foreign[0]!r} is merged into {name}, but the active one is {', '.join(active)}: call "
            "model.unmerge_adapter() first"
        )
    return list(active)


def _to_merge(layer: BaseTunerLayer, name: str) -> list[str]:
    """The active adapters that `layer` has and has not merged yet."""
    names = layer.adapter_layer_names
    held = {key for group in names for key in getattr(layer, group, None) or ()}
    return [a for a in _active(layer, name) if a in held and a not in layer.merged_adapters]


def _adapted(layer: BaseTunerLayer, prefix: str) -> Iterator[MergedWeight]:
    """A layer of PEFT around one module."""
    base = layer.base_layer
    if isinstance(base, (BaseTunerLayer, AuxiliaryTrainingWrapper)) or isinstance(layer, MultiheadAttention):
        raise ValueError(
            f"{prefix} is a {type(layer).__name__} of PEFT around a {type(base).__name__}, which cannot be merged "
            "here: use save_method='lora'"
        )
    adapters = _to_merge(layer, prefix)
    if not adapters:
        yield from _walk(base, prefix)
        return
    with_bias = [a for a in adapters if isinstance(layer, LoraLayer) and layer.lora_bias.get(a)]
    if with_bias and getattr(base, "bias", None) is None:
        raise ValueError(
            f"adapter {with_bias[0]!r} has lora_bias=True, and {prefix} has no bias to add it to, so a merged model "
            "could not hold it: use save_method='lora', or train with lora_bias=False"
        )
    # LoRA leaves a bias alone without `lora_bias`; of other kinds nothing is known
    changed = ("weight",) if isinstance(layer, LoraLayer) and not with_bias else tuple(base._parameters)
    for key in changed:
        if base._parameters.get(key) is not None:
            yield _changed(layer, key, _join(prefix, key), adapters)
    yield from _own(base, prefix, skip=changed)
    for name, child in base._modules.items():
        if child is not None:
            yield from _walk(child, _join(prefix, name))


def _changed(layer: BaseTunerLayer, key: str, name: str, adapters: list[str]) -> MergedWeight:
    shape, dtype, quantized = _describe(layer.base_layer, key, name)

    def read(wanted: torch.dtype) -> torch.Tensor:
        return _merge_copy(layer, name, adapters)[key].to(wanted)

    def delta() -> torch.Tensor:
        return _merge_copy(layer, name, adapters, zero_base=True)[key]

    variants = getattr(layer, "lora_variant", {})
    kinds = [type(variants[a]).__name__ for a in adapters if a in variants]
    if not isinstance(layer, LoraLayer):
        kinds.append(type(layer).__name__)
    not_additive = kinds[0] if kinds else None
    return MergedWeight(
        name, shape, dtype, read, quantized=quantized, delta=None if kinds else delta, not_additive=not_additive
    )


@torch.no_grad()
def _merge_copy(
    layer: BaseTunerLayer, name: str, adapters: list[str], zero_base: bool = False
) -> dict[str, torch.Tensor]:
    """The parameters of the base module after PEFT has merged `adapters` into a copy of it, in fp32."""
    twin = _shell(layer)
    # PEFT's layers over quantised weights would quantise the sum again
    if type(layer).__module__ == "peft.tuners.lora.bnb":
        twin.__class__ = LoraLinear
    elif type(layer).__module__.endswith(".bnb"):
        raise ValueError(f"{name}: {type(layer).__module__} over quantised weights cannot be merged here, only LoRA")
    for child, module in layer._modules.items():
        twin._modules[child] = _wide_base(layer.base_layer, zero_base) if child == "base_layer" else _wide(module)
    try:
        twin.merge(adapter_names=adapters)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"PEFT cannot merge {', '.join(adapters)} into {name}: {error}") from error
    return {key: value.detach() for key, value in twin.base_layer._parameters.items() if value is not None}


def _shell(module: nn.Module) -> nn.Module:
    """A copy of the module alone: same tensors and submodules, containers of its own, no forward of its own."""
    twin = object.__new__(type(module))
    for key, value in module.__dict__.items():
        # patches and accelerate leave what refers to the original
        if key not in ("forward", "_cast_input_dtype", "_hf_hook", "_old_forward"):
            twin.__dict__[key] = value.copy() if isinstance(value, (list, dict, set)) else value
    return twin


def _wide_base(base: nn.Module, zero: bool) -> nn.Module:
    """The base module with its parameters in fp32, dequantised; `zero` leaves out their values."""
    if type(base).__module__.startswith("bitsandbytes"):
        if not isinstance(base, nn.Linear):
            raise ValueError(f"an adapter on a {type(base).__name__} of bitsandbytes cannot be merged here")
        twin = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    else:
        twin = _shell(base)
    for key, value in base._parameters.items():
        if value is not None:
            dense = _dense(base, key)
            wide = dense.to(torch.promote_types(dense.dtype, torch.float32), copy=True)
            twin._parameters[key] = nn.Parameter(wide.zero_() if zero else wide, requires_grad=False)
    return twin


def _wide(module: nn.Module) -> nn.Module:
    """A copy of what PEFT adds beside a layer, in fp32 where it is narrower."""
    return copy.deepcopy(module)._apply(
        lambda value: value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value
    )


def _stacked(wrapper: ParamWrapper, prefix: str) -> Iterator[MergedWeight]:
    """LoRA on parameters of one module: one `ParamWrapper` around another, and the module in the middle."""
    by_parameter: dict[str, list[ParamWrapper]] = {}
    module: nn.Module = wrapper
    while isinstance(module, ParamWrapper):
        by_parameter.setdefault(module.parameter_name, []).append(module)
        module = module.base_layer
    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        raise ValueError(
            f"{prefix} is in target_parameters and has a {type(module).__name__} too, which cannot be merged here: "
            "use save_method='lora'"
        )
    changed = []
    for key, wrappers in by_parameter.items():
        pairs = [(w, a) for w in wrappers for a in _to_merge(w, _join(prefix, key))]
        if pairs:
            changed.append(key)
            yield _changed_stack(module, key, _join(prefix, key), pairs)
    yield from _own(module, prefix, skip=tuple(changed))
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, _join(prefix, name))


def _changed_stack(module: nn.Module, key: str, name: str, pairs: list[tuple[ParamWrapper, str]]) -> MergedWeight:
    shape, dtype, quantized = _describe(module, key, name)
    num_experts = pairs[0][0].num_experts

    @torch.no_grad()
    def factors() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            factors_by_expert(w.lora_A[a].weight, w.lora_B[a].weight, num_experts, w.scaling[a], torch.float32)
            for w, a in pairs
        ]

    # a plain matrix is (out, in) as that of a linear layer is, which PEFT does not call swapped
    out_first = len(shape) == 2 or pairs[0][0]._did_swap_in_out_features

    def added(found: list[tuple[torch.Tensor, torch.Tensor]], expert: int) -> torch.Tensor:
        total = sum(b[expert].T @ a[expert] for a, b in found)
        return total if out_first else total.T

    @torch.no_grad()
    def read(wanted: torch.dtype) -> torch.Tensor:
        found, packed = factors(), packed_weight(module, key)
        device = module._parameters[key].device
        out = torch.empty(shape, dtype=wanted, device=device)
        for expert, target in enumerate(out if len(shape) == 3 else [out]):
            if packed is None:
                weight = module._parameters[key].detach()
                weight = weight[expert] if len(shape) == 3 else weight
            else:
                weight = dequantize_nf4(packed, experts=(expert, expert + 1))[0]
            target.copy_(weight.float() + added(found, expert))
        return out

    @torch.no_grad()
    def delta() -> torch.Tensor:
        found = factors()
        stack = torch.stack([added(found, expert) for expert in range(num_experts)])
        return stack if len(shape) == 3 else stack[0]

    return MergedWeight(name, shape, dtype, read, quantized=quantized, delta=delta)
