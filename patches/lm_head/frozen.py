"""Log-probabilities of a head that is not trained: its gradient is worked out in the forward, while logits are there.

The gradient of a token's log-probability with respect to its hidden state is `W[target] - softmax @ W`, and the loss
decides one factor on it. With that vector kept, the backward needs neither the logits again nor the head: two products
with the head in all, where recomputing takes three. The softmax is summed up chunk by chunk of the vocabulary, with
the exponentials of a running maximum.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ..kernels import use_kernels


# Logits that are there at once: of so many tokens, and of as many columns as that leaves.
MOST_TOKENS = 4096
LOGITS_BYTES = 256 * 2**20
_COLUMNS = 1024
_BLOCK = 2048
# What exponentials are in fp16 at most: those of a large vocabulary would be subnormal numbers.
_FP16_FACTOR = 4096.0


def refusal(weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why the head's gradient cannot be worked out in the forward, or `None` if it can."""
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "the head is trained"
    if isinstance(weight, DTensor) or hasattr(weight, "ds_id"):
        return "the head is sharded"
    if type(weight) not in (torch.Tensor, nn.Parameter) or not weight.is_floating_point():
        return f"the head is a {type(weight).__name__} of {weight.dtype}"
    if torch.compiler.is_compiling():
        return "it is being compiled"
    return None


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def chunks(num_tokens: int, vocab_size: int, itemsize: int) -> tuple[int, int]:
    """Tokens and columns of a tile of logits, those of all tiles but the last ones."""
    rows = max(1, -(-num_tokens // -(-num_tokens // MOST_TOKENS))) if num_tokens else 1
    most = max(_COLUMNS, LOGITS_BYTES // (rows * itemsize) // _COLUMNS * _COLUMNS)
    tiles = -(-vocab_size // most)
    return rows, min(vocab_size, -(-vocab_size // (tiles * _COLUMNS)) * _COLUMNS)


class State(NamedTuple):
    """
    What is known of each token, `(num_tokens,)` each, after some columns of its logits.

    Args:
        top (`torch.Tensor`): Their maximum.
        total (`torch.Tensor`): Sum of the exponentials of what is left of each without the maximum.
        weighted (`torch.Tensor`): Sum of the same times the logits.
        before (`torch.Tensor`): Maximum over the columns before the target.
        own, slope (`torch.Tensor`): The target's logit, and the derivative of its soft cap.
    """

    top: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor
    before: torch.Tensor
    own: torch.Tensor
    slope: torch.Tensor

    @classmethod
    def start(cls, like: torch.Tensor, num_tokens: int) -> "State":
        """Before any column; rows of one tensor, in which the maximum is finite, so that no difference is NaN."""
        values = like.new_zeros(6, num_tokens, dtype=torch.promote_types(like.dtype, torch.float32))
        values[0].fill_(-3e38)  # not by an index, which would wait for the device
        values[3].fill_(-float("inf"))
        return cls(*values)

    def of(self, part: slice) -> "State":
        """The state of some tokens."""
        return State(*(value[part] for value in self))


class Scoring(NamedTuple):
    """What becomes of the head's output before the softmax, in this order: factor, soft cap, temperature."""

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


def fold_reference(logits, targets, state: State, rescale, start: int, scoring: Scoring, factor, gradient) -> None:
    """
    The kernel in plain PyTorch.

    Args:
        logits (`torch.Tensor` of shape `(num_tokens, num_cols)`): Output of the head for the columns from `start`; if
            `gradient`, overwritten with their exponentials without the maximum, times `factor` and their soft caps'
            derivatives.
        targets (`torch.Tensor` of shape `(num_tokens,)`, int64): Tokens.
        state (`State`): Written to.
        rescale (`torch.Tensor` of shape `(num_tokens,)`): Written to: what earlier exponentials are to be multiplied
            with.
    """
    z, slope = logits.to(state.top.dtype) * scoring.logit_scale, torch.ones((), dtype=state.top.dtype)
    if scoring.softcap is not None:
        squashed = torch.tanh(z / scoring.softcap)
        z, slope = scoring.softcap * squashed, 1 - squashed * squashed
    z = z / scoring.temperature
    columns = torch.arange(start, start + z.shape[1], device=z.device)
    state.before.copy_(torch.maximum(state.before, z.masked_fill(columns >= targets[:, None], -float("inf")).amax(1)))
    here = (targets >= start) & (targets < start + z.shape[1])
    at = (targets - start).clamp(0, z.shape[1] - 1)[:, None]
    for value, columns in ((state.own, z), (state.slope, slope.expand_as(z))):
        value.copy_(torch.where(here, columns.gather(1, at)[:, 0], value))
    top = torch.maximum(state.top, z.amax(1))
    rescale.copy_((state.top - top).exp())
    e = (z - top[:, None]).exp()
    state.top.copy_(top)
    state.total.mul_(rescale).add_(e.sum(1))
    state.weighted.mul_(rescale).add_(torch.where(e > 0, e * z, 0).sum(1))
    if gradient:
        logits.copy_(e * slope * factor)


def launch_fold(logits, targets, state: State, rescale, start: int, scoring: Scoring, factor, gradient) -> None:
    """`fold_reference` through the kernel."""
    from .kernels import fold_kernel

    if not logits.shape[0]:
        return
    with torch.cuda.device_of(logits):
        fold_kernel[(logits.shape[0],)](
            logits,
            targets,
            state.top,  # and the others behind it
            rescale,
            logits.stride(0),
            state.total.storage_offset() - state.top.storage_offset(),
            start,
            logits.shape[1],
            float(scoring.logit_scale),
            float(scoring.softcap or 1.0),
            1.0 / scoring.temperature,
            float(factor),
            SOFTCAP=scoring.softcap is not None,
            GRADIENT=gradient,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total += a @ b` with an fp32 `total`, not rounded on the way where the device can do that."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _score(hidden, weight, bias, targets, scoring: Scoring, gradient: bool):
    """Scores, and with `gradient` that of the log-probabilities."""
    num_tokens, vocab_size, dtype = hidden.shape[0], weight.shape[0], _compute_dtype(hidden)
    rows, columns = chunks(num_tokens, vocab_size, dtype.itemsize)
    state = State.start(hidden, num_tokens)
    rescale = torch.empty_like(state.top)
    logits = hidden.new_empty(min(rows, num_tokens) * columns, dtype=dtype)
    direction = hidden.new_zeros(hidden.shape, dtype=state.top.dtype) if gradient else None
    kernel = use_kernels(logits)
    factor = _FP16_FACTOR if kernel and dtype == torch.float16 else 1.0
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, num_tokens, rows):
            part = slice(first, min(first + rows, num_tokens))
            some = hidden[part].to(dtype)
            for start in range(0, vocab_size, columns):
                head = weight[start : start + columns].to(dtype)
                tile = logits[: some.shape[0] * head.shape[0]].view(some.shape[0], head.shape[0])
                torch.mm(some, head.t(), out=tile)
                if bias is not None:
                    tile += bias[start : start + columns].to(tile.dtype)
                fold = launch_fold if kernel else fold_reference
                fold(tile, targets[part], state.of(part), rescale[part], start, scoring, factor, gradient)
                if gradient:
                    if start:
                        direction[part].mul_(rescale[part, None])
                    _add_product(direction[part], tile, head)
            if gradient:
                own = weight[targets[part]].to(dtype).to(direction.dtype) * state.slope[part, None]
                direction[part].div_(state.total[part, None] * -factor).add_(own)
        if gradient:
            direction *= scoring.logit_scale / scoring.temperature
    log_z = state.top + state.total.log()
    is_top1 = (state.own >= state.top) & (state.own > state.before)
    return state.own - log_z, log_z - state.weighted / state.total, is_top1, direction


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, *rest):
        log_probs, entropy, is_top1, direction = _score(hidden, *rest, gradient=True)
        ctx.set_materialize_grads(False)
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(direction)
        ctx.mark_non_differentiable(is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropy, *_):
        if grad_entropy is not None:
            raise RuntimeError(
                "the entropy of a frozen head is part of the loss, and its gradient was not worked out; set "
                "frozen_head=False"
            )
        if grad is None:
            return (None,) * 5
        (direction,) = ctx.saved_tensors
        return (direction * grad.unsqueeze(-1)).to(ctx.dtype), *[None] * 4


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
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): The head. It computes in the dtype of autocast,
            if that is on, else in that of `hidden`.
        bias (`torch.Tensor` of shape `(vocab_size,)`, *optional*): Its bias.
        targets (`torch.Tensor` of shape `(num_tokens,)`, int64): Tokens.
        temperature (`float`, *optional*, defaults to 1.0): The logits are divided by it.
        softcap (`float`, *optional*): Soft cap of the logits.
        logit_scale (`float`, *optional*, defaults to 1.0): Factor on the head's output, before the cap.

    Returns:
        `log_probs`, `entropy` (fp32) and `is_top1` (bool), each of shape `(num_tokens,)`.

    Raises:
        RuntimeError: In the backward, if the loss has the entropy in it.
    """
    inputs = (hidden, weight, bias, targets.contiguous(), Scoring(logit_scale, softcap, temperature))
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _FrozenHead.apply(*inputs)
    with torch.no_grad():
        return _score(*inputs, gradient=False)[:3]
