"""Per-token log-probabilities at given positions, without asking the device which positions those are."""

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import maybe_gather_lm_head_ctx

from .frozen import frozen_head_scores, refusal


VOCAB_CHUNK = 32768


class TokenScores(NamedTuple):
    """Scores of the labelled tokens, each of shape `(num_labels,)`; `entropy` and `is_top1` carry no loss."""

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
    labels: torch.Tensor,
    label_positions: torch.Tensor,
    text_config,
    frozen_head: bool = True,
) -> TokenScores:
    """
    Log-probability, entropy and top-1 hit of the labels at `label_positions`, from those rows only.

    A head that is frozen now goes through `frozen_head_scores`, any other through TRL's chunked kernel.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, seq_len, hidden_size)`): Output of the decoder.
        lm_head (`torch.nn.Module`): The head; its weight is read at every call, FSDP and PEFT replace it.
        labels (`torch.Tensor` of shape `(batch, seq_len)`, int64): Labels, not shifted.
        label_positions (`torch.Tensor` of shape `(num_labels,)`, int64): Flat index into `(batch, seq_len)` of each
            position that predicts a labelled next token.
        text_config (`PretrainedConfig`): Where soft-capping and logit scale stand.
        frozen_head (`bool`, *optional*, defaults to `True`): `False` leaves a frozen head to TRL's kernel too.

    Returns:
        `TokenScores`: In the order of `label_positions`, fp32.
    """
    weight, bias = lm_head.weight, lm_head.bias
    softcap = getattr(text_config, "final_logit_softcapping", None)
    if frozen_head and refusal(hidden_states, weight, bias) is None:
        # a model split over devices may end elsewhere than its head
        hidden, labels, positions = (x.to(weight.device) for x in (hidden_states, labels, label_positions))
        scores = frozen_head_scores(
            hidden.flatten(0, 1).index_select(0, positions),
            weight,
            bias,
            labels.flatten().index_select(0, positions + 1),
            softcap=softcap,
            logit_scale=logit_scale(text_config),
        )
        return TokenScores(*scores)
    # FSDP2 keeps sharded parameters as DTensors; the products need the whole matrix
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
        bias = None if bias is None else bias.full_tensor()
    hidden_states, labels, label_positions = (x.to(weight.device) for x in (hidden_states, labels, label_positions))
    with maybe_gather_lm_head_ctx(weight, bias):
        log_probs, entropy, _, _, is_top1 = ChunkedLogProbFunction.apply(
            hidden_states.flatten(0, 1).index_select(0, label_positions),
            weight,
            bias,
            labels.flatten().index_select(0, label_positions + 1),
            1.0,
            VOCAB_CHUNK,
            softcap,
            logit_scale(text_config),
            ("entropy", "is_top1"),
        )
    return TokenScores(log_probs, entropy, is_top1)
