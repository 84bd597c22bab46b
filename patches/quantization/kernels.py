"""Triton kernel of the way back from bitsandbytes' 4-bit format; its launcher is in `op.py`."""

import triton
import triton.language as tl


# Eight digits of a word, by tables of the low and of the high bytes of the 16 values: three byte permutations give a
# byte of four values each, and two more put the bytes together.
_LOOK_UP = tl.constexpr(
    """
    {
    .reg .b32 word, digit, upper, a, b, low, high;
    mov.b32 word, $4;
    and.b32 digit, word, 0x7777;
    and.b32 upper, word, 0x8888;
    shr.b32 upper, upper, 1;
    or.b32 upper, upper, 0x3210;
    prmt.b32 a, $5, $6, digit;
    prmt.b32 b, $7, $8, digit;
    prmt.b32 low, a, b, upper;
    prmt.b32 a, $9, $10, digit;
    prmt.b32 b, $11, $12, digit;
    prmt.b32 high, a, b, upper;
    prmt.b32 $0, low, high, 0x4051;
    prmt.b32 $1, low, high, 0x6273;
    shr.b32 word, word, 16;
    and.b32 digit, word, 0x7777;
    and.b32 upper, word, 0x8888;
    shr.b32 upper, upper, 1;
    or.b32 upper, upper, 0x3210;
    prmt.b32 a, $5, $6, digit;
    prmt.b32 b, $7, $8, digit;
    prmt.b32 low, a, b, upper;
    prmt.b32 a, $9, $10, digit;
    prmt.b32 b, $11, $12, digit;
    prmt.b32 high, a, b, upper;
    prmt.b32 $2, low, high, 0x4051;
    prmt.b32 $3, low, high, 0x6273;
    }
    """
)


@triton.jit
def _bytes_of_four(code_ptr, scale, dtype, first: tl.constexpr):
    """Low and high bytes of four digits' values in 16 bits."""
    low = tl.zeros_like(scale).to(tl.uint32)
    high = tl.zeros_like(scale).to(tl.uint32)
    for i in tl.static_range(4):
        value = (tl.load(code_ptr + first + i) * scale).to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        low |= (value & 255) << (8 * i)
        high |= (value >> 8) << (8 * i)
    return low, high


@triton.jit
def _look_up(word, code_ptr, scale, dtype):
    """The values of the digits of 32-bit words, `(BLOCKS, words)`, two to a word of the result, in their order."""
    low0, high0 = _bytes_of_four(code_ptr, scale, dtype, 0)
    low1, high1 = _bytes_of_four(code_ptr, scale, dtype, 4)
    low2, high2 = _bytes_of_four(code_ptr, scale, dtype, 8)
    low3, high3 = _bytes_of_four(code_ptr, scale, dtype, 12)
    a, b, c, d = tl.inline_asm_elementwise(
        _LOOK_UP,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [word, low0, low1, low2, low3, high0, high1, high2, high3],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )
    both = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(both, (word.shape[0], 4 * word.shape[1]))


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
    WORDS: tl.constexpr,  # 32 bits at a time, with NVIDIA's instruction for it
):
    """
    Elements `start` to `end` of a weight, `BLOCKS` of its quantisation blocks a program.

    The scales are worked out once a block, in fp32. The launcher turns off the fusion of products and sums, so that
    they round as bitsandbytes' do. Masks keep the compiler from loading and storing more than one number at once.
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
    if WORDS:
        place = local[:, None] * (BLOCKSIZE // 8) + tl.arange(0, BLOCKSIZE // 8)[None, :]
        word = tl.load((packed_ptr + first * HALF).to(tl.pointer_type(tl.uint32)) + place)
        value = _look_up(word, code_ptr, scale[:, None], out_ptr.dtype.element_ty)
        place = local[:, None] * HALF + tl.arange(0, HALF)[None, :]
        tl.store((out_ptr + (first * BLOCKSIZE - start)).to(tl.pointer_type(tl.uint32)) + place, value)
        return
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
