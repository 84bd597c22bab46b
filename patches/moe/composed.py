"""Experts whose activation is their own: the products as ops, and what is between them as the model computes it."""

import torch
from torch import nn

from .backends import Backend, grouped_gram, grouped_mm, refusal, thin_backend
from .counting_sort import sort_rows
from .op import Projection
from .routing import Routing
from .weights import dense


@torch.library.custom_op("unsloth_trl::moe_linear", mutates_args=())
def _moe_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scales: list[torch.Tensor],
    order: torch.Tensor,
    place: torch.Tensor,
    offsets: torch.Tensor,
    meta: list[int],
    out_features: int,
    transposed: bool,
    backend: str,
) -> list[torch.Tensor]:
    routing = Routing(order, place, offsets)
    with dense(weight, scales, meta, x.dtype, "linear") as full:
        out = grouped_mm(x, full if transposed else full.transpose(1, 2), routing, backend)
    if a is None:
        return [out, x.new_empty(0)]
    thin = _backend_of(a)
    xa = grouped_mm(x, a.transpose(1, 2), routing, thin)
    out += grouped_mm(xa, b, routing, thin)
    return [out, xa]


def _backend_of(factor: torch.Tensor) -> Backend:
    """For an adapter's factor of any rank: torch's product where there is no Triton and it takes that rank."""
    thin = thin_backend(factor)
    if thin == "triton" or not factor.is_cuda:
        return thin
    return thin if refusal("grouped_mm", factor.device, factor.dtype, tuple(factor.shape[1:])) else "grouped_mm"


@_moe_linear.register_fake
def _(x, weight, a, b, scales, order, place, offsets, meta, out_features, transposed, backend):
    return [
        x.new_empty(x.shape[0], out_features),
        x.new_empty(0) if a is None else x.new_empty(x.shape[0], a.shape[1]),
    ]


@torch.library.custom_op("unsloth_trl::moe_linear_backward", mutates_args=())
def _moe_linear_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    order: torch.Tensor,
    place: torch.Tensor,
    offsets: torch.Tensor,
    xa: torch.Tensor,
    scales: list[torch.Tensor],
    needed: list[bool],
    meta: list[int],
    transposed: bool,
    backend: str,
) -> list[torch.Tensor]:
    """Gradients of x, weight, a and b; empty where not `needed`."""
    routing = Routing(order, place, offsets)
    grads: list[torch.Tensor | None] = [None] * 4
    thin = None if a is None else _backend_of(a)
    grad_xa = None if a is None else grouped_mm(grad, b.transpose(1, 2), routing, thin)
    if needed[0]:
        with dense(weight, scales, meta, grad.dtype, "linear") as full:
            grads[0] = grouped_mm(grad, full.transpose(1, 2) if transposed else full, routing, backend)
        if a is not None:
            grads[0] += grouped_mm(grad_xa, a, routing, thin)
    if needed[1]:
        pair = (x, grad) if transposed else (grad, x)
        grads[1] = grouped_gram(*pair, routing, backend)
    if needed[2]:
        grads[2] = grouped_gram(grad_xa, x, routing, thin)
    if needed[3]:
        grads[3] = grouped_gram(xa, grad, routing, thin)
    return [grad.new_empty(0) if g is None else g for g in grads]


@_moe_linear_backward.register_fake
def _(grad, x, weight, a, b, order, place, offsets, xa, scales, needed, meta, transposed, backend):
    return [
        torch.empty_like(t) if need else grad.new_empty(0) for t, need in zip((x, weight, a, b), needed, strict=True)
    ]


def _setup_context(ctx, inputs, output):
    x, weight, a, b, scales, order, place, offsets, meta, _, transposed, backend = inputs
    ctx.settings = (meta, transposed, backend)
    ctx.save_for_backward(x, weight, a, b, order, place, offsets, output[1], *scales)
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    none = [None] * 8
    tensors, scales = ctx.saved_tensors[:8], list(ctx.saved_tensors[8:])
    none[0] = [None] * len(scales)
    if grads[0] is None:
        return (None,) * 4 + tuple(none)
    needed = list(ctx.needs_input_grad[:4])
    found = torch.ops.unsloth_trl.moe_linear_backward(grads[0].contiguous(), *tensors, scales, needed, *ctx.settings)
    return *(grad if need else None for grad, need in zip(found, needed, strict=True)), *none


_moe_linear.register_autograd(_backward, setup_context=_setup_context)


def composed_experts(
    module: nn.Module,
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    first: Projection,
    down: Projection,
    backend: Backend,
) -> torch.Tensor:
    """
    The experts of a layer whose activation, norm behind it, or adapters' rank is not one of the op's.

    Args:
        module (`nn.Module`): The experts, which has `_apply_gate`, or `act_fn` where it has no gate.
        x (`torch.Tensor` of shape `(num_tokens, hidden)`): Tokens, in the dtype of the weights.
        top_k_index, top_k_weights (`torch.Tensor` of shape `(num_tokens, top_k)`): Experts and their weights.
        first, down (`Projection`): Into the activation, and back.
        backend (`str`): What computes the grouped products.

    Returns:
        `torch.Tensor` of shape `(num_tokens, hidden)`.
    """
    routing = sort_rows(top_k_index, down.weight.shape[0])

    def project(rows: torch.Tensor, projection: Projection) -> torch.Tensor:
        weight = projection.weight
        out, _ = torch.ops.unsloth_trl.moe_linear(
            rows.to(weight.dtype),
            weight.tensor,
            projection.a,
            projection.b,
            weight.scales,
            routing.order,
            routing.place,
            routing.offsets,
            weight.meta,
            weight.shape[2 if module.is_transposed else 1],
            module.is_transposed,
            backend,
        )
        return out if projection.bias is None else out + projection.bias[routing.expert]

    hidden = project(x[routing.token], first)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    out = project(hidden.contiguous(), down)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    weighted = out * top_k_weights.reshape(-1)[routing.order].unsqueeze(-1)
    return weighted[routing.place].sum(1).to(x.dtype)
