"""The compiled forward of a decoder layer.

All layers of a class share one compiled function: dynamo takes a layer's weights as inputs. The layer is compiled
inside of its checkpoint, so that the plan decides from layer to layer and from batch to batch as it does uncompiled.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import deprecation

from ..attention.compiled import hold
from ..checkpointing.policy import Plan
from ..checkpointing.settings import tile_of
from ..checkpointing.tiles import TileSwitch
from ..owner import OwnForward


logger = get_logger(__name__)

# From transformers 5.24 on a class's `forward` holds the checkpoint, and its own one is behind it; before, `__call__`.
CHECKPOINTS_FORWARD = "__init_subclass__" in vars(GradientCheckpointingLayer)


def _without_deprecations(forward: Callable) -> Callable:
    """
    A forward without the decorators that translate old names of its arguments, which transformers does not use itself.

    They look into dictionaries of arguments, and a graph that is interrupted within them is one for each number of
    arguments.
    """
    while hasattr(forward, "__wrapped__") and forward.__code__.co_filename == deprecation.__file__:
        forward = forward.__wrapped__
    return forward


class LayerCompiler:
    """
    Compiles the forwards of one model's layers, and knows when not to use them.

    Args:
        backend (`str`): Of `torch.compile`.
        plan (`Plan`, *optional*): The checkpoint plan; rows that it cuts into tiles are not compiled.
        tiles (`TileSwitch`, *optional*): The tiled forwards within the layers.
        windows (`bool`): Whether some layers have a sliding window.

    Attributes:
        num_graphs (`int`): Graphs that have been compiled.
        failure (`str` or `None`): Why nothing is compiled any more.
    """

    def __init__(self, backend: str, plan: Plan | None, tiles: TileSwitch | None, windows: bool):
        self.backend, self.tiles, self.windows = backend, tiles, windows
        self._plan = None if plan is None else weakref.ref(plan)
        self.num_graphs = 0
        self.failure: str | None = None
        self._compiled: dict[Callable, Callable] = {}

    def compiled(self, forward: Callable) -> Callable:
        """The compiled version of a class's forward, whose first argument is the layer."""
        if forward not in self._compiled:
            self._compiled[forward] = torch.compile(_without_deprecations(forward), backend=self._compile_graph)
        return self._compiled[forward]

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: Any) -> Callable:
        self.num_graphs += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs, **kwargs)

    def wants(self, hidden: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this call is to run compiled; switches the tiles within the layers on where it is not for them."""
        if self.failure is not None or torch.compiler.is_compiling() or not isinstance(hidden, torch.Tensor):
            return False
        tokens = hidden.shape[:-1].numel()
        tiled = self._is_tiled(tokens)
        if self.tiles is not None:
            self.tiles.set(tiled)
        # the argument has had several names
        if tiled or any(isinstance(value, Cache) for value in kwargs.values()):
            return False
        layout = kwargs.get("packed_layout")
        if layout is None:
            return True
        return layout.cached and not (self.windows and layout.parents is not None)

    def _is_tiled(self, tokens: int) -> bool:
        plan = None if self._plan is None else self._plan()
        if plan is None:
            return False
        return 0 < (plan.notch.tile if torch.is_grad_enabled() else tile_of(tokens)) < tokens

    def give_up(self, error: Exception) -> None:
        """Run everything as it is from here on, and say why."""
        cause = getattr(error, "inner_exception", None) or error
        line = (str(cause).strip() or "no message").splitlines()[0][:300]
        self.failure = f"{type(cause).__name__}: {line}"
        logger.warning(
            f"Layers run uncompiled from here on, right but slower: compiling them failed ({self.failure}). Set "
            "compile_layers='off' to leave it out."
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compiled": {}, "_plan": None, "tiles": None}


class CompiledForward(OwnForward[nn.Module]):
    """
    The `forward` of a decoder layer, compiled where that is possible.

    Args:
        layer (`GradientCheckpointingLayer`): The layer.
        compiler (`LayerCompiler`): That of the model.
    """

    def __init__(self, layer: nn.Module, compiler: LayerCompiler):
        super().__init__(layer)
        self.compiler = compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.owner
        forward = type(layer).forward
        if CHECKPOINTS_FORWARD:
            if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
                return forward(layer, *args, **kwargs)  # calls the checkpoint, and that calls `run`
            forward = forward.__wrapped__
        return self.run(forward, args, kwargs)

    def checkpointed(self, function: functools.partial) -> Callable:
        """What a checkpoint is to run in the place of a class's forward with its layer and keywords."""
        return functools.partial(self._run_later, function)

    def _run_later(self, function: functools.partial, *args: Any, **kwargs: Any) -> Any:
        return self.run(function.func, (*function.args[1:], *args), function.keywords | kwargs)

    def run(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A class's forward on this layer."""
        layer, compiler = self.owner, self.compiler
        if not args and "hidden_states" in kwargs:
            args = (kwargs["hidden_states"],)
            kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        if not compiler.wants(args[0] if args else None, kwargs):
            return forward(layer, *args, **kwargs)
        inputs = kwargs
        if kwargs.get("packed_layout") is not None:
            inputs = kwargs | {"packed_layout": hold(kwargs["packed_layout"])}
        try:
            _mark_tokens(args[0].shape[:2], (args, inputs))
            return compiler.compiled(forward)(layer, *args, **inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            compiler.give_up(error)
            return forward(layer, *args, **kwargs)


def _mark_tokens(sizes: torch.Size, inputs: Any) -> None:
    """Let batch and tokens be symbols in a graph, in whichever of its inputs they are: no batch compiles again."""
    for value in tree_leaves(inputs):
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            for dim, size in enumerate(value.shape):
                if size in sizes and size > 1:
                    torch._dynamo.maybe_mark_dynamic(value, dim)


class EagerForward(OwnForward[nn.Module]):
    """The `forward` of a part of a layer that stays out of its graph."""

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.before(*args, **kwargs)


def through_own_forward(function: Callable) -> Callable:
    """What a checkpoint is to run: compiled, if `function` is a class's forward with a layer that is."""
    if isinstance(function, functools.partial) and function.args and inspect.isfunction(function.func):
        own = getattr(function.args[0], "__dict__", {}).get("forward")
        if isinstance(own, CompiledForward):
            return own.checkpointed(function)
    return function
