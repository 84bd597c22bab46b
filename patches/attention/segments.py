"""Attention over segments in a few padded calls: for the CPU and for what the varlen kernel cannot do."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..layout import NO_PARENT, PackedLayout
from .reference import causal_mask, eager_attention


MAX_BUCKETS = 8


class Bucket(NamedTuple):
    """
    Segments of similar length, padded to one length on the right. The keys are those of their ancestors, padded to
    one length on the left, and then their own, so that the distance of two tokens is that of their columns.
    """

    rows: int
    length: int
    ancestors: int  # keys in front of the segments' own
    gather: torch.Tensor | None  # (rows * length,) int64: the token in each padded slot; None where it is that already
    key_gather: torch.Tensor | None  # (rows * (ancestors + length),) int64; None without ancestors
    num_ancestors: torch.Tensor | None  # (rows,) int64: how many of the `ancestors` keys are real


def _classes(lengths: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` classes of length, equal steps of the ratio longest / shortest, the longest first."""
    longest, shortest = lengths.max(), lengths.min()
    if longest == shortest:
        return torch.zeros_like(lengths)
    step = torch.log(longest / shortest.double()) / count
    return torch.log(longest / lengths.double()).div(step).floor().clamp(max=count - 1).long()


def _ancestor_tokens(layout: PackedLayout, starts: list[int], segment: int) -> torch.Tensor:
    """The tokens in front of a segment's own, from the root down."""
    chain = []
    parent = layout.parents[segment]
    while parent != NO_PARENT:
        chain.append(torch.arange(starts[parent], starts[parent] + layout.seqlens[parent]))
        parent = layout.parents[parent]
    return torch.cat(chain[::-1])


def build_buckets(layout: PackedLayout) -> tuple[list[Bucket], torch.Tensor | None]:
    """
    Sort the segments into at most `MAX_BUCKETS` classes of length, and those with ancestors, apart from the others,
    into a quarter as many for each of four classes of how many tokens their ancestors have.

    Args:
        layout (`PackedLayout`): Segments, with or without parents.

    Returns:
        The buckets, and for each token its slot in the concatenated padded output (`None` when that is the identity).
    """
    starts = list(itertools.accumulate(layout.seqlens, initial=0))[:-1]
    roots, children, before = [], [], {}
    for i, n in enumerate(layout.seqlens):
        if not n:
            continue
        if layout.parents is not None and layout.parents[i] != NO_PARENT:
            tokens = _ancestor_tokens(layout, starts, i)
            if len(tokens):
                before[i] = tokens
                children.append(i)
                continue
        roots.append(i)
    lengths = {layout.seqlens[i] for i in roots}
    if not children and len(lengths) == 1:
        return [Bucket(len(roots), lengths.pop(), 0, None, None, None)], None
    groups = []
    for members, count in ((roots, MAX_BUCKETS), (children, MAX_BUCKETS // 4)):
        if not members:
            continue
        index = _classes(torch.tensor([layout.seqlens[i] for i in members]), count)
        if members is children:
            index = index * 4 + _classes(torch.tensor([len(before[i]) for i in members]), 4)
        groups += [[members[j] for j in (index == c).nonzero().flatten().tolist()] for c in index.unique().tolist()]
    restore = torch.empty(layout.num_tokens, dtype=torch.int64)
    buckets, slot = [], 0
    for members in groups:
        length = torch.tensor([layout.seqlens[i] for i in members])
        start = torch.tensor([starts[i] for i in members])
        width = int(length.max())
        column = torch.arange(width)
        valid = column < length[:, None]
        token = start[:, None] + column
        restore[token[valid]] = (slot + torch.arange(valid.numel()).view_as(valid))[valid]
        # padded slots read the segment's last token: any finite value does, causality hides it from every real query
        token = torch.where(valid, token, start[:, None] + length[:, None] - 1)
        key_gather, num_ancestors, widest = None, None, 0
        if members[0] in before:
            num_ancestors = torch.tensor([len(before[i]) for i in members])
            widest = int(num_ancestors.max())
            padded = torch.stack([F.pad(before[i], (widest - len(before[i]), 0)) for i in members])
            key_gather = torch.cat([padded, token], dim=1).reshape(-1)
        buckets.append(Bucket(len(members), width, widest, token.reshape(-1), key_gather, num_ancestors))
        slot += valid.numel()
    parts = [t for b in buckets for t in b[3:] if t is not None] + [restore]
    moved = iter(_to_device(parts, layout.device))
    buckets = [Bucket(*b[:3], *(None if t is None else next(moved) for t in b[3:])) for b in buckets]
    return buckets, next(moved)


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
    Apply causal attention `attend` to the segments of `layout` and their ancestors, in a few padded calls.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Keys.
        value (`torch.Tensor` of shape `(num_tokens, num_kv_heads, v_head_dim)`): Values.
        layout (`PackedLayout`): Their segments, on the same device.
        attend (`Callable`): Takes query, key and value, `(rows, heads, length, dim)`, the last query beside the last
            key, and which keys are real, `(rows, num_keys)` bool or `None` for all.

    Returns:
        `torch.Tensor` of shape `(num_tokens, num_heads, v_head_dim)`.
    """
    buckets, restore = layout.derived("attention_buckets", build_buckets)
    outputs = []
    for rows, length, ancestors, gather, key_gather, num_ancestors in buckets:
        key_gather = gather if key_gather is None else key_gather
        q, k, v = (
            (x if index is None else x.index_select(0, index)).unflatten(0, (rows, -1)).transpose(1, 2)
            for x, index in ((query, gather), (key, key_gather), (value, key_gather))
        )
        real = None
        if num_ancestors is not None:
            real = torch.arange(ancestors + length, device=q.device) >= ancestors - num_ancestors[:, None]
        outputs.append(attend(q, k, v, real).transpose(1, 2).flatten(0, 1))
    if restore is None:
        return outputs[0]
    return torch.cat(outputs).index_select(0, restore)


def sdpa_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """
    Causal `scaled_dot_product_attention` on right-padded rows; shapes as in `eager_attention`. A window shorter than
    the rows is computed in blocks of its size, each with the block before it, so that no mask covers all tokens. Rows
    with ancestors do get a mask, over one row's queries and keys.
    """
    kwargs = {"scale": scale, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    if real is not None:
        mask = causal_mask(query.shape[2], key.shape[2], window, query.device) & real[:, None, None, :]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **kwargs)
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
    real: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal `eager_attention` on right-padded rows, for soft-capping and sinks."""
    mask = causal_mask(query.shape[2], key.shape[2], window, query.device)
    if real is not None:
        mask = mask & real[:, None, None, :]
    return eager_attention(query, key, value, scale=scale, mask=mask, softcap=softcap, sinks=sinks, dropout=dropout)
