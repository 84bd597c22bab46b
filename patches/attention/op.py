"""FlashAttention-2 over packed rows as a `torch.library` op, and its launcher.

The kernel is the one that torch bundles (`aten::_flash_attention_forward` with cumulative lengths). Called directly it
takes fewer KV heads than query heads as they are, and allocates nothing besides its outputs.
"""

import functools

import torch
import torch.nn.functional as F

from ..layout import PackedLayout
from .heads import backward_by_heads
from .reference import varlen_attention_backward_reference, varlen_attention_reference


HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def flash_forward(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window=0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the kernel. `window` keys are seen, with `causal` only; 0 for no limit."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window - 1 if window else -1,
        window_size_right=0 if window else -1,
    )
    return out, lse


def flash_backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    scale,
    causal,
    window=0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; `grad_out` contiguous, the rest as in `flash_forward`."""
    # without dropout the kernel never reads its random state, but wants the tensors
    rng_state = torch.empty(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, dtype=torch.uint64, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        causal,
        rng_state,
        unused,
        scale=scale,
        window_size_left=window - 1 if window else -1,
        window_size_right=0 if window else -1,
    )


# The name keeps "flash_attn" in it: TRL's selective checkpointing saves ops whose name has it instead of recomputing.
@torch.library.custom_op("unsloth_trl::flash_attn_varlen", mutates_args=(), device_types="cuda")
def _flash_attn_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_forward(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale, True, window)


@_flash_attn_varlen.register_kernel("cpu")
def _(query, key, value, cu_seqlens, max_seqlen, scale, window):
    return varlen_attention_reference(query, key, value, cu_seqlens, scale, window)


@_flash_attn_varlen.register_fake
def _(query, key, value, cu_seqlens, max_seqlen, scale, window):
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=lse_dtype)


@torch.library.custom_op("unsloth_trl::flash_attn_varlen_backward", mutates_args=(), device_types="cuda")
def _flash_attn_varlen_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def attend_backward(*tensors):
        return flash_backward(*tensors, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale, True, window)

    return backward_by_heads(attend_backward, grad_out.contiguous(), query, key, value, out, lse)


@_flash_attn_varlen_backward.register_kernel("cpu")
def _(grad_out, query, key, value, out, lse, cu_seqlens, max_seqlen, scale, window):
    return varlen_attention_backward_reference(grad_out, query, key, value, out, lse, cu_seqlens, scale, window)


@_flash_attn_varlen_backward.register_fake
def _(grad_out, query, key, value, out, lse, cu_seqlens, max_seqlen, scale, window):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output):
    query, key, value, cu_seqlens, ctx.max_seqlen, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    if grad_out is None:
        return (None,) * 7
    query, key, value, out, lse, cu_seqlens = ctx.saved_tensors
    grads = torch.ops.unsloth_trl.flash_attn_varlen_backward(
        grad_out, query, key, value, out, lse, cu_seqlens, ctx.max_seqlen, ctx.scale, ctx.window
    )
    return *grads, None, None, None, None


_flash_attn_varlen.register_autograd(_backward, setup_context=_setup_context)


@functools.cache
def device_supports_flash(device: torch.device) -> bool:
    """Whether torch's FlashAttention-2 runs on `device`: CUDA from sm_80. ROCm's build has other kernels."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def plain_refusal(softcap: float | None, sinks: torch.Tensor | None, dropout: float) -> str | None:
    """What FlashAttention's softmax is not asked for, or `None`."""
    if softcap is not None:
        return f"soft-capping ({softcap})"
    if sinks is not None:
        return "attention sinks"
    return f"attention dropout ({dropout})" if dropout else None


def refusal_of_any_layout(
    query: torch.Tensor, value: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None, dropout: float
) -> str | None:
    """Why FlashAttention-2 cannot take such a call, whatever its layout, or `None` if it can."""
    if (refused := plain_refusal(softcap, sinks, dropout)) is not None:
        return refused
    if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
        return f"head size {max(query.shape[-1], value.shape[-1])} over {MAX_HEAD_DIM}"
    if query.dtype not in HALF:
        return f"dtype {query.dtype}"
    if not device_supports_flash(query.device):
        return f"device {query.device} (needs CUDA sm_80 or newer)"
    return None


def pad_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    The kernel wants one head size, a multiple of 8; zeros change neither the scores nor the other columns.

    Args:
        query, key (`torch.Tensor` of shape `(num_tokens, heads, head_dim)`): Queries and keys.
        value (`torch.Tensor` of shape `(num_tokens, heads, v_head_dim)`): Values.

    Returns:
        The three with one last dimension.
    """
    size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    return tuple(pad_columns(x, size) for x in (query, key, value))


def pad_columns(x: torch.Tensor, size: int) -> torch.Tensor:
    """`x` with zeros up to `size` in its last dimension; itself, where `F.pad` would copy it to the same."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def flash_attn_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """
    Causal attention within the segments of a packed row, FlashAttention-2 (Dao 2023).

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`, fp16 or bf16): Queries.
        key (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Keys; `num_kv_heads` divides `num_heads`.
        value (`torch.Tensor` of shape `(num_tokens, num_kv_heads, v_head_dim)`): Values, `v_head_dim` up to the
            head size of the keys (MLA): padded with zeros for the kernel and cropped again.
        layout (`PackedLayout`): Segments without parents, on the same device.
        scale (`float`): Factor on the scores.
        window (`int`, *optional*): Keys a query sees, itself included.

    Returns:
        `torch.Tensor` of shape `(num_tokens, num_heads, v_head_dim)`.

    Raises:
        ValueError: If the layout does not have this many tokens.
    """
    layout.check(query.shape[0])
    v_head_dim = value.shape[-1]
    query, key, value = pad_heads(query, key, value)
    out, _ = torch.ops.unsloth_trl.flash_attn_varlen(
        query, key, value, layout.cu_seqlens, layout.max_seqlen, scale, window or 0
    )
    return out if out.shape[-1] == v_head_dim else out[..., :v_head_dim]
