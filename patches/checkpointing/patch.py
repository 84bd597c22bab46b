"""Installs the checkpoint of each decoder layer, so that disabling and enabling checkpointing keeps it."""

import functools
import warnings
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import PatchConfig
from ..owner import Owned
from ..report import LiveText, PatchEntry
from .checkpoint import LayerCheckpoint
from .policy import Plan
from .tiles import TiledForward, remove_tiles, tileable


class EnableCheckpointing(Owned[PreTrainedModel]):
    """
    A model's `gradient_checkpointing_enable`: its own, and then our checkpoint in every decoder layer.

    TRL's GRPO switches checkpointing off and on again around generation and scoring, which gives each layer torch's
    checkpoint back; a call of this object puts ours in its place.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan):
        super().__init__(model)
        self.plan = plan

    def __call__(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # the name is deprecated, and the one that transformers still calls on an instance
            warnings.simplefilter("ignore", FutureWarning)
            enable = type(self.owner).gradient_checkpointing_enable
            enable(self.owner, gradient_checkpointing_kwargs=gradient_checkpointing_kwargs, **kwargs)
        if foreign_options((gradient_checkpointing_kwargs or {}) | kwargs) is None:
            self.install(gradient_checkpointing_kwargs)

    def install(self, options: dict[str, Any] | None = None) -> None:
        for index, layer in enumerate(decoder_layers(self.owner)):
            layer._gradient_checkpointing_func = LayerCheckpoint(self.plan, index, options)


def foreign_options(options: dict[str, Any] | None) -> str | None:
    """Options of the user's that ask for another checkpoint than ours, or `None`."""
    options = options or {}
    for name in ("use_reentrant", "offload", "selective", "context_fn"):
        if options.get(name):
            return f"gradient_checkpointing_kwargs={{'{name}': ...}} asks for another checkpoint"
    if options.get("every_n_layers", 1) != 1:
        return f"gradient_checkpointing_kwargs={{'every_n_layers': {options['every_n_layers']}}} chooses the layers"
    return None


def _options_of(layers: list[nn.Module]) -> dict[str, Any] | None:
    """Options that a checkpointed model was given before it had ours, unless they ask for another checkpoint."""
    functions = (layer._gradient_checkpointing_func for layer in layers if layer.gradient_checkpointing)
    options = next((f.keywords for f in functions if isinstance(f, functools.partial)), None)
    return options if foreign_options(options) is None else None


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the text decoder that can be checkpointed, in the order of the forward."""
    return [module for module in _decoder(model).modules() if isinstance(module, GradientCheckpointingLayer)]


def _decoder(model: PreTrainedModel) -> nn.Module:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model if decoder is None else decoder


def current_plan(model: PreTrainedModel) -> Plan | None:
    """The plan that is on this model object."""
    enable = model.__dict__.get("gradient_checkpointing_enable")
    return enable.plan if isinstance(enable, EnableCheckpointing) else None


def apply(model: PreTrainedModel, config: PatchConfig) -> PatchEntry:
    """Give the model a plan, its layers a checkpoint that follows it, and what works by token a tiled forward."""
    layers = decoder_layers(model)
    if not layers:
        return PatchEntry("checkpointing", (), "the model has no layers that transformers can checkpoint")
    plan = Plan(
        config.checkpoint_policy,
        len(layers),
        max_pinned_gb=config.max_pinned_gb,
        staging_buffers=config.staging_buffers,
        num_devices=len({p.device for p in model.parameters()}),
    )
    enable = EnableCheckpointing(model, plan)
    model.gradient_checkpointing_enable = enable
    if any(layer.gradient_checkpointing for layer in layers):
        enable.install(_options_of(layers))
    for module, place in tileable(_decoder(model), layers):
        module.forward = TiledForward(module, plan, place)

    def undo(model: PreTrainedModel) -> None:
        model.__dict__.pop("gradient_checkpointing_enable").plan.offloader.release()
        remove_tiles(model)
        for layer in decoder_layers(model):
            ours = layer.__dict__.get("_gradient_checkpointing_func")
            if isinstance(ours, LayerCheckpoint):
                layer._gradient_checkpointing_func = ours.torch_checkpoint()

    return PatchEntry("checkpointing", (f"{len(layers)} layers",), LiveText(plan), undo=undo)
