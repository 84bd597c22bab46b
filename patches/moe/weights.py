"""Stacked weights as the experts op takes them: one tensor, or the packed bytes of 4 bits and their scales."""

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..quantization.experts import packed_weight
from ..quantization.foresight import Foresight
from ..quantization.op import NF4Weight
from ..quantization.scratch import Scratch


# Where the weights of a model are dequantised, right before a product; only the packed ones are kept for a backward.
# An op takes no objects, so each has a number.
_SCRATCHES: dict[int, Foresight] = {}
_NUMBERS = itertools.count(1)
SCRATCH = "_unsloth_trl_scratch"  # the number, on an experts module


class Stacked(NamedTuple):
    """
    The weights of all experts.

    Args:
        tensor (`torch.Tensor` of shape `(num_experts, ...)`, or uint8): Weights, or their packed bytes.
        scales (`list[torch.Tensor]`): Empty, or what `NF4Weight` has beside the bytes.
        meta (`list[int]`): Its two block sizes and the number of the model's scratch buffers, zeros where it is not
            packed, and its shape.
        dtype (`torch.dtype`): Of the weights, or of those that were packed.
        shape (`tuple[int, ...]`): Of the weights.
    """

    tensor: torch.Tensor
    scales: list[torch.Tensor]
    meta: list[int]
    dtype: torch.dtype
    shape: tuple[int, ...]


def plain(weight: torch.Tensor) -> Stacked:
    """A weight that is not packed."""
    return Stacked(weight, [], [0, 0, 0, *weight.shape], weight.dtype, tuple(weight.shape))


def read_stacked(module: nn.Module, name: str) -> Stacked:
    """The stacked weight `name` of an experts module, as it is stored."""
    packed = packed_weight(module, name)
    if packed is None:
        weight = getattr(module, name)
        return plain(weight)
    scales = [packed.absmax, packed.code]
    if packed.nested_absmax is not None:
        scales += [packed.nested_absmax, packed.nested_code, packed.offset]
    meta = [packed.blocksize, packed.nested_blocksize, module.__dict__.get(SCRATCH, 0), *packed.shape]
    return Stacked(packed.packed, scales, meta, packed.dtype, packed.shape)


def stacked_shape(module: nn.Module, name: str) -> tuple[int, ...] | None:
    """The shape of the stacked weight `name`, however it is stored; `None` if `module` has no such weight."""
    stored = module._parameters.get(name)
    if stored is None:
        stored = getattr(module, name, None)  # what a parametrisation has in a parameter's place
    if (state := getattr(stored, "quant_state", None)) is not None:
        return tuple(state.shape)
    return None if stored is None else tuple(stored.shape)


@contextlib.contextmanager
def dense(
    tensor: torch.Tensor, scales: list[torch.Tensor], meta: list[int], dtype: torch.dtype, purpose: str
) -> Iterator[torch.Tensor]:
    """
    Within this context the weights in `dtype`; outside of it the next ones may be in their place.

    Args:
        tensor, scales, meta: See `Stacked`.
        dtype (`torch.dtype`): Of the product.
        purpose (`str`): Weights of two purposes can be held at once.
    """
    if not scales:
        yield tensor
        return
    blocksize, nested_blocksize, number, *shape = meta
    weight = NF4Weight(
        tensor, *scales[:2], tuple(shape), dtype, blocksize, *scales[2:], nested_blocksize=nested_blocksize
    )
    with scratch_of(number).use(weight, dtype, purpose) as buffer:
        yield buffer


def scratch_of(number: int) -> Foresight:
    """The scratch buffers of a model, made when they are first asked for."""
    if number not in _SCRATCHES:
        _SCRATCHES[number] = Foresight(Scratch())
    return _SCRATCHES[number]


def add_scratch(model: nn.Module, experts: list[nn.Module]) -> int:
    """
    Give the experts of a model scratch buffers of their own, which go with the model.

    Args:
        model (`nn.Module`): The model.
        experts (`list[nn.Module]`): Its experts.

    Returns:
        `int`: Their number.
    """
    number = next(_NUMBERS)
    for module in experts:
        module.__dict__[SCRATCH] = number
    weakref.finalize(model, _SCRATCHES.pop, number, None)
    return number


def remove_scratch(experts: list[nn.Module]) -> None:
    """Free the buffers that `add_scratch` gave."""
    for number in {module.__dict__.pop(SCRATCH, None) for module in experts}:
        _SCRATCHES.pop(number, None)
