"""The backward of long rows takes a few heads at a time, since FlashAttention's scratch is several times its inputs.

It holds the gradient of the queries in fp32 and that of the keys and values once per query head. Heads do not see each
other, so nothing changes but the memory.
"""

from collections.abc import Callable

import torch


BYTES = 2**28  # of queries in one call; rows that need less, 32k tokens of 32 heads of 128, are one call


def head_parts(query: torch.Tensor, key: torch.Tensor) -> list[tuple[slice, slice]]:
    """
    Query heads and KV heads of each call.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Keys.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    group = num_heads // num_kv_heads
    nbytes = query.shape[0] * group * query.shape[2] * query.element_size()
    width = max(1, BYTES // max(nbytes, 1))
    starts = range(0, num_kv_heads, width)
    return [(slice(i * group, (i + width) * group), slice(i, i + width)) for i in starts]


def backward_by_heads(
    attend_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend_backward(grad_out, query, key, value, out, lse)`, which returns three gradients, part by part."""
    parts = head_parts(query, key)
    if len(parts) == 1:
        return attend_backward(grad_out, query, key, value, out, lse)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    for heads, kv_heads in parts:
        part = attend_backward(
            grad_out[:, heads].contiguous(),
            query[:, heads],
            key[:, kv_heads],
            value[:, kv_heads],
            out[:, heads].contiguous(),
            lse[heads],
        )
        for grad, span, values in zip(grads, (heads, kv_heads, kv_heads), part, strict=True):
            grad[:, span] = values
        del part, values
    return grads
