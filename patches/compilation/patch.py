"""Puts compiled forwards on the decoder layers of a model."""

import weakref

from torch import nn
from transformers import PreTrainedModel

from ..checkpointing.patch import current_plan, decoder_layers
from ..checkpointing.tiles import TiledForward, TileSwitch
from ..config import PatchConfig
from ..quantization.experts import is_experts
from ..report import PatchEntry
from .layers import CHECKPOINTS_FORWARD, CompiledForward, EagerForward, LayerCompiler


class CompilerText:
    """What has been compiled so far; keeps no compiler alive."""

    def __init__(self, compiler: LayerCompiler):
        self._compiler = weakref.ref(compiler)

    def __str__(self) -> str:
        compiler = self._compiler()
        if compiler is None:
            return "its model is gone"
        if compiler.failure is not None:
            return f"given up after {compiler.num_graphs} graphs ({compiler.failure})"
        return f"one by one, each class once; {compiler.num_graphs} graphs compiled so far"


def has_windows(model: PreTrainedModel) -> bool:
    """Whether some layers of the text model attend within a sliding window."""
    text = model.config.get_text_config()
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)


def apply(model: PreTrainedModel, config: PatchConfig, backend: str = "inductor") -> PatchEntry:
    """Compile each decoder layer, experts excepted; the last of the patches, since it calls the others' forwards."""
    if config.compile_layers != "on":
        return PatchEntry("compilation", (), f"compile_layers={config.compile_layers!r}")
    layers = decoder_layers(model)
    if not layers:
        return PatchEntry("compilation", (), "the model has no layers that transformers can checkpoint")
    plan = current_plan(model)
    if plan is None and CHECKPOINTS_FORWARD and any(layer.gradient_checkpointing for layer in layers):
        return PatchEntry("compilation", (), "the layers have another checkpoint than this package's")
    inside = [module for layer in layers for module in layer.modules()]
    tiles = TileSwitch([module for module in inside if isinstance(module.__dict__.get("forward"), TiledForward)])
    compiler = LayerCompiler(backend, plan, tiles, has_windows(model))
    for layer in layers:
        for child in layer.children():
            if any(is_experts(module) for module in child.modules()):
                child.forward = EagerForward(child)
        layer.forward = CompiledForward(layer, compiler)
    tiles.set(False)

    def undo(model: PreTrainedModel) -> None:
        tiles.set(True)
        for module in _decoder_modules(model):
            if isinstance(forward := module.__dict__.get("forward"), (CompiledForward, EagerForward)):
                forward.take_off()

    return PatchEntry("compilation", (f"{len(layers)} layers",), CompilerText(compiler), undo=undo)


def _decoder_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [module for layer in decoder_layers(model) for module in layer.modules()]
