"""The steps of a mixture as loops over its experts: the CPU path, and the truth that kernels are tested against."""

import math
from typing import NamedTuple

import torch

from .routing import Routing


def grouped_mm_reference(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """
    Each row times the weight of its expert.

    Args:
        x (`torch.Tensor` of shape `(num_rows, in_features)`): Rows, sorted by expert.
        weight (`torch.Tensor` of shape `(num_experts, in_features, out_features)`, any strides): Weights.
        offsets (`torch.Tensor` of shape `(num_experts,)`, int32): Where the rows of each expert end.

    Returns:
        `torch.Tensor` of shape `(num_rows, out_features)`: In the dtype of `x`; zeros for rows beyond the last offset.
    """
    out = x.new_zeros(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    return out


def grouped_gram_reference(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """
    For each expert the product of its rows of `x`, transposed, and its rows of `y`: the gradient of a weight.

    Args:
        x (`torch.Tensor` of shape `(num_rows, in_features)`): Rows, sorted by expert.
        y (`torch.Tensor` of shape `(num_rows, out_features)`): Rows, in the same order.
        offsets (`torch.Tensor` of shape `(num_experts,)`, int32): Where the rows of each expert end.

    Returns:
        `torch.Tensor` of shape `(num_experts, in_features, out_features)`: Zeros for experts without rows.
    """
    out = x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end].t(), y[start:end], out=out[expert])
        start = end
    return out


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


def split_gate(gate_up: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate's columns and the values', views of `gate_up` `(num_rows, 2 * intermediate)`."""
    if gate.kind == "gpt_oss":
        return gate_up[:, ::2], gate_up[:, 1::2]
    return gate_up.chunk(2, dim=-1)


def apply_gate_reference(gate_up: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Args:
        gate_up (`torch.Tensor` of shape `(num_rows, 2 * intermediate)`): Output of the first product.
        gate (`Gate`): The activation.

    Returns:
        The activation `(num_rows, intermediate)`, and its derivatives by gate and value, in the dtype of `gate_up`.
    """
    g, u = split_gate(gate_up, gate)
    if gate.kind == "gpt_oss":
        free_g, free_u = (g <= gate.limit).to(g.dtype), (u.abs() <= gate.limit).to(g.dtype)
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit) + 1
        slope = torch.sigmoid(gate.alpha * g)
        act, by_gate = g * slope, slope * (1 + gate.alpha * g * (1 - slope))
        return act * u, by_gate * u * free_g, act * free_u
    if gate.kind == "silu":
        slope = torch.sigmoid(g)
        act, by_gate = g * slope, slope * (1 + g * (1 - slope))
    else:
        inner = math.sqrt(2 / math.pi)
        tanh = torch.tanh(inner * (g + 0.044715 * g**3))
        act = 0.5 * g * (1 + tanh)
        by_gate = 0.5 * (1 + tanh) + 0.5 * g * (1 - tanh**2) * inner * (1 + 3 * 0.044715 * g**2)
    return act * u, by_gate * u, act


def gather_project_reference(
    x: torch.Tensor, routing: Routing, a: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The rows of `x` in sorted order, and each times the `a` of its expert.

    Args:
        x (`torch.Tensor` of shape `(num_tokens, hidden)`): Tokens.
        routing (`Routing`): Where they go.
        a (`torch.Tensor` of shape `(num_experts, rank, hidden)`, *optional*): Skinny weights.

    Returns:
        Sorted rows `(num_rows, hidden)`, and their products `(num_rows, rank)` or `None`.
    """
    rows = x[routing.token]
    return rows, None if a is None else grouped_mm_reference(rows, a.transpose(1, 2), routing.offsets)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _with_product(rows: torch.Tensor, xa: torch.Tensor | None, b: torch.Tensor | None, routing: Routing):
    return rows if xa is None else rows + grouped_mm_reference(xa, b, routing.offsets)


def gate_forward_reference(
    gate_up: torch.Tensor,
    routing: Routing,
    gate: Gate,
    xa: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    a_down: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The activation of `gate_up + xa @ b`, and its product with the next `a`.

    Args:
        gate_up (`torch.Tensor` of shape `(num_rows, 2 * intermediate)`): Output of the first product.
        routing (`Routing`): The rows' experts.
        gate (`Gate`): The activation.
        xa (`torch.Tensor` of shape `(num_rows, rank)`, *optional*): What the first `b` is multiplied with.
        b (`torch.Tensor` of shape `(num_experts, rank, 2 * intermediate)`, *optional*): Skinny weights.
        a_down (`torch.Tensor` of shape `(num_experts, rank, intermediate)`, *optional*): Skinny weights.

    Returns:
        `(num_rows, intermediate)`, and its products `(num_rows, rank)` or `None`.
    """
    hidden = apply_gate_reference(_wide(_with_product(gate_up, xa, b, routing)), gate)[0].to(gate_up.dtype)
    product = None if a_down is None else grouped_mm_reference(hidden, a_down.transpose(1, 2), routing.offsets)
    return hidden, product


def gate_backward_reference(
    gate_up: torch.Tensor,
    grad_hidden: torch.Tensor,
    row_weights: torch.Tensor,
    routing: Routing,
    gate: Gate,
    xa: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    grad_a: torch.Tensor | None = None,
    a_down: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """
    Backward of `gate_forward_reference` and of the routing weights.

    The gradients that come in are those of rows before they are weighted, so that those of the weights follow without
    the experts' outputs: `<grad, y> = <grad @ w_down.T, hidden>`.

    Args:
        gate_up, routing, gate, xa, b, a_down: As in the forward.
        grad_hidden (`torch.Tensor` of shape `(num_rows, intermediate)`): Gradient through the second product.
        row_weights (`torch.Tensor` of shape `(num_rows,)`): Routing weights in sorted order.
        grad_a (`torch.Tensor` of shape `(num_rows, rank)`, *optional*): Gradient of the product with `a_down`.

    Returns:
        Gradient of `gate_up`, weighted; the activation, weighted; the gradient of the weights `(num_rows,)`, in fp32
        or wider; and the first times `b` transposed, `(num_rows, rank)`, or `None`.
    """
    hidden, by_gate, by_value = apply_gate_reference(_wide(_with_product(gate_up, xa, b, routing)), gate)
    grad_hidden = _wide(_with_product(grad_hidden, grad_a, a_down, routing))
    grad_weights = (grad_hidden * hidden).sum(-1)
    weights = row_weights.unsqueeze(-1)
    grad_hidden = grad_hidden * weights
    grad_gate_up = torch.empty_like(gate_up)
    for part, derivative in zip(split_gate(grad_gate_up, gate), (by_gate, by_value), strict=True):
        part.copy_(grad_hidden * derivative)
    back = None if b is None else grouped_mm_reference(grad_gate_up, b.transpose(1, 2), routing.offsets)
    return grad_gate_up, (hidden * weights).to(gate_up.dtype), grad_weights, back


def combine_reference(rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None = None) -> torch.Tensor:
    """
    The weighted sum of each token's rows.

    Args:
        rows (`torch.Tensor` of shape `(num_rows, hidden)`): Rows in sorted order.
        routing (`Routing`): Where they came from.
        weights (`torch.Tensor` of shape `(num_tokens, top_k)`, *optional*): Routing weights; 1 if not given.

    Returns:
        `torch.Tensor` of shape `(num_tokens, hidden)`: Summed in fp32 or wider, in the dtype of `rows`.
    """
    picked = _wide(rows[routing.place])
    if weights is not None:
        picked = picked * weights.unsqueeze(-1)
    return picked.sum(1).to(rows.dtype)
