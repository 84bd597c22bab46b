"""Runs a decoder's forward and backward from CUDA graphs: what the host would launch one by one, it starts at once.

Built on `torch.cuda.make_graphed_callables`, one graph for each shape. A graph repeats kernels on the same memory and
runs no Python, so that everything that Python decides on (adapters, checkpoint plan, frozen weights) is part of what a
graph is looked up by, and what a graph cannot do goes the usual way.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..checkpointing.policy import Plan
from ..layout import PackedLayout
from ..owner import OwnForward


logger = get_logger(__name__)

RUNS_BEFORE = 2  # runs of a shape before it is captured: kernels are compiled and the plan has been made by then
MOST_GRAPHS = 8
_CONSTANTS = (bool, int, float, str, type(None))


class Call(NamedTuple):
    """
    A forward that a graph can do.

    Args:
        input_ids (`torch.Tensor` of shape `(1, num_tokens)`): Tokens.
        layout (`PackedLayout`): Of static sizes.
        mask (`torch.Tensor` of shape `(1, 1, 1, 1)`): The placeholder that packed calls have.
        constants (`dict`): All other arguments.
    """

    input_ids: torch.Tensor
    layout: PackedLayout
    mask: torch.Tensor
    constants: dict[str, Any]

    @property
    def shape(self) -> tuple:
        layout = self.layout
        return (
            layout.num_tokens,
            layout.cu_seqlens.shape[0],
            layout.max_seqlen,
            tuple(sorted(self.constants.items())),
        )


class _Token:
    """Lives for as long as the backward of one replay can still come."""


class _Watched(torch.autograd.Function):
    """The identity, whose context keeps a token alive until its backward, and knows the replay that it is of."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, graph: "_Graph", token: _Token) -> torch.Tensor:
        ctx.graph, ctx.number, ctx.token = graph, graph.number, token
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        if ctx.graph.number != ctx.number:
            raise RuntimeError(
                "a second backward through a forward from a CUDA graph, which has run again since; set "
                "cuda_graphs='off' to keep a graph with retain_graph=True"
            )
        ctx.token = None
        return grad, None, None


class _Callable(nn.Module):
    """What is captured: the forward of a decoder, as tensors in and tensors out, with the weights that are trained."""

    def __init__(self, forward: Callable, call: Call, layout: PackedLayout, parameters: list[nn.Parameter]):
        super().__init__()
        self._run, self._call, self._layout = forward, call, layout
        for i, parameter in enumerate(parameters):
            self.register_parameter(str(i), parameter)
        self.spec: Any = None
        self.others: list[Any] = []

    def forward(self, input_ids: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device = input_ids.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        layout = self._layout  # its tensors are views of `buffer`
        # the cache of autocast would keep casts of weights from one replay to the next
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            output = self._run(
                input_ids=input_ids,
                attention_mask=self._call.mask,
                position_ids=layout.position_ids,
                packed_layout=layout,
                **self._call.constants,
            )
        leaves, self.spec = tree_flatten(output)
        self.others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def output(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The decoder's own output with these tensors in it."""
        tensors = iter(tensors)
        return tree_unflatten([next(tensors) if other is None else other[0] for other in self.others], self.spec)


class _Graph:
    """A captured shape, and the replay whose backward may still come."""

    def __init__(self, decoder: "GraphedDecoder", call: Call, pool: Any):
        owner = decoder.owner
        parameters = [p for p in owner.parameters() if p.requires_grad]
        layout = call.layout.of_any_lengths()
        self.module = _Callable(decoder.before, call, layout, parameters)
        self.sample = (call.input_ids.clone(), layout._buffer)
        device = call.input_ids.device.type
        with torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            cache_enabled=False,
            enabled=torch.is_autocast_enabled(device),
        ):
            self.graphed = torch.cuda.make_graphed_callables(
                self.module, self.sample, allow_unused_input=True, pool=pool
            )
        self.number = 0
        self._pending: weakref.ref | None = None

    @property
    def busy(self) -> bool:
        """Whether the memory of the last replay is still needed for its backward."""
        return self._pending is not None and self._pending() is not None

    def __call__(self, call: Call) -> Any:
        self.number += 1
        tensors = list(self.graphed(call.input_ids, call.layout._buffer))
        first = next((i for i, tensor in enumerate(tensors) if tensor.requires_grad), None)
        if first is not None:
            token = _Token()
            self._pending = weakref.ref(token)
            tensors[first] = _Watched.apply(tensors[first], self, token)
        call.layout.reached.add("attention")  # by the kernels of the replay
        return self.module.output(tuple(tensors))


class GraphedDecoder(OwnForward[nn.Module]):
    """
    The `forward` of a decoder, from a graph where that is possible.

    Args:
        decoder (`nn.Module`): Takes `input_ids` and `packed_layout`.
        plan (`Plan`, *optional*): The checkpoint plan of its layers.

    Attributes:
        failure (`str` or `None`): Why nothing is captured any more.
        replays, others (`int`): Training forwards that came from a graph, and those that did not.
    """

    def __init__(self, decoder: nn.Module, plan: Plan | None):
        super().__init__(decoder)
        self._plan = None if plan is None else weakref.ref(plan)
        self.failure: str | None = None
        self.replays = self.others = 0
        self._graphs: dict[tuple, _Graph] = {}
        self._runs: dict[tuple, int] = {}
        self._pool: Any = None
        self._parts: _Parts | None = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.owner.training) or self.failure is not None:
            return self.before(*args, **kwargs)
        call = self._call_of(args, kwargs)
        graph = None if call is None else self._graph_of(call)
        if graph is None or graph.busy:
            self.others += 1
            return self.before(*args, **kwargs)
        self.replays += 1
        return graph(call)

    def _call_of(self, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        """The call that a graph is to do, or `None` where none can."""
        if torch.compiler.is_compiling() or len(args) > 1 or (args and "input_ids" in kwargs):
            return None
        rest = dict(kwargs)
        ids = args[0] if args else rest.pop("input_ids", None)
        layout, mask, positions = (rest.pop(k, None) for k in ("packed_layout", "attention_mask", "position_ids"))
        if not isinstance(layout, PackedLayout) or layout.parents is not None or not layout.cached:
            return None
        tensors = (ids, mask, positions)
        if not all(isinstance(t, torch.Tensor) and t.device == layout.device for t in tensors):
            return None
        if ids.ndim != 2 or mask.shape != (1, 1, 1, 1) or positions.data_ptr() != layout.position_ids.data_ptr():
            return None
        if not all(isinstance(value, _CONSTANTS) for value in rest.values()):
            return None
        return Call(ids, layout, mask, rest)

    def _graph_of(self, call: Call) -> _Graph | None:
        if not self._plan_is_settled(call.layout.num_tokens):
            return None
        key = (call.shape, *self._state())
        if key in self._graphs:
            return self._graphs[key]
        self._runs[key] = self._runs.get(key, 0) + 1
        if self._runs[key] <= RUNS_BEFORE or len(self._graphs) >= MOST_GRAPHS:
            return None
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()
            self._graphs[key] = _Graph(self, call, self._pool)
        except RuntimeError as error:  # torch's own for what cannot be captured, and for memory
            self.give_up(error)
            return None
        return self._graphs[key]

    def _plan_is_settled(self, tokens: int) -> bool:
        plan = None if self._plan is None else self._plan()
        if plan is None:
            return True
        return plan.watch is None and not plan.notch.offload and not 0 < plan.notch.tile < tokens

    def _state(self) -> tuple:
        """What Python decides on in a forward, and where the weights are."""
        plan = None if self._plan is None else self._plan()
        parts = self._parts
        if parts is None or parts.children != parts.look():
            parts = self._parts = _Parts(self.owner)
        device = self.owner.device.type
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        return (autocast, parts.weights(), parts.adapters(), None if plan is None else plan.notch)

    def give_up(self, error: Exception) -> None:
        """Capture nothing from here on, and say why."""
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        self.failure = f"{type(error).__name__}: {line}"
        self.release()
        logger.warning(
            f"No CUDA graphs from here on, right but slower: capturing one failed ({self.failure}). Set "
            "cuda_graphs='off' to leave it out."
        )

    def release(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._runs.clear()
        self._pool = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "_graphs": {},
            "_runs": {},
            "_pool": None,
            "_plan": None,
            "_parts": None,
        }


class _Parts:
    """A module's parts, looked up once: walking through it in each step would take longer than the step's launches."""

    def __init__(self, module: nn.Module):
        modules = list(module.modules())
        self._children = [m._modules for m in modules if m._modules]
        self._parameters = [m._parameters for m in modules if m._parameters]
        self._tuners = [m for m in modules if isinstance(m, BaseTunerLayer)]
        self.children = self.look()

    def look(self) -> int:
        """Another number where a module was put in, taken out or exchanged."""
        return hash(tuple([id(child) for children in self._children for child in children.values()]))

    def weights(self) -> int:
        """Another number where a weight has moved, or is trained and was not."""
        found = [p for parameters in self._parameters for p in parameters.values() if p is not None]
        return hash(tuple([(p.data_ptr(), p.requires_grad) for p in found]))

    def adapters(self) -> int:
        """Another number where adapters were switched, turned off or merged."""
        return hash(
            tuple([(m._disable_adapters, tuple(m.active_adapters), len(m.merged_adapters)) for m in self._tuners])
        )


class GraphsText:
    """What the graphs have done so far; keeps none of them alive."""

    def __init__(self, graphed: GraphedDecoder):
        self._graphed = weakref.ref(graphed)

    def __str__(self) -> str:
        graphed = self._graphed()
        if graphed is None:
            return "its model is gone"
        if graphed.failure is not None:
            return f"given up ({graphed.failure})"
        total = graphed.replays + graphed.others
        return f"{graphed.num_graphs} shapes captured; {graphed.replays} of {total} training forwards so far"


def why_no_graphs(model: nn.Module, decoder: nn.Module) -> str | None:
    """Why a decoder's training forward cannot be captured, or `None`."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if len({p.device for p in decoder.parameters()}) > 1:
        return "the model is on several devices"
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in decoder.modules()):
        return "dropout, whose masks a checkpoint could not draw again inside of a graph"
    text = model.config.get_text_config()
    if getattr(text, "attention_dropout", 0.0) or getattr(text, "attention_dropout_prob", 0.0):
        return "attention dropout, whose masks a checkpoint could not draw again inside of a graph"
    return None
