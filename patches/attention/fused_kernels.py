"""Triton kernels of attention over segments with parents: one pass over the keys, and no mask in memory.

A program has a block of rows of one segment, and walks through the spans that concern them: for queries the keys of
their ancestors and of their own segment, for keys the queries of their own segment and of all descendants. Who sees
whom follows from positions alone: a key is seen by queries at its position and after it, within the window.
"""

import triton
import triton.language as tl


LOG2E = tl.constexpr(1.4426950408889634)
TILE = tl.constexpr(6)  # numbers of a tile: first row, end of segment, its start, its position, first and end span
KEY_TILE = tl.constexpr(9)  # a tile of keys has three more: first and end unit, and its slot
SUM = tl.constexpr(4)  # numbers of a sum: first row, end of segment, first and end slot
SPAN = tl.constexpr(3)  # numbers of a span: first row, end row, position of the first row


@triton.jit
def _open_block(at, BLOCK: tl.constexpr):
    """A tile's rows, which of them are live, their positions, the first and the last of these, and its spans."""
    first, seg_end = tl.load(at), tl.load(at + 1)
    to_pos = tl.load(at + 3) - tl.load(at + 2)
    rows = first + tl.arange(0, BLOCK)
    last = tl.minimum(first + BLOCK, seg_end) - 1
    return rows, rows < seg_end, rows + to_pos, first + to_pos, last + to_pos, tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _load_span(spans, span):
    at = spans + span * SPAN
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _load_rows(base, rows, live, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    """Rows of a matrix, zeros beyond its columns and, if `MASKED`, for those that are not live."""
    cols = tl.arange(0, BLOCK)
    at = base + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    if MASKED:
        value = tl.load(at, mask=live[:, None] & (cols < SIZE)[None, :], other=0.0)
    elif SIZE == BLOCK:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=(cols < SIZE)[None, :], other=0.0)
    return value


@triton.jit
def _store_rows(base, value, rows, live, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = live[:, None] & (cols < SIZE)[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * stride + cols[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _cap(scores, softcap):
    """`softcap * tanh(scores / softcap)` and its derivative."""
    squashed = 2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0
    return softcap * squashed, 1.0 - squashed * squashed


@triton.jit
def _scores(left, right, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores of the rows of `left` with those of `right`, capped, and the derivative of the cap."""
    scores = tl.dot(left, tl.trans(right), input_precision="ieee") * scale
    slope = 1.0
    if SOFTCAP:
        scores, slope = _cap(scores, softcap)
    return scores, slope


@triton.jit
def _keys_of(k_start, k_end, k_pos, first_pos, last_pos, window, WINDOW: tl.constexpr):
    """The rows of a span that queries at positions from `first_pos` to `last_pos` may see."""
    end = tl.minimum(k_end, k_start + tl.maximum(last_pos - k_pos + 1, 0))
    start = k_start
    if WINDOW:
        start = tl.minimum(k_start + tl.maximum(first_pos - window + 1 - k_pos, 0), k_end)
    return start, end


@triton.jit
def _inner(start, end, lowest, highest, BLOCK: tl.constexpr):
    """Of the blocks from `start` to `end`, those that are whole and within `lowest` and `highest`: no mask there."""
    first = tl.minimum(start + tl.cdiv(tl.maximum(lowest - start, 0), BLOCK) * BLOCK, end)
    return first, first + tl.maximum(tl.minimum(highest, end) - first, 0) // BLOCK * BLOCK


@triton.jit
def _inner_keys(start, end, k_start, k_pos, first_pos, last_pos, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that all queries at positions from `first_pos` to `last_pos` see."""
    lowest = start
    if WINDOW:
        lowest = k_start + last_pos - window + 1 - k_pos
    return _inner(start, end, lowest, k_start + first_pos - k_pos + 1, BLOCK)


@triton.jit
def _inner_queries(start, end, q_start, q_pos, first_pos, last_pos, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """The queries that see all keys at positions from `first_pos` to `last_pos`."""
    highest = end
    if WINDOW:
        highest = q_start + first_pos + window - q_pos
    return _inner(start, end, q_start + last_pos - q_pos, highest, BLOCK)


@triton.jit
def _queries_of(q_start, q_end, q_pos, first_pos, last_pos, window, WINDOW: tl.constexpr):
    """The rows of a span that may see keys at positions from `first_pos` to `last_pos`."""
    start = tl.minimum(q_start + tl.maximum(first_pos - q_pos, 0), q_end)
    end = q_end
    if WINDOW:
        end = tl.minimum(q_end, q_start + tl.maximum(last_pos + window - q_pos, 0))
    return start, end


@triton.jit
def _seen(q_pos, k_pos, live, window, WINDOW: tl.constexpr):
    seen = (k_pos <= q_pos) & live
    if WINDOW:
        seen &= q_pos - k_pos < window
    return seen


@triton.jit
def _attend(acc, total, top, scores, value):
    """One block of keys more in an online softmax to the base of 2."""
    higher = tl.maximum(top, tl.max(scores, 1))
    # a row that has seen nothing yet has no finite maximum
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, total * fade + tl.sum(weights, 1), higher


@triton.jit
def _backward_q(acc, query, key, value, d_out, level, inner, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """One block of keys more in the gradient of queries; `seen` is `None` where every query sees every key."""
    scores, slope = _scores(query, key, scale, softcap, SOFTCAP)
    weights = tl.exp2(scores * LOG2E - level[:, None])
    if seen is not None:
        weights = tl.where(seen, weights, 0.0)
    d_weights = tl.dot(d_out, tl.trans(value), input_precision="ieee")
    d_scores = weights * (d_weights - inner[:, None]) * slope
    return tl.dot(d_scores.to(key.dtype), key, acc, input_precision="ieee")


@triton.jit
def _backward_kv(d_key, d_value, key, value, query, d_out, level, inner, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """One block of queries more in the gradients of keys and values, with scores that have a row for each key."""
    scores, slope = _scores(key, query, scale, softcap, SOFTCAP)
    weights = tl.exp2(scores * LOG2E - level[None, :])
    if seen is not None:
        weights = tl.where(seen, weights, 0.0)
    d_value = tl.dot(weights.to(d_out.dtype), d_out, d_value, input_precision="ieee")
    d_weights = tl.dot(value, tl.trans(d_out), input_precision="ieee")
    d_scores = weights * (d_weights - inner[None, :]) * slope
    return tl.dot(d_scores.to(query.dtype), query, d_key, input_precision="ieee"), d_value


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["tiles", "spans"])
def attention_forward_kernel(
    q,  # (num_tokens, heads, SIZE)
    k,
    v,
    sinks,  # (heads,) or None
    out,  # (num_tokens, heads, V_SIZE)
    lse,  # (heads, num_tokens) fp32
    tiles,
    spans,
    scale,
    softcap,
    window,
    num_tokens,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    stride_o,
    stride_oh,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Softmax over the keys of all spans of a block of queries, in one pass (FlashAttention-2, Dao 2023)."""
    rows, live, q_pos, first_pos, last_pos, span, last_span = _open_block(tiles + tl.program_id(0) * TILE, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    query = _load_rows(q + head * stride_qh, rows, live, stride_q, SIZE, BLOCK_D)
    k += kv_head * stride_kh
    v += kv_head * stride_vh

    if sinks is not None:
        top = tl.zeros((BLOCK_M,), dtype=tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.zeros((BLOCK_M,), dtype=tl.float32) + 1.0
    else:
        top = tl.zeros((BLOCK_M,), dtype=tl.float32) - float("inf")
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    while span < last_span:
        k_start, k_end, k_pos0 = _load_span(spans, span)
        start, end = _keys_of(k_start, k_end, k_pos0, first_pos, last_pos, window, WINDOW)
        first, last = _inner_keys(start, end, k_start, k_pos0, first_pos, last_pos, window, BLOCK_N, WINDOW)
        for n in range(first, last, BLOCK_N):
            key = _load_rows(k, n + tl.arange(0, BLOCK_N), live, stride_k, SIZE, BLOCK_D, MASKED=False)
            scores, _ = _scores(query, key, scale, softcap, SOFTCAP)
            value = _load_rows(v, n + tl.arange(0, BLOCK_N), live, stride_v, V_SIZE, BLOCK_DV, MASKED=False)
            acc, total, top = _attend(acc, total, top, scores * LOG2E, value)
        for step in range(start, end - (last - first), BLOCK_N):  # those in front of them, and those behind
            cols = tl.where(step < first, step, step + last - first) + tl.arange(0, BLOCK_N)
            inside = cols < end
            key = _load_rows(k, cols, inside, stride_k, SIZE, BLOCK_D)
            scores, _ = _scores(query, key, scale, softcap, SOFTCAP)
            seen = _seen(q_pos[:, None], (k_pos0 + cols - k_start)[None, :], inside[None, :], window, WINDOW)
            value = _load_rows(v, cols, inside, stride_v, V_SIZE, BLOCK_DV)
            acc, total, top = _attend(acc, total, top, tl.where(seen, scores * LOG2E, float("-inf")), value)
        span += 1
    _store_rows(out + head * stride_oh, acc / total[:, None], rows, live, stride_o, V_SIZE, BLOCK_DV)
    tl.store(lse + head * num_tokens + rows, (top + tl.log2(total)) / LOG2E, mask=live)


@triton.jit(do_not_specialize=["num_tokens"])
def attention_delta_kernel(
    grad,  # (num_tokens, heads, V_SIZE)
    out,
    delta,  # (heads, num_tokens) fp32
    num_tokens,
    stride_g,
    stride_gh,
    stride_o,
    stride_oh,
    V_SIZE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`<grad, out>` of each row and head."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < num_tokens
    head = tl.program_id(1).to(tl.int64)
    left = _load_rows(grad + head * stride_gh, rows, live, stride_g, V_SIZE, BLOCK_DV).to(tl.float32)
    right = _load_rows(out + head * stride_oh, rows, live, stride_o, V_SIZE, BLOCK_DV).to(tl.float32)
    tl.store(delta + head * num_tokens + rows, tl.sum(left * right, axis=1), mask=live)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["tiles", "spans"])
def attention_backward_q_kernel(
    q,
    k,
    v,
    grad,  # as out
    lse,
    delta,  # (heads, num_tokens) fp32: <grad, out>
    dq,  # (num_tokens, heads, SIZE), contiguous
    tiles,
    spans,
    scale,
    softcap,
    window,
    num_tokens,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    stride_g,
    stride_gh,
    stride_dq,
    stride_dqh,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The gradient of a block of queries, which walks as the forward does."""
    rows, live, q_pos, first_pos, last_pos, span, last_span = _open_block(tiles + tl.program_id(0) * TILE, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    query = _load_rows(q + head * stride_qh, rows, live, stride_q, SIZE, BLOCK_D)
    d_out = _load_rows(grad + head * stride_gh, rows, live, stride_g, V_SIZE, BLOCK_DV)
    level = tl.load(lse + head * num_tokens + rows, mask=live, other=0.0) * LOG2E
    inner = tl.load(delta + head * num_tokens + rows, mask=live, other=0.0)
    k += kv_head * stride_kh
    v += kv_head * stride_vh
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    while span < last_span:
        k_start, k_end, k_pos0 = _load_span(spans, span)
        start, end = _keys_of(k_start, k_end, k_pos0, first_pos, last_pos, window, WINDOW)
        first, last = _inner_keys(start, end, k_start, k_pos0, first_pos, last_pos, window, BLOCK_N, WINDOW)
        for n in range(first, last, BLOCK_N):
            key = _load_rows(k, n + tl.arange(0, BLOCK_N), live, stride_k, SIZE, BLOCK_D, MASKED=False)
            value = _load_rows(v, n + tl.arange(0, BLOCK_N), live, stride_v, V_SIZE, BLOCK_DV, MASKED=False)
            acc = _backward_q(acc, query, key, value, d_out, level, inner, None, scale, softcap, SOFTCAP)
        for step in range(start, end - (last - first), BLOCK_N):  # those in front of them, and those behind
            cols = tl.where(step < first, step, step + last - first) + tl.arange(0, BLOCK_N)
            inside = cols < end
            key = _load_rows(k, cols, inside, stride_k, SIZE, BLOCK_D)
            value = _load_rows(v, cols, inside, stride_v, V_SIZE, BLOCK_DV)
            seen = _seen(q_pos[:, None], (k_pos0 + cols - k_start)[None, :], inside[None, :], window, WINDOW)
            acc = _backward_q(acc, query, key, value, d_out, level, inner, seen, scale, softcap, SOFTCAP)
        span += 1
    _store_rows(dq + head * stride_dqh, acc * scale, rows, live, stride_dq, SIZE, BLOCK_D)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["tiles", "spans"])
def attention_backward_kv_kernel(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    dk,  # (num_tokens, kv_heads, SIZE), contiguous
    dv,  # (num_tokens, kv_heads, V_SIZE), contiguous
    parts,  # (num_slots, kv_heads, BLOCK_N, BLOCK_D + BLOCK_DV) fp32, or None where no tile has a slot
    tiles,
    spans,
    scale,
    softcap,
    window,
    num_tokens,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    stride_g,
    stride_gh,
    stride_dk,
    stride_dkh,
    stride_dv,
    stride_dvh,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """
    The gradients of a block of `BLOCK_N` keys: sums over the queries that see them, in a fixed order.

    A unit of its work is a span of one head's queries. A tile with a slot has some units of its block and leaves their
    sums there, for `attention_sum_kernel`; one without has them all.
    """
    at = tiles + tl.program_id(0) * KEY_TILE
    cols, live, k_pos, first_pos, last_pos, first_span, last_span = _open_block(at, BLOCK_N)
    kv_head = tl.program_id(1).to(tl.int64)
    key = _load_rows(k + kv_head * stride_kh, cols, live, stride_k, SIZE, BLOCK_D)
    value = _load_rows(v + kv_head * stride_vh, cols, live, stride_v, V_SIZE, BLOCK_DV)
    d_key = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    d_value = tl.zeros((BLOCK_N, BLOCK_DV), dtype=tl.float32)
    for unit in range(tl.load(at + 6), tl.load(at + 7)):
        head = kv_head * GROUP + unit // (last_span - first_span)
        q_start, q_end, q_pos0 = _load_span(spans, first_span + unit % (last_span - first_span))
        start, end = _queries_of(q_start, q_end, q_pos0, first_pos, last_pos, window, WINDOW)
        first, last = _inner_queries(start, end, q_start, q_pos0, first_pos, last_pos, window, BLOCK_M, WINDOW)
        for m in range(first, last, BLOCK_M):
            rows = m + tl.arange(0, BLOCK_M)
            query = _load_rows(q + head * stride_qh, rows, live, stride_q, SIZE, BLOCK_D, MASKED=False)
            d_out = _load_rows(grad + head * stride_gh, rows, live, stride_g, V_SIZE, BLOCK_DV, MASKED=False)
            level = tl.load(lse + head * num_tokens + rows) * LOG2E
            inner = tl.load(delta + head * num_tokens + rows)
            d_key, d_value = _backward_kv(
                d_key, d_value, key, value, query, d_out, level, inner, None, scale, softcap, SOFTCAP
            )
        for step in range(start, end - (last - first), BLOCK_M):  # those in front of them, and those behind
            rows = tl.where(step < first, step, step + last - first) + tl.arange(0, BLOCK_M)
            inside = rows < end
            query = _load_rows(q + head * stride_qh, rows, inside, stride_q, SIZE, BLOCK_D)
            d_out = _load_rows(grad + head * stride_gh, rows, inside, stride_g, V_SIZE, BLOCK_DV)
            level = tl.load(lse + head * num_tokens + rows, mask=inside, other=0.0) * LOG2E
            inner = tl.load(delta + head * num_tokens + rows, mask=inside, other=0.0)
            both = inside[None, :] & live[:, None]
            seen = _seen((q_pos0 + rows - q_start)[None, :], k_pos[:, None], both, window, WINDOW)
            d_key, d_value = _backward_kv(
                d_key, d_value, key, value, query, d_out, level, inner, seen, scale, softcap, SOFTCAP
            )
    slot = tl.load(at + 8)
    if slot < 0:
        _store_rows(dk + kv_head * stride_dkh, d_key * scale, cols, live, stride_dk, SIZE, BLOCK_D)
        _store_rows(dv + kv_head * stride_dvh, d_value, cols, live, stride_dv, V_SIZE, BLOCK_DV)
    if parts is not None:
        width: tl.constexpr = BLOCK_D + BLOCK_DV
        if slot >= 0:
            own = parts + (tl.cast(slot, tl.int64) * tl.num_programs(1) + kv_head) * (BLOCK_N * width)
            within = tl.arange(0, BLOCK_N)
            _store_rows(own, d_key * scale, within, live, width, BLOCK_D, BLOCK_D)
            _store_rows(own + BLOCK_D, d_value, within, live, width, BLOCK_DV, BLOCK_DV)


@triton.jit(do_not_specialize_on_alignment=["sums"])
def attention_sum_kernel(
    parts,  # as in `attention_backward_kv_kernel`
    dk,
    dv,
    sums,
    stride_dk,
    stride_dkh,
    stride_dv,
    stride_dvh,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The gradients of `BLOCK_M` of a block's `BLOCK_N` keys from the sums in their slots, one after the other."""
    at = sums + tl.program_id(0) * SUM
    kv_head = tl.program_id(1).to(tl.int64)
    within = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.load(at) + within
    live = rows < tl.load(at + 1)
    width: tl.constexpr = BLOCK_D + BLOCK_DV
    d_key = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    d_value = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    for slot in range(tl.load(at + 2), tl.load(at + 3)):
        own = parts + (tl.cast(slot, tl.int64) * tl.num_programs(1) + kv_head) * (BLOCK_N * width)
        d_key += _load_rows(own, within, live, width, BLOCK_D, BLOCK_D)
        d_value += _load_rows(own + BLOCK_D, within, live, width, BLOCK_DV, BLOCK_DV)
    _store_rows(dk + kv_head * stride_dkh, d_key, rows, live, stride_dk, SIZE, BLOCK_D)
    _store_rows(dv + kv_head * stride_dvh, d_value, rows, live, stride_dv, V_SIZE, BLOCK_DV)
