"""Puts compiled forwards on the decoder layers of a model, and a captured one on the decoder."""

import os
import shutil

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.patch import text_decoder
from ..checkpointing.patch import current_plan, decoder_layers
from ..checkpointing.tiles import TiledForward, TileSwitch
from ..config import PatchConfig
from ..kernels import has_triton
from ..quantization.experts import is_experts
from ..report import LiveText, PatchEntry
from .graphs import GraphedDecoder, why_no_graphs
from .layers import CHECKPOINTS_FORWARD, CompiledForward, EagerForward, LayerCompiler


def has_windows(model: PreTrainedModel) -> bool:
    """Whether some layers of the text model attend within a sliding window."""
    text = model.config.get_text_config()
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)


def why_no_compiler(device: torch.device) -> str | None:
    """What a device or its machine lacks for layers that are compiled to kernels worth having, or `None`."""
    if device.type != "cuda":
        return f"no measured gain on {device.type}"
    if not has_triton():
        return "Triton is not installed: pip install triton"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "no measured gain on cards before sm_80"
    # what Triton compiles its launchers with; its package for Windows brings one
    found = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    if found is None and os.name != "nt":
        return "no C compiler was found: install gcc or clang, or set CC"
    return None


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
    tiles = TileSwitch(
        [module for module in _decoder_modules(model) if isinstance(module.__dict__.get("forward"), TiledForward)]
    )
    compiler = LayerCompiler(backend, plan, tiles, has_windows(model), config.lean_lora)
    # what is there already (another package's hook, a device map's) is called with the layer, not compiled with it
    taken = [layer for layer in layers if "forward" in layer.__dict__]
    layers = [layer for layer in layers if "forward" not in layer.__dict__]
    if not layers:
        return PatchEntry("compilation", (), "the layers have a forward of their own already, a device map's for one")
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

    where = f"{len(layers)} layers" + (f", {len(taken)} others keep their own forward" if taken else "")
    return PatchEntry("compilation", (where,), LiveText(compiler), undo=undo)


def apply_graphs(model: PreTrainedModel, config: PatchConfig) -> PatchEntry:
    """Run the decoder's training forward and backward from CUDA graphs; behind all patches that sit inside of it."""
    if config.cuda_graphs != "on":
        return PatchEntry("cuda_graphs", (), f"cuda_graphs={config.cuda_graphs!r}")
    decoder = text_decoder(model)
    if (reason := why_no_graphs(decoder)) is not None:
        return PatchEntry("cuda_graphs", (), reason)
    graphed = GraphedDecoder(decoder, current_plan(model))
    decoder.forward = graphed

    def undo(model: PreTrainedModel) -> None:
        forward = text_decoder(model).__dict__.get("forward")
        if isinstance(forward, GraphedDecoder):
            forward.release()
            forward.take_off()

    return PatchEntry("cuda_graphs", ("decoder",), LiveText(graphed), undo=undo)


def _decoder_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [module for layer in decoder_layers(model) for module in layer.modules()]
