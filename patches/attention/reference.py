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


def _spans(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    edges = cu_seqlens.tolist()
    return list(zip(edges, edges[1:], strict=False))


def _pairs(cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor | None) -> list[tuple[int, int, int, int]]:
    """First and last query, first and last key of each block of scores; without keys of their own, causal ones."""
    queries = _spans(cu_seqlens)
    keys = queries if cu_seqlens_k is None else _spans(cu_seqlens_k)
    return [(a, b, c, d) for (a, b), (c, d) in zip(queries, keys, strict=True) if b > a and d > c]


def varlen_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    window: int = 0,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Causal attention within each segment, or full attention of each segment to another one; and the log-sum-exp of the
    scores.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(num_keys, num_kv_heads, head_dim)`): Keys.
        value (`torch.Tensor` of shape `(num_keys, num_kv_heads, v_head_dim)`): Values.
        cu_seqlens (`torch.Tensor` of shape `(num_segments + 1,)`, int32): Segment boundaries.
        scale (`float`): Factor on the scores.
        window (`int`, *optional*, defaults to `0`): Keys a query sees, itself included; 0 for no limit.
        cu_seqlens_k (`torch.Tensor` of shape `(num_segments + 1,)`, int32, *optional*): Boundaries of the keys that
            each segment sees all of. Without it the keys are the segment's own, and attention is causal.

    Returns:
        The output of shape `(num_tokens, num_heads, v_head_dim)`, and the log-sum-exp of shape
        `(num_heads, num_tokens)`, fp32 (fp64 for fp64): infinite where there is no key, as FlashAttention-2 has it.
    """
    out = query.new_zeros((*query.shape[:2], value.shape[-1]))
    stat_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full((query.shape[1], query.shape[0]), float("inf"), dtype=stat_dtype)
    groups = query.shape[1] // key.shape[1]
    for a, b, c, d in _pairs(cu_seqlens, cu_seqlens_k):
        q, k, v = (x.transpose(0, 1).to(stat_dtype) for x in (query[a:b], key[c:d], value[c:d]))
        scores = torch.matmul(q, k.repeat_interleave(groups, 0).transpose(-1, -2)) * scale
        if cu_seqlens_k is None:
            scores = scores.masked_fill(~causal_mask(b - a, d - c, window or None, q.device), float("-inf"))
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
    window: int = 0,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Gradients of `varlen_attention_reference` from its saved output and log-sum-exp, the way FlashAttention-2 does it
    (Dao 2023, algorithm 2): probabilities are `exp(scores - lse)`, and `delta = sum(grad_out * out)` replaces the
    softmax's own backward. With the output and log-sum-exp over more keys than these, the result is their share of
    the gradients. Shapes as in the forward; returns the gradients of query, key and value.
    """
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for a, b, c, d in _pairs(cu_seqlens, cu_seqlens_k):
        q, do, o = (x[a:b].transpose(0, 1).to(lse.dtype) for x in (query, grad_out, out))
        k_full, v_full = (x[c:d].transpose(0, 1).to(lse.dtype).repeat_interleave(groups, 0) for x in (key, value))
        probs = (torch.matmul(q, k_full.transpose(-1, -2)) * scale - lse[:, a:b, None]).exp()
        if cu_seqlens_k is None:
            probs = probs.masked_fill(~causal_mask(b - a, d - c, window or None, q.device), 0.0)
        grad_scores = probs * (torch.matmul(do, v_full.transpose(-1, -2)) - (do * o).sum(-1, keepdim=True)) * scale
        parts = (
            torch.matmul(grad_scores, k_full),
            torch.matmul(grad_scores.transpose(-1, -2), q).unflatten(0, (-1, groups)).sum(1),
            torch.matmul(probs.transpose(-1, -2), do).unflatten(0, (-1, groups)).sum(1),
        )
        for grad, part, (first, last) in zip(grads, parts, ((a, b), (c, d), (c, d)), strict=True):
            grad[first:last] += part.transpose(0, 1).to(grad.dtype)
    return tuple(grads)
