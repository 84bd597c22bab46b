"""Triton kernel of the frozen head: folds the logits of some columns into what is known of each token."""

import triton
import triton.language as tl


@triton.jit
def _logits(row, cols, mask, logit_scale, softcap, inv_t, SOFTCAP: tl.constexpr):
    """What the softmax is over, fp32, and the derivative of the soft cap."""
    z = tl.load(row + cols, mask=mask, other=0.0).to(tl.float32) * logit_scale
    slope = 1.0
    if SOFTCAP:
        squashed = 2 * tl.sigmoid(2 * z / softcap) - 1  # tanh
        z, slope = softcap * squashed, 1 - squashed * squashed
    return z * inv_t, slope


@triton.jit(
    do_not_specialize=["state_stride", "start"], do_not_specialize_on_alignment=["targets", "state", "rescale"]
)
def fold_kernel(
    logits,  # (num_tokens, stride), of which num_cols; overwritten if GRADIENT
    targets,  # (num_tokens,) int64
    state,  # (6, state_stride) fp32: see `State`
    rescale,  # (num_tokens,) fp32
    stride,
    state_stride,
    start,
    num_cols,
    logit_scale,
    softcap,
    inv_t,
    factor,  # on what is written
    SOFTCAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """
    Columns `start` to `start + num_cols` of one token: first their maximum, then the sums, the exponentials in place.

    Each lane keeps sums of its own, and they are brought together once: nothing is reduced in a loop.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    own_col = tl.load(targets + token) - start
    here = (own_col >= 0) & (own_col < num_cols)
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    before = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)  # of columns before the target
    for first in range(0, num_cols, BLOCK):
        cols = first + lanes
        mask = cols < num_cols
        z, _ = _logits(row, cols, mask, logit_scale, softcap, inv_t, SOFTCAP)
        z = tl.where(mask, z, -float("inf"))
        highest = tl.maximum(highest, z)
        before = tl.maximum(before, tl.where(cols < own_col, z, -float("inf")))
    if here:
        own, own_slope = _logits(row, own_col, here, logit_scale, softcap, inv_t, SOFTCAP)
        tl.store(state + 4 * state_stride + token, own)
        tl.store(state + 5 * state_stride + token, own_slope)
    tl.debug_barrier()  # every thread has read the target's logit
    before_ptr = state + 3 * state_stride + token
    tl.store(before_ptr, tl.maximum(tl.load(before_ptr), tl.max(before, axis=0)))
    old = tl.load(state + token)
    top = tl.maximum(old, tl.max(highest, axis=0))
    shrink = tl.exp(old - top)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, num_cols, BLOCK):
        cols = first + lanes
        mask = cols < num_cols
        z, slope = _logits(row, cols, mask, logit_scale, softcap, inv_t, SOFTCAP)
        e = tl.where(mask, tl.exp(z - top), 0.0)
        total += e
        weighted += tl.where(e > 0, e * z, 0.0)
        if GRADIENT:
            tl.store(row + cols, (e * slope * factor).to(logits.dtype.element_ty), mask=mask)
    tl.store(state + token, top)
    total_ptr, weighted_ptr = state + state_stride + token, state + 2 * state_stride + token
    tl.store(total_ptr, tl.load(total_ptr) * shrink + tl.sum(total, axis=0))
    tl.store(weighted_ptr, tl.load(weighted_ptr) * shrink + tl.sum(weighted, axis=0))
    tl.store(rescale + token, shrink)
