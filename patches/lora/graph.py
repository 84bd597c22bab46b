"""Finds PEFT's LoRA on a linear layer in a graph that dynamo has traced, and puts one op in its place."""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from . import op  # noqa: F401 (registers the op)


_ADD = (operator.add, operator.iadd, torch.add)
_MUL = (operator.mul, torch.mul)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Match(NamedTuple):
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    lora_A: fx.Node
    lora_B: fx.Node
    scaling: float
    inside: tuple[fx.Node, ...]  # that nothing else uses, users first


def fuse_lora(graph: fx.GraphModule) -> int:
    """
    Replace each `linear(x, W) + linear(linear(x, A), B) * scaling` of a frozen `W` by `unsloth_trl::lora_linear`.

    Args:
        graph (`torch.fx.GraphModule`): As dynamo hands it to a backend, changed in place; graphs within it as well.

    Returns:
        `int`: How many there were.
    """
    number = 0
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        found = 0
        for node in list(module.graph.nodes):
            if (match := _match(node)) is not None:
                _replace(module.graph, node, match)
                found += 1
        if found:
            module.recompile()
        number += found
    return number


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_linear(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is torch.nn.functional.linear


def _arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return node.args[0], node.args[1], bias


def _same_input(x: fx.Node, other: fx.Node) -> bool:
    """Whether `x` is `other`, or a cast of it."""
    cast = x.op == "call_method" and x.target == "to"
    return x is other or (cast and x.args[0] is other and _value(x).shape == _value(other).shape)


def _match(node: fx.Node) -> _Match | None:
    if node.op != "call_function" or node.target not in _ADD or len(node.args) != 2 or node.kwargs:
        return None
    base, scaled = node.args
    if not _is_linear(base) or not isinstance(scaled, fx.Node) or scaled.target not in _MUL or len(scaled.args) != 2:
        return None
    outer, scaling = scaled.args
    if not isinstance(scaling, (int, float)) or not _is_linear(outer):
        return None
    x, weight, bias = _arguments(base)
    inner, lora_B, no_bias = _arguments(outer)
    if no_bias is not None or not _is_linear(inner):
        return None
    thin_x, lora_A, no_bias = _arguments(inner)
    if no_bias is not None or any(len(n.users) != 1 for n in (base, scaled, outer, inner)):
        return None
    values = [_value(n) for n in (node, base, outer, inner, x, thin_x, weight, lora_A, lora_B)]
    if any(value is None for value in values) or not _same_input(thin_x, x):
        return None
    frozen = [weight] if bias is None else [weight, bias]
    if len({value.dtype for value in values[:4]}) > 1 or values[0].dtype not in _DTYPES:
        return None
    if any(_value(n) is None or _value(n).requires_grad for n in frozen):
        return None
    return _Match(x, weight, bias, lora_A, lora_B, float(scaling), (scaled, outer, inner, base))


def _replace(graph: fx.Graph, node: fx.Node, match: _Match) -> None:
    dtype = _value(node).dtype

    def cast(other: fx.Node | None) -> fx.Node | None:
        # by autocast, in the layer; in the graph they are fused with what is before them
        same = other is None or _value(other).dtype == dtype
        return other if same else graph.call_method("to", (other, dtype))

    with graph.inserting_before(node):
        x, weight, bias, lora_A, lora_B = map(cast, match[:5])
        detached = tuple(graph.call_method("detach", (n,)) for n in (x, lora_A))
        x_A = graph.call_function(torch.nn.functional.linear, detached)
        fused = torch.ops.unsloth_trl.lora_linear.default
        made = graph.call_function(fused, (x, weight, bias, lora_A, lora_B, x_A, match.scaling))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    for dead in (node, *match.inside):  # no more than these: to `fx`, what writes into a tensor is dead as well
        graph.erase_node(dead)
