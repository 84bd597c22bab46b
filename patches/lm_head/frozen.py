"""Log-probabilities of a head that is not trained: its gradient is worked out in the forward, while logits are there.

The gradient of a token's log-probability with respect to its hidden state is `(onehot - softmax) @ W`, and the loss
decides one factor on it. With that vector kept, the backward needs neither the logits again nor the head: two products
with the head in all, where recomputing takes three.
"""

import importlib.util
import math

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


# Bytes of the logits that are there at once. As many tokens as that, so that the products stay large.
LOGITS_BYTES = 256 * 2**20
LEAST_TOKENS = 128
_BLOCK = 4096
# What probabilities become at most in fp16, so that those of a large vocabulary are no subnormal numbers.
_FP16_RANGE = 4096.0


def refusal(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why the head's gradient cannot be worked out in the forward, or `None` if it can."""
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "the head is trained"
    if isinstance(weight, DTensor) or hasattr(weight, "ds_id"):
        return "the head is sharded"
    if weight.dtype != _compute_dtype(hidden):
        return f"the head is {weight.dtype} and computes in {_compute_dtype(hidden)}"
    if torch.compiler.is_compiling():
        return "it is being compiled"
    return None


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def tokens_at_once(num_tokens: int, vocab_size: int, itemsize: int) -> int:
    """Tokens of a chunk: of equal size but for the last, and no more than `LOGITS_BYTES` of logits."""
    most = max(LEAST_TOKENS, LOGITS_BYTES // (vocab_size * itemsize) // LEAST_TOKENS * LEAST_TOKENS)
    chunks = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // (chunks * LEAST_TOKENS))) * LEAST_TOKENS


def score_reference(
    logits, targets, log_probs, entropy, is_top1, *, logit_scale, softcap, temperature, factor, gradient
):
    """
    The kernel in plain PyTorch.

    Args:
        logits (`torch.Tensor` of shape `(num_tokens, vocab_size)`): Output of the head; if `gradient`, it is
            overwritten with the gradient of each token's log-probability with respect to it, times `factor`.
        targets (`torch.Tensor` of shape `(num_tokens,)`, int64): Tokens.
        log_probs, entropy, is_top1 (`torch.Tensor` of shape `(num_tokens,)`, fp32, fp32 and bool): Written to.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    z, slope = logits.to(wide) * logit_scale, 1.0
    if softcap is not None:
        squashed = torch.tanh(z / softcap)
        z, slope = softcap * squashed, 1 - squashed * squashed
    z = z / temperature
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    at = targets.unsqueeze(-1)
    log_probs.copy_(log_p.gather(-1, at).squeeze(-1))
    entropy.copy_(-torch.where(p > 0, p * log_p, 0).sum(-1))
    is_top1.copy_(z.argmax(-1) == targets)
    if gradient:
        p = p.neg_()
        p.scatter_add_(-1, at, torch.ones_like(at, dtype=p.dtype))
        logits.copy_(p * slope * (logit_scale * factor / temperature))


def _use_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton") is not None


def launch_score(logits, targets, log_probs, entropy, is_top1, *, logit_scale, softcap, temperature, factor, gradient):
    """`score_reference` through the kernel."""
    from .kernels import score_kernel

    if not logits.shape[0]:
        return
    with torch.cuda.device_of(logits):
        score_kernel[(logits.shape[0],)](
            logits,
            targets,
            log_probs,
            entropy,
            is_top1,
            logits.shape[1],
            float(logit_scale),
            float(softcap or 1.0),
            1.0 / temperature,
            float(factor),
            SOFTCAP=softcap is not None,
            GRADIENT=gradient,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """`out = a @ b` with an fp32 `out`, not rounded on the way where the device can do that."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(a @ b)


def _score(hidden, weight, bias, targets, temperature, softcap, logit_scale, gradient):
    """Scores, and with `gradient` that of the log-probabilities times the factor that comes last."""
    num_tokens, (vocab_size, width) = hidden.shape[0], weight.shape
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_probs, entropy = (hidden.new_empty(num_tokens, dtype=wide) for _ in range(2))
    is_top1 = hidden.new_empty(num_tokens, dtype=torch.bool)
    chunk = tokens_at_once(num_tokens, vocab_size, weight.dtype.itemsize)
    logits = weight.new_empty(min(chunk, num_tokens), vocab_size)
    direction = hidden.new_empty(num_tokens, width, dtype=wide) if gradient else None
    factor = 1.0
    if (kernel := _use_kernel(logits)) and weight.dtype == torch.float16:
        factor = 2.0 ** math.floor(math.log2(_FP16_RANGE * temperature / max(abs(logit_scale), 1e-6)))
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, num_tokens, chunk):
            part = slice(start, min(start + chunk, num_tokens))
            rows = logits[: part.stop - start]
            torch.mm(hidden[part].to(weight.dtype), weight.t(), out=rows)
            if bias is not None:
                rows += bias.to(rows.dtype)
            (launch_score if kernel else score_reference)(
                rows,
                targets[part],
                log_probs[part],
                entropy[part],
                is_top1[part],
                logit_scale=logit_scale,
                softcap=softcap,
                temperature=temperature,
                factor=factor,
                gradient=gradient,
            )
            if gradient:
                _product(rows, weight, direction[part])
    return log_probs, entropy, is_top1, direction, factor


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, *rest):
        log_probs, entropy, is_top1, direction, ctx.factor = _score(hidden, *rest, gradient=True)
        ctx.set_materialize_grads(False)
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(direction)
        ctx.mark_non_differentiable(entropy, is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        if grad is None:
            return (None,) * 7
        (direction,) = ctx.saved_tensors
        return (direction * (grad / ctx.factor).unsqueeze(-1)).to(ctx.dtype), *[None] * 6


def frozen_head_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Log-probability, entropy and top-1 hit of each token, without its logits; see `refusal`.

    Args:
        hidden (`torch.Tensor` of shape `(num_tokens, hidden_size)`): Hidden states; the only input with a gradient,
            and only that of the log-probabilities.
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): The head, in the dtype that it computes in.
        bias (`torch.Tensor` of shape `(vocab_size,)`, *optional*): Its bias.
        targets (`torch.Tensor` of shape `(num_tokens,)`, int64): Tokens.
        temperature (`float`, *optional*, defaults to 1.0): The logits are divided by it.
        softcap (`float`, *optional*): Soft cap of the logits.
        logit_scale (`float`, *optional*, defaults to 1.0): Factor on the head's output, before the cap.

    Returns:
        `log_probs`, `entropy` (fp32) and `is_top1` (bool), each of shape `(num_tokens,)`.
    """
    inputs = (hidden, weight, bias, targets, temperature, softcap, logit_scale)
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _FrozenHead.apply(*inputs)
    with torch.no_grad():
        return _score(*inputs, gradient=False)[:3]
