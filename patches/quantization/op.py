"""From 4 bits to 16 into a buffer that is given: the format, the `torch.library` op, and its launcher."""

import math
from dataclasses import dataclass

import torch

from .reference import dequantize_nf4_reference


BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# elements of a program of the kernel; the largest block is one
TILE = 4096


@dataclass(frozen=True)
class NF4Weight:
    """
    A weight in bitsandbytes' 4-bit format, NF4 or FP4 by its `code`; all tensors on one device.

    Args:
        packed (`torch.Tensor` of shape `((numel + 1) // 2,)`, uint8): Two digits a byte.
        absmax (`torch.Tensor` of shape `(num_blocks,)`, uint8 with double quantisation, else fp32): Scales.
        code (`torch.Tensor` of shape `(16,)`, fp32): The value of each digit.
        shape (`tuple[int, ...]`): Of the weight, `(num_experts, ...)` for experts.
        dtype (`torch.dtype`): Of the weight before it was quantised.
        blocksize (`int`): Elements of a block.
        nested_absmax (`torch.Tensor` of shape `(num_nested_blocks,)`, fp32, *optional*): Scales of the scales.
        nested_code (`torch.Tensor` of shape `(256,)`, fp32, *optional*): The value of each quantised scale.
        offset (`torch.Tensor` of shape `()`, fp32, *optional*): Mean of the scales.
        nested_blocksize (`int`, *optional*, defaults to 256): Scales of a block of scales.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    code: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int
    nested_absmax: torch.Tensor | None = None
    nested_code: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    nested_blocksize: int = 256

    @classmethod
    def from_quant_state(cls, packed: torch.Tensor, state) -> "NF4Weight":
        """
        Args:
            packed (`torch.Tensor`, uint8): As `bitsandbytes.functional.quantize_4bit` returns it.
            state (`bitsandbytes.functional.QuantState`): As it returns it, with `compress_statistics` or without.

        Returns:
            `NF4Weight`: Shares the memory of both.
        """
        nested = {}
        if state.nested:
            nested = {
                "nested_absmax": state.state2.absmax,
                "nested_code": state.state2.code,
                "offset": state.offset,
                "nested_blocksize": state.state2.blocksize,
            }
        flat = packed.detach().as_subclass(torch.Tensor).view(-1)
        return cls(flat, state.absmax, state.code, tuple(state.shape), state.dtype, state.blocksize, **nested)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """What it takes, with its scales and without the two tables."""
        parts = (self.packed, self.absmax, self.nested_absmax)
        return sum(part.nbytes for part in parts if part is not None)


def dequantize_nf4_triton(
    packed, absmax, code, nested_absmax, nested_code, offset, blocksize, nested_blocksize, start, out
) -> None:
    """Arguments as in `dequantize_nf4_reference`."""
    import triton

    from .kernels import dequantize_nf4_kernel

    end = start + out.numel()
    blocks = max(TILE // blocksize, 1)
    nested = nested_absmax is not None
    grid = (triton.cdiv(triton.cdiv(end, blocksize) - start // blocksize, blocks),)
    with torch.cuda.device_of(packed):
        dequantize_nf4_kernel[grid](
            packed,
            absmax,
            code,
            nested_absmax if nested else absmax,
            nested_code if nested else code,
            offset if nested else code,
            out,
            start,
            end,
            NESTED=nested,
            NESTED_BLOCKSIZE=nested_blocksize,
            BLOCKSIZE=blocksize,
            BLOCKS=blocks,
            EVEN=start % blocksize == 0 and out.numel() % (blocks * blocksize) == 0,
            num_warps=4,
            enable_fp_fusion=False,
        )


@torch.library.custom_op("unsloth_trl::dequantize_nf4", mutates_args=("out",), device_types="cuda")
def _dequantize_nf4(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
    blocksize: int,
    nested_blocksize: int,
    start: int,
    out: torch.Tensor,
) -> None:
    dequantize_nf4_triton(
        packed, absmax, code, nested_absmax, nested_code, offset, blocksize, nested_blocksize, start, out
    )


_dequantize_nf4.register_kernel("cpu")(dequantize_nf4_reference)


@_dequantize_nf4.register_fake
def _(packed, absmax, code, nested_absmax, nested_code, offset, blocksize, nested_blocksize, start, out):
    return None


def dequantize_nf4(
    weight: NF4Weight,
    *,
    experts: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    A weight, or the weights of some experts, in 16 or 32 bits.

    In fp32 the result has the bits of bitsandbytes' `dequantize_4bit` on the CPU; in bf16 and fp16 it is that, rounded
    once. The gradient stops here.

    Args:
        weight (`NF4Weight`): The weight.
        experts (`tuple[int, int]`, *optional*): First expert, and the one after the last; all by default.
        dtype (`torch.dtype`, *optional*): Of the result: bf16, fp16 or fp32; by default the dtype of `out`, else the
            one that the weight had.
        out (`torch.Tensor`, *optional*): Contiguous buffer with as many elements as the result; written to and
            returned in the result's shape. Allocated by default.

    Returns:
        `torch.Tensor` of shape `(num_experts, *weight.shape[1:])`.

    Raises:
        ValueError: If the range, the block size, the dtype or `out` does not fit.
    """
    first, last = experts if experts is not None else (0, weight.shape[0])
    if not 0 <= first <= last <= weight.shape[0]:
        raise ValueError(f"experts={experts} of {weight.shape[0]}")
    if weight.blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize={weight.blocksize} is none of {BLOCKSIZES}")
    shape = (last - first, *weight.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)
    if out.dtype not in DTYPES or dtype not in (None, out.dtype):
        raise ValueError(f"out is {out.dtype}, asked for {dtype or out.dtype}; the result can be {DTYPES}")
    if out.numel() != math.prod(shape) or not out.is_contiguous() or out.device != weight.device:
        raise ValueError(
            f"out of shape {tuple(out.shape)} on {out.device} does not hold {shape} on {weight.device} contiguously"
        )
    out = out.view(shape)
    if out.numel():
        torch.ops.unsloth_trl.dequantize_nf4(
            weight.packed,
            weight.absmax,
            weight.code,
            weight.nested_absmax,
            weight.nested_code,
            weight.offset,
            weight.blocksize,
            weight.nested_blocksize,
            first * math.prod(weight.shape[1:]),
            out,
        )
    return out
