"""Triton kernel of the way back from bitsandbytes' 4-bit format; its launcher is in `op.py`."""

import triton
import triton.language as tl


@triton.jit
def dequantize_nf4_kernel(
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_absmax_ptr,
    nested_code_ptr,
    offset_ptr,
    out_ptr,
    start,
    end,
    NESTED: tl.constexpr,
    NESTED_BLOCKSIZE: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """
    Elements `start` to `end` of a weight, `BLOCKS` of its quantisation blocks a program.

    The scales are worked out once a block, in fp32. The launcher turns off the fusion of products and sums, so that
    they round as bitsandbytes' do.
    """
    block = (start // BLOCKSIZE).to(tl.int64) + tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    live = block * BLOCKSIZE < end
    absmax = tl.load(absmax_ptr + block, mask=live, other=0)
    if NESTED:
        nested_absmax = tl.load(nested_absmax_ptr + block // NESTED_BLOCKSIZE, mask=live, other=0.0)
        scale = tl.load(nested_code_ptr + absmax.to(tl.int32)) * nested_absmax
        scale = scale + tl.load(offset_ptr)
    else:
        scale = absmax

    HALF: tl.constexpr = BLOCKSIZE // 2
    pair = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    # a byte may hold one element of the range and one beside it
    byte = tl.load(packed_ptr + pair, mask=(pair * 2 + 1 >= start) & (pair * 2 < end), other=0).to(tl.int32)
    first = tl.load(code_ptr + (byte >> 4)) * scale[:, None]
    second = tl.load(code_ptr + (byte & 15)) * scale[:, None]

    element = block[:, None] * BLOCKSIZE + tl.arange(0, BLOCKSIZE)[None, :]
    value = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (element - start), value, mask=(element >= start) & (element < end))
