"""Stacked weights as the experts op takes them: one tensor, or the packed bytes of 4 bits and their scales."""

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..quantization.experts import packed_weight
from ..quantization.foresight import Foresight
from ..quantization.op import NF4Weight, dequantize_nf4
from ..quantization.scratch import Scratch


# Where the weights of a model are dequantised, right before a product; only the packed ones are kept for a backward.
# An op takes no objects, so each has a number.
_SCRATCHES: dict[int, Foresight] = {}
_NUMBERS = itertools.count(1)
META = 4  # numbers of `Stacked.meta` before the shape
_ATTRIBUTE = "_unsloth_trl_scratch"


class ScratchNumber:
    """
    The number of a model's scratch buffers, an attribute of all its experts; the buffers go with the last of them.

    A copy of the experts, or what is unpickled of them, has a number and buffers of its own.
    """

    def __init__(self):
        self.number = next(_NUMBERS)
        _SCRATCHES[self.number] = Foresight(Scratch())
        weakref.finalize(self, _SCRATCHES.pop, self.number, None)

    def give(self, module: nn.Module) -> None:
        """Let `module` use these buffers."""
        module.__dict__[_ATTRIBUTE] = self

    @staticmethod
    def take(module: nn.Module) -> None:
        """Let `module` use the buffers of nobody."""
        module.__dict__.pop(_ATTRIBUTE, None)

    @staticmethod
    def of(module: nn.Module) -> int:
        """The number of `module`, 0 without one."""
        held = module.__dict__.get(_ATTRIBUTE)
        return 0 if held is None else held.number

    def __deepcopy__(self, memo: dict) -> "ScratchNumber":
        return ScratchNumber()

    def __reduce__(self):
        return _unpickled, ()


def _unpickled() -> ScratchNumber:
    """In a process that has patched nothing yet, experts that come patched need the experts function."""
    from .patch import register

    register()
    return ScratchNumber()


class Stacked(NamedTuple):
    """
    The weights of all experts.

    Args:
        tensor (`torch.Tensor` of shape `(num_experts, ...)`, or uint8): Weights, or their packed bytes.
        scales (`list[torch.Tensor]`): Empty, or what `NF4Weight` has beside the bytes.
        meta (`list[int]`): Its two block sizes, the number of the model's scratch buffers and its own number among
            the model's weights, zeros where it is not packed; and its shape.
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
    return Stacked(weight, [], [0, 0, 0, 0, *weight.shape], weight.dtype, tuple(weight.shape))


def read_stacked(module: nn.Module, name: str) -> Stacked:
    """The stacked weight `name` of an experts module, as it is stored."""
    packed = packed_weight(module, name)
    if packed is None:
        weight = getattr(module, name)
        return plain(weight)
    scales = [packed.absmax, packed.code]
    if packed.nested_absmax is not None:
        scales += [packed.nested_absmax, packed.nested_code, packed.offset]
    number = ScratchNumber.of(module)
    who = scratch_of(number).know(module, name)
    meta = [packed.blocksize, packed.nested_blocksize, number, who, *packed.shape]
    return Stacked(packed.packed, scales, meta, packed.dtype, packed.shape)


def is_sharded(module: nn.Module) -> bool:
    """Whether another process has some of the experts, or some of each."""
    stored = module._parameters.get("down_proj")
    return bool(getattr(module, "_is_expert_parallel", False)) or isinstance(stored, DTensor)


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
    blocksize, nested_blocksize, number, who, *shape = meta
    weight = NF4Weight(
        tensor, *scales[:2], tuple(shape), dtype, blocksize, *scales[2:], nested_blocksize=nested_blocksize
    )
    if is_capturing(tensor.device):
        # a graph repeats what is launched now: neither what a buffer holds already, nor another stream
        yield dequantize_nf4(weight, dtype=dtype)
        return
    with scratch_of(number).use(weight, dtype, purpose, who) as buffer:
        yield buffer


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on this device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def scratch_of(number: int) -> Foresight:
    """The scratch buffers with this number; those of 0 are for experts without a number."""
    if number not in _SCRATCHES:
        _SCRATCHES[number] = Foresight(Scratch())
    return _SCRATCHES[number]
