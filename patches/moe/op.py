"""The experts of a layer as one op: sort, two grouped products, activation, LoRA beside them, weighted sum.

LoRA stays two thin products, `x @ A.T` and then `@ B`, so nothing as large as the stacked weights is ever made, in
either direction. A bias is one more row of `B` whose factor is 1. The gradient of the routing weights needs no output
of the experts: `<grad, h @ W> = <grad @ W.T, h>`, and `h` is there anyway.
"""

from typing import NamedTuple

import torch

from .backends import Backend, grouped_gram, grouped_mm
from .reference import (
    Gate,
    combine_reference,
    gate_backward_reference,
    gate_forward_reference,
    gather_project_reference,
    grouped_gram_reference,
    grouped_mm_reference,
)
from .routing import Routing, route


class Projection(NamedTuple):
    """
    One of the two projections of all experts.

    Args:
        weight (`torch.Tensor` of shape `(num_experts, out, in)`, or `(num_experts, in, out)` where `transposed`):
            Stacked weights.
        a (`torch.Tensor` of shape `(num_experts, rank, in)`, *optional*): LoRA's first factor.
        b (`torch.Tensor` of shape `(num_experts, rank, out)`, *optional*): LoRA's second factor, scaled.
        bias (`torch.Tensor` of shape `(num_experts, out)`, *optional*): Biases.
    """

    weight: torch.Tensor
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


@torch.library.custom_op("unsloth_trl::moe_experts", mutates_args=())
def _moe_experts(
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
    transposed: bool,
    kind: str,
    alpha: float,
    limit: float,
    backend: str,
) -> list[torch.Tensor]:
    gate = Gate(kind, alpha, limit)
    routing = route(top_k_index, gate_up.shape[0])
    rows, xa = gather_project_reference(x, routing, gate_up_a)
    gu = grouped_mm(rows, _forwards(gate_up, transposed), routing.offsets, backend)
    xa = _with_ones(xa, gate_up_bias, rows)
    del rows
    hidden, ha = gate_forward_reference(gu, routing, gate, xa, _factors(gate_up_b, gate_up_bias), down_a)
    y = grouped_mm(hidden, _forwards(down, transposed), routing.offsets, backend)
    ha = _with_ones(ha, down_bias, hidden)
    if ha is not None:
        y += grouped_mm_reference(ha, _factors(down_b, down_bias), routing.offsets)
    out = combine_reference(y, routing, top_k_weights)
    saved = [x.new_empty(0) if t is None else t for t in (xa, ha)]
    return [out, gu, *saved, routing.order, routing.place, routing.offsets, routing.expert]


@_moe_experts.register_fake
def _(x, top_k_index, top_k_weights, gate_up, down, gua, gub, gubias, da, db, dbias, transposed, *_):
    num_rows, (num_experts, *sides) = top_k_index.numel(), gate_up.shape
    ranks = [(0 if a is None else a.shape[1]) + (bias is not None) for a, bias in ((gua, gubias), (da, dbias))]
    return [
        torch.empty_like(x),
        x.new_empty(num_rows, sides[1 if transposed else 0]),
        *(x.new_empty(num_rows, rank) if rank else x.new_empty(0) for rank in ranks),
        top_k_index.new_empty(num_rows, dtype=torch.int64),
        top_k_index.new_empty(top_k_index.shape, dtype=torch.int64),
        top_k_index.new_empty(num_experts, dtype=torch.int32),
        top_k_index.new_empty(num_rows),
    ]


@torch.library.custom_op("unsloth_trl::moe_experts_backward", mutates_args=())
def _moe_experts_backward(
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
    gu: torch.Tensor,
    xa: torch.Tensor,
    ha: torch.Tensor,
    order: torch.Tensor,
    place: torch.Tensor,
    offsets: torch.Tensor,
    expert: torch.Tensor,
    needed: list[bool],
    transposed: bool,
    kind: str,
    alpha: float,
    limit: float,
    backend: str,
) -> list[torch.Tensor]:
    """Gradients of x, weights, gate_up, its a, b and bias, down, its a, b and bias; empty where not `needed`."""
    gate, routing = Gate(kind, alpha, limit), Routing(order, place, offsets, expert)
    weights = top_k_weights.reshape(-1)[order]
    gu_b, d_b = _factors(gate_up_b, gate_up_bias), _factors(down_b, down_bias)
    grad_rows, grad_ha = gather_project_reference(grad, routing, d_b)
    grad_hidden = grouped_mm(grad_rows, _backwards(down, transposed), offsets, backend)
    bias_part = None
    if down_bias is not None:
        bias_part, grad_ha = grad_ha[:, -1], grad_ha[:, :-1].contiguous()
    grad_gu, hidden, grad_weights, grad_xa = gate_backward_reference(
        gu,
        grad_hidden,
        weights,
        routing,
        gate,
        xa if gu_b is not None else None,
        gu_b,
        grad_ha if down_a is not None else None,
        down_a,
    )
    del grad_hidden
    if bias_part is not None:
        grad_weights = grad_weights + bias_part
    grads: list[torch.Tensor | None] = [None] * 10
    if needed[6]:
        grads[6] = _weight_grad(hidden, grad_rows, offsets, transposed, backend)
    if needed[7]:
        grads[7] = grouped_gram_reference(grad_ha, hidden, offsets)
    if needed[8] or needed[9]:
        both = grouped_gram_reference((ha * weights.unsqueeze(1)).to(ha.dtype), grad_rows, offsets)
        grads[8], grads[9] = _split(both, down_b, down_bias)
    del grad_rows, hidden
    if needed[4] or needed[5]:
        grads[4], grads[5] = _split(grouped_gram_reference(xa, grad_gu, offsets), gate_up_b, gate_up_bias)
    if gate_up_a is not None:
        grad_xa = grad_xa[:, : gate_up_a.shape[1]].contiguous()
    if needed[2] or needed[3]:
        rows = x[routing.token]
        if needed[2]:
            grads[2] = _weight_grad(rows, grad_gu, offsets, transposed, backend)
        if needed[3]:
            grads[3] = grouped_gram_reference(grad_xa, rows, offsets)
    if needed[0]:
        grad_x = grouped_mm(grad_gu, _backwards(gate_up, transposed), offsets, backend)
        if gate_up_a is not None:
            grad_x += grouped_mm_reference(grad_xa, gate_up_a, offsets)
        grads[0] = combine_reference(grad_x, routing)
    if needed[1]:
        slots = torch.empty_like(grad_weights)
        slots[order] = grad_weights
        grads[1] = slots.view(place.shape).to(top_k_weights.dtype)
    return [grad.new_empty(0) if g is None else g for g in grads]


def _weight_grad(x, grad, offsets, transposed, backend: Backend) -> torch.Tensor:
    return grouped_gram(x, grad, offsets, backend) if transposed else grouped_gram(grad, x, offsets, backend)


def _split(both: torch.Tensor, b: torch.Tensor | None, bias: torch.Tensor | None):
    """Gradients of `b` and of the bias, which were one tensor in `_factors`."""
    if bias is None:
        return both, None
    return (None if b is None else both[:, :-1].contiguous()), both[:, -1].contiguous()


@_moe_experts_backward.register_fake
def _(grad, x, weights, gate_up, down, gua, gub, gubias, da, db, dbias, *rest):
    needed = rest[7]
    tensors = (grad, weights, gate_up, gua, gub, gubias, down, da, db, dbias)
    return [torch.empty_like(t) if need else grad.new_empty(0) for t, need in zip(tensors, needed, strict=True)]


# inputs of the forward op in the order of the gradients that the backward op returns
_DIFFERENTIABLE = (0, 2, 3, 5, 6, 7, 4, 8, 9, 10)


def _setup_context(ctx, inputs, output):
    x, _, top_k_weights, *tensors = inputs[:11]
    ctx.settings = inputs[11:]
    if not (ctx.needs_input_grad[3] or ctx.needs_input_grad[5]):
        x = x.new_empty(0)  # only the gradients of the first projection's weights read the tokens
    ctx.save_for_backward(x, top_k_weights, *tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    if grads[0] is None:
        return (None,) * 16
    needed = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    found = torch.ops.unsloth_trl.moe_experts_backward(
        grads[0].contiguous(), *ctx.saved_tensors, needed, *ctx.settings
    )
    result: list[torch.Tensor | None] = [None] * 16
    for i, need, grad in zip(_DIFFERENTIABLE, needed, found, strict=True):
        result[i] = grad if need else None
    return tuple(result)


_moe_experts.register_autograd(_backward, setup_context=_setup_context)


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
    outputs = torch.ops.unsloth_trl.moe_experts(
        x,
        top_k_index,
        top_k_weights,
        gate_up.weight,
        down.weight,
        gate_up.a,
        gate_up.b,
        gate_up.bias,
        down.a,
        down.b,
        down.bias,
        transposed,
        gate.kind,
        gate.alpha,
        gate.limit,
        backend,
    )
    return outputs[0]
