"""Lets a checkpoint within a graph recompute what is inside of an autograd function, too.

Before torch 2.12 only the nodes of the checkpointed graph itself are marked for it. An `autograd.Function`, as many
kernels come in, is a graph within it, whose results would all be kept. A checkpoint with a policy, as of
`create_selective_checkpoint_contexts`, asks at every op. (Products with weights in 4 bits are no functions any more
when this looks: `lora.graph_4bit`.)
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..lora.nodes import bodies, writes


MARKS_ALL = torch.__version__ >= "2.12"  # compares versions, not letters


def _recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


_contexts = functools.partial(create_selective_checkpoint_contexts, _recompute)


def recompute_functions(graph: fx.GraphModule) -> int:
    """
    Have checkpoints with an autograd function in them ask a policy, which recomputes everything.

    Args:
        graph (`torch.fx.GraphModule`): As dynamo hands it to a backend, changed in place.

    Returns:
        `int`: How many checkpoints were changed; none from torch 2.12 on. One with a policy, or with one in it,
        stays as it is, and so does one whose forward writes into a tensor: with a policy, torch may refuse that.
    """
    number = 0
    for node in [] if MARKS_ALL else list(_nodes(graph)):
        if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
            continue
        body = bodies(node)[0]
        inside = list(_nodes(body))
        within = [body, *(other for n in inside for other in bodies(n))]
        if any("_checkpoint_context_fn" in part.meta for part in within):
            continue  # somebody's own policy
        functions = (other.target is torch.ops.higher_order.autograd_function_apply for other in inside)
        if any(functions) and not any(map(writes, inside)):
            body.meta["_checkpoint_context_fn"] = _contexts  # where dynamo puts a checkpoint's own
            number += 1
    return number


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Of a graph and of those within it, as its forward runs them."""
    for node in module.graph.nodes:
        yield node
        for body in bodies(node):
            yield from _nodes(body)


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Without torch's line that a policy is not asked about writes, which has been seen to."""
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(_is_no_advice)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "context_fn is passed" not in str(record.msg)
