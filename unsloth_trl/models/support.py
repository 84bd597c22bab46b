"""Which architectures may train on packed rows.

A packed row is right only where nothing but attention carries information from one token to the next: our attention
stops at the boundaries, a convolution or a recurrent state does not. `VERIFIED` lists what a test has compared with
unpacked training; `state_between_tokens` names the architectures for which packing can never be right.

Only attributes of the config are read, so this module needs neither torch nor transformers.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Support:
    """
    What packed training is verified for, in one architecture.

    Args:
        packing (`bool`):
            Packed rows give the losses and gradients of separate rows.
        sliding_window (`bool`):
            Including layers that attend to the last few tokens only.
        soft_cap (`bool`):
            Including soft-capped attention scores.
        sinks (`bool`):
            Including learned attention sinks.
        moe (`bool`):
            Including mixture-of-experts layers.
    """

    packing: bool = True
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    moe: bool = False


VERIFIED: dict[str, Support] = {
    "cohere": Support(),
    "deepseek_v3": Support(moe=True),
    "gemma2": Support(sliding_window=True, soft_cap=True),
    "gemma3_text": Support(sliding_window=True),
    "gemma4_text": Support(sliding_window=True, moe=True),
    "glm4": Support(),
    "glm4_moe": Support(moe=True),
    "gpt_oss": Support(sliding_window=True, sinks=True, moe=True),
    "granite": Support(),
    "kimi_k25": Support(moe=True),
    "llama": Support(),
    "mistral": Support(sliding_window=True),
    "mixtral": Support(moe=True),
    "olmo2": Support(),
    "phi3": Support(sliding_window=True),
    "qwen2": Support(sliding_window=True),
    "qwen3": Support(sliding_window=True),
    "qwen3_moe": Support(moe=True),
    "smollm3": Support(sliding_window=True),
}

# Image-text models that are verified on text-only rows. Their text model decides; any other wrapper is unverified even
# around a verified text model, since its own forward may build positions, masks or token types.
TEXT_ONLY_WRAPPERS = frozenset({"kimi_k25"})

_MAMBA = "Mamba layers"
_DELTA_NET = "gated delta net layers"
_LINEAR = "linear attention layers"
_SHORT_CONV = "short convolutions over tokens"
_STATEFUL = {
    "bailing_hybrid": _LINEAR,
    "bamba": _MAMBA,
    "blt": "byte patches and hashes over the preceding tokens",
    "deepseek_v4": "compressed keys that span several tokens",
    "falcon_h1": _MAMBA,
    "falcon_mamba": _MAMBA,
    "glm5_next": _LINEAR,
    "glm5_next_text": _LINEAR,
    "inkling2_loop_text": _SHORT_CONV,
    "inkling2_text": _SHORT_CONV,
    "inkling_text": _SHORT_CONV,
    "jamba": _MAMBA,
    "kimi_linear": _LINEAR,
    "lara_mini": _DELTA_NET,
    "lfm2": _SHORT_CONV,
    "lfm2_moe": _SHORT_CONV,
    "lfm3": _SHORT_CONV,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "minimax": _LINEAR,
    "nemotron_h": _MAMBA,
    "olmo_hybrid": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET,
    "qwen4_exp_text": _DELTA_NET,
    "recurrent_gemma": "recurrent (RG-LRU) layers",
    "rwkv": "RWKV layers",
    "xlstm": "xLSTM layers",
    "zamba": _MAMBA,
    "zamba2": _MAMBA,
    "zaya": _SHORT_CONV,
}

# For models that the table does not know, such as those with code on the Hub.
_LAYER_FIELDS = ("layer_types", "layers_block_type", "block_types", "layers_types", "mixer_types")
_STATEFUL_LAYERS = (
    "conv",
    "delta",
    "hybrid",
    "kda",
    "lightning",
    "linear",
    "lstm",
    "mamba",
    "recurrent",
    "rwkv",
    "ssm",
)
_ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention", "dense", "mlp", "moe", "sparse"})
_STATE_FIELDS = (
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "lru_width",
    "mamba_d_conv",
    "mamba_d_state",
    "short_conv_kernel_size",
    "ssm_state_size",
)
_NOT_TEXT = ("audio", "image", "vision", "video", "vit")

_FEATURE_NAMES = {
    "packing": "packing",
    "sliding_window": "sliding window",
    "soft_cap": "soft cap",
    "sinks": "attention sinks",
    "moe": "experts",
}


class UnsupportedArchitectureWarning(UserWarning):
    """
    The model's architecture is outside the verified table; the message says what that is, what follows from it, and
    what to do.

    Every message begins with `model_type`. That is what Python's own option needs, `python -W error:model_type`: the
    class is not to be had yet where `-W error::CATEGORY` is read, before installed packages are on the path.
    """


def text_model_type(config: Any) -> str:
    """The `model_type` that decides about text-only rows: the text model's, for a verified image-text wrapper."""
    if config.model_type in TEXT_ONLY_WRAPPERS:
        return config.text_config.model_type
    return config.model_type


def state_between_tokens(config: Any, model: Any = None) -> str | None:
    """
    What carries information from token to token besides attention, or `None`.

    Args:
        config:
            A transformers config; text sub-configs of multimodal models are looked at too.
        model (*optional*):
            The model, whose classes may declare themselves stateful without a word in the config.
    """
    for part in _text_configs(config):
        layers = _layer_types(part)
        stateful = [layer for layer in layers if any(word in layer for word in _STATEFUL_LAYERS)]
        state_fields = [name for name in _STATE_FIELDS if getattr(part, name, None)]
        if part.model_type in _STATEFUL:
            return _STATEFUL[part.model_type]
        if stateful:
            return f"layers of type '{stateful[0]}'"
        # Granite 4 and the like keep their Mamba sizes in the config of a model whose layers are all attention.
        if state_fields and not layers:
            return f"layers sized by config.{state_fields[0]}"
    for module in model.modules() if model is not None else ():
        own_config = getattr(module, "config", None)
        if getattr(type(module), "_is_stateful", False) and not (own_config and _layer_types(own_config)):
            return f"the state of {type(module).__name__}"
    return None


def check_architecture(config: Any, *, strict: bool, own_code: bool = False) -> None:
    """
    Say what is not verified about a model, before its weights are loaded.

    Args:
        config:
            The model's config.
        strict (`bool`):
            A gap is an error.
        own_code (`bool`, *optional*, defaults to `False`):
            The model runs code from its repository instead of transformers'.

    Raises:
        `ValueError`: There is a gap, and `strict` is on. Otherwise each gap is an `UnsupportedArchitectureWarning` of
            its own: what it is, what follows from it, and what to do.
    """
    name = f"model_type '{config.model_type}'"
    slower = (
        "It trains on TRL's padded rows, one prompt per completion: right, but slower and in more memory. To use the "
        "fast path all the same, compare the loss of a few steps with patches='none', then set allow_unverified=True "
        "in the trainer's config"
    )
    obstacle = _obstacle(config, None)
    if obstacle:
        found = [
            f"{name}: {obstacle}. Samples in one row would mix, so packing=True is refused and prompts are not "
            "shared. Set packing=False and padding_free=False in the trainer's config"
        ]
    else:
        found = [f"{name} {gap}. {slower}" for gap in _gaps(config)]
    if own_code:
        found.append(
            f"{name} runs code from its repository, which no test has compared with transformers'. Its forward may "
            "ignore what packed rows need. Load it with trust_remote_code=False if transformers has this model, or "
            "compare the loss of a few steps with patches='none'"
        )
    if found and strict:
        raise ValueError(" ".join(f"{gap}." for gap in found) + " strict=True makes this an error; set strict=False")
    for gap in found:
        warnings.warn(f"{gap}. strict=True makes this an error.", UnsupportedArchitectureWarning, stacklevel=3)


def check_packing(config: Any, *, strict: bool, allow_unverified: bool, model: Any = None) -> bool:
    """
    Whether the model may train on packed rows; called before the first batch is built.

    Args:
        config:
            The model's config.
        strict (`bool`):
            An unverified architecture is an error.
        allow_unverified (`bool`):
            An unverified architecture is packed all the same, with a warning. Wins over `strict`.
        model (*optional*):
            The model, for `state_between_tokens`.

    Returns:
        `bool`: `False` if the rows have to stay unpacked; an `UnsupportedArchitectureWarning` has then said so.

    Raises:
        `ValueError`: packing can never be right here, or the architecture is unverified and `strict` is on.
    """
    name = f"model_type '{config.model_type}'"
    obstacle = _obstacle(config, model)
    if obstacle:
        raise ValueError(
            f"packing=True is not possible for {name}: {obstacle}, so samples in one row would mix. "
            "Set packing=False and padding_free=False."
        )
    gap = _gap(config)
    if gap is None:
        return True
    if allow_unverified:
        warnings.warn(
            f"{name} {gap}. allow_unverified=True packs it anyway; if anything but causal "
            "attention links its tokens, samples mix silently. Compare the loss of a few steps with packing=False.",
            UnsupportedArchitectureWarning,
            stacklevel=2,
        )
        return True
    if strict:
        raise ValueError(
            f"{name} {gap}, and strict=True. Set packing=False and padding_free=False, or allow_unverified=True after "
            "comparing the loss of a few steps with packing=False."
        )
    warnings.warn(
        f"{name} {gap}. It trains unpacked: the result is right, but padding costs time and memory. "
        "allow_unverified=True packs it anyway, strict=True makes this an error.",
        UnsupportedArchitectureWarning,
        stacklevel=2,
    )
    return False


def check_sharing(config: Any, *, strict: bool, allow_unverified: bool, model: Any = None) -> str | None:
    """
    Whether completions of one prompt may share it in a packed row.

    Args:
        config, strict, allow_unverified, model: As in `check_packing`.

    Returns:
        `str` or `None`: Why they may not; an `UnsupportedArchitectureWarning` has then said so, or has warned that an
        unverified architecture shares all the same.

    Raises:
        `ValueError`: They may not, and `strict` is on.
    """
    name = f"model_type '{config.model_type}'"
    obstacle = _obstacle(config, model)
    gap = None if obstacle else _gap(config)
    if obstacle is None and gap is None:
        return None
    if gap is not None and allow_unverified:
        warnings.warn(
            f"{name} {gap}. allow_unverified=True shares prompts anyway; if anything but causal attention links its "
            "tokens, completions of one prompt see each other silently. Compare the loss of a few steps with "
            "share_prompts=False and with patches='none'.",
            UnsupportedArchitectureWarning,
            stacklevel=2,
        )
        return None
    reason = f"{name}: {obstacle}" if obstacle else f"{name} {gap}"
    if strict:
        raise ValueError(f"{reason}, and strict=True. Set strict=False to train it on TRL's padded rows.")
    instead = "strict=True makes this an error" + ("" if obstacle else ", allow_unverified=True shares prompts anyway")
    warnings.warn(
        f"{reason}. It trains on TRL's padded rows, in which every completion carries its prompt: the result is "
        f"right, but takes more time and memory. {instead}.",
        UnsupportedArchitectureWarning,
        stacklevel=2,
    )
    return reason


def support_table() -> str:
    """`VERIFIED` as the Markdown table of the README."""
    columns = [field.name for field in fields(Support)]
    lines = [
        "| `model_type` | " + " | ".join(_FEATURE_NAMES[column] for column in columns) + " |",
        "|---|" + ":-:|" * len(columns),
    ]
    for model_type, support in sorted(VERIFIED.items()):
        cells = ["yes" if getattr(support, column) else "-" for column in columns]
        lines.append(f"| {model_type} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _obstacle(config: Any, model: Any) -> str | None:
    """Why packed rows would be wrong whatever the attention function does, or `None`."""
    state = state_between_tokens(config, model)
    if state:
        return f"{state} keep state between tokens"
    for part in _text_configs(config):
        # "vision" lets image tokens see each other; on text rows it is causal.
        if getattr(part, "use_bidirectional_attention", None) in (True, "all"):
            return "its attention is bidirectional"
        other = [layer for layer in _layer_types(part) if layer not in _ATTENTION_LAYERS]
        if other:
            return f"layers of type '{other[0]}' choose their keys by a mask that packed rows do not have"
    return None


def _gap(config: Any) -> str | None:
    """What of this config no test has verified, as the rest of a sentence, or `None`."""
    return next(_gaps(config), None)


def _gaps(config: Any) -> Iterator[str]:
    """Everything of this config that no test has verified, as rests of sentences."""
    text_type = text_model_type(config)
    if config.model_type not in VERIFIED or text_type not in VERIFIED:
        inner = "" if text_type == config.model_type else f" around text model '{text_type}'"
        yield f"{inner} is not among the verified architectures ({', '.join(sorted(VERIFIED))})".strip()
        return
    support = VERIFIED[text_type]
    text_config = config.text_config if config.model_type in TEXT_ONLY_WRAPPERS else config
    windowed = getattr(text_config, "sliding_window", None) and getattr(text_config, "use_sliding_window", True)
    if windowed and not support.sliding_window:
        yield "is verified without sliding_window, which this config sets"
    if getattr(text_config, "attn_logit_softcapping", None) and not support.soft_cap:
        yield "is verified without attn_logit_softcapping, which this config sets"


def _text_configs(config: Any) -> Iterator[Any]:
    """The config and its sub-configs at any depth, without those of other modalities."""
    yield config
    for name, value in vars(config).items():
        if hasattr(value, "model_type") and not any(word in name for word in _NOT_TEXT):
            yield from _text_configs(value)


def _layer_types(config: Any) -> list[str]:
    for name in _LAYER_FIELDS:
        # Some configs compute the list: a property is not in vars().
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            return [str(layer) for layer in value]
    return []
