"""Runs parts of a layer that work token by token in tiles of a row, so that only one tile's activations exist at once.

The method is that of TiledMLP (Arctic Long Sequence Training, arXiv 2506.13996), here without a second backward: the
gradients of the weights are returned to autograd, as sums over the tiles in fp32.
"""

import weakref
from typing import Any

import torch
from torch import nn

from ..owner import OwnForward
from ..quantization.experts import is_experts
from .policy import Place, Plan


class _Stash(torch.autograd.Function):
    """
    Saves a tensor for a later backward through autograd, and so through the hooks of a checkpoint around it.

    Under a checkpoint the tensor is its last one: the recomputation ends there, and the tiles are not run once more.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("nothing is differentiated through a stash")


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, run: "TiledForward", tile: int, stash: list[torch.Tensor], x: torch.Tensor, *weights: torch.Tensor
    ):
        ctx.run, ctx.tile, ctx.stash = run, tile, stash
        ctx.weights = weights
        device = x.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return run.in_tiles(x, tile)

    @staticmethod
    def backward(ctx, grad_out: torch.Tensor):
        if ctx.stash is None:
            raise RuntimeError("the backward of a tiled layer runs once; call backward() without retain_graph")
        (x,) = ctx.stash[0].grad_fn.saved_tensors
        # attributes live as long as the graph, unlike saved tensors
        ctx.stash = None
        device, dtype, enabled = ctx.autocast
        needed = [i for i, need in enumerate(ctx.needs_input_grad[4:]) if need]
        weights = [ctx.weights[i] for i in needed]
        wants_x = ctx.needs_input_grad[3]
        grad_x = torch.empty_like(x) if wants_x else None
        sums: list[torch.Tensor | None] = [None] * len(weights)
        watch = ctx.run.plan.watch
        for start in range(0, x.shape[1], ctx.tile):
            part = slice(start, start + ctx.tile)
            x_part = x[:, part].detach().requires_grad_(wants_x)
            before = watch.probe.allocated() if watch is not None else 0
            # no cache: a cast of a weight kept for the next tile would sum the weight's gradient in low precision
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
                out = ctx.run.before(x_part)
            if watch is not None and not start:
                watch.tile((watch.probe.allocated() - before) * x.shape[1] // ctx.tile)
            inputs = [x_part, *weights] if wants_x else weights
            grads = torch.autograd.grad(out, inputs, grad_out[:, part], allow_unused=True)
            del out
            if wants_x:
                grad_x[:, part] = grads[0]
                grads = grads[1:]
            for i, grad in enumerate(grads):
                if grad is not None:
                    grad = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
                    sums[i] = grad if sums[i] is None else sums[i].add_(grad)
        grad_weights: list[torch.Tensor | None] = [None] * len(ctx.weights)
        for i, total, weight in zip(needed, sums, weights, strict=True):
            grad_weights[i] = None if total is None else total.to(weight.dtype)
        ctx.weights = None
        return None, None, None, grad_x, *grad_weights


class TiledForward(OwnForward[nn.Module]):
    """
    The `forward` of a module that works token by token: in tiles when the plan says so, else its own.

    Args:
        module (`nn.Module`): Takes `(batch, tokens, hidden)` and returns the same but for the last dimension.
        plan (`Plan`): Says how many tokens a tile has.
        place (`str`): Where the module is; see `Plan.tile_for`.
    """

    def __init__(self, module: nn.Module, plan: Plan, place: Place):
        super().__init__(module)
        self.plan, self.place = plan, place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].ndim == 3:
            tile = self.plan.tile_for(args[0].shape[:2].numel(), self.place)
            # an adapter added since may have brought dropout
            if tile and not (self.owner.training and _has_dropout(self.owner)):
                return self._tiled(args[0], tile)
        return self.before(*args, **kwargs)

    @torch.compiler.disable
    def _tiled(self, x: torch.Tensor, tile: int) -> torch.Tensor:
        if self.place == "outside":
            self.plan.offloader.let_go()  # the head wants the memory of the last inputs
        flat = x.reshape(1, -1, x.shape[-1])
        if torch.is_grad_enabled():
            weights = [p for p in self.owner.parameters() if p.requires_grad]
            anchor = torch.empty(0, device=x.device, requires_grad=True)
            out = _Tiled.apply(self, tile, [_Stash.apply(flat, anchor)], flat, *weights)
        else:
            out = self.in_tiles(flat, tile)
        return out.view(*x.shape[:-1], -1)

    def in_tiles(self, x: torch.Tensor, tile: int) -> torch.Tensor:
        """The output for `x`, `(1, tokens, hidden)`, computed tile by tile without a graph."""
        out = None
        with torch.no_grad():
            for start in range(0, x.shape[1], tile):
                part = self.before(x[:, start : start + tile])
                if out is None:
                    out = part.new_empty(1, x.shape[1], part.shape[-1])
                out[:, start : start + tile] = part
        return out


def tileable(decoder: nn.Module, layers: list[nn.Module]) -> list[tuple[nn.Module, Place]]:
    """
    Parts of the model that work token by token, and where they are.

    Args:
        decoder (`nn.Module`): What has the layers.
        layers (`list[nn.Module]`): Its checkpointed layers.

    Returns:
        The MLPs, norms and projections of the layers, and the norms outside of them. Experts are not among them, since
        their router looks at all tokens, and neither is anything with dropout, which would draw other masks.
    """
    found: list[tuple[nn.Module, Place]] = []
    for layer in layers:
        for child in layer.children():
            kind = type(child).__name__
            if kind.endswith(("MLP", "FeedForward", "Norm")):
                found.append((child, "layer"))
            elif "Attention" in kind:
                found.extend((module, "projection") for module in child.children() if _is_projection(module))
    found.extend((child, "outside") for child in decoder.children() if type(child).__name__.endswith("Norm"))
    return [(module, place) for module, place in found if _works_by_token(module)]


def _is_projection(module: nn.Module) -> bool:
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    return isinstance(base, nn.Linear)


def _has_dropout(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())


def _works_by_token(module: nn.Module) -> bool:
    if _has_dropout(module):
        return False
    for part in module.modules():
        # a stack of experts, whose weights in 4 bits are flat, or a convolution over tokens
        if is_experts(part) or any(p.ndim > 2 for p in part.parameters(recurse=False)):
            return False
    return True


def remove_tiles(model: nn.Module) -> None:
    """Give every tiled module its own forward back."""
    for module in model.modules():
        if isinstance(tiled := module.__dict__.get("forward"), TiledForward):
            tiled.take_off()


class TileSwitch:
    """
    Takes the tiled forwards of modules off and puts them on again: for a compiler each is another module's.

    Args:
        modules (`list[nn.Module]`): Modules that have one as the last forward that was put on them.
    """

    def __init__(self, modules: list[nn.Module]):
        self._tiled = [(weakref.ref(module), module.__dict__["forward"]) for module in modules]
        self.on = True

    def set(self, on: bool) -> None:
        if on == self.on:
            return
        self.on = on
        for reference, tiled in self._tiled:
            if (module := reference()) is None:
                continue
            if on:
                # one that was put on since stays
                if "forward" not in module.__dict__ or module.__dict__["forward"] is tiled.inner:
                    module.forward = tiled
            elif module.__dict__.get("forward") is tiled:
                tiled.take_off()

    def __getstate__(self) -> dict[str, Any]:
        return {"on": self.on, "_tiled": [(reference(), tiled) for reference, tiled in self._tiled]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.on = state["on"]
        self._tiled = [(weakref.ref(module), tiled) for module, tiled in state["_tiled"] if module is not None]
