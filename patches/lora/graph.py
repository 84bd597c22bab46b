"""Finds PEFT's LoRA on a linear layer in a graph that dynamo has traced, and puts one op in its place."""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from . import op, op_4bit  # noqa: F401 (registers the ops)
from .graph_4bit import find_product
from .nodes import calls, cast, is_written_between, value_of


_ADD = (operator.add, operator.iadd, torch.add)
_MUL = (operator.mul, torch.mul)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Base(NamedTuple):
    """The product with a frozen weight: its input, the op for it with an adapter, and that op's arguments between."""

    x: fx.Node
    fused: Any
    arguments: tuple
    inside: tuple[fx.Node, ...]  # that nothing else uses, users first


class _Thin(NamedTuple):
    """A product of an input with the first factor of one adapter, which others of the same input may join."""

    node: fx.Node
    x: fx.Node  # without casts
    dtype: torch.dtype
    lora_A: fx.Node


class _Adapter(NamedTuple):
    x: fx.Node
    lora_A: fx.Node
    lora_B: fx.Node
    scaling: float | fx.Node  # a node where dynamo has made it a symbol, which other layers have another value of
    inside: tuple[fx.Node, ...]


def fuse_lora(graph: fx.GraphModule) -> int:
    """
    Replace each `linear(x, W) + linear(linear(x, A), B) * scaling` of a frozen `W` by `unsloth_trl::lora_linear`.

    A `W` in 4 bits, which bitsandbytes (from 0.50 on) multiplies with in one op, makes it `lora_linear_4bit`. Layers
    with the same `x` have one product with all of their `A`.

    Args:
        graph (`torch.fx.GraphModule`): As dynamo hands it to a backend, changed in place; graphs within it as well.

    Returns:
        `int`: How many there were.
    """
    number = 0
    for module in list(graph.modules()):
        if not isinstance(module, fx.GraphModule):
            continue
        found: dict[tuple[fx.Node, torch.dtype], list[_Thin]] = {}
        for node in list(module.graph.nodes):
            if (match := _match(node)) is not None:
                thin = _replace(module.graph, node, *match)
                found.setdefault((thin.x, thin.dtype), []).append(thin)
        for products in found.values():
            # a factor that is worked out in the graph may come too late
            _join(module.graph, [thin for thin in products if thin.lora_A.op in ("placeholder", "get_attr")])
        if found:
            module.recompile()
        number += sum(map(len, found.values()))
    return number


def _is_linear(node: Any) -> bool:
    """A product as `nn.Linear` has it; others may give their arguments by name."""
    return calls(node, torch.nn.functional.linear) and len(node.args) > 1


def _is_number(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return isinstance(value.meta.get("example_value"), torch.SymFloat)
    return isinstance(value, (int, float))


def _is_cast(node: Any) -> bool:
    is_to = isinstance(node, fx.Node) and node.op == "call_method" and node.target == "to"
    return is_to and value_of(node) is not None


def _source(x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What is cast, in one or more steps of which none loses what `dtype` still has."""
    while _is_cast(x) and (before := value_of(x.args[0])) is not None:
        after = value_of(x).dtype
        if after not in (torch.promote_types(after, dtype), torch.promote_types(after, before.dtype)):
            break
        x = x.args[0]
    return x


def _through(node: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """A node behind casts to the dtype that it has and copies, and these; PEFT copies what bitsandbytes returns."""
    passed = ()
    while isinstance(node, fx.Node) and len(node.users) == 1 and node.op == "call_method":
        before = value_of(node.args[0])
        same = before is not None and value_of(node) is not None and before.dtype == value_of(node).dtype
        if node.target not in ("to", "clone") or not same:
            break
        passed, node = (*passed, node), node.args[0]
    return node, passed


def _bias(node: fx.Node) -> fx.Node | None:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def _adapter(node: Any) -> _Adapter | None:
    scaled, passed = _through(node)
    if not calls(scaled, *_MUL) or len(scaled.args) != 2:
        return None
    outer, scaling = scaled.args
    inner = outer.args[0] if _is_linear(outer) else None
    if not _is_number(scaling) or not _is_linear(inner):
        return None
    if any(_bias(n) is not None or len(n.users) != 1 for n in (outer, inner)) or len(scaled.users) != 1:
        return None
    scaling = scaling if isinstance(scaling, fx.Node) else float(scaling)
    return _Adapter(inner.args[0], inner.args[1], outer.args[1], scaling, (*passed, scaled, outer, inner))


def _dense(base: fx.Node, passed: tuple[fx.Node, ...]) -> _Base | None:
    weight, bias = base.args[1], _bias(base)
    frozen = [weight] if bias is None else [weight, bias]
    if any(value_of(n) is None or value_of(n).requires_grad for n in frozen) or len(base.users) != 1:
        return None
    fused = torch.ops.unsloth_trl.lora_linear.default
    return _Base(base.args[0], fused, (weight, bias), (*passed, base))


def _four_bits(result: fx.Node, passed: tuple[fx.Node, ...]) -> _Base | None:
    product = find_product(result)
    if product is None or len(result.users) != 1:
        return None
    bias = value_of(product.bias)
    if bias is not None and (bias.requires_grad or bias.dtype != value_of(product.x).dtype):
        return None
    fused = torch.ops.unsloth_trl.lora_linear_4bit.default
    return _Base(product.x, fused, product.arguments, (*passed, *product.inside))


def _match(node: fx.Node) -> tuple[_Base, _Adapter] | None:
    if not calls(node, *_ADD) or len(node.args) != 2 or node.kwargs or (adapter := _adapter(node.args[1])) is None:
        return None
    product, passed = _through(node.args[0])
    base = _dense(product, passed) if _is_linear(product) else _four_bits(product, passed)
    if base is None or (out := value_of(node)) is None:
        return None
    if _source(base.x, out.dtype) is not _source(adapter.x, out.dtype):
        return None
    if any(is_written_between(node.graph, inside[-1], node) for inside in (base.inside, adapter.inside)):
        return None  # the op would read its input later than they do
    values = [value_of(n) for n in (node, product, *adapter.inside, adapter.lora_A, adapter.lora_B)]
    if any(value is None for value in values) or values[0].dtype not in _DTYPES:
        return None
    if len({value.dtype for value in values[:-2]}) > 1:
        return None
    return base, adapter


def _replace(graph: fx.Graph, node: fx.Node, base: _Base, adapter: _Adapter) -> _Thin:
    dtype = value_of(node).dtype
    with graph.inserting_before(node):
        x, lora_A, lora_B = (cast(graph, n, dtype) for n in (base.x, adapter.lora_A, adapter.lora_B))
        dense = base.fused is torch.ops.unsloth_trl.lora_linear.default
        arguments = tuple(cast(graph, n, dtype) for n in base.arguments) if dense else base.arguments
        x_A = _product(graph, x, lora_A)
        thin, first, scaling = x_A, graph.call_method("detach", (lora_A,)), adapter.scaling
        if isinstance(scaling, fx.Node):
            # the op's is a constant, for which there would be a graph for each value
            thin, first = (graph.call_function(operator.mul, (factor, scaling)) for factor in (thin, first))
            scaling = 1.0
        made = graph.call_function(base.fused, (x, *arguments, first, lora_B, thin, scaling))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    # no more than these: to `fx`, what writes into a tensor is dead as well
    for dead in (node, *adapter.inside, *base.inside):
        graph.erase_node(dead)
    return _Thin(x_A, _source(base.x, dtype), dtype, adapter.lora_A)


def _product(graph: fx.Graph, x: fx.Node, lora_A: fx.Node) -> fx.Node:
    """Of an input with a factor; the input's gradient is the op's."""
    return graph.call_function(torch.nn.functional.linear, (graph.call_method("detach", (x,)), lora_A))


def _join(graph: fx.Graph, products: list[_Thin]) -> None:
    """One product for all, in the place of the first: the input is read once, here and in the backward."""
    if len(products) < 2 or is_written_between(graph, products[0].node, products[-1].node):
        return
    first = products[0]
    with graph.inserting_before(first.node):
        joined = graph.call_function(torch.cat, ([cast(graph, thin.lora_A, thin.dtype) for thin in products],))
        x = first.node.args[0].args[0]
        ranks = [value_of(thin.lora_A).shape[0] for thin in products]
        parts = graph.call_function(torch.split, (_product(graph, x, joined), ranks, -1))
        for place, thin in enumerate(products):
            thin.node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, place)))
    for thin in products:
        detached = thin.node.args[0]
        graph.erase_node(thin.node)
        graph.erase_node(detached)
