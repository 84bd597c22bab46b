"""A llama whose loss is known in advance: each token alone decides the distribution of the next one."""

import math

import torch

from tests.tiny import VOCAB, tiny_model


def bigram_model(losses: dict[int, tuple[int, float]], entropies: dict[int, float] | None = None):
    """
    A tiny llama without attention and MLP whose logits are set by hand.

    Args:
        losses: `{token: (next_token, loss)}`: what predicting `next_token` after `token` costs. Tokens below 64.
        entropies: `{token: entropy}`: the entropy after `token`, whatever the loss; up to `log(128)`.
    """
    model = tiny_model("llama")
    width = model.config.hidden_size
    scale = width**0.5  # what the final norm makes of a one-hot row
    head = torch.zeros(VOCAB, width, dtype=torch.float64)
    for token, (following, loss) in losses.items():
        others = math.log1p(-math.exp(-loss)) - math.log(VOCAB - 1)
        head[:, token] = others
        head[following, token] = -loss
    for token, entropy in (entropies or {}).items():
        head[:, token] = _log_probs(entropy)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB, width))
        model.lm_head.weight.copy_(head / scale)
    model.config.rms_norm_eps = 0.0
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.0
    return model


def _log_probs(entropy: float) -> torch.Tensor:
    """A distribution of this entropy: geometric, its rate found by bisection. Token 3 is the likeliest one."""
    order = (torch.arange(VOCAB, dtype=torch.float64) - 3) % VOCAB
    low, high = 0.0, 20.0
    for _ in range(100):
        rate = (low + high) / 2
        log_probs = torch.log_softmax(-rate * order, dim=0)
        low, high = (rate, high) if -(log_probs.exp() * log_probs).sum() > entropy else (low, rate)
    return log_probs
