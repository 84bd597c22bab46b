"""Attention over segments in a few padded calls: for the CPU and for what the varlen kernel cannot do."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..layout import PackedLayout
from .reference import causal_mask, eager_attention


MAX_BUCKETS = 8


class Bucket(NamedTuple):
    """Segments of similar length, padded to one length. `gather` is None where the rows lie there already."""

    rows: int
    length: int
    gather: torch.Tensor | None  # (rows * length,) int64: the token in each padded slot


def build_buckets(layout: PackedLayout) -> tuple[list[Bucket], torch.Tensor | None]:
    """
    Sort the segments into at most `MAX_BUCKETS` classes of length, equal steps of the ratio longest / shortest.

    Args:
        layout (`PackedLayout`): Segments without parents.

    Returns:
        The buckets, and for each token its slot in the concatenated padded output (`None` when that is the identity).
    """
    starts, lengths, offset = [], [], 0
    for n in layout.seqlens:
        if n:
            starts.append(offset)
            lengths.append(n)
        offset += n
    longest, shortest = max(lengths), min(lengths)
    if longest == shortest:
        return [Bucket(len(lengths), longest, None)], None
    length = torch.tensor(lengths)
    start = torch.tensor(starts)
    step = torch.log(torch.tensor(longest / shortest, dtype=torch.float64)) / MAX_BUCKETS
    index = torch.log(longest / length.double()).div(step).floor().clamp(max=MAX_BUCKETS - 1).long()
    restore = torch.empty(layout.num_tokens, dtype=torch.int64)
    buckets, slot = [], 0
    for i in index.unique().tolist():
        members = (index == i).nonzero().flatten()
        width = int(length[members].max())
        column = torch.arange(width)
        valid = column < length[members, None]
        token = start[members, None] + column
        restore[token[valid]] = (slot + torch.arange(valid.numel()).view_as(valid))[valid]
        # padded slots read the segment's last token: any finite value does, causality hides it from every real query
        token = torch.where(valid, token, start[members, None] + length[members, None] - 1)
        buckets.append(Bucket(len(members), width, token.reshape(-1)))
        slot += valid.numel()
    device = layout.device
    moved = _to_device([b.gather for b in buckets] + [restore], device)
    return [b._replace(gather=t) for b, t in zip(buckets, moved, strict=False)], moved[-1]


def _to_device(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """One copy for all of them, without waiting for the device."""
    flat = torch.cat(tensors)
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    else:
        flat = flat.to(device)
    return list(flat.split([t.numel() for t in tensors]))


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """
    Apply causal attention `attend` to the segments of `layout`, at most `MAX_BUCKETS` padded calls.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Keys.
        value (`torch.Tensor` of shape `(num_tokens, num_kv_heads, v_head_dim)`): Values.
        layout (`PackedLayout`): Their segments, on the same device.
        attend (`Callable`): Takes `(rows, heads, length, dim)` tensors, padded on the right.

    Returns:
        `torch.Tensor` of shape `(num_tokens, num_heads, v_head_dim)`.
    """
    buckets, restore = layout.derived("attention_buckets", build_buckets)
    outputs = []
    for rows, length, gather in buckets:
        q, k, v = (
            (x if gather is None else x.index_select(0, gather)).unflatten(0, (rows, length)).transpose(1, 2)
            for x in (query, key, value)
        )
        outputs.append(attend(q, k, v).transpose(1, 2).flatten(0, 1))
    if restore is None:
        return outputs[0]
    return torch.cat(outputs).index_select(0, restore)


def sdpa_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """
    Causal `scaled_dot_product_attention` on right-padded rows; shapes as in `eager_attention`. A window shorter than
    the rows is computed in blocks of its size, each with the block before it, so that no mask covers all tokens.
    """
    kwargs = {"scale": scale, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    length = query.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **kwargs)
    blocks = -(-length // window)
    pad = blocks * window - length
    query = F.pad(query, (0, 0, 0, pad))
    # one empty block in front: the block before the first one
    key, value = (F.pad(x, (0, 0, window, pad)) for x in (key, value))
    batch = query.shape[0]
    q = query.unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)
    k, v = (
        x.unfold(2, 2 * window, window).transpose(-1, -2).transpose(1, 2).flatten(0, 1)  # (batch * blocks, heads, ...)
        for x in (key, value)
    )
    mask = causal_mask(window, 2 * window, window, query.device)
    first = mask & (torch.arange(2 * window, device=query.device) >= window)
    mask = torch.cat([first[None], mask[None].expand(blocks - 1, -1, -1)])[:, None].repeat(batch, 1, 1, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs)
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def eager_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal `eager_attention` on right-padded rows, for soft-capping and sinks."""
    mask = causal_mask(query.shape[2], key.shape[2], window, query.device)
    return eager_attention(query, key, value, scale=scale, mask=mask, softcap=softcap, sinks=sinks, dropout=dropout)
