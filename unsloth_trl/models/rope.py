"""Positions beyond those that a model was made for."""

import warnings
from typing import Any


def fit_positions(config: Any, max_seq_length: int, rope_scaling: dict[str, Any] | None = None) -> None:
    """
    Let a config have `max_seq_length` positions, before its model is made.

    Within the positions that it has nothing changes. Beyond them plain RoPE is scaled linearly: positions are divided
    by a factor, so that the longest one is one that the model knows (Chen et al., "Extending Context Window of Large
    Language Models via Positional Interpolation", 2023, https://arxiv.org/abs/2306.15595).

    Args:
        config: The config of a model; changed in place.
        max_seq_length (`int`): Tokens of the longest sample.
        rope_scaling (`dict`, *optional*): RoPE as asked for by the user, with `rope_type` and what this type needs.

    Raises:
        ValueError: If the positions cannot be scaled without being told how, or if `rope_scaling` names no type.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    current = getattr(text, "rope_parameters", None)
    if rope_scaling is not None:
        _apply(text, current, dict(rope_scaling), max_seq_length)
        return
    if limit is None or max_seq_length <= limit:
        return
    if not isinstance(current, dict) or current.get("rope_type") != "default":
        kind = "no RoPE" if not current else f"RoPE of its own ({current.get('rope_type') or 'one per kind of layer'})"
        raise ValueError(
            f"max_seq_length={max_seq_length} is more than the {limit} positions of model_type '{config.model_type}', "
            f"which has {kind}; set max_seq_length={limit}, or say how in rope_scaling={{'rope_type': ..., ...}}"
        )
    factor = max_seq_length / limit
    text.rope_parameters = current | {"rope_type": "linear", "factor": factor}
    text.max_position_embeddings = max_seq_length
    warnings.warn(
        f"max_seq_length={max_seq_length} is more than the {limit} positions of model_type '{config.model_type}': "
        f"RoPE is scaled linearly by {factor:g}, for short texts too. An adapter that is trained so needs the same "
        "RoPE when it is loaded: FastLanguageModel finds it beside one that a trainer of this package or "
        f"save_pretrained_merged has saved. Set max_seq_length={limit} to leave RoPE as it is",
        stacklevel=3,
    )


def _apply(text: Any, current: Any, asked: dict[str, Any], max_seq_length: int) -> None:
    kind = asked.pop("type", None)  # the older name
    asked.setdefault("rope_type", kind)
    if not asked["rope_type"]:
        raise ValueError(
            f"rope_scaling={asked} has no rope_type; set for example {{'rope_type': 'yarn', 'factor': 4.0}}"
        )
    if not isinstance(current, dict) or "rope_theta" not in current:
        raise ValueError(
            f"rope_scaling={asked}: model_type '{text.model_type}' has no RoPE that is the same in all layers; set "
            "rope_parameters in its config instead"
        )
    before = text.max_position_embeddings
    if asked["rope_type"] in ("yarn", "longrope", "llama3"):
        asked.setdefault("original_max_position_embeddings", current.get("original_max_position_embeddings", before))
    text.rope_parameters = {"rope_theta": current["rope_theta"]} | asked
    if "partial_rotary_factor" in current:
        text.rope_parameters.setdefault("partial_rotary_factor", current["partial_rotary_factor"])
    text.max_position_embeddings = max(before, max_seq_length)
