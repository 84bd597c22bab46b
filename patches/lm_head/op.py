"""Per-token log-probabilities at given positions, without asking the device which positions those are."""

import contextlib
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import maybe_gather_lm_head_ctx

from .frozen import frozen_head_scores, refusal


VOCAB_CHUNK = 32768


class TokenScores(NamedTuple):
    """Scores of the labelled tokens, each of shape `(num_labels,)`; `is_top1` carries no loss."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    is_top1: torch.Tensor


def logit_scale(text_config) -> float:
    """
    The factor that this architecture puts on its logits, under whatever name its config has it.

    Cohere multiplies by `logit_scale`, Muse by `output_multiplier`, Falcon-H1 by `lm_head_multiplier`; Granite and
    MiniCPM3 divide by `logits_scaling`, HyperCLOVA X multiplies by it. The order is TRL's (`add_fused_lm_head`).
    """
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(text_config, name, None)
        if value is not None:
            return value
    scaling = getattr(text_config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return scaling if text_config.model_type == "hyperclovax" else 1 / scaling


def labelled_scores(
    hidden_states: torch.Tensor,
    lm_head: torch.nn.Module,
    targets: torch.Tensor,
    label_positions: torch.Tensor,
    text_config,
    *,
    temperature: float = 1.0,
    in_fp32: bool = False,
    frozen_head: bool = True,
    entropy_gradient: bool = False,
) -> TokenScores:
    """
    Log-probability, entropy and top-1 hit of the labels at `label_positions`, from those rows only.

    A head that is frozen now goes through `frozen_head_scores`, any other through TRL's chunked kernel.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, seq_len, hidden_size)`): Output of the decoder.
        lm_head (`torch.nn.Module`): The head; its weight is read at every call, FSDP and PEFT replace it.
        targets (`torch.Tensor` of shape `(num_labels,)`, int64): Labelled tokens.
        label_positions (`torch.Tensor` of shape `(num_labels,)`, int64): Flat index into `(batch, seq_len)` of each
            position that predicts one.
        text_config (`PretrainedConfig`): Where soft-capping and logit scale stand.
        temperature (`float`, *optional*, defaults to 1.0): The logits are divided by it.
        in_fp32 (`bool`, *optional*, defaults to `False`): Compute in fp32, outside of autocast, with a head in fp32.
        frozen_head (`bool`, *optional*, defaults to `True`): `False` leaves a frozen head to TRL's kernel too.
        entropy_gradient (`bool`, *optional*, defaults to `False`): Whether the loss has the entropy in it.

    Returns:
        `TokenScores`: In the order of `label_positions`, fp32.
    """
    weight, bias = lm_head.weight, lm_head.bias
    softcap, scale = getattr(text_config, "final_logit_softcapping", None), logit_scale(text_config)
    # a model split over devices may end elsewhere than its head
    hidden, targets, label_positions = (x.to(weight.device) for x in (hidden_states, targets, label_positions))
    hidden = hidden.flatten(0, 1).index_select(0, label_positions)
    autocast = contextlib.nullcontext()
    if in_fp32:
        hidden, autocast = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
    with autocast:
        if frozen_head and not entropy_gradient and refusal(weight, bias) is None:
            settings = {"temperature": temperature, "softcap": softcap, "logit_scale": scale}
            return TokenScores(*frozen_head_scores(hidden, weight, bias, targets, **settings))
        # FSDP2 keeps sharded parameters as DTensors; the products need the whole matrix
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
            bias = None if bias is None else bias.full_tensor()
        with maybe_gather_lm_head_ctx(weight, bias):
            log_probs, entropy, _, _, is_top1 = ChunkedLogProbFunction.apply(
                hidden, weight, bias, targets, temperature, VOCAB_CHUNK, softcap, scale, ("entropy", "is_top1")
            )
    return TokenScores(log_probs, entropy, is_top1)
