"""The work on the rows of a mixture around its two grouped products, each step one pass over memory.

With rows sorted by expert (`routing.py`), a layer with low-rank adapters `A`, `B` on its stacked weights is

    xs, xa = gather_project(x, routing, A_gate_up)
    gu = grouped product of xs
    h, ha = gate_forward(gu, routing, kind, xa, B_gate_up, A_down)
    y = grouped product of h, ha B_down added
    out = combine(y, routing, weights)

and backwards, for which `y` is not kept,

    ds, dyb = gather_project(grad, routing, B_down)
    dh = grouped product of ds
    dgu, h, dgub, dweights = gate_backward_weighted(gu, dh, routing, kind, weights, xa, B_gate_up, dyb, A_down)
    gradients of weights and factors from h, ds, xs, dgu and the thin products
    dxs = grouped product of dgu, dgub A_gate_up added
    dx = combine(dxs, routing)

Grouped products that gather the rows they read (`backends.gathers`) take `x` and `grad` themselves; `project` then
stands for `gather_project`, and no `xs` or `ds` is written. Those that cannot add an adapter leave it to
`add_product_`, in place. All other products with an adapter's factors are done on rows that are in registers anyway.

`gu` is saved without its adapter. A scaling is in `B` already.

Triton on CUDA (`row_kernels.py`), plain PyTorch elsewhere (`rows_reference.py`). Nothing here has autograd.
"""

import torch

from ..kernels import least_block, use_kernels
from .routing import Routing
from .rows_reference import (
    add_product_reference_,
    combine_reference,
    gate_backward_reference,
    gate_forward_reference,
    gather_project_reference,
)


KINDS = ("silu", "gelu_tanh", "gpt_oss")
MAX_RANK = 128  # a bias that comes as one more row of `B` is a rank of its own
TILE_ROWS = 32  # of `Routing.tiles`, for every kernel, so that one table serves a layer

# More than this, and programs of 32 rows fill a GPU of 132 SMs; below, those of 16 rows are twice as many.
_MANY_ROWS = 132 * 4 * 32


def _pad(rank: int) -> int:
    """`tl.dot` wants at least 16, and a power of two."""
    if not 0 < rank <= MAX_RANK:
        raise ValueError(f"the rank of an adapter on experts can be 1 to {MAX_RANK} here, not {rank}")
    return least_block(rank)


def _ranks(name: str, factor: torch.Tensor | None) -> dict[str, int]:
    rank = 0 if factor is None else factor.shape[1]
    return {name: rank, f"{name}_PAD": _pad(rank) if rank else 16}


def _columns(columns: int, dtype: torch.dtype, *ranks: int) -> int:
    """Columns of a step: `columns` in 16 bits up to a rank of 64, half of it in 32 bits and beyond that rank."""
    return max(16, columns // (2 if dtype.itemsize == 4 else 1) // (2 if max(ranks) > 64 else 1))


def _rows(num_rows: int) -> dict[str, int]:
    return {"TILE": TILE_ROWS, "BLOCK_M": 32 if num_rows >= _MANY_ROWS else 16}


def _gate_steps(dtype: torch.dtype, block_m: int, *ranks: int, backward: bool = False) -> dict[str, int]:
    """
    The activation's columns and warps. Its values are an operand of a product, and warps beyond one for 16 rows would
    all compute the same ones; without products the warps share the columns.
    """
    if not any(ranks):
        return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    columns, stages = (64, 2) if backward else (32, 3)
    if dtype.itemsize == 4 and max(ranks) > 64:
        stages = 2  # more factors do not fit into the shared memory of sm_86 and sm_120
    return {"BLOCK_N": _columns(columns, dtype, *ranks), "num_warps": block_m // 16, "num_stages": stages}


def _parts(routing: Routing, blocks: dict[str, int]) -> int:
    """Programs that cover all rows of all experts."""
    return routing.tiles(TILE_ROWS).shape[0] * (TILE_ROWS // blocks["BLOCK_M"])


def _check(**contiguous: torch.Tensor | None) -> None:
    for name, x in contiguous.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} has to be contiguous")


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")


def _check_pair(first: torch.Tensor | None, second: torch.Tensor | None, names: str) -> None:
    if (first is None) != (second is None):
        raise ValueError(f"{names} come together or not at all")


def gather_project(
    x: torch.Tensor, routing: Routing, a: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Bring the tokens into the order of the experts and multiply them with an adapter's first factor.

    Args:
        x (`torch.Tensor` of shape `(num_tokens, hidden_size)`): Tokens.
        routing (`Routing`): Their rows.
        a (`torch.Tensor` of shape `(num_experts, rank, hidden_size)`, *optional*): First factors, in the dtype of `x`.

    Returns:
        `xs` `(num_rows, hidden_size)` and `xa` `(num_rows, rank)` or `None`, in the dtype of `x`.
    """
    if not use_kernels(x):
        return gather_project_reference(x, routing, a)
    return launch_gather_project(x, routing, a)


def launch_gather_project(x, routing, a, with_rows=True):
    """`gather_project` through the kernel."""
    from .row_kernels import gather_project_kernel

    _check(x=x, a=a)
    width, ranks, blocks = x.shape[1], _ranks("RANK", a), _rows(routing.num_rows)
    xs = x.new_empty(routing.num_rows, width) if with_rows else None
    xa = None if a is None else x.new_empty(routing.num_rows, ranks["RANK"])
    if routing.num_rows and width:
        # nothing but a thin product: more loads in flight, and no warps beyond those that its rows have work for
        thin = not with_rows
        step = _columns(64 if thin else 128, x.dtype, ranks["RANK"])
        chunk = 2 * step if a is None else width
        with torch.cuda.device_of(x):
            gather_project_kernel[(_parts(routing, blocks), -(-width // chunk))](
                x,
                routing.order,
                routing.tiles(TILE_ROWS),
                a,
                xs,
                xa,
                width,
                chunk,
                TOP_K=routing.top_k,
                **ranks,
                **blocks,
                BLOCK_N=step,
                num_warps=blocks["BLOCK_M"] // 16 if thin else 4,
                num_stages=4 if thin else 3,
            )
    return xs, xa


def project(x: torch.Tensor, routing: Routing, a: torch.Tensor) -> torch.Tensor:
    """
    Multiply the tokens with the first factors of an adapter of their experts, for products that gather them.

    Args:
        x, routing, a: As in `gather_project`.

    Returns:
        `torch.Tensor` of shape `(num_rows, rank)`, in the order of the experts.
    """
    run = launch_gather_project if use_kernels(x) else gather_project_reference
    return run(x, routing, a, with_rows=False)[1]


def gate_forward(
    gu: torch.Tensor,
    routing: Routing,
    kind: str,
    xa: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    a_down: torch.Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Add the adapter, activate, and multiply with the first factor of the next adapter.

    Args:
        gu (`torch.Tensor` of shape `(num_rows, 2 * intermediate_size)`): Gate and up, a bias included.
        routing (`Routing`): The rows.
        kind (`str`): `"silu"` and `"gelu_tanh"`: gate, then up, `act(gate) * up`. `"gpt_oss"`: columns of gate and up
            in turn, `(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit`, up within it.
        xa, b (`torch.Tensor` of shapes `(num_rows, rank)` and `(num_experts, rank, 2 * intermediate_size)`,
            *optional*): Adapter of `gu`.
        a_down (`torch.Tensor` of shape `(num_experts, rank, intermediate_size)`, *optional*): First factors of the
            adapter of what follows.

    Returns:
        `h` `(num_rows, intermediate_size)` and `ha` `(num_rows, rank)` or `None`, in the dtype of `gu`.
    """
    _check_kind(kind)
    _check_pair(xa, b, "xa and b")
    if not use_kernels(gu):
        return gate_forward_reference(gu, routing, kind, xa, b, a_down, alpha, limit)
    return launch_gate_forward(gu, routing, kind, xa, b, a_down, alpha, limit)


def launch_gate_forward(gu, routing, kind, xa, b, a_down, alpha, limit):
    """`gate_forward` through the kernel."""
    from .row_kernels import gate_forward_kernel

    _check(gu=gu, xa=xa, b=b, a_down=a_down)
    width, ranks, down = gu.shape[1] // 2, _ranks("RANK", b), _ranks("RANK_DOWN", a_down)
    blocks = _rows(routing.num_rows)
    h = gu.new_empty(routing.num_rows, width)
    ha = None if a_down is None else gu.new_empty(routing.num_rows, down["RANK_DOWN"])
    if h.numel():
        steps = _gate_steps(gu.dtype, blocks["BLOCK_M"], ranks["RANK"], down["RANK_DOWN"])
        chunk = 2 * steps["BLOCK_N"] if a_down is None else width
        with torch.cuda.device_of(gu):
            gate_forward_kernel[(_parts(routing, blocks), -(-width // chunk))](
                gu,
                routing.tiles(TILE_ROWS),
                xa,
                b,
                a_down,
                h,
                ha,
                width,
                chunk,
                alpha,
                limit,
                KIND=kind,
                **ranks,
                **down,
                **blocks,
                **steps,
            )
    return h, ha


def gate_backward_weighted(
    gu: torch.Tensor,
    dh: torch.Tensor,
    routing: Routing,
    kind: str,
    weights: torch.Tensor,
    xa: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    dyb: torch.Tensor | None = None,
    a_down: torch.Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    with_h: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """
    Gradient of `gate_forward` and of the weights; arguments that have the same name are those of the forward.

    Everything between `h` and the weighted sum is linear, so that `<grad[token], y>`, the gradient of a weight, is
    `<dh, h>` with the gradient of a row as if its weight was 1. Neither `y` nor weighted rows of `grad` are needed.

    Args:
        dh (`torch.Tensor` of shape `(num_rows, intermediate_size)`): Gradient of `h` from the down weight alone, where
            that of `y` is `grad[token]`, without the factor of the sum.
        weights (`torch.Tensor` of shape `(num_tokens, top_k)`): Factors of the sum.
        dyb (`torch.Tensor` of shape `(num_rows, rank)`, *optional*): Gradient of `ha`, from the same `grad[token]`;
            with `a_down` the adapter's part of the gradient of `h`.
        with_h (`bool`): Whether to write `h` again, which gradients of `a_down` and of the down weight need.

    Returns:
        `dgu` as `gu`, `h` `(num_rows, intermediate_size)` or `None`, and `dgub` `(num_rows, rank)`, the gradient of
        `xa`, or `None`, each row times its weight (with `grad[token]` such a `h` gives the gradient of the down
        weight); and `dweights` `(num_tokens, top_k)` in fp32, zeros for slots of no expert.
    """
    _check_kind(kind)
    _check_pair(xa, b, "xa and b")
    _check_pair(dyb, a_down, "dyb and a_down")
    run = launch_gate_backward if use_kernels(gu) else gate_backward_reference
    return run(gu, dh, routing, kind, weights, xa, b, dyb, a_down, alpha, limit, with_h)


def launch_gate_backward(gu, dh, routing, kind, weights, xa, b, dyb, a_down, alpha, limit, with_h):
    """`gate_backward_weighted` through the kernel."""
    from .row_kernels import gate_backward_kernel

    _check(gu=gu, dh=dh, xa=xa, b=b, dyb=dyb, a_down=a_down, weights=weights)
    width, ranks, down = gu.shape[1] // 2, _ranks("RANK", b), _ranks("RANK_DOWN", a_down)
    blocks = _rows(routing.num_rows)
    dgu = torch.empty_like(gu)
    h = torch.empty_like(dh) if with_h else None
    dgub = None if b is None else gu.new_empty(routing.num_rows, ranks["RANK"])
    dweights = torch.empty(weights.shape, dtype=torch.float32, device=gu.device)
    if dh.numel():
        steps = _gate_steps(gu.dtype, blocks["BLOCK_M"], ranks["RANK"], down["RANK_DOWN"], backward=True)
        with torch.cuda.device_of(gu):
            gate_backward_kernel[(_parts(routing, blocks),)](
                gu,
                dh,
                routing.order,
                routing.tiles(TILE_ROWS),
                weights,
                routing.offsets,
                xa,
                b,
                dyb,
                a_down,
                dgu,
                h,
                dgub,
                dweights,
                routing.num_rows,
                width,
                routing.num_experts,
                alpha,
                limit,
                KIND=kind,
                WITH_H=with_h,
                **ranks,
                **down,
                **blocks,
                **steps,
            )
    return dgu, h, dgub, dweights


def combine(y: torch.Tensor, routing: Routing, weights: torch.Tensor | None = None) -> torch.Tensor:
    """
    Sum the rows of each token.

    Args:
        y (`torch.Tensor` of shape `(num_rows, hidden_size)`): Rows. Those of no expert may hold anything, NaN too.
        routing (`Routing`): The rows.
        weights (`torch.Tensor` of shape `(num_tokens, top_k)`, *optional*): Factors, of any float dtype.

    Returns:
        `torch.Tensor` of shape `(num_tokens, hidden_size)`: In the dtype of `y`, summed in fp32.
    """
    if not use_kernels(y):
        return combine_reference(y, routing, weights)
    return launch_combine(y, routing, weights)


def launch_combine(y, routing, weights):
    """`combine` through the kernel."""
    from .row_kernels import combine_kernel

    _check(y=y, weights=weights, place=routing.place)
    num_tokens, width = routing.place.shape[0], y.shape[1]
    out = y.new_empty(num_tokens, width)
    if out.numel():
        step = min(1024, max(128, 1 << (width - 1).bit_length()))
        with torch.cuda.device_of(y):
            combine_kernel[(num_tokens, -(-width // step))](
                y,
                routing.place,
                weights,
                routing.offsets,
                out,
                width,
                routing.num_experts,
                TOP_K=routing.top_k,
                WEIGHTED=weights is not None,
                BLOCK_N=step,
                num_warps=max(1, step // 256),
            )
    return out


def add_product_(y: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, routing: Routing) -> torch.Tensor:
    """
    Add a low-rank product in place.

    Args:
        y (`torch.Tensor` of shape `(num_rows, width)`): Rows.
        xa (`torch.Tensor` of shape `(num_rows, rank)`): First product.
        b (`torch.Tensor` of shape `(num_experts, rank, width)`): Second factors.
        routing (`Routing`): The rows.

    Returns:
        `y`.
    """
    if not use_kernels(y):
        return add_product_reference_(y, xa, b, routing)
    return launch_add_product_(y, xa, b, routing)


def launch_add_product_(y, xa, b, routing):
    """`add_product_` through the kernel."""
    from .row_kernels import add_product_kernel

    _check(y=y, xa=xa, b=b)
    width, ranks, blocks = y.shape[1], _ranks("RANK", b), _rows(routing.num_rows)
    if y.numel():
        step = _columns(128, y.dtype, ranks["RANK"])
        with torch.cuda.device_of(y):
            add_product_kernel[(_parts(routing, blocks), -(-width // step))](
                y, routing.tiles(TILE_ROWS), xa, b, width, **ranks, **blocks, BLOCK_N=step, num_warps=4, num_stages=1
            )
    return y
