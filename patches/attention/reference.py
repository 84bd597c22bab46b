"""Eager attention: the truth that the kernels are tested against, and the path for what no kernel here can do."""

import torch


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """
    Which key each query may see; the last query sees the last key.

    Args:
        num_queries (`int`): Queries.
        num_keys (`int`): Keys, at least the queries.
        window (`int`, *optional*): Keys a query sees, itself included.
        device (`torch.device`): Where the mask is built.

    Returns:
        `torch.Tensor` of shape `(num_queries, num_keys)`, bool: True where attention is allowed.
    """
    distance = (
        torch.arange(num_queries, device=device)[:, None]
        + (num_keys - num_queries)
        - torch.arange(num_keys, device=device)[None, :]
    )
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """
    Softmax attention written out, with everything an architecture may add to it.

    Args:
        query (`torch.Tensor` of shape `(batch, num_heads, num_queries, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(batch, num_kv_heads, num_keys, head_dim)`): Keys; query heads share them in
            consecutive groups.
        value (`torch.Tensor` of shape `(batch, num_kv_heads, num_keys, v_head_dim)`): Values.
        scale (`float`): Factor on the scores.
        mask (`torch.Tensor`, *optional*): Broadcastable to the scores; bool (True is allowed) or additive.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.
        sinks (`torch.Tensor` of shape `(num_heads,)`, *optional*): A logit per head that takes part in the softmax
            and has no value (gpt-oss).
        dropout (`float`, *optional*, defaults to `0.0`): Dropout on the probabilities.

    Returns:
        `torch.Tensor` of shape `(batch, num_heads, num_queries, v_head_dim)`, in the dtype of `query`.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        probs = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    probs = torch.nn.functional.dropout(probs.to(query.dtype), dropout, training=dropout > 0)
    return torch.matmul(probs, value)


def _segments(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    edges = cu_seqlens.tolist()
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def varlen_attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Causal attention within each segment, and the log-sum-exp of its scores.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Keys.
        value (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Values.
        cu_seqlens (`torch.Tensor` of shape `(num_segments + 1,)`, int32): Segment boundaries.
        scale (`float`): Factor on the scores.
        window (`int`): Keys a query sees, itself included; 0 for no limit.

    Returns:
        The output, shaped like `query`, and the log-sum-exp of shape `(num_heads, num_tokens)`, fp32 (fp64 for fp64).
    """
    out = torch.zeros_like(query)
    stat_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_zeros((query.shape[1], query.shape[0]), dtype=stat_dtype)
    groups = query.shape[1] // key.shape[1]
    for a, b in _segments(cu_seqlens):
        q, k, v = (x[a:b].transpose(0, 1).to(stat_dtype) for x in (query, key, value))
        scores = torch.matmul(q, k.repeat_interleave(groups, 0).transpose(-1, -2)) * scale
        scores = scores.masked_fill(~causal_mask(b - a, b - a, window or None, q.device), float("-inf"))
        lse[:, a:b] = scores.logsumexp(-1)
        out[a:b] = torch.matmul(scores.softmax(-1), v.repeat_interleave(groups, 0)).transpose(0, 1).to(out.dtype)
    return out, lse


def varlen_attention_backward_reference(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Gradients of `varlen_attention_reference` from its saved output and log-sum-exp, the way FlashAttention-2 does it
    (Dao 2023, algorithm 2): probabilities are `exp(scores - lse)`, and `delta = sum(grad_out * out)` replaces the
    softmax's own backward. Shapes as in the forward; returns the gradients of query, key and value.
    """
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for a, b in _segments(cu_seqlens):
        q, k, v, do, o = (x[a:b].transpose(0, 1).to(lse.dtype) for x in (query, key, value, grad_out, out))
        k_full, v_full = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        probs = (torch.matmul(q, k_full.transpose(-1, -2)) * scale - lse[:, a:b, None]).exp()
        probs = probs.masked_fill(~causal_mask(b - a, b - a, window or None, q.device), 0.0)
        grad_scores = probs * (torch.matmul(do, v_full.transpose(-1, -2)) - (do * o).sum(-1, keepdim=True)) * scale
        for grad, part in zip(
            grads,
            (
                torch.matmul(grad_scores, k_full),
                torch.matmul(grad_scores.transpose(-1, -2), q).unflatten(0, (-1, groups)).sum(1),
                torch.matmul(probs.transpose(-1, -2), do).unflatten(0, (-1, groups)).sum(1),
            ),
            strict=True,
        ):
            grad[a:b] = part.transpose(0, 1).to(grad.dtype)
    return tuple(grads)
