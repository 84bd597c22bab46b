"""The work on the rows of a mixture in plain PyTorch: the CPU path, and what the Triton kernels are tested against.

Arguments and results are those of `rows`. Each step rounds to the dtype it is given; in fp64 it is the truth. Rows
beyond the last offset belong to no expert: they may hold anything and come out as zeros or as anything.
"""

import torch

from .reference import grouped_mm_reference
from .routing import Routing


def _project(x: torch.Tensor, factor: torch.Tensor | None, routing: Routing) -> torch.Tensor | None:
    """`x factor[expert]^T` for a factor of `(num_experts, rank, width)`."""
    return None if factor is None else grouped_mm_reference(x, factor.transpose(1, 2), routing.offsets)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _split(gu: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (gu[:, ::2], gu[:, 1::2]) if kind == "gpt_oss" else gu.chunk(2, dim=1)


def _exponent(gate: torch.Tensor, kind: str, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`u` and its derivative; each activation is `gate * sigmoid(u(gate))`."""
    if kind == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z)
        scale = 2 * (2 / torch.pi) ** 0.5
        return scale * (gate + 0.044715 * gate**3), scale * (1 + 3 * 0.044715 * gate**2)
    slope = alpha if kind == "gpt_oss" else 1.0
    return gate * slope, torch.full_like(gate, slope)


def _clamp(gate: torch.Tensor, up: torch.Tensor, kind: str, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (gate.clamp(max=limit), up.clamp(-limit, limit) + 1) if kind == "gpt_oss" else (gate, up)


def gather_project_reference(
    x: torch.Tensor, routing: Routing, a: torch.Tensor | None, with_rows: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    xs = x[routing.token]
    return xs if with_rows else None, _project(xs, a, routing)


def gate_forward_reference(
    gu: torch.Tensor,
    routing: Routing,
    kind: str,
    xa: torch.Tensor | None,
    b: torch.Tensor | None,
    a_down: torch.Tensor | None,
    alpha: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if b is not None:
        gu = gu + grouped_mm_reference(xa, b, routing.offsets)
    gate, up = _clamp(*_split(gu, kind), kind, limit)
    h = gate * _exponent(gate, kind, alpha)[0].sigmoid() * up
    return h, _project(h, a_down, routing)


def gate_backward_reference(
    gu: torch.Tensor,
    dh: torch.Tensor,
    routing: Routing,
    kind: str,
    weights: torch.Tensor,
    xa: torch.Tensor | None,
    b: torch.Tensor | None,
    dyb: torch.Tensor | None,
    a_down: torch.Tensor | None,
    alpha: float,
    limit: float,
    with_h: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    if b is not None:
        gu = gu + grouped_mm_reference(xa, b, routing.offsets)
    if a_down is not None:
        dh = dh + grouped_mm_reference(dyb, a_down, routing.offsets)
    raw_gate, raw_up = _split(gu, kind)
    gate, up = _clamp(raw_gate, raw_up, kind, limit)
    exponent, slope = _exponent(gate, kind, alpha)
    squashed = exponent.sigmoid()
    active = gate * squashed
    h = active * up
    dweights = (_wide(_ours(dh, routing)) * _wide(_ours(h, routing))).sum(dim=1)[routing.place]
    weight = _wide(weights).reshape(-1)[routing.order, None]
    dh, h = (dh * weight).to(dh.dtype), (h * weight).to(h.dtype)
    d_gate = dh * up * (squashed + active * (1 - squashed) * slope)
    d_up = dh * active
    if kind == "gpt_oss":
        d_gate = d_gate.masked_fill(raw_gate > limit, 0)
        d_up = d_up.masked_fill(raw_up.abs() > limit, 0)
        dgu = torch.stack([d_gate, d_up], dim=2).flatten(1)
    else:
        dgu = torch.cat([d_gate, d_up], dim=1)
    return dgu, h if with_h else None, _project(dgu, b, routing), dweights


def _ours(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """`y` with zeros in the rows of no expert; selected, not multiplied, as these may hold NaN."""
    row = torch.arange(y.shape[0], device=y.device)
    return torch.where(row[:, None] < routing.offsets[-1], y, 0)


def combine_reference(y: torch.Tensor, routing: Routing, weights: torch.Tensor | None) -> torch.Tensor:
    chosen = _wide(_ours(y, routing))[routing.place]
    if weights is not None:
        ours = routing.place < routing.offsets[-1]
        chosen = chosen * torch.where(ours, _wide(weights), 0)[..., None]
    return chosen.sum(dim=1).to(y.dtype)


def add_product_reference_(y: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, routing: Routing) -> torch.Tensor:
    return y.add_(grouped_mm_reference(xa, b, routing.offsets))
