"""Questions to the nodes of a graph that dynamo has traced."""

import itertools
import operator
from typing import Any

import torch
from torch import fx


# what dynamo makes of a statement that writes into a tensor
_IN_PLACE = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv)
_IN_PLACE += (operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul)


def value_of(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a node runs; of an autograd function that of its forward, not of its backward."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    names = [arg.target for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    found = [getattr(node.graph.owning_module, str(name), None) for name in names]
    graphs = [body for body in found if isinstance(body, fx.GraphModule)]
    return graphs[:1] if node.target is torch.ops.higher_order.autograd_function_apply else graphs


def is_written_between(graph: fx.Graph, first: fx.Node, last: fx.Node) -> bool:
    """Whether something writes into a tensor between two nodes, into their input perhaps."""
    nodes = itertools.dropwhile(lambda node: node is not first, graph.nodes)
    return any(writes(node) for node in itertools.takewhile(lambda node: node is not last, nodes))


def writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    if node.op != "call_function":
        return False
    mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    name, home = (getattr(node.target, key, None) or "" for key in ("__name__", "__module__"))
    in_place = name.endswith("_") and not name.endswith("__")  # `torch.relu_`
    # by place, `inplace` may be any argument
    asked = node.kwargs.get("inplace") or (home == "torch.nn.functional" and any(value is True for value in node.args))
    return bool("out" in node.kwargs or asked or mutable or in_place or node.target in _IN_PLACE)


def cast(graph: fx.Graph, other: Any, dtype: torch.dtype) -> Any:
    # by autocast, in the layer; in the graph they are fused with what is before them
    value = value_of(other)
    floating = value is not None and value.is_floating_point()
    return graph.call_method("to", (other, dtype)) if floating and value.dtype != dtype else other
