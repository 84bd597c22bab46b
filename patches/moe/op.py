"""The experts of a layer as one op: sort, two grouped products, activation, LoRA beside them, weighted sum.

LoRA stays two thin products, `x @ A.T` and then `@ B`, so nothing as large as the stacked weights is ever made, in
either direction. A bias is one more row of `B` whose factor is 1. The gradient of the routing weights needs no output
of the experts: `<grad, h @ W> = <grad @ W.T, h>`, and `h` is there anyway.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .backends import Backend, gathers, grouped_gram, grouped_mm, row_tile, thin_backend
from .counting_sort import sort_rows
from .routing import Routing, max_tiles
from .rows import TILE_ROWS, combine, gate_backward_weighted, gate_forward, gather_project, project
from .weights import META, Stacked, dense


class Gate(NamedTuple):
    """
    What experts do between their two products.

    Args:
        kind (`str`): `"silu"` or `"gelu_tanh"`: of the first half of the columns, times the second half. `"gpt_oss"`:
            gate in the even columns and values in the odd ones, both clamped, and a sigmoid with a slope.
        alpha, limit (`float`): Slope and clamp of `"gpt_oss"`.
    """

    kind: str
    alpha: float = 1.0
    limit: float = 0.0


class Projection(NamedTuple):
    """
    One of the two projections of all experts.

    Args:
        weight (`Stacked`): Of shape `(num_experts, out, in)`, or `(num_experts, in, out)` where `transposed`.
        a (`torch.Tensor` of shape `(num_experts, rank, in)`, *optional*): LoRA's first factor.
        b (`torch.Tensor` of shape `(num_experts, rank, out)`, *optional*): LoRA's second factor, scaled.
        bias (`torch.Tensor` of shape `(num_experts, out)`, *optional*): Biases.
    """

    weight: Stacked
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def _forwards(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """`(num_experts, in, out)`, what rows are multiplied with."""
    return weight if transposed else weight.transpose(1, 2)


def _backwards(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """`(num_experts, out, in)`, what gradients are multiplied with."""
    return weight.transpose(1, 2) if transposed else weight


def _factors(b: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """`b` with the bias as its last row."""
    if bias is None:
        return b
    row = bias.unsqueeze(1)
    return row if b is None else torch.cat([b, row], dim=1)


def _with_ones(product: torch.Tensor | None, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """`product` with the bias's factor as its last column."""
    if bias is None:
        return product
    ones = rows.new_ones(rows.shape[0], 1)
    return ones if product is None else torch.cat([product, ones], dim=1)


def _until_activation(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_a: torch.Tensor | None,
    gate_up_b: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_a: torch.Tensor | None,
    down_b: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_up_scales: list[torch.Tensor],
    down_scales: list[torch.Tensor],
    gate_up_meta: list[int],
    down_meta: list[int],
    transposed: bool,
    kind: str,
    alpha: float,
    limit: float,
    backend: str,
) -> list[torch.Tensor]:
    """Rows after the activation, and what a backward wants to have kept."""
    num_experts = gate_up_meta[META]
    wide = row_tile(x, top_k_index.numel(), num_experts, backend)
    routing = sort_rows(top_k_index, num_experts, wide)
    rows, token, xa = _gathered(x, routing, backend, gate_up_a)
    with dense(gate_up, gate_up_scales, gate_up_meta, x.dtype, "gate_up") as weight:
        gu = grouped_mm(rows, _forwards(weight, transposed), routing, backend, rows=token)
    del rows
    xa = _with_ones(xa, gate_up_bias, gu)
    gate_up_b = _factors(gate_up_b, gate_up_bias)
    hidden, ha = gate_forward(gu, routing, kind, xa, gate_up_b, down_a, alpha=alpha, limit=limit)
    ha = _with_ones(ha, down_bias, hidden)
    kept = [x.new_empty(0) if t is None else t for t in (xa, ha)]
    tiles = (routing.tiles(TILE_ROWS), _wide_tiles(routing, wide))
    return [hidden, gu, *kept, routing.order, routing.place, routing.offsets, *tiles]


def _from_activation(hidden: torch.Tensor, kept: list[torch.Tensor], inputs: tuple) -> torch.Tensor:
    """The sum of the experts' outputs, from what `_until_activation` gave for these inputs."""
    _, _, top_k_weights, _, down, _, _, _, _, down_b, down_bias, _, scales, _, meta, transposed, *_, backend = inputs
    ha, routing = kept[2], _routing_of(*kept[3:], row_tile(hidden, hidden.shape[0], meta[META], backend))
    factors = () if down_b is None and down_bias is None else (ha, _factors(down_b, down_bias))
    with dense(down, scales, meta, hidden.dtype, "down") as weight:
        y = grouped_mm(hidden, _forwards(weight, transposed), routing, backend, *factors)
    return combine(y, routing, top_k_weights)


def _routing_of(order, place, offsets, tiles, wide_tiles, wide: int) -> Routing:
    return Routing(order, place, offsets, {TILE_ROWS: tiles} | ({wide: wide_tiles} if wide else {}))


def _forward(*inputs) -> list[torch.Tensor]:
    hidden, *kept = _until_activation(*inputs)
    return [_from_activation(hidden, kept, inputs), *kept]


def _gathered(x: torch.Tensor, routing: Routing, backend: Backend, factors: torch.Tensor | None):
    """
    The tokens of the rows for a backend's products: the rows themselves and no index, or all tokens and the index;
    and their product with an adapter's factors, if there are any.
    """
    if not gathers(backend):
        rows, product = gather_project(x, routing, factors)
        return rows, None, product
    return x, routing.token, None if factors is None else project(x, routing, factors)


def _wide_tiles(routing: Routing, wide: int) -> torch.Tensor:
    return routing.tiles(wide) if wide else routing.offsets.new_empty(0, 3)


_moe_experts = torch.library.custom_op(
    "unsloth_trl::moe_experts",
    _forward,
    mutates_args=(),
    schema=torch.library.infer_schema(_until_activation, mutates_args=()),
)


@_moe_experts.register_fake
def _(x, index, weights, gate_up, down, gua, gub, gubias, da, db, dbias, gus, ds, meta, dm, transposed, *rest):
    num_rows, (num_experts, *sides) = index.numel(), meta[META:]
    wide = row_tile(x, num_rows, num_experts, rest[-1])
    ranks = [(0 if a is None else a.shape[1]) + (bias is not None) for a, bias in ((gua, gubias), (da, dbias))]
    return [
        torch.empty_like(x),
        x.new_empty(num_rows, sides[1 if transposed else 0]),
        *(x.new_empty(num_rows, rank) if rank else x.new_empty(0) for rank in ranks),
        index.new_empty(num_rows, dtype=torch.int64),
        index.new_empty(index.shape, dtype=torch.int64),
        index.new_empty(num_experts, dtype=torch.int32),
        index.new_empty(max_tiles(num_rows, num_experts, TILE_ROWS), 3, dtype=torch.int32),
        index.new_empty(max_tiles(num_rows, num_experts, wide) if wide else 0, 3, dtype=torch.int32),
    ]


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_a: torch.Tensor | None,
    gate_up_b: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_a: torch.Tensor | None,
    down_b: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_up_scales: list[torch.Tensor],
    down_scales: list[torch.Tensor],
    gu: torch.Tensor,
    xa: torch.Tensor,
    ha: torch.Tensor,
    order: torch.Tensor,
    place: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    wide_tiles: torch.Tensor,
    needed: list[bool],
    gate_up_meta: list[int],
    down_meta: list[int],
    transposed: bool,
    kind: str,
    alpha: float,
    limit: float,
    backend: str,
) -> list[torch.Tensor]:
    """Gradients of x, weights, gate_up, its a, b and bias, down, its a, b and bias; empty where not `needed`."""
    wide = row_tile(grad, order.shape[0], gate_up_meta[META], backend)
    routing = _routing_of(order, place, offsets, tiles, wide_tiles, wide)
    thin = thin_backend(grad)
    gu_b, d_b = _factors(gate_up_b, gate_up_bias), _factors(down_b, down_bias)
    grad_rows, token, grad_ha = _gathered(grad, routing, backend, d_b)
    with dense(down, down_scales, down_meta, grad.dtype, "down") as weight:
        grad_hidden = grouped_mm(grad_rows, _backwards(weight, transposed), routing, backend, rows=token)
    bias_part = None
    if down_bias is not None:
        bias_part, grad_ha = grad_ha[:, -1], grad_ha[:, :-1].contiguous()
    grad_gu, hidden, grad_xa, grad_weights = gate_backward_weighted(
        gu,
        grad_hidden,
        routing,
        kind,
        top_k_weights,
        None if gu_b is None else xa,
        gu_b,
        None if down_a is None else grad_ha,
        down_a,
        alpha=alpha,
        limit=limit,
        with_h=needed[6] or needed[7],
    )
    del grad_hidden
    grads: list[torch.Tensor | None] = [None] * 10
    if needed[1]:
        total = grad_weights if bias_part is None else grad_weights + bias_part[place]
        grads[1] = total.to(top_k_weights.dtype)
    if needed[6]:
        grads[6] = _weight_grad(hidden, grad_rows, routing, transposed, backend, grad_rows=token)
    if needed[7]:
        grads[7] = grouped_gram(grad_ha, hidden, routing, thin)
    if needed[8] or needed[9]:
        weighted = (ha * top_k_weights.reshape(-1)[order].unsqueeze(1)).to(ha.dtype)
        grads[8], grads[9] = _split(grouped_gram(weighted, grad_rows, routing, thin, token), down_b, down_bias)
    del grad_rows, hidden
    if needed[4] or needed[5]:
        grads[4], grads[5] = _split(grouped_gram(xa, grad_gu, routing, thin), gate_up_b, gate_up_bias)
    if gate_up_a is not None and gate_up_bias is not None:
        grad_xa = grad_xa[:, :-1].contiguous()
    if needed[2] or needed[3]:
        token = routing.token if token is None else token
        if needed[2]:
            grads[2] = _weight_grad(x, grad_gu, routing, transposed, backend, x_rows=token)
        if needed[3]:
            grads[3] = grouped_gram(grad_xa, x, routing, thin, token)
    if needed[0]:
        with dense(gate_up, gate_up_scales, gate_up_meta, grad.dtype, "gate_up") as weight:
            factors = () if gate_up_a is None else (grad_xa, gate_up_a)
            grad_x = grouped_mm(grad_gu, _backwards(weight, transposed), routing, backend, *factors)
        grads[0] = combine(grad_x, routing)
    return [grad.new_empty(0) if g is None else g for g in grads]


def _weight_grad(
    x, grad, routing: Routing, transposed: bool, backend: Backend, x_rows=None, grad_rows=None
) -> torch.Tensor:
    if transposed:
        return grouped_gram(x, grad, routing, backend, grad_rows, x_rows)
    return grouped_gram(grad, x, routing, backend, x_rows, grad_rows)


def _split(both: torch.Tensor, b: torch.Tensor | None, bias: torch.Tensor | None):
    """Gradients of `b` and of the bias, which were one tensor in `_factors`."""
    if bias is None:
        return both, None
    return (None if b is None else both[:, :-1].contiguous()), both[:, -1].contiguous()


_moe_experts_backward = torch.library.custom_op("unsloth_trl::moe_experts_backward", _backward, mutates_args=())


@_moe_experts_backward.register_fake
def _(grad, x, weights, gate_up, down, gua, gub, gubias, da, db, dbias, gus, ds, gu, xa, ha, order, *rest):
    needed = rest[4]
    tensors = (grad, weights, gate_up, gua, gub, gubias, down, da, db, dbias)
    return [torch.empty_like(t) if need else grad.new_empty(0) for t, need in zip(tensors, needed, strict=True)]


# inputs of the forward op in the order of the gradients that the backward op returns
_DIFFERENTIABLE = (0, 2, 3, 5, 6, 7, 4, 8, 9, 10)
_NUM_INPUTS = 20


def _keep(ctx, inputs, kept):
    x, _, top_k_weights, *tensors = inputs[:11]
    scales, ctx.settings = inputs[11:13], inputs[13:]
    ctx.num_scales = [len(part) for part in scales]
    if not (ctx.needs_input_grad[3] or ctx.needs_input_grad[5]):
        x = x.new_empty(0)  # only the gradients of the first projection's weights read the tokens
    ctx.save_for_backward(x, top_k_weights, *tensors, *scales[0], *scales[1], *kept)
    ctx.set_materialize_grads(False)


def _setup_context(ctx, inputs, output):
    _keep(ctx, inputs, output[1:])


def _gradients(ctx, grads, backward):
    if grads[0] is None:
        return (None,) * _NUM_INPUTS
    needed = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    saved = list(ctx.saved_tensors)
    first, second = ctx.num_scales
    scales = [saved[10 : 10 + first], saved[10 + first : 10 + first + second]]
    found = backward(grads[0].contiguous(), *saved[:10], *scales, *saved[10 + first + second :], needed, *ctx.settings)
    result: list[torch.Tensor | list | None] = [None] * _NUM_INPUTS
    for i, need, grad in zip(_DIFFERENTIABLE, needed, found, strict=True):
        result[i] = grad if need else None
    return result


def _backward_of_op(ctx, grads):
    result = _gradients(ctx, grads, torch.ops.unsloth_trl.moe_experts_backward)
    result[11], result[12] = ([None] * number for number in ctx.num_scales)
    return tuple(result)


_moe_experts.register_autograd(_backward_of_op, setup_context=_setup_context)


class _UntilActivation(torch.autograd.Function):
    """
    The first half of the op, without the dispatcher, whose checks of 20 arguments take the host longer than kernels.

    It keeps what the backward of both halves wants, so that a checkpoint, which recomputes no more than what was kept,
    stops before the second half: a third of the products. The first output only carries the gradient of the sum.
    """

    @staticmethod
    def forward(ctx, *inputs):
        hidden, *kept = _until_activation(*inputs)
        _keep(ctx, inputs, kept)
        carrier = inputs[0].new_empty(()).expand_as(inputs[0])
        ctx.mark_non_differentiable(hidden, *kept)
        return carrier, hidden, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        return tuple(_gradients(ctx, (grad,), _backward))


class _FromActivation(torch.autograd.Function):
    """The second half of the op; its gradient is all the work of the first's."""

    @staticmethod
    def forward(ctx, carrier, inputs, hidden, *kept):
        ctx.set_materialize_grads(False)
        return _from_activation(hidden, list(kept), inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


def moe_experts(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: Projection,
    down: Projection,
    *,
    gate: Gate,
    transposed: bool,
    backend: Backend,
) -> torch.Tensor:
    """
    The experts of a layer.

    Args:
        x (`torch.Tensor` of shape `(num_tokens, hidden)`): Tokens, in the dtype of the weights.
        top_k_index (`torch.Tensor` of shape `(num_tokens, top_k)`, integer): The experts of each token.
        top_k_weights (`torch.Tensor` of shape `(num_tokens, top_k)`): What their outputs are multiplied with.
        gate_up (`Projection`): Into gate and values, `out = 2 * intermediate`.
        down (`Projection`): Back, `in = intermediate`.
        gate (`Gate`): The activation between the two.
        transposed (`bool`): Whether weights are `(num_experts, in, out)`.
        backend (`str`): What computes the grouped products.

    Returns:
        `torch.Tensor` of shape `(num_tokens, hidden)`, in the dtype of `x`.
    """
    # kernels read these row by row
    x, top_k_weights, *factors = (
        None if t is None else t.contiguous()
        for t in (x, top_k_weights, gate_up.a, gate_up.b, gate_up.bias, down.a, down.b, down.bias)
    )
    inputs = (
        x,
        top_k_index,
        top_k_weights,
        gate_up.weight.tensor,
        down.weight.tensor,
        *factors,
        gate_up.weight.scales,
        down.weight.scales,
        gate_up.weight.meta,
        down.weight.meta,
        transposed,
        gate.kind,
        gate.alpha,
        gate.limit,
        backend,
    )
    # compilers and other modes see ops, and nothing inside of a function
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.unsloth_trl.moe_experts(*inputs)[0]
    if not torch.is_grad_enabled():
        return _forward(*inputs)[0]
    carrier, *halfway = _UntilActivation.apply(*inputs)
    return _FromActivation.apply(carrier, inputs, *halfway)
