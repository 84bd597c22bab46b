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
    EVEN: tl.constexpr,  # all blocks of all programs are whole, and within the range
):
    """
    Elements `start` to `end` of a weight, `BLOCKS` of its quantisation blocks a program.

    The scales are worked out once a block, in fp32. The launcher turns off the fusion of products and sums, so that
    they round as bitsandbytes' do. Without masks it is as fast as a copy of the bytes; with them it is not.
    """
    first = (start // BLOCKSIZE).to(tl.int64) + tl.program_id(0).to(tl.int64) * BLOCKS
    local = tl.arange(0, BLOCKS)
    block = first + local
    live = (block * BLOCKSIZE < end) | EVEN
    absmax = tl.load(absmax_ptr + first + local, mask=live, other=0)
    if NESTED:
        nested_absmax = tl.load(nested_absmax_ptr + block // NESTED_BLOCKSIZE, mask=live, other=0.0)
        scale = tl.load(nested_code_ptr + absmax.to(tl.int32)) * nested_absmax
        scale = scale + tl.load(offset_ptr)
    else:
        scale = absmax

    HALF: tl.constexpr = BLOCKSIZE // 2
    pair = local[:, None] * HALF + tl.arange(0, HALF)[None, :]
    element = local[:, None] * BLOCKSIZE + tl.arange(0, BLOCKSIZE)[None, :]
    if EVEN:
        byte = tl.load(packed_ptr + first * HALF + pair).to(tl.int32)
    else:
        # a byte may hold one element of the range and one beside it
        lowest = (first * HALF + pair) * 2
        here = (lowest + 1 >= start) & (lowest < end)
        byte = tl.load(packed_ptr + first * HALF + pair, mask=here, other=0).to(tl.int32)
    high = tl.load(code_ptr + (byte >> 4)) * scale[:, None]
    low = tl.load(code_ptr + (byte & 15)) * scale[:, None]
    value = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    if EVEN:
        tl.store(out_ptr + (first * BLOCKSIZE - start) + element, value)
    else:
        place = first * BLOCKSIZE + element
        tl.store(out_ptr + (place - start), value, mask=(place >= start) & (place < end))
