"""A linear layer and its LoRA as one op of a compiled graph: both products into one output, and one gradient of x.

Written apart, each product has an output of its own that waits for the addition: in the backward of a gated MLP that
is three tensors of tokens x intermediate size more than the sums need.
"""

import torch
import torch.nn.functional as F


def add_product(out: torch.Tensor, x_A: torch.Tensor, lora_B: torch.Tensor, scaling: float) -> torch.Tensor:
    """`out += scaling * x_A @ lora_B.T`, in place and returned."""
    out.view(-1, out.shape[-1]).addmm_(x_A.reshape(-1, x_A.shape[-1]), lora_B.t(), alpha=scaling)
    return out


def adapter_gradients(
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    x_A: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `x` (empty where `weight` is `None`), `x_A` and `lora_B`."""
    flat, thin = grad.reshape(-1, grad.shape[-1]), x_A.reshape(-1, x_A.shape[-1])
    grad_thin = torch.mm(flat, lora_B).mul_(scaling)
    grad_B = torch.mm(flat.t(), thin).mul_(scaling)
    if weight is None:
        return grad.new_empty(0), grad_thin.view(x_A.shape), grad_B
    grad_x = torch.mm(flat, weight).addmm_(grad_thin, lora_A)
    return grad_x.view(*grad.shape[:-1], weight.shape[1]), grad_thin.view(x_A.shape), grad_B


@torch.library.custom_op("unsloth_trl::lora_linear", mutates_args=())
def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    x_A: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """
    `x @ weight.T + bias + scaling * x @ lora_A.T @ lora_B.T`, all of one floating dtype.

    Args:
        x (`torch.Tensor` of shape `(..., in_features)`): Input.
        weight (`torch.Tensor` of shape `(out_features, in_features)`): Of the base layer; it gets no gradient.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): Of the base layer; it gets no gradient.
        lora_A (`torch.Tensor` of shape `(r, in_features)`): For the gradient of `x`; it gets none itself.
        lora_B (`torch.Tensor` of shape `(out_features, r)`): The other factor.
        x_A (`torch.Tensor` of shape `(..., r)`): `x @ lora_A.T`, of an `x` without and a `lora_A` with a gradient. It
            comes from outside: a graph that needs it for the backward does not need this op again, and layers with
            the same `x` can have one product for all of theirs.
        scaling (`float`): Of the adapter.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`.
    """
    return add_product(F.linear(x, weight, bias), x_A, lora_B, scaling)


@lora_linear.register_fake
def _(x, weight, bias, lora_A, lora_B, x_A, scaling):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("unsloth_trl::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    x_A: torch.Tensor,
    scaling: float,
    needs_x: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `x` (empty unless `needs_x`), `x_A` and `lora_B`; arguments as in `lora_linear`."""
    return adapter_gradients(grad, weight if needs_x else None, lora_A, lora_B, x_A, scaling)


def gradients_like(
    grad: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, x_A: torch.Tensor, needs_x: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the shapes that `adapter_gradients` returns, for a compiler."""
    shape = (*grad.shape[:-1], lora_A.shape[1]) if needs_x else (0,)
    return grad.new_empty(shape), grad.new_empty(x_A.shape), lora_B.new_empty(lora_B.shape)


@lora_linear_backward.register_fake
def _(grad, weight, lora_A, lora_B, x_A, scaling, needs_x):
    return gradients_like(grad, lora_A, lora_B, x_A, needs_x)


def _setup(ctx, inputs, output):
    _, weight, _, lora_A, lora_B, x_A, scaling = inputs
    ctx.save_for_backward(weight, lora_A, lora_B, x_A)
    ctx.scaling = scaling


def _backward(ctx, grad):
    needs_x = ctx.needs_input_grad[0]
    grads = torch.ops.unsloth_trl.lora_linear_backward(grad, *ctx.saved_tensors, ctx.scaling, needs_x)
    return grads[0] if needs_x else None, None, None, None, grads[2], grads[1], None


lora_linear.register_autograd(_backward, setup_context=_setup)
