"""Finds products with a weight in bitsandbytes' 4-bit format in a graph that dynamo has traced; puts one op in place.

bitsandbytes from 0.50 on multiplies in one op. In a graph that op has the dtype of its input. Uncompiled, autocast
reaches the product within it (but for a few rows, which have a kernel of their own), and an input in fp32, as of a
model that was loaded in fp32, is multiplied in 16 bits.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from . import op_4bit  # noqa: F401 (registers the op)
from .nodes import bodies, calls, cast, value_of


_FUNCTIONS = "bitsandbytes/autograd/_functions.py"
_HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


class Product4bit(NamedTuple):
    """A product with a weight in 4 bits: its input, the arguments of our ops behind it, and its nodes."""

    x: fx.Node
    arguments: tuple  # the last is the bias
    inside: tuple[fx.Node, ...]  # users first

    @property
    def bias(self) -> fx.Node | None:
        return self.arguments[-1]


def find_product(result: Any) -> Product4bit | None:
    """
    The product that a node is the result of.

    Args:
        result (`torch.fx.Node`): The op of bitsandbytes, or the first result of its autograd function, whose forward
            is a graph of its own.
    """
    if _is_product(result):
        return _product(result, lambda value: value, (result,))
    if not calls(result, operator.getitem) or result.args[1] != 0:
        return None
    apply = result.args[0]
    if not calls(apply, torch.ops.higher_order.autograd_function_apply):
        return None
    others = [user for user in apply.users if user is not result]
    if any(user.users or not calls(user, operator.getitem) for user in others):
        return None
    body = next(iter(bodies(apply)), None)
    made = None if body is None else _output(body)
    if not _is_product(made) or not _is_theirs(made):
        return None
    # operands of the call, by the inputs of its graph
    inputs = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), apply.args[2:], strict=False))

    def outer(value: Any) -> Any:
        value = _viewed(value)
        return inputs.get(value) if isinstance(value, fx.Node) else value

    return _product(made, outer, (result, *others, apply))


def _viewed(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target in ("view", "reshape"):
        node = node.args[0]
    return node


def _output(body: fx.GraphModule) -> Any:
    """What the forward of an autograd function returns first: its result, or the first of several."""
    (output,) = (node.args[0] for node in body.graph.nodes if node.op == "output")
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output


def _is_theirs(node: fx.Node) -> bool:
    """Whether a line of bitsandbytes has called it, whose backward is known; anybody's function may call the op."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    return bool(files) and _FUNCTIONS in files[-1].replace("\\", "/")


def _is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and "bitsandbytes::gemm_4bit" in str(getattr(node.target, "_name", ""))


def _product(node: fx.Node, outer: Any, inside: tuple[fx.Node, ...]) -> Product4bit | None:
    if not 6 <= len(node.args) <= 7:
        return None  # not as bitsandbytes itself calls it
    x, packed, shape, absmax, blocksize, quant_type = map(outer, node.args[:6])
    optional = [node.kwargs.get(name) for name in ("absmax_8bit", "absmax_code", "absmax_offset")]
    optional.append(node.args[6] if len(node.args) > 6 else node.kwargs.get("bias"))
    given = [outer(value) for value in optional]
    tensors = [x, packed, absmax, *(g for g, value in zip(given, optional, strict=True) if value is not None)]
    if any(value_of(tensor) is None for tensor in tensors) or not isinstance(blocksize, int):
        return None
    return Product4bit(x, (packed, list(shape), absmax, blocksize, quant_type, *given), inside)


def replace_products(graph: fx.GraphModule) -> int:
    """
    Replace each product with a weight in 4 bits by `unsloth_trl::linear_4bit`.

    Args:
        graph (`torch.fx.GraphModule`): As dynamo hands it to a backend, changed in place; graphs within it as well.

    Returns:
        `int`: How many there were.
    """
    number = 0
    for node in list(graph.graph.nodes):
        if (product := find_product(node)) is not None:
            _replace(graph.graph, node, product)
            number += 1
        elif not calls(node, torch.ops.higher_order.autograd_function_apply):
            number += sum(map(replace_products, bodies(node)))
    if number:
        graph.recompile()
    return number


def _replace(graph: fx.Graph, result: fx.Node, product: Product4bit) -> None:
    dtype = _dtype(result, value_of(product.x))
    with graph.inserting_before(product.inside[-1]):
        x, bias = cast(graph, product.x, dtype), cast(graph, product.bias, dtype)
        made = graph.call_function(torch.ops.unsloth_trl.linear_4bit.default, (x, *product.arguments[:-1], bias))
    made.meta = dict(result.meta)
    if (value := value_of(result)) is not None:
        made.meta["example_value"] = value.to(dtype)  # what comes after it was traced with another, but runs with this
    result.replace_all_uses_with(made)
    for dead in product.inside:
        graph.erase_node(dead)


def _dtype(node: fx.Node, x: torch.Tensor) -> torch.dtype:
    """Of a product at the place of a node: that of its input, or the one that autocast gives it there."""
    kind = x.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    entered = []
    for other in node.graph.nodes:
        if other is node:
            break
        if calls(other, torch.amp.autocast_mode._enter_autocast):
            entered.append(other)
        elif calls(other, torch.amp.autocast_mode._exit_autocast):
            entered.remove(other.args[0])
    for region in entered:
        where, its_dtype, enables = region.args[:3]
        if where == kind:
            enabled, dtype = enables, its_dtype or dtype
    return dtype if enabled and x.dtype in _HALF_AND_SINGLE else x.dtype
