"""How the base of an adapter was while it was trained: PEFT's files name the base, and not its bits or its RoPE."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig

from ..patches.quantization.loading import METHOD
from ..patches.registry import base_model


BASE_STATE = "base_model_state.json"
_QUANTIZED = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
_POSITIONS = ("max_position_embeddings", "rope_parameters")


def save_base_state(model: nn.Module, folder: str | Path) -> None:
    """
    Write `base_model_state.json` beside an adapter.

    Args:
        model (`nn.Module`): A PEFT model, not wrapped by DDP or a compiler.
        folder (`str` or `Path`): Where its adapter is.
    """
    base = base_model(model)
    state: dict[str, Any] = {"dtype": str(base.dtype).removeprefix("torch.")}
    config = getattr(base.config, "quantization_config", None)
    if config is not None:
        values = config if isinstance(config, dict) else config.to_dict()
        state["quantization"] = {key: values[key] for key in _QUANTIZED if values.get(key) is not None}
        if getattr(values.get("quant_method"), "value", values.get("quant_method")) == METHOD:
            state["quantization"]["load_in_4bit"] = True  # which is all that it can be
    if positions := getattr(base, "scaled_positions", None):
        state["positions"] = positions
    text = json.dumps(state, indent=2, sort_keys=True) + "\n"
    (Path(folder) / BASE_STATE).write_text(text, encoding="utf-8")


def read_base_state(path: str | None) -> dict[str, Any]:
    """What `save_base_state` wrote to `path`; empty for `None`, as other programs save adapters without it."""
    return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def bits_of(state: dict[str, Any]) -> int | None:
    """Bits of the base's weights: 4, 8 or 16 (not quantised); `None` where that is not known."""
    if not state:
        return None
    quantization = state.get("quantization")
    if quantization is None:
        return 16
    return 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else None


def quantization_of(state: dict[str, Any]) -> BitsAndBytesConfig | None:
    """The same quantisation for loading the base again; `None` if bitsandbytes did not quantise it."""
    if bits_of(state) not in (4, 8):
        return None
    options = {"bnb_4bit_compute_dtype": dtype_of(state)} if bits_of(state) == 4 else {}
    return BitsAndBytesConfig(**state["quantization"], **options)


def dtype_of(state: dict[str, Any]) -> torch.dtype:
    """The dtype of what was not quantised."""
    return getattr(torch, state["dtype"])


def positions_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The positions and RoPE of a config, which `fit_positions` may change."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in _POSITIONS}


def set_positions(config: PreTrainedConfig, state: dict[str, Any]) -> None:
    """Give a config the positions and RoPE that its adapter was trained with."""
    for name, value in (state.get("positions") or {}).items():
        setattr(config.get_text_config(), name, value)
