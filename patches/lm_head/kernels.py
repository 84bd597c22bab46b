"""Triton kernel of the frozen head: from the logits of some tokens to their scores, and to a gradient in place."""

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


@triton.jit
def score_kernel(
    logits,  # (num_tokens, vocab_size), contiguous; overwritten if GRADIENT
    targets,  # (num_tokens,) int64
    log_probs,  # (num_tokens,) fp32
    entropy,  # (num_tokens,) fp32
    is_top1,  # (num_tokens,) bool
    vocab_size,
    logit_scale,
    softcap,
    inv_t,
    factor,  # on the gradient
    SOFTCAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """
    The scores of one token, and the gradient of its log-probability with respect to what the head put out.

    Each lane keeps a maximum and sums of its own, and they are brought together once: nothing is reduced in the loop.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocab_size
    target = tl.load(targets + token)
    lanes = tl.arange(0, BLOCK)
    # finite, so that a lane without a column has no NaN
    highest = tl.full((BLOCK,), -3.0e38, dtype=tl.float32)
    before = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)  # of columns before the target
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        cols = start + lanes
        mask = cols < vocab_size
        z, _ = _logits(row, cols, mask, logit_scale, softcap, inv_t, SOFTCAP)
        z = tl.where(mask, z, -float("inf"))
        before = tl.maximum(before, tl.where(cols < target, z, -float("inf")))
        new = tl.maximum(highest, z)
        shrink = tl.exp(highest - new)
        e = tl.exp(z - new)
        total = total * shrink + e
        weighted = weighted * shrink + tl.where(e > 0, e * z, 0.0)
        highest = new
    top = tl.max(highest, axis=0)
    shrink = tl.exp(highest - top)
    total_sum = tl.sum(total * shrink, axis=0)
    log_z = top + tl.log(total_sum)
    own, _ = _logits(row, target, target < vocab_size, logit_scale, softcap, inv_t, SOFTCAP)
    tl.store(log_probs + token, own - log_z)
    tl.store(entropy + token, log_z - tl.sum(weighted * shrink, axis=0) / total_sum)
    # the first of equal maxima is the one that counts
    tl.store(is_top1 + token, (own >= top) & (own > tl.max(before, axis=0)))
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the target's logit
        for start in range(0, vocab_size, BLOCK):
            cols = start + lanes
            mask = cols < vocab_size
            z, slope = _logits(row, cols, mask, logit_scale, softcap, inv_t, SOFTCAP)
            grad = tl.where(cols == target, 1.0, 0.0) - tl.exp(z - log_z)
            grad = grad * slope * (inv_t * logit_scale * factor)
            tl.store(row + cols, grad.to(logits.dtype.element_ty), mask=mask)
