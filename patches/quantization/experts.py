"""Experts whose weights are kept in 4 bits: the storage on the module, and what reads it.

A quantised module is of a subclass of its class, made on the spot, with the same name. Its big parameters are
`bitsandbytes.nn.Params4bit`, as those of a `Linear4bit` are: whoever goes through `named_parameters()` meets packed
bytes that need no gradient. Only the attribute differs: `experts.gate_up_proj` is the weight itself, dequantised at
that moment, in its shape and dtype. So PEFT's `target_parameters` and the experts functions of transformers work as
they are. They pay for it: each look dequantises the whole weight, and what autograd saves of it stays. Our experts
function reads `packed_weight(experts, name)` instead.

A weight that was looked up is a temporary. Writing to it, which is what PEFT's merge does, raises: in 4 bits the sum
would be rounded again at each merge. `dequantize_experts` comes before a merge.
"""

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .op import NF4Weight, dequantize_nf4


# A block is never cut, and temporaries of bitsandbytes on the CPU are 14 bytes an element.
_CHUNK = 1 << 20
_WRITES = {torch.Tensor.data.__set__, torch.Tensor.__setitem__}
_NO_WRITES = {torch.Tensor.requires_grad_, torch.Tensor.set_}  # `parametrize` sets a tensor to itself


class DequantizedWeight(torch.Tensor):
    """The weight of quantised experts as it was when it was looked up. Reading gives plain tensors, writing raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        in_place = in_place or (name.startswith("__i") and name in _IN_PLACE)
        if args and isinstance(args[0], cls) and func not in _NO_WRITES and (in_place or func in _WRITES):
            raise RuntimeError(
                "this weight is dequantised from 4 bits, and what is written to it is lost; to merge an adapter or to "
                "train the experts themselves, call dequantize_experts(model) first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_IN_PLACE = {f"__i{op}__" for op in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()}


class _Quantized:
    """What the subclass of a class of experts adds to it; `_make_class` puts the two together."""

    def __getattr__(self, name: str):
        value = super().__getattr__(name)
        if not _is_packed(value) or "_packed_as_is" in self.__dict__:
            return value
        return dequantize_nf4(NF4Weight.from_quant_state(value, value.quant_state)).as_subclass(DequantizedWeight)

    def __delattr__(self, name: str) -> None:
        # `parametrize`, which PEFT goes through, takes a parameter away and registers what it saw in its place again
        if _is_packed(self._parameters.get(name)):
            self.__dict__.setdefault("_packed_aside", {})[name] = self._parameters[name]
        super().__delattr__(name)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        aside = self.__dict__.get("_packed_aside", {})
        if name in aside and isinstance(tensor, DequantizedWeight):
            self.register_parameter(name, aside.pop(name))
        else:
            super().register_buffer(name, tensor, persistent)

    def _apply(self, fn, recurse: bool = True):
        held = {name: value for name, value in self._parameters.items() if _is_packed(value)}
        moved = {name: _moved(value, fn) for name, value in held.items()}
        # Module._apply would lose the scales of a parameter that it has to make anew; it skips None
        self._parameters.update(dict.fromkeys(held))
        try:
            super()._apply(fn, recurse)
        except BaseException:
            self._parameters.update(held)
            raise
        self._parameters.update(moved)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._parameters.items():
            if _is_packed(value):
                for key, part in value.quant_state.as_dict(packed=True).items():
                    destination[f"{prefix}{name}.{key}"] = part if keep_vars else part.detach()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors):
        loaded = []
        for name, value in self._parameters.items():
            scales = {key: state_dict[key] for key in state_dict if key.startswith(f"{prefix}{name}.")}
            if _is_packed(value) and scales and prefix + name in state_dict:
                data = state_dict.pop(prefix + name)
                for key in scales:
                    del state_dict[key]
                self._parameters[name] = parameter_from_state(data.to(value.device, copy=True), scales)
                loaded.append(prefix + name)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
        )
        missing_keys[:] = [key for key in missing_keys if key not in loaded]

    def __reduce_ex__(self, protocol):
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _rebuild, (type(self).__bases__[1],), state


@functools.cache
def _make_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (_Quantized, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def _rebuild(base: type[nn.Module]) -> nn.Module:
    cls = _make_class(base)
    return cls.__new__(cls)


def _is_packed(value) -> bool:
    return isinstance(value, nn.Parameter) and getattr(value, "quant_state", None) is not None


def _moved(value: nn.Parameter, fn) -> nn.Parameter:
    """The parameter after `fn`, which moves or casts; scales follow to the device and keep their dtype."""
    data = fn(value.detach().as_subclass(torch.Tensor))
    return _parameter(data, _state_on(value.quant_state, data.device))


def _state_on(state, device: torch.device):
    """A copy of a `QuantState` on `device`; `QuantState.to` would move the scales of a parameter that stays."""
    from bitsandbytes.functional import QuantState

    def moved(tensor):
        if tensor is None:
            return None
        # `to_empty` makes a parameter out of one without numbers; so for its scales
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    nested = state.state2
    if nested is not None:
        nested = QuantState(
            moved(nested.absmax), code=moved(nested.code), blocksize=nested.blocksize, dtype=nested.dtype
        )
    return QuantState(
        moved(state.absmax),
        shape=state.shape,
        code=moved(state.code),
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
        offset=moved(state.offset),
        state2=nested,
    )


def _parameter(packed: torch.Tensor, state) -> nn.Parameter:
    import bitsandbytes as bnb

    return bnb.nn.Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=packed.dtype,
        bnb_quantized=True,
    )


def parameter_from_state(packed: torch.Tensor, scales: dict[str, torch.Tensor]) -> nn.Parameter:
    """
    The parameter of a checkpoint in bitsandbytes' format.

    Args:
        packed (`torch.Tensor`, uint8): The tensor under the parameter's name.
        scales (`dict[str, torch.Tensor]`): What lies beside it, by names that end on those of bitsandbytes
            (`absmax`, `quant_map`, ..., `quant_state.bitsandbytes__nf4`).

    Returns:
        `bitsandbytes.nn.Params4bit`: On the device of `packed`.
    """
    from bitsandbytes.functional import QuantState

    return _parameter(packed, QuantState.from_dict(dict(scales), device=packed.device))


def quantize_nf4(
    weight: torch.Tensor, *, blocksize: int = 64, compress_statistics: bool = True, quant_type: str = "nf4"
) -> tuple[torch.Tensor, object]:
    """
    `bitsandbytes.functional.quantize_4bit`, in pieces on the CPU, where it takes several times the weight's memory.

    Args:
        weight (`torch.Tensor`, fp32, fp16 or bf16): Of any shape.
        blocksize (`int`, *optional*, defaults to 64): Elements that share a scale.
        compress_statistics (`bool`, *optional*, defaults to `True`): Double quantisation.
        quant_type (`str`, *optional*, defaults to `"nf4"`): Or `"fp4"`.

    Returns:
        The packed bytes of shape `((numel + 1) // 2, 1)` and the `QuantState`, bit for bit as bitsandbytes makes them.
    """
    from bitsandbytes import functional as bnb

    flat = weight.detach().reshape(-1)
    if flat.device.type != "cpu" or flat.numel() <= _CHUNK:
        packed, state = bnb.quantize_4bit(
            flat, blocksize=blocksize, compress_statistics=compress_statistics, quant_type=quant_type
        )
    else:
        parts = [bnb.quantize_4bit(part, blocksize=blocksize, quant_type=quant_type) for part in flat.split(_CHUNK)]
        packed = torch.cat([packed for packed, _ in parts])
        absmax, state = torch.cat([state.absmax for _, state in parts]), parts[0][1]
        state.absmax = absmax
        if compress_statistics:
            state.offset = absmax.mean()
            state.absmax, state.state2 = bnb.quantize_blockwise(absmax - state.offset, blocksize=256)
            state.nested = True
    state.shape = weight.shape
    return packed, state


def stacked_shape(module: nn.Module, name: str) -> tuple[int, ...] | None:
    """The shape of the stacked weight `name`, however it is stored; `None` if `module` has no such weight."""
    stored = module._parameters.get(name)
    if stored is None:
        stored = getattr(module, name, None)  # what a parametrisation has in a parameter's place
    if (state := getattr(stored, "quant_state", None)) is not None:
        return tuple(state.shape)
    return None if stored is None else tuple(stored.shape)


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is a stack of experts that transformers runs through `ExpertsInterface`."""
    known = hasattr(module, "has_gate") and hasattr(module, "is_transposed")
    return known and bool(stacked_shape(module, "down_proj"))


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """
    The modules whose experts are 3-D parameters (`transformers.integrations.use_experts_implementation`).

    Args:
        model (`nn.Module`): The model, quantised or not.

    Yields:
        Name, module, and the names of its 3-D parameters.
    """
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        weights = tuple(key for key in module._parameters if len(stacked_shape(module, key) or ()) == 3)
        if weights:
            yield name, module, weights


def make_quantized(module: nn.Module) -> None:
    """Make `module` one that reads packed parameters; what it has stays as it is."""
    if not isinstance(module, _Quantized):
        module.__class__ = _make_class(type(module))


def show_packed(module: nn.Module, packed: bool) -> None:
    """Whether the attributes of a quantised module are the packed parameters, for code that fills it, or weights."""
    if packed:
        module.__dict__["_packed_as_is"] = True
    else:
        module.__dict__.pop("_packed_as_is", None)


def packed_parameter(weight: torch.Tensor, **kwargs) -> nn.Parameter:
    """`quantize_nf4`, whose arguments it takes, as a frozen `bitsandbytes.nn.Params4bit`."""
    return _parameter(*quantize_nf4(weight, **kwargs))


@torch.no_grad()
def quantize_experts(
    module: nn.Module,
    names: Iterable[str] = ("gate_up_proj", "down_proj"),
    *,
    blocksize: int = 64,
    compress_statistics: bool = True,
    quant_type: str = "nf4",
) -> None:
    """
    Keep the named parameters of a module of experts in 4 bits, in place; 16-bit weights are freed one by one.

    Args:
        module (`nn.Module`): The experts.
        names (`Iterable[str]`, *optional*): Its parameters; those that are in 4 bits already stay as they are.
        blocksize, compress_statistics, quant_type: See `quantize_nf4`.

    Raises:
        ValueError: If the module has no such parameter.
    """
    for name in names:
        value = module._parameters.get(name)
        if value is None:
            raise ValueError(f"{type(module).__name__} has no parameter {name!r}")
        if not _is_packed(value):
            make_quantized(module)
            module._parameters[name] = packed_parameter(
                value, blocksize=blocksize, compress_statistics=compress_statistics, quant_type=quant_type
            )


def quantize_experts_(model: nn.Module, **kwargs) -> list[str]:
    """
    `quantize_experts` for every module of experts of a loaded model.

    Args:
        model (`nn.Module`): The model, before PEFT wraps it.
        **kwargs: See `quantize_experts`.

    Returns:
        `list[str]`: The parameters that are in 4 bits now.
    """
    found = list(find_experts(model))
    for _, module, names in found:
        quantize_experts(module, names, **kwargs)
    return [f"{path}.{name}" for path, _, names in found for name in names]


@torch.no_grad()
def dequantize_experts(model: nn.Module, dtype: torch.dtype | None = None) -> list[str]:
    """
    The way back, in place: ordinary modules with frozen parameters in 16 bits.

    Args:
        model (`nn.Module`): The model, with or without adapters, or one module of experts.
        dtype (`torch.dtype`, *optional*): Of the parameters; by default the one that they had.

    Returns:
        `list[str]`: The parameters that were in 4 bits.
    """
    done = []
    for path, module in model.named_modules():
        if not isinstance(module, _Quantized):
            continue
        for name in [name for name, value in module._parameters.items() if _is_packed(value)]:
            dense = dequantize_nf4(packed_weight(module, name), dtype=dtype)
            module._parameters[name] = nn.Parameter(dense, requires_grad=False)
            done.append(f"{path}.{name}" if path else name)
        module.__class__ = type(module).__bases__[1]
    return done


def packed_weight(module: nn.Module, name: str) -> NF4Weight | None:
    """The 4-bit weight `name` of a module of experts, sharing its memory; `None` if it is not in 4 bits."""
    value = module._parameters.get(name)
    return NF4Weight.from_quant_state(value, value.quant_state) if _is_packed(value) else None
