"""Triton kernels for the rows of a mixture of experts: all that is not a product with an expert's weight.

Rows are sorted by expert, and a program has up to `BLOCK_M` of one expert: the part `program_id(0) % (TILE / BLOCK_M)`
of a tile of `Routing.tiles(TILE)`. Low-rank products are done while a row is in registers anyway. Everything is summed
in fp32 and in a fixed order. Rows beyond the last offset belong to no expert; nothing reads or writes them.
"""

import triton
import triton.language as tl


@triton.jit
def _part(tiles, TILE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert (int64), first row and end row of this program; the end may be at or before the first."""
    tile = tiles + tl.program_id(0) // (TILE // BLOCK_M) * 3
    first = tl.load(tile + 1) + tl.program_id(0) % (TILE // BLOCK_M) * BLOCK_M
    return tl.load(tile).to(tl.int64), first, tl.load(tile + 2)


@triton.jit
def _load_ranks(x, rows, live, RANK: tl.constexpr, RANK_PAD: tl.constexpr):
    """Rows of a contiguous `(num_rows, RANK)` matrix, zeros beyond its columns."""
    ranks = tl.arange(0, RANK_PAD)
    return tl.load(x + rows[:, None] * RANK + ranks[None, :], mask=live[:, None] & (ranks < RANK)[None, :], other=0.0)


@triton.jit
def _store_ranks(x, value, rows, live, RANK: tl.constexpr, RANK_PAD: tl.constexpr):
    ranks = tl.arange(0, RANK_PAD)
    mask = live[:, None] & (ranks < RANK)[None, :]
    tl.store(x + rows[:, None] * RANK + ranks[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _load_factor(factor, expert, cols, width, RANK: tl.constexpr, RANK_PAD: tl.constexpr):
    """Columns of one expert's `(RANK, width)` matrix, zeros beyond its rows and columns."""
    ranks = tl.arange(0, RANK_PAD)
    start = factor + (expert * RANK + ranks)[:, None] * width
    return tl.load(start + cols[None, :], mask=(ranks < RANK)[:, None] & (cols < width)[None, :], other=0.0)


@triton.jit
def _zero_rest(dweights, order, offsets, num_rows, num_experts, BLOCK_M: tl.constexpr):
    """Zeros for slots of no expert. They have no tile, but all parts of all tiles, empty ones too, reach round."""
    rest = tl.load(offsets + num_experts - 1) + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(order + rest, mask=rest < num_rows, other=0)
    tl.store(dweights + slot, tl.zeros((BLOCK_M,), dtype=tl.float32), mask=rest < num_rows)


@triton.jit
def _load_halves(base, live, col, width, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """
    Columns `col` to `col + BLOCK_N` of gate and of up from rows of `2 * width`, which start at `base` `(ROWS, 1)`.

    Interleaved columns are read in one piece and separated in registers, so that reads stay wide.
    """
    if INTERLEAVED:
        cols = 2 * col + tl.arange(0, 2 * BLOCK_N)
        both = tl.load(base + cols[None, :], mask=live[:, None] & (cols < 2 * width)[None, :], other=0.0)
        gate, up = tl.split(tl.reshape(both, (ROWS, BLOCK_N, 2)))
    else:
        cols = col + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (cols < width)[None, :]
        gate = tl.load(base + cols[None, :], mask=mask, other=0.0)
        up = tl.load(base + width + cols[None, :], mask=mask, other=0.0)
    return gate, up


@triton.jit
def _store_halves(
    base, gate, up, live, col, width, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    if INTERLEAVED:
        cols = 2 * col + tl.arange(0, 2 * BLOCK_N)
        both = tl.reshape(tl.join(gate, up), (ROWS, 2 * BLOCK_N))
        tl.store(base + cols[None, :], both, mask=live[:, None] & (cols < 2 * width)[None, :])
    else:
        cols = col + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (cols < width)[None, :]
        tl.store(base + cols[None, :], gate, mask=mask)
        tl.store(base + width + cols[None, :], up, mask=mask)


@triton.jit
def _squash(gate, alpha, KIND: tl.constexpr):
    """
    Each activation is `gate * sigmoid(u(gate))`: the sigmoid, and the derivative of `u`.

    The tanh form of GELU is one of them, since `(1 + tanh(z)) / 2` is `sigmoid(2 z)`.
    """
    if KIND == "gelu_tanh":
        square = gate * gate
        return (
            tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * square)),
            1.5957691216057308 * (1.0 + 0.134145 * square),
        )
    elif KIND == "gpt_oss":
        return tl.sigmoid(alpha * gate), alpha
    else:
        return tl.sigmoid(gate), 1.0


@triton.jit
def _clamp(gate, up, limit, KIND: tl.constexpr):
    """What goes into the activation; comparisons that let NaN through, as `torch.clamp` does."""
    if KIND == "gpt_oss":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
    return gate, up


@triton.jit
def gather_project_kernel(
    x,
    order,
    tiles,
    a,
    xs,
    xa,
    width,
    chunk,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`xs = x[token]`, if wanted, and `xa = x[token] a[expert]^T`; `chunk` columns of a program, all if `RANK`."""
    expert, first, end = _part(tiles, TILE, BLOCK_M)
    if first >= end:
        return
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = rows < end
    source = x + (tl.load(order + rows, mask=live, other=0) // TOP_K * width)[:, None]
    start = tl.program_id(1) * chunk
    total = tl.zeros((BLOCK_M, RANK_PAD), dtype=tl.float32)
    for col in range(start, min(start + chunk, width), BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (cols < width)[None, :]
        block = tl.load(source + cols[None, :], mask=mask, other=0.0)
        if xs is not None:
            tl.store(xs + (rows * width)[:, None] + cols[None, :], block, mask=mask)
        if RANK:
            factor = _load_factor(a, expert, cols, width, RANK, RANK_PAD)
            total = tl.dot(block, tl.trans(factor), total, input_precision="ieee")
    if RANK:
        _store_ranks(xa, total, rows, live, RANK, RANK_PAD)


@triton.jit
def gate_forward_kernel(
    gu,
    tiles,
    xa,
    b,
    a_down,
    h,
    ha,
    width,
    chunk,
    alpha,
    limit,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    RANK_DOWN: tl.constexpr,
    RANK_DOWN_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`h = activation(gu + xa b[expert])` and `ha = h a_down[expert]^T`; `chunk` columns, all if `RANK_DOWN`."""
    INTERLEAVED: tl.constexpr = KIND == "gpt_oss"
    expert, first, end = _part(tiles, TILE, BLOCK_M)
    if first >= end:
        return
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = rows < end
    ranks = tl.arange(0, RANK_PAD)
    if RANK:
        projected = _load_ranks(xa, rows, live, RANK, RANK_PAD)
        b += (expert * RANK + ranks)[:, None] * (2 * width)
    source = gu + (rows * 2 * width)[:, None]
    target = h + (rows * width)[:, None]
    start = tl.program_id(1) * chunk
    total = tl.zeros((BLOCK_M, RANK_DOWN_PAD), dtype=tl.float32)
    for col in range(start, min(start + chunk, width), BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        gate, up = _load_halves(source, live, col, width, INTERLEAVED, BLOCK_M, BLOCK_N)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if RANK:
            b_gate, b_up = _load_halves(b, ranks < RANK, col, width, INTERLEAVED, RANK_PAD, BLOCK_N)
            gate += tl.dot(projected, b_gate, input_precision="ieee")
            up += tl.dot(projected, b_up, input_precision="ieee")
        gate, up = _clamp(gate, up, limit, KIND)
        squashed, _ = _squash(gate, alpha, KIND)
        out = (gate * squashed * up).to(h.dtype.element_ty)
        tl.store(target + cols[None, :], out, mask=live[:, None] & (cols < width)[None, :])
        if RANK_DOWN:
            factor = _load_factor(a_down, expert, cols, width, RANK_DOWN, RANK_DOWN_PAD)
            total = tl.dot(out, tl.trans(factor), total, input_precision="ieee")
    if RANK_DOWN:
        _store_ranks(ha, total, rows, live, RANK_DOWN, RANK_DOWN_PAD)


@triton.jit(do_not_specialize=["num_rows"])  # another batch does not compile again
def gate_backward_kernel(
    gu,
    dh,
    order,
    tiles,
    weights,
    offsets,
    xa,
    b,
    dyb,
    a_down,
    dgu,
    h,
    dgub,
    dweights,
    num_rows,
    width,
    num_experts,
    alpha,
    limit,
    KIND: tl.constexpr,
    WITH_H: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    RANK_DOWN: tl.constexpr,
    RANK_DOWN_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """
    Gradient of `gate_forward_kernel` with `dh + dyb a_down[expert]`; `h` again; `dgub = dgu b[expert]^T`.

    The gradients that come in are those of weighted rows, and their product with `h` is that of the weights; what goes
    out has the weights in it.
    """
    INTERLEAVED: tl.constexpr = KIND == "gpt_oss"
    _zero_rest(dweights, order, offsets, num_rows, num_experts, BLOCK_M)
    expert, first, end = _part(tiles, TILE, BLOCK_M)
    if first >= end:
        return
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = rows < end
    ranks = tl.arange(0, RANK_PAD)
    if RANK:
        projected = _load_ranks(xa, rows, live, RANK, RANK_PAD)
        b += (expert * RANK + ranks)[:, None] * (2 * width)
    if RANK_DOWN:
        down = _load_ranks(dyb, rows, live, RANK_DOWN, RANK_DOWN_PAD)
    slot = tl.load(order + rows, mask=live, other=0)
    weight = tl.load(weights + slot, mask=live, other=0.0).to(tl.float32)[:, None]
    products = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, RANK_PAD), dtype=tl.float32)
    for col in range(0, width, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (cols < width)[None, :]
        gate, up = _load_halves(gu + (rows * 2 * width)[:, None], live, col, width, INTERLEAVED, BLOCK_M, BLOCK_N)
        grad = tl.load(dh + (rows * width)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if RANK:
            b_gate, b_up = _load_halves(b, ranks < RANK, col, width, INTERLEAVED, RANK_PAD, BLOCK_N)
            gate += tl.dot(projected, b_gate, input_precision="ieee")
            up += tl.dot(projected, b_up, input_precision="ieee")
        if RANK_DOWN:
            factor = _load_factor(a_down, expert, cols, width, RANK_DOWN, RANK_DOWN_PAD)
            grad += tl.dot(down, factor, input_precision="ieee")
        held, lifted = _clamp(gate, up, limit, KIND)
        squashed, slope = _squash(held, alpha, KIND)
        active = held * squashed
        out = active * lifted
        products += grad * out
        grad *= weight
        out *= weight
        d_gate = grad * lifted * (squashed + active * (1.0 - squashed) * slope)
        d_up = grad * active
        if KIND == "gpt_oss":
            d_gate = tl.where(gate > limit, 0.0, d_gate)
            d_up = tl.where((up > limit) | (up < -limit), 0.0, d_up)
        d_gate, d_up = d_gate.to(dgu.dtype.element_ty), d_up.to(dgu.dtype.element_ty)
        target = dgu + (rows * 2 * width)[:, None]
        _store_halves(target, d_gate, d_up, live, col, width, INTERLEAVED, BLOCK_M, BLOCK_N)
        if WITH_H:
            tl.store(h + (rows * width)[:, None] + cols[None, :], out.to(h.dtype.element_ty), mask=mask)
        if RANK:
            total = tl.dot(d_gate, tl.trans(b_gate), total, input_precision="ieee")
            total = tl.dot(d_up, tl.trans(b_up), total, input_precision="ieee")
    if RANK:
        _store_ranks(dgub, total, rows, live, RANK, RANK_PAD)
    tl.store(dweights + slot, tl.sum(products, axis=1), mask=live)


@triton.jit
def combine_kernel(
    y,
    place,
    weights,
    offsets,
    out,
    width,
    num_experts,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Columns of one token: the sum of its rows, weighted if `WEIGHTED`."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.load(offsets + num_experts - 1)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + choice)
        # nothing of a row of no expert, which may hold NaN
        end = tl.where(row < last, width, 0)
        value = tl.load(y + row * width + cols, mask=cols < end, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + token * TOP_K + choice).to(tl.float32)
            value *= tl.where(row < last, weight, 0.0)
        total += value
    tl.store(out + token * width + cols, total.to(out.dtype.element_ty), mask=cols < width)


@triton.jit
def add_product_kernel(
    y,
    tiles,
    xa,
    b,
    width,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`y += xa b[expert]`, `BLOCK_N` columns of a program."""
    expert, first, end = _part(tiles, TILE, BLOCK_M)
    if first >= end:
        return
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = rows < end
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = live[:, None] & (cols < width)[None, :]
    target = y + (rows * width)[:, None] + cols[None, :]
    value = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    factor = _load_factor(b, expert, cols, width, RANK, RANK_PAD)
    value += tl.dot(_load_ranks(xa, rows, live, RANK, RANK_PAD), factor, input_precision="ieee")
    tl.store(target, value.to(y.dtype.element_ty), mask=mask)
