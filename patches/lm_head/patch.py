"""Gives a causal model's forward one more keyword, `label_positions`, beside TRL's fused head."""

import inspect
import weakref
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput

from ..config import PatchConfig
from ..owner import OwnForward
from ..report import PatchEntry
from .frozen import refusal as frozen_refusal
from .op import labelled_scores


# of the model: the objects of `LabelledForward` that were put on it and not taken off
_PUT_ON = "_labelled_forwards"


class LabelledForward(OwnForward[PreTrainedModel]):
    """
    The `forward` of a patched model.

    Called with `fused_lm_head=True` and `label_positions`, it returns a `FusedCausalLMOutput` whose `log_probs`,
    `entropy` and `is_top1` have shape `(num_labels,)`; any other call goes on to the forward that was there before.
    The labelled tokens are those of `labels`, not shifted, or `label_targets`; `scoring` has keywords of
    `labelled_scores`.
    """

    def __init__(self, model: PreTrainedModel, frozen_head: bool = True):
        super().__init__(model)  # over TRL's fused head, if it is there
        self.frozen_head = frozen_head
        self.active = True
        earlier = getattr(model, _PUT_ON, ())
        self.place = len(earlier)
        setattr(model, _PUT_ON, (*earlier, self))

    def take_off(self) -> None:
        super().take_off()
        if self.place:
            setattr(self.owner, _PUT_ON, getattr(self.owner, _PUT_ON)[: self.place])
        else:
            delattr(self.owner, _PUT_ON)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        # TRL's fused head has the forward of the model that it was put on in its closure, which is not copied: in a
        # copy, calls that are not its own would run with the other model's weights
        cells = getattr(getattr(self.inner, "__func__", None), "__closure__", None) or ()
        if any(isinstance(getattr(cell.cell_contents, "__self__", None), nn.Module) for cell in cells):
            self.inner = None

    @property
    def __func__(self) -> Callable:
        """
        A function of the model that calls this, as a method has one.

        `Accelerator.prepare` puts autocast around it and binds it to the model again. What it puts around an object
        without one stays with that object: a copy of the model would run with the weights of the original.
        """
        place = self.place

        def forward(model, *args, **kwargs):
            return getattr(model, _PUT_ON)[place](*args, **kwargs)

        forward.__signature__ = inspect.signature(type(self.owner).forward)
        return forward

    @property
    def __signature__(self) -> inspect.Signature:
        # `generate` and the trainer check keyword arguments against the model's own signature
        return inspect.signature(type(self.owner).forward)

    def __call__(self, *args, label_positions=None, fused_lm_head=False, labels=None, **kwargs):
        if label_positions is None or not (self.active and fused_lm_head):
            if labels is not None:
                kwargs["labels"] = labels
            if fused_lm_head:
                kwargs["fused_lm_head"] = True
            return self.before(*args, **kwargs)
        targets, scoring = kwargs.pop("label_targets", None), kwargs.pop("scoring", {})
        if targets is None:
            targets = labels.flatten().index_select(0, label_positions.to(labels.device) + 1)
        return self._score(args, kwargs, targets, label_positions, scoring)

    def _score(self, args: tuple, kwargs: dict, targets, label_positions, scoring: dict) -> FusedCausalLMOutput:
        model = self.owner
        text_config = model.config.get_text_config()
        kwargs["use_cache"] = False
        router_logits = kwargs.get("output_router_logits", getattr(text_config, "output_router_logits", False))
        if router_logits:
            kwargs["output_router_logits"] = True
        outputs = model.base_model(*args, **kwargs)
        scores = labelled_scores(
            outputs.last_hidden_state,
            model.get_output_embeddings(),
            targets,
            label_positions,
            text_config,
            frozen_head=self.frozen_head,
            **scoring,
        )
        aux_loss = None
        if router_logits:
            aux_loss = load_balancing_loss_func(
                outputs.router_logits, text_config.num_experts, text_config.num_experts_per_tok, _real_tokens(kwargs)
            )
        return FusedCausalLMOutput(
            log_probs=scores.log_probs, entropy=scores.entropy, is_top1=scores.is_top1, aux_loss=aux_loss
        )


def _real_tokens(kwargs: dict):
    """What the load-balancing loss counts, `(batch, seq_len)`: what it is told to, or every token but padding."""
    layout, mask = kwargs.get("packed_layout"), kwargs.get("attention_mask")
    if layout is None or mask is not None:
        return mask
    # a mask also where nothing is padded: without one, transformers before 5.24 counts with a host synchronisation
    mask = torch.ones_like(layout.position_ids)
    if layout.num_padding:
        mask[:, -layout.num_padding :] = 0
    return mask


def refusal(model: PreTrainedModel) -> str | None:
    """Why this model's head cannot be called on chosen positions, or `None` if it can."""
    head = model.get_output_embeddings()
    if head is None:
        return f"{type(model).__name__} has no output embeddings"
    if not isinstance(head, nn.Linear):
        return f"the head is a {type(head).__name__}, not a plain linear layer"
    return None


def apply(model: PreTrainedModel, config: PatchConfig) -> PatchEntry:
    """Install the forward on the root model, over TRL's fused head if that is there."""
    if not config.packed_metadata:
        return PatchEntry("lm_head", (), "packed_metadata=False: the head looks for labelled positions itself")
    reason = refusal(model)
    if reason:
        return PatchEntry("lm_head", (), reason)
    forward = LabelledForward(model, config.frozen_head)
    model.forward = forward
    # the report outlives the trainer: it must not keep the model alive
    installed = weakref.ref(forward)

    def undo(model: PreTrainedModel) -> None:
        forward = installed()
        if forward is None:
            return
        if model.__dict__.get("forward") is not forward:
            # somebody wrapped it since: stay as a plain pass-through inside that wrapper
            forward.active = False
        else:
            forward.take_off()

    head = model.get_output_embeddings()
    frozen = config.frozen_head and frozen_refusal(head.weight, head.bias) is None
    return PatchEntry(
        "lm_head",
        (type(model).__name__,),
        "log-probabilities at the labelled positions, which come with the batch; "
        + ("the head is frozen: its gradient in the forward" if frozen else "TRL's kernel"),
        undo=undo,
    )
