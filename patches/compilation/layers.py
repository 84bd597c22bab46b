"""The compiled forward of a decoder layer.

All layers of a class share one compiled function: dynamo takes a layer's weights as inputs. The layer is compiled
inside of its checkpoint, so that the plan decides from layer to layer and from batch to batch as it does uncompiled.
Where a layer is one graph and is computed again from an input on the device, the checkpoint is within the graph.
"""

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import deprecation

from ..attention.compiled import hold
from ..attention.shared import level_refusal
from ..checkpointing.policy import Plan
from ..checkpointing.settings import tile_of
from ..checkpointing.tiles import TileSwitch
from ..kernels import has_triton
from ..lora.graph import fuse_lora
from ..lora.graph_4bit import replace_products
from ..owner import OwnForward
from .recompute import recompute_functions, without_advice


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


def compiler_errors() -> tuple[type[Exception], ...]:
    """What dynamo raises where it does not compile; the second, of another base, for code that it did too often."""
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit


def _own_code(function: Callable) -> Callable:
    """
    A copy of a function with a code object of its own, by which dynamo counts what it has compiled.

    It stops, or raises, after a few: without a copy each model of a process would take from what is left to the next.
    """
    if not inspect.isfunction(function):
        return function
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _in_checkpoint(forward: Callable) -> Callable:
    """A class's forward within a checkpoint that becomes part of its graph."""

    def run(layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # the compiler repeats what it draws by itself, and cannot trace the reading of a random state
        return checkpoint(
            lambda hidden: forward(layer, hidden, *args, **kwargs),
            hidden,
            use_reentrant=False,
            preserve_rng_state=False,
        )

    return run


class LayerCompiler:
    """
    Compiles the forwards of one model's layers, and knows when not to use them.

    Args:
        backend (`str`): Of `torch.compile`.
        plan (`Plan`, *optional*): The checkpoint plan; rows that it cuts into tiles are not compiled.
        tiles (`TileSwitch`, *optional*): The tiled forwards within the layers.
        windows (`bool`): Whether some layers have a sliding window.
        fuses_lora (`bool`, *optional*, defaults to `True`): See `fuse_lora`.

    Attributes:
        num_graphs (`int`): Graphs that have been compiled.
        failure (`str` or `None`): Why nothing is compiled any more.
        apart (`set[type]`): Layers that come in several graphs, whose checkpoints stay around them.
    """

    def __init__(
        self, backend: str, plan: Plan | None, tiles: TileSwitch | None, windows: bool, fuses_lora: bool = True
    ):
        self.backend, self.tiles, self.windows, self.fuses_lora = backend, tiles, windows, fuses_lora
        self._plan = None if plan is None else weakref.ref(plan)
        self.num_graphs = 0
        self.failure: str | None = None
        self.apart: set[type[nn.Module]] = set()
        self._compiled: dict[tuple[Callable, bool], Callable] = {}

    def compiled(self, forward: Callable, checkpointed: bool = False) -> Callable:
        """
        The compiled version of a class's forward, whose first argument is the layer.

        Args:
            forward (`Callable`): The forward.
            checkpointed (`bool`): Let the graph of its backward compute again what it needs, and no more: not the
                layer's output, which a checkpoint around a compiled layer computes twice. A layer that does not come
                in one graph raises.
        """
        key = forward, checkpointed
        if key not in self._compiled:
            plain = _without_deprecations(forward)
            run = _own_code(_in_checkpoint(plain) if checkpointed else plain)
            this = weakref.ref(self)  # dynamo keeps every backend for as long as the process lives

            def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: Any) -> Callable:
                return this()._compile_graph(graph, inputs, **kwargs)

            self._compiled[key] = torch.compile(run, backend=compile_graph, fullgraph=checkpointed)
        return self._compiled[key]

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: Any) -> Callable:
        self.num_graphs += 1
        if self.fuses_lora:
            fuse_lora(graph)
        replace_products(graph)
        backend = torch._dynamo.lookup_backend(self.backend)
        with without_advice() if recompute_functions(graph) else contextlib.nullcontext():
            return backend(graph, inputs, **kwargs)

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
        if layout is None or layout.parents is None:
            return layout is None or layout.cached
        if not layout.cached or (hidden.is_cuda and has_triton()):  # the fused kernel takes any
            return layout.cached
        return not self.windows and layout.derived("level_refusal", level_refusal) is None

    def _is_tiled(self, tokens: int) -> bool:
        plan = None if self._plan is None else self._plan()
        if plan is None:
            return False
        return 0 < (plan.notch.tile if torch.is_grad_enabled() else tile_of(tokens)) < tokens

    def __str__(self) -> str:
        if self.failure is not None:
            return f"given up after {self.num_graphs} graphs ({self.failure})"
        around = ", ".join(sorted(kind.__name__ for kind in self.apart))
        outside = f"; checkpoints stay around {around}, not one graph" if around else ""
        return f"one by one, each class once; {self.num_graphs} graphs compiled so far{outside}"

    def give_up(self, error: Exception) -> None:
        """Run everything as it is from here on, and say why."""
        cause = getattr(error, "inner_exception", None) or error
        line = (str(cause).strip() or "no message").splitlines()[0][:300]
        self.failure = f"{type(cause).__name__}: {line}"
        if self.tiles is not None:
            self.tiles.set(True)
        logger.warning(
            f"Layers run uncompiled from here on, right but slower: compiling them failed ({self.failure}). Set "
            "compile_layers='off' to leave it out."
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compiled": {}, "_plan": None if self._plan is None else self._plan()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        plan = state["_plan"]
        vars(self).update(state | {"_plan": None if plan is None else weakref.ref(plan)})


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
        self.decision: _Checkpointed | None = None
        # what comes apart into several graphs, or draws random numbers, is checkpointed from outside
        self.whole = not any(
            isinstance(m.__dict__.get("forward"), EagerForward) or (isinstance(m, nn.Dropout) and m.p > 0)
            for m in layer.modules()
        )
        self._hooks: HookWatch | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.owner
        forward = type(layer).forward
        if CHECKPOINTS_FORWARD:
            if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
                return forward(layer, *args, **kwargs)  # calls the checkpoint, and that calls `run`
            forward = forward.__wrapped__
        return self.run(forward, args, kwargs)

    def run(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A class's forward on this layer."""
        layer, compiler, decision = self.owner, self.compiler, self.decision
        if not args and "hidden_states" in kwargs:
            args = (kwargs["hidden_states"],)
            kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        compiled = None if decision is None else decision.compiled
        if compiled is None:
            compiled = self.wants(args[0] if args else None, kwargs)
        if decision is not None:
            decision.compiled = compiled
        if not compiled:
            return forward(layer, *args, **kwargs)
        inputs = kwargs
        if kwargs.get("packed_layout") is not None:
            inputs = kwargs | {"packed_layout": hold(kwargs["packed_layout"])}
        _mark_tokens(args[0].shape[:2], (args, inputs))
        try:
            inside = decision is not None and decision.inside
            return compiler.compiled(forward, inside)(layer, *args, **inputs)
        except compiler_errors() as error:
            if decision is not None:
                raise  # what was saved until now is the checkpoint's, which begins again
            compiler.give_up(error)
            return forward(layer, *args, **kwargs)

    def wants(self, hidden: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this call is to run compiled; see `LayerCompiler.wants`."""
        if not self.compiler.wants(hidden, kwargs):
            return False
        # all layers share one graph, in which one layer's hooks would be all layers'
        if self._hooks is None:
            self._hooks = HookWatch(self.owner)
        return not self._hooks.found()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_hooks": None, "decision": None}


class _Checkpointed:
    """
    A layer's forward under a checkpoint: compiled when it is recomputed if and only if it was the first time.

    Args:
        forward (`CompiledForward`): That of the layer.
        function (`functools.partial`): Of the class's forward with its layer, or of the layer's `__call__`.
    """

    def __init__(self, forward: CompiledForward, function: functools.partial):
        self.forward, self.function = forward, function
        self.compiled: bool | None = None
        self.inside = False

    def goes_inside(self, args: tuple) -> bool:
        """
        Whether the checkpoint can be part of the compiled layer, and is from here on.

        Args:
            args (`tuple`): What the function will be called with, hidden states first.
        """
        forward = self.forward
        hidden = args[0] if args else self.function.keywords.get("hidden_states")
        self.compiled = forward.wants(hidden, self.function.keywords)
        self.inside = self.compiled and forward.whole and type(forward.owner) not in forward.compiler.apart
        return self.inside

    def comes_apart(self) -> None:
        """The layer is not one graph, or no graph at all: the checkpoint has to be around it."""
        self.forward.compiler.apart.add(type(self.forward.owner))
        self.inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, function = self.forward, self.function
        before, forward.decision = forward.decision, self
        try:
            if not inspect.isfunction(function.func):
                return function(*args, **kwargs)
            return forward.run(function.func, (*function.args[1:], *args), function.keywords | kwargs)
        finally:
            forward.decision = before

    def give_up(self, error: Exception) -> None:
        """The compiler has failed in this forward, which comes again."""
        self.forward.compiler.give_up(error)
        self.compiled = self.inside = False


class HookWatch:
    """
    Whether somebody's hooks are on the parts of a module, those of transformers that record outputs excepted.

    Args:
        module (`nn.Module`): The module; its own hooks are not asked for.
    """

    def __init__(self, module: nn.Module):
        names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._hooks = [getattr(m, name) for m in module.modules() if m is not module for name in names]

    def found(self) -> bool:
        if not any(self._hooks):
            return False
        return any(not _records(hook) for hooks in self._hooks for hook in hooks.values())


def _records(hook: Callable) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("transformers.")


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
    """What a checkpoint is to run: `function`, or what remembers how it ran if its layer can be compiled."""
    if not isinstance(function, functools.partial):
        return function
    layer = function.args[0] if function.args else getattr(function.func, "__self__", None)
    own = getattr(layer, "__dict__", {}).get("forward")
    return _Checkpointed(own, function) if isinstance(own, CompiledForward) else function
