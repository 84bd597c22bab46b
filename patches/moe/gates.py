"""Which activation the experts of a model have between their products."""

from typing import Any

import torch
from torch import nn

from .op import Gate
from .rows_reference import gate_forward_reference


_KEPT = "_unsloth_trl_gate"
# far enough out to meet every clamp, and finely enough in between
_VALUES = [0.0, *(s * v for v in (1e-2, 0.1, 0.3, 0.7, 1.5, 3, 5, 8, 11, 15, 19, 33, 70, 250, 3e3) for s in (1, -1))]


def recognise_gate(module: nn.Module) -> Gate | None:
    """
    The activation of an experts module, or `None` if it is none of those that the op has.

    Found by trying: names and layouts of activations differ between models, their values do not lie.
    """
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        return None
    known = [Gate("silu"), Gate("gelu_tanh")]
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, int | float) and isinstance(limit, int | float):
        known.append(Gate("gpt_oss", float(alpha), float(limit)))
    probe = _probe()
    try:
        with torch.no_grad():
            found = module._apply_gate(probe)
    except Exception:  # an activation with weights of its own, or one that wants other inputs
        return None
    if found.shape != (probe.shape[0], probe.shape[1] // 2):
        return None
    return next((gate for gate in known if torch.allclose(_activate(probe, gate), found, rtol=1e-9)), None)


def _probe() -> torch.Tensor:
    """Each of the values beside each other one, whether gates and values are halves or take turns."""
    first, second = torch.cartesian_prod(*2 * [torch.tensor(_VALUES, dtype=torch.float64)]).unbind(1)
    number = len(_VALUES)
    first, second = first.view(number, number), second.view(number, number)
    halves = torch.cat([first, second], dim=1)
    turns = torch.stack([first, second], dim=2).flatten(1)
    return torch.cat([halves, turns])


def _activate(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    return gate_forward_reference(gate_up, None, gate.kind, None, None, None, gate.alpha, gate.limit)[0]


def gate_of(module: nn.Module) -> Gate | None:
    """`recognise_gate`, tried again when what the activation depends on is another object or number."""
    state: tuple[Any, ...] = (
        getattr(module, "act_fn", None),
        getattr(module, "alpha", None),
        getattr(module, "limit", None),
        module.training,
    )
    kept = module.__dict__.get(_KEPT)
    if kept is None or any(a is not b and a != b for a, b in zip(kept[0], state, strict=True)):
        kept = module.__dict__[_KEPT] = (state, recognise_gate(module))
    return kept[1]


def forget_gate(module: nn.Module) -> None:
    """Leave nothing of `gate_of` on the module."""
    module.__dict__.pop(_KEPT, None)
