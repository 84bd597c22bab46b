"""Triton kernel between PEFT's layout of a stacked weight's second LoRA factor and that of the experts op."""

import triton
import triton.language as tl


@triton.jit
def move_factor_kernel(
    source,
    target,
    width,
    columns,
    num_experts,
    scaling,
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """
    `target[e, r, w] = scaling * source[w, r * num_experts + e]`, or the other way round if `INVERSE`.

    A block is read along the source's rows and written along the target's, so that both are whole lines of memory.
    """
    rank = columns // num_experts
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # of the tensor by expert, `(num_experts * rank, width)`
    row = column % num_experts * rank + column // num_experts
    flat = w[:, None] * columns + column[None, :]
    stacked = row[:, None] * width + w[None, :]
    inside, turned = (
        (w < width)[:, None] & (column < columns)[None, :],
        (column < columns)[:, None] & (w < width)[None, :],
    )
    if INVERSE:
        value = tl.load(source + stacked, mask=turned, other=0.0).to(tl.float32) * scaling
        tl.store(target + flat, tl.trans(value).to(target.dtype.element_ty), mask=inside)
    else:
        value = tl.load(source + flat, mask=inside, other=0.0).to(tl.float32) * scaling
        tl.store(target + stacked, tl.trans(value).to(target.dtype.element_ty), mask=turned)
