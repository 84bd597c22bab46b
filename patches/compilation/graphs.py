"""Runs a decoder's forward and backward from CUDA graphs: what the host would launch one by one, it starts at once.

Built on `torch.cuda.make_graphed_callables`, one graph for each shape. A graph repeats kernels on the same memory and
runs no Python, so that everything that Python decides on (adapters, checkpoint plan, frozen weights) is part of what a
graph is looked up by, and what a graph cannot do goes the usual way.
"""

import gc
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..checkpointing.policy import Plan
from ..layout import PackedLayout
from ..owner import OwnForward
from .gradients import LentGradients
from .layers import HookWatch


logger = get_logger(__name__)

RUNS_BEFORE = 2  # runs of a shape before it is captured: kernels are compiled and the plan has been made by then
MOST_GRAPHS = 8  # the one that was not used for longest goes first
MOST_COUNTED = 256  # shapes that are waiting for their turn
_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits", "use_cache")
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
    """Lives for as long as the backward of a replay can still come."""


class _Watched(torch.autograd.Function):
    """A copy of what a replay gives, whose context keeps a token alive until its backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, token: _Token) -> torch.Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ctx.token = None
        return grad, None


class _Once:
    """In front of the backward of a replay: there is no second one, whichever output it comes from."""

    def __init__(self):
        self.ran = False

    def __call__(self, grads: tuple) -> None:
        if self.ran:
            raise RuntimeError(
                "a second backward through a forward from a CUDA graph, whose activations are gone; set "
                "cuda_graphs='off' for retain_graph=True"
            )
        self.ran = True


class _Callable(nn.Module):
    """What is captured: the forward of a decoder, as tensors in and tensors out, with the weights that are trained."""

    def __init__(self, decoder: "GraphedDecoder", call: Call, parameters: list[nn.Parameter]):
        super().__init__()
        self._decoder = weakref.ref(decoder)  # which has this
        self._call, self.layout = call, call.layout.of_any_lengths()
        for i, parameter in enumerate(parameters):
            self.register_parameter(str(i), parameter)
        self.spec: Any = None
        self.others: list[Any] = []

    def forward(self, input_ids: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layout = self.layout  # its tensors are views of `buffer`
        layout.forget_derived()  # what is derived from them is part of the graph
        with _without_cache(input_ids.device.type):
            output = self._decoder().before(
                input_ids=input_ids,
                attention_mask=self._call.mask,
                position_ids=layout.position_ids,
                packed_layout=layout,
                **self._call.constants,
            )
        leaves, self.spec = tree_flatten(output)
        self.others = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def output(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The decoder's own output with these tensors in it."""
        tensors = iter(tensors)
        return tree_unflatten([next(tensors) if other is None else other[0] for other in self.others], self.spec)


def _without_cache(device: str) -> torch.autocast:
    """Autocast as it is, but for its cache, which would keep casts of weights from one replay to the next."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


class _Graph:
    """A captured shape."""

    def __init__(self, decoder: "GraphedDecoder", call: Call, pool: Any):
        self.parameters = [p for p in decoder.owner.parameters() if p.requires_grad]
        self.gradients = decoder.gradients
        self.module = _Callable(decoder, call, self.parameters)
        self.sample = (call.input_ids.clone(), self.module.layout._buffer)
        with self.gradients.capture(self.parameters), _without_cache(call.input_ids.device.type):
            self.graphed = torch.cuda.make_graphed_callables(
                self.module, self.sample, allow_unused_input=True, pool=pool
            )

    def __call__(self, call: Call, token: _Token) -> Any:
        tensors = self.graphed(call.input_ids, call.layout._buffer)
        node = next((tensor.grad_fn for tensor in tensors if tensor.requires_grad), None)
        if node is not None:
            node.register_prehook(_Once())
            node.register_hook(self._own_gradients)
        call.layout.reached.add("attention")  # by the kernels of the replay
        # the next replay writes to the same memory
        return self.module.output(
            _Watched.apply(tensor, token) if tensor.requires_grad else tensor.clone() for tensor in tensors
        )

    def _own_gradients(self, grads: tuple, _) -> tuple:
        """What is given out of the memory that the next replay writes to."""
        inputs = len(self.sample)
        taken = [i for i in range(inputs, inputs + len(self.parameters)) if grads[i] is not None]
        given = self.gradients.give([self.parameters[i - inputs] for i in taken], [grads[i] for i in taken])
        own = dict(zip(taken, given, strict=True))
        return tuple(own.get(i, grad) for i, grad in enumerate(grads))


class GraphedDecoder(OwnForward[nn.Module]):
    """
    The `forward` of a decoder, from a graph where that is possible.

    Args:
        decoder (`nn.Module`): Takes `input_ids` and `packed_layout`.
        plan (`Plan`, *optional*): The checkpoint plan of its layers.

    Attributes:
        failure (`str` or `None`): Why nothing is captured any more.
        replays, others (`int`): Training forwards that came from a graph, and those that did not.
        tokens, padding (`int`): Tokens of the replays, and those that were added for the shape alone.
    """

    def __init__(self, decoder: nn.Module, plan: Plan | None):
        super().__init__(decoder)
        self._plan = None if plan is None else weakref.ref(plan)
        self.failure: str | None = None
        self.replays = self.others = self.tokens = self.padding = 0
        self.gradients = LentGradients()
        self._graphs: dict[tuple, _Graph] = {}
        self._runs: dict[tuple, int] = {}
        self._pool: Any = None
        self._parts: _Parts | None = None
        self._pending: weakref.ref | None = None
        self._notch: Any = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def busy(self) -> bool:
        """Whether the backward of a replay is still to come: all graphs share their memory."""
        return self._pending is not None and self._pending() is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.owner.training) or self.failure is not None:
            return self.before(*args, **kwargs)
        call = self._call_of(args, kwargs)
        graph = None
        if call is not None and not self.busy:
            if self.gradients.take_back():
                graph = self._graph_of(call)
            else:
                self.release()  # what is held is its holder's; the next graphs have memory of their own
        if graph is None:
            self.others += 1
            return self.before(*args, **kwargs)
        self.replays += 1
        self.tokens += call.layout.num_tokens
        self.padding += call.layout.own_padding
        token = _Token()
        self._pending = weakref.ref(token)
        return graph(call, token)

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
        plan = None if self._plan is None else self._plan()
        if plan is not None:
            if plan.notch != self._notch:
                if self._graphs:
                    self.release()  # another plan wants the memory
                self._notch = plan.notch
            if plan.watch is not None or plan.notch.offload or 0 < plan.notch.tile < call.layout.num_tokens:
                return None
        if self._parts is None or self._parts.children != self._parts.look():
            self._parts = _Parts(self.owner)
        if self._parts.hooks.found():
            return None
        state = self._state()
        key = (call.shape, state)
        if key in self._graphs:
            self._graphs[key] = self._graphs.pop(key)  # the last one used comes last
            return self._graphs[key]
        self._runs[key] = self._runs.pop(key, 0) + 1
        while len(self._runs) > MOST_COUNTED:
            self._runs.pop(next(iter(self._runs)))
        trained = [p for p in self.owner.parameters() if p.requires_grad]
        if self._runs[key] <= RUNS_BEFORE or not trained or what_draws(self.owner) is not None:
            return None
        # what was captured with weights that have moved since cannot be used again
        self._graphs = {k: graph for k, graph in self._graphs.items() if k[1].weights == state.weights}
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()
            self.gradients.keep([*trained, *(p for graph in self._graphs.values() for p in graph.parameters)])
            self._graphs[key] = _Graph(self, call, self._pool)
        except (RuntimeError, AssertionError) as error:  # torch's own for what cannot be captured, and for memory
            self.give_up(error)
            return None
        return self._graphs[key]

    def _state(self) -> "_State":
        owner, parts = self.owner, self._parts
        device, config = owner.device.type, owner.config
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        flags = tuple(getattr(config, name, None) for name in _FLAGS)
        return _State(parts.weights(), parts.adapters(), autocast, flags)

    def give_up(self, error: Exception) -> None:
        """Capture nothing from here on, and say why."""
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        self.failure = f"{type(error).__name__}: {line}"
        self.release()
        logger.warning(
            f"No CUDA graphs from here on, right but slower: capturing one failed ({self.failure}). Set "
            "cuda_graphs='off' to leave it out."
        )

    def __str__(self) -> str:
        if self.failure is not None:
            return f"given up ({self.failure})"
        total = self.replays + self.others
        share = f", {self.padding / self.tokens:.1%} of their tokens padding for the shape" if self.tokens else ""
        return f"{self.num_graphs} shapes captured; {self.replays} of {total} training forwards so far{share}"

    def release(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._runs.clear()
        self.gradients.clear()
        self._pool = None
        gc.collect()  # torch's functions around a graph refer to themselves
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __getstate__(self) -> dict[str, Any]:
        plan = None if self._plan is None else self._plan()
        empty = {"_graphs": {}, "_runs": {}, "_pool": None, "_parts": None, "_pending": None, "_plan": plan}
        return super().__getstate__() | empty

    def __setstate__(self, state: dict[str, Any]) -> None:
        plan = state["_plan"]
        super().__setstate__(state | {"_plan": None if plan is None else weakref.ref(plan)})


class _State(NamedTuple):
    """What Python decides on in a forward, and where the weights are, each as a number that changes with it."""

    weights: int
    adapters: int
    autocast: tuple
    flags: tuple


class _Parts:
    """A module's parts, looked up once: walking through it in each step would take longer than the step's launches."""

    def __init__(self, module: nn.Module):
        modules = list(module.modules())
        self._inner = [m for m in modules if m is not module]  # alive, so that no other object has their id
        self._children = [m._modules for m in modules if m._modules]
        self._tensors = [d for m in modules for d in (m._parameters, m._buffers) if d]
        self._tuners = [m for m in modules if isinstance(m, BaseTunerLayer)]
        self.hooks = HookWatch(module)
        self.children = self.look()

    def look(self) -> int:
        """Another number where a module was put in, taken out or exchanged."""
        return hash(tuple([id(child) for children in self._children for child in children.values()]))

    def weights(self) -> int:
        """Another number where a weight or a buffer has moved, or is trained and was not."""
        found = [t for tensors in self._tensors for t in tensors.values() if t is not None]
        return hash(tuple([(t.data_ptr(), t.requires_grad) for t in found]))

    def adapters(self) -> int:
        """Another number where adapters were switched, scaled, turned off or merged."""
        return hash(
            tuple(
                [(m._disable_adapters, *m.active_adapters, len(m.merged_adapters), *_scales(m)) for m in self._tuners]
            )
        )


def _scales(layer: BaseTunerLayer) -> Iterable[float]:
    scaling = getattr(layer, "scaling", {})
    return [value for value in scaling.values() if isinstance(value, (int, float))]


def what_draws(decoder: nn.Module) -> str | None:
    """What of a decoder draws random numbers in training, or `None`: a checkpoint in a graph could not repeat them."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in decoder.modules()):
        return "dropout"
    for name in ("attention_dropout", "attention_dropout_prob", "router_jitter_noise", "input_jitter_noise"):
        if getattr(decoder.config, name, None):
            return f"{name}={getattr(decoder.config, name)}"
    return None


def why_no_graphs(decoder: nn.Module) -> str | None:
    """Why a decoder's training forward cannot be captured, or `None`."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if len({p.device for p in decoder.parameters()}) > 1:
        return "the model is on several devices"
    if any(hasattr(m, "_hf_hook") for m in decoder.modules()):
        return "a hook of accelerate's moves weights or activations"
    if (what := what_draws(decoder)) is not None:
        return f"{what}, whose masks a checkpoint could not draw again inside of a graph"
    return None
