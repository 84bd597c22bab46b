"""Attention over segments with parents, from FlashAttention-2 calls whose outputs are merged by their log-sum-exp.

Each segment attends to itself causally, and to all of its ancestors. The first part is one varlen call over all
tokens. For the second, the segments lie level by level: all roots, then all children of roots, and so on, siblings
together. The tokens below one ancestor are then one span of a level, and the keys of all ancestors of a level are
contiguous too, so each pair of levels is one more varlen call on slices, without gathering a query, key or value.

Softmax over the union of two sets of keys follows from the two outputs and the two log-sum-exps; with the merged
output and log-sum-exp, each call's own backward gives its exact share of the gradients (Dao 2023, algorithm 2, which
recomputes probabilities from the log-sum-exp). A fused kernel that walks a segment's ancestors itself can take this
function's place in `patch.py`.
"""

import itertools
from typing import NamedTuple

import torch

from ..layout import NO_PARENT, PackedLayout
from .heads import backward_by_heads
from .op import flash_backward, flash_forward, pad_heads
from .reference import varlen_attention_backward_reference, varlen_attention_reference


# Of one call between levels: the kernel's scratch memory is several times its queries.
MAX_QUERIES = 2**15


class CrossCalls(NamedTuple):
    """The calls of one layout between levels."""

    cu_seqlens: torch.Tensor  # int32, the boundaries of queries and keys of each call, one after the other
    table: list[int]  # for each call `_Call`'s fields


class _Call(NamedTuple):
    """Queries `[q_start, q_end)` attend to keys `[k_start, k_end)`, in `spans` blocks."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    max_q: int
    max_k: int
    spans: int


class _Part(NamedTuple):
    """Some of the spans between two levels, `(queries, keys)` each, and what lies before them."""

    q_offset: int
    k_offset: int
    spans: list[tuple[int, int]]


def _cut(queries: list[int], keys: list[int]) -> list[_Part]:
    """The spans of two levels in parts of at most `MAX_QUERIES` queries; a longer span is cut."""
    parts = [_Part(0, 0, [])]
    q_offset = k_offset = in_part = 0
    for num_queries, num_keys in zip(queries, keys, strict=True):
        left = num_queries
        while in_part + left > MAX_QUERIES:
            if room := MAX_QUERIES - in_part:
                parts[-1].spans.append((room, num_keys))
            left -= room
            q_offset += room
            in_part = 0
            parts.append(_Part(q_offset, k_offset, []))
        parts[-1].spans.append((left, num_keys))
        in_part += left
        q_offset += left
        k_offset += num_keys
    return parts


def level_refusal(layout: PackedLayout) -> str | None:
    """Why the segments of `layout` do not lie level by level, siblings together, or `None` if they do."""
    last = (0, NO_PARENT)
    for i, place in enumerate(zip(_depths(layout), layout.parents, strict=False)):
        if place < last:
            return f"segment {i} before the others of its level (order segments by depth, then by parent)"
        last = place
    return None


def _depths(layout: PackedLayout) -> list[int]:
    """How many ancestors each segment has, the closing padding segment left out."""
    depths: list[int] = []
    for parent in layout.parents[: layout.num_segments - bool(layout.num_padding)]:
        depths.append(0 if parent == NO_PARENT else depths[parent] + 1)
    return depths


def build_cross_calls(layout: PackedLayout) -> CrossCalls:
    """
    The calls between levels, computed on the host.

    Args:
        layout (`PackedLayout`): Segments with parents, in the order that `level_refusal` asks for.

    Returns:
        `CrossCalls`: On the layout's device.
    """
    levels: list[list[int]] = []
    for i, depth in enumerate(_depths(layout)):
        if depth == len(levels):
            levels.append([])
        levels[depth].append(i)
    starts = list(itertools.accumulate(layout.seqlens, initial=0))
    boundaries, table = [], []
    for depth in range(1, len(levels)):
        ancestor = {i: i for i in levels[depth]}
        for above in range(depth - 1, -1, -1):
            ancestor = {i: layout.parents[a] for i, a in ancestor.items()}
            tokens = dict.fromkeys(levels[above], 0)
            for i, a in ancestor.items():
                tokens[a] += layout.seqlens[i]
            q_start, k_start = starts[levels[depth][0]], starts[levels[above][0]]
            for part in _cut(list(tokens.values()), [layout.seqlens[i] for i in levels[above]]):
                queries = list(itertools.accumulate((q for q, _ in part.spans), initial=0))
                keys = list(itertools.accumulate((k for _, k in part.spans), initial=0))
                if queries[-1] and keys[-1]:
                    first_q, first_k = q_start + part.q_offset, k_start + part.k_offset
                    table += _Call(
                        first_q,
                        first_q + queries[-1],
                        first_k,
                        first_k + keys[-1],
                        max(q for q, _ in part.spans),
                        max(k for _, k in part.spans),
                        len(part.spans),
                    )
                    boundaries += [*queries, *keys]
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    if layout.device.type == "cuda":
        cu_seqlens = cu_seqlens.pin_memory().to(layout.device, non_blocking=True)
    return CrossCalls(cu_seqlens, table)


def _calls(cu_seqlens: torch.Tensor, table: list[int]):
    offset = 0
    width = len(_Call._fields)
    for first in range(0, len(table), width):
        call = _Call(*table[first : first + width])
        size = call.spans + 1
        yield call, cu_seqlens[offset : offset + size], cu_seqlens[offset + size : offset + 2 * size]
        offset += 2 * size


def _attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal):
    if q.device.type != "cuda":
        return varlen_attention_reference(q, k, v, cu_q, scale, cu_seqlens_k=None if causal else cu_k)
    return flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal)


def _attend_backward(grad_out, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal):
    if q.device.type != "cuda":
        cu_k = None if causal else cu_k
        return varlen_attention_backward_reference(grad_out, q, k, v, out, lse, cu_q, scale, cu_seqlens_k=cu_k)
    return flash_backward(grad_out, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal)


def _merge_(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """
    Fold the attention of the same queries to other keys into `out` `(queries, heads, dim)` and `lse`
    `(heads, queries)`, in place. A query of `other` without keys has an infinite log-sum-exp and keeps what it had.
    """
    other_lse = other_lse.masked_fill(other_lse == float("inf"), float("-inf"))
    merged = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((x - merged).exp().t().unsqueeze(-1) for x in (lse, other_lse))
    out.copy_((out * weight).add_(other * other_weight))
    lse.copy_(merged)


# The name keeps "flash_attn" in it: TRL's selective checkpointing saves ops whose name has it instead of recomputing.
@torch.library.custom_op("unsloth_trl::flash_attn_shared", mutates_args=())
def _flash_attn_shared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    cross_cu_seqlens: torch.Tensor,
    cross_table: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _attend(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale, True)
    for call, cu_q, cu_k in _calls(cross_cu_seqlens, cross_table):
        queries, keys = slice(call.q_start, call.q_end), slice(call.k_start, call.k_end)
        part, part_lse = _attend(
            query[queries], key[keys], value[keys], cu_q, cu_k, call.max_q, call.max_k, scale, False
        )
        _merge_(out[queries], lse[:, queries], part, part_lse)
    return out, lse


@_flash_attn_shared.register_fake
def _(query, key, value, cu_seqlens, max_seqlen, cross_cu_seqlens, cross_table, scale):
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty((*query.shape[:2], value.shape[-1]))
    return out, query.new_empty((query.shape[1], query.shape[0]), dtype=lse_dtype)


@torch.library.custom_op("unsloth_trl::flash_attn_shared_backward", mutates_args=())
def _flash_attn_shared_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    cross_cu_seqlens: torch.Tensor,
    cross_table: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_out = grad_out.contiguous()

    def to_itself(*tensors):
        return _attend_backward(*tensors, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale, True)

    grads = backward_by_heads(to_itself, grad_out, query, key, value, out, lse)
    calls = list(_calls(cross_cu_seqlens, cross_table))
    # the gradients of a prompt are sums over several calls: rounded once, and no fp32 copies of the completions'
    first = min((call.k_start for call, _, _ in calls), default=0)
    prompts = slice(first, max((call.k_end for call, _, _ in calls), default=0))
    sums = [grad[prompts].to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads[1:]]
    for call, cu_q, cu_k in calls:
        queries, keys = slice(call.q_start, call.q_end), slice(call.k_start, call.k_end)
        parts = _attend_backward(
            grad_out[queries],
            query[queries],
            key[keys],
            value[keys],
            out[queries],
            lse[:, queries].contiguous(),
            cu_q,
            cu_k,
            call.max_q,
            call.max_k,
            scale,
            False,
        )
        spans = (queries, *2 * [slice(call.k_start - first, call.k_end - first)])
        for grad, part, span in zip((grads[0], *sums), parts, spans, strict=True):
            grad[span].add_(part)
        del parts, part
    for grad, total in zip(grads[1:], sums, strict=True):
        grad[prompts] = total
    return grads


@_flash_attn_shared_backward.register_fake
def _(grad_out, query, key, value, out, lse, cu_seqlens, max_seqlen, cross_cu_seqlens, cross_table, scale):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output):
    query, key, value, cu_seqlens, ctx.max_seqlen, cross_cu_seqlens, ctx.cross_table, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, cross_cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    if grad_out is None:
        return (None,) * 8
    query, key, value, out, lse, cu_seqlens, cross_cu_seqlens = ctx.saved_tensors
    grads = torch.ops.unsloth_trl.flash_attn_shared_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        cu_seqlens,
        ctx.max_seqlen,
        cross_cu_seqlens,
        ctx.cross_table,
        ctx.scale,
    )
    return *grads, None, None, None, None, None


_flash_attn_shared.register_autograd(_backward, setup_context=_setup_context)


def batch_arguments(layout: PackedLayout) -> tuple[torch.Tensor, int, torch.Tensor, list[int]]:
    """
    What the op takes of a layout, between the values and the scale.

    Raises:
        ValueError: If its segments are in another order than the op's.
    """
    refusal = layout.derived("level_refusal", level_refusal)
    if refusal:
        raise ValueError(f"packed_layout has {refusal}")
    calls = layout.derived("cross_calls", build_cross_calls)
    return layout.cu_seqlens, layout.max_seqlen, calls.cu_seqlens, calls.table


def flash_attn_shared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, *, scale: float
) -> torch.Tensor:
    """
    Attention of each segment to itself, causally, and to all of its ancestors.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`, fp16 or bf16): Queries.
        key (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Keys; `num_kv_heads` divides `num_heads`.
        value (`torch.Tensor` of shape `(num_tokens, num_kv_heads, v_head_dim)`): Values, `v_head_dim` up to the
            head size of the keys (MLA): padded with zeros for the kernel and cropped again.
        layout (`PackedLayout`): Segments with parents, level by level, on the same device.
        scale (`float`): Factor on the scores.

    Returns:
        `torch.Tensor` of shape `(num_tokens, num_heads, v_head_dim)`.

    Raises:
        ValueError: If the layout does not have this many tokens, or its segments are in another order.
    """
    layout.check(query.shape[0])
    batch = batch_arguments(layout)
    v_head_dim = value.shape[-1]
    query, key, value = pad_heads(query, key, value)
    out, _ = torch.ops.unsloth_trl.flash_attn_shared(query, key, value, *batch, scale)
    return out if out.shape[-1] == v_head_dim else out[..., :v_head_dim]
