"""Experts whose activation is their own: the products as ops, and what is between them as the model computes it."""

import torch
from torch import nn

from .backends import Backend, grouped_gram, grouped_mm
from .reference import grouped_gram_reference, grouped_mm_reference
from .routing import route


@torch.library.custom_op("unsloth_trl::moe_linear", mutates_args=())
def _moe_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    offsets: torch.Tensor,
    transposed: bool,
    backend: str,
) -> list[torch.Tensor]:
    out = grouped_mm(x, weight if transposed else weight.transpose(1, 2), offsets, backend)
    if a is None:
        return [out, x.new_empty(0)]
    xa = grouped_mm_reference(x, a.transpose(1, 2), offsets)
    out += grouped_mm_reference(xa, b, offsets)
    return [out, xa]


@_moe_linear.register_fake
def _(x, weight, a, b, offsets, transposed, backend):
    return [
        x.new_empty(x.shape[0], weight.shape[2 if transposed else 1]),
        x.new_empty(0) if a is None else x.new_empty(x.shape[0], a.shape[1]),
    ]


@torch.library.custom_op("unsloth_trl::moe_linear_backward", mutates_args=())
def _moe_linear_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    offsets: torch.Tensor,
    xa: torch.Tensor,
    needed: list[bool],
    transposed: bool,
    backend: str,
) -> list[torch.Tensor]:
    """Gradients of x, weight, a and b; empty where not `needed`."""
    grads: list[torch.Tensor | None] = [None] * 4
    grad_xa = None if a is None else grouped_mm_reference(grad, b.transpose(1, 2), offsets)
    if needed[0]:
        grads[0] = grouped_mm(grad, weight.transpose(1, 2) if transposed else weight, offsets, backend)
        if a is not None:
            grads[0] += grouped_mm_reference(grad_xa, a, offsets)
    if needed[1]:
        pair = (x, grad) if transposed else (grad, x)
        grads[1] = grouped_gram(*pair, offsets, backend)
    if needed[2]:
        grads[2] = grouped_gram_reference(grad_xa, x, offsets)
    if needed[3]:
        grads[3] = grouped_gram_reference(xa, grad, offsets)
    return [grad.new_empty(0) if g is None else g for g in grads]


@_moe_linear_backward.register_fake
def _(grad, x, weight, a, b, offsets, xa, needed, transposed, backend):
    return [
        torch.empty_like(t) if need else grad.new_empty(0) for t, need in zip((x, weight, a, b), needed, strict=True)
    ]


def _setup_context(ctx, inputs, output):
    x, weight, a, b, offsets, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, a, b, offsets, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    if grads[0] is None:
        return (None,) * 7
    needed = list(ctx.needs_input_grad[:4])
    found = torch.ops.unsloth_trl.moe_linear_backward(grads[0].contiguous(), *ctx.saved_tensors, needed, *ctx.settings)
    return *(grad if need else None for grad, need in zip(found, needed, strict=True)), None, None, None


_moe_linear.register_autograd(_backward, setup_context=_setup_context)


def composed_experts(
    module: nn.Module,
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    first,
    down,
    backend: Backend,
) -> torch.Tensor:
    """
    The experts of a layer whose activation, or norm behind it, is not one of the op's.

    Args:
        module (`nn.Module`): The experts, which has `_apply_gate`, or `act_fn` where it has no gate.
        x (`torch.Tensor` of shape `(num_tokens, hidden)`): Tokens, in the dtype of the weights.
        top_k_index, top_k_weights (`torch.Tensor` of shape `(num_tokens, top_k)`): Experts and their weights.
        first, down (`Projection`): Into the activation, and back.
        backend (`str`): What computes the grouped products.

    Returns:
        `torch.Tensor` of shape `(num_tokens, hidden)`.
    """
    routing = route(top_k_index, down.weight.shape[0])

    def project(rows: torch.Tensor, projection) -> torch.Tensor:
        out, _ = torch.ops.unsloth_trl.moe_linear(
            rows,
            projection.weight,
            projection.a,
            projection.b,
            routing.offsets,
            module.is_transposed,
            backend,
        )
        return out if projection.bias is None else out + projection.bias[routing.expert]

    hidden = project(x[routing.token], first)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    out = project(hidden.to(x.dtype).contiguous(), down)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    weighted = out * top_k_weights.reshape(-1)[routing.order].unsqueeze(-1)
    return weighted[routing.place].sum(1).to(x.dtype)
