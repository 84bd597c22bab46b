"""The weights of a source, in 16 or 32 bits, or quantised as they are read."""

import copy
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ..patches.quantization.experts import find_experts
from ..patches.quantization.loading import METHOD, load_in_4bit, register_nf4_experts
from .loading_sources import Source
from .memory_terms import meta_model


@dataclass(frozen=True)
class Loading:
    """
    How weights are to be loaded.

    Args:
        dtype (`torch.dtype`): Of what is not quantised, and of the computation.
        bits (`int`): 4, 8, or 16 for weights that are not quantised.
        device_map: As for `from_pretrained`.
        quantization_config (*optional*): As for `from_pretrained`; wins over `bits`.
        options (`Mapping[str, Any]`): Further keywords for `from_pretrained`.
    """

    dtype: torch.dtype
    bits: int
    device_map: Any
    quantization_config: Any
    options: Mapping[str, Any]


def choose_dtype(dtype: torch.dtype | str | None, device_map: Any, full_finetuning: bool) -> torch.dtype:
    """
    The dtype to load in: bf16 where the device has it, fp16 on a CUDA card that does not, fp32 on a CPU.

    Args:
        dtype (`torch.dtype` or `str`, *optional*): What the user asked for.
        device_map: Where the model goes.
        full_finetuning (`bool`): Whether all weights are trained; those cannot be fp16, whose gradients the loss
            scaler does not take, so a card without bf16 gets fp32.

    Raises:
        ValueError: If there is no such dtype, if the card does not have it, or if all weights would be trained in it
            and it is fp16.
    """
    cpu = on_cpu(device_map)
    without_bf16 = (
        not cpu and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    )
    if dtype is None:
        if cpu:
            return torch.float32
        if not without_bf16:
            return torch.bfloat16
        return torch.float32 if full_finetuning else torch.float16
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if named not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype!r} is not torch.bfloat16, torch.float16 or torch.float32; set None to choose")
    if named == torch.bfloat16 and without_bf16:
        raise ValueError(
            f"dtype=torch.bfloat16 needs a GPU from Ampere (sm_80) on, this one is a {torch.cuda.get_device_name()}; "
            "set dtype=None for fp16"
        )
    if named == torch.float16 and full_finetuning:
        raise ValueError(
            "dtype=torch.float16 with full_finetuning=True: the loss scaler does not take gradients in fp16; set "
            "dtype=torch.float32, or train an adapter with full_finetuning=False"
        )
    return named


def on_cpu(device_map: Any) -> bool:
    """Whether a model with this device map is on the CPU alone."""
    if device_map is None or isinstance(device_map, str) and device_map != "cpu":
        return not torch.accelerator.is_available()
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return all(str(place) == "cpu" for place in places)


def default_device_map() -> dict[str, Any] | None:
    """The card of this process, with or without a launcher; `None` on a machine without one, or under ZeRO-3."""
    if not torch.cuda.is_available() or is_deepspeed_zero3_enabled():
        return None
    return {"": int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))}


def load_weights(source: Source, config: PreTrainedConfig, loading: Loading) -> PreTrainedModel:
    """
    Load a model.

    Args:
        source (`Source`): Where it is.
        config (`PreTrainedConfig`): Its config, with what was changed in it.
        loading (`Loading`): How.

    Returns:
        `PreTrainedModel`: In evaluation mode. Weights in 4 bits were quantised one by one as they were read, stacked
        experts too.

    Raises:
        ImportError: If a package is missing, with what to install.
        ValueError: If this machine does not read the quantised weights as they were written.
    """
    model = _load(source, config, loading)
    _check_read(model)
    return model


def _check_read(model: PreTrainedModel) -> None:
    """
    bitsandbytes 0.50 reads wrong scales on CPUs with AVX-512 where a block goes over the end of a row: compare, once
    for each such width, with the same weight as one long row.
    """
    seen = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if type(module).__name__ != "Linear4bit" or state is None or weight.device.type != "cpu":
            continue
        width = state.shape[-1]
        if width % state.blocksize == 0 or width in seen:
            continue
        import bitsandbytes
        from bitsandbytes.functional import dequantize_4bit

        seen.add(width)
        as_one_row = copy.copy(state)
        as_one_row.shape = (1, state.shape.numel())
        expected = dequantize_4bit(weight.data, as_one_row).flatten()
        if not torch.equal(dequantize_4bit(weight.data, state).flatten(), expected):
            raise ValueError(
                f"bitsandbytes {bitsandbytes.__version__} does not read 4-bit weights of width {width} ({name}) as it "
                "wrote them on this CPU; set load_in_4bit=False, or load the model on a GPU"
            )


def _load(source: Source, config: PreTrainedConfig, loading: Loading) -> PreTrainedModel:
    if source.gguf_file:
        return _from_gguf(source, config, loading)
    saved = getattr(config, "quantization_config", None)
    saved = saved if isinstance(saved, dict) or saved is None else saved.to_dict()
    if saved is not None and loading.quantization_config is None:
        return _prequantised(source, config, loading, saved)
    quantise = loading.quantization_config
    if quantise is None and loading.bits < 16:
        quantise = _bits_and_bytes(loading)
    arguments = _arguments(source, config, loading)
    auto_class = _auto_class(config)
    # the name comes from what is in the checkpoint already, if it is in this package's format
    stacked = isinstance(quantise, BitsAndBytesConfig) and quantise.load_in_4bit and _has_experts(config)
    if stacked:
        return load_in_4bit(source.name, auto_class=auto_class, quantization_config=quantise, **arguments)
    if quantise is not None:
        arguments["quantization_config"] = quantise
    return auto_class.from_pretrained(source.name, **arguments)


def _arguments(source: Source, config: PreTrainedConfig, loading: Loading) -> dict[str, Any]:
    return dict(config=config, dtype=loading.dtype, device_map=loading.device_map, **loading.options, **source.kwargs)


def _bits_and_bytes(loading: Loading) -> BitsAndBytesConfig:
    require_bitsandbytes(loading.bits)
    if on_cpu(loading.device_map):
        warnings.warn(
            f"load_in_{loading.bits}bit=True on a CPU: bitsandbytes keeps the weights in {loading.bits} bits and "
            "dequantises each one whenever it is used. The results are right and memory is saved, but it is slow; "
            f"set load_in_{loading.bits}bit=False if the weights fit in {torch.finfo(loading.dtype).bits} bits",
            stacklevel=6,
        )
    if loading.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=loading.dtype,
    )


def require_bitsandbytes(bits: int) -> None:
    """
    Raises:
        ImportError: If bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            f"{bits}-bit weights need bitsandbytes: pip install 'unsloth_trl[quant]', or set load_in_{bits}bit=False"
        )


def require_gguf() -> None:
    """
    Raises:
        ImportError: If gguf is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("GGUF files are read with the package gguf: pip install 'unsloth_trl[gguf]'")


def _prequantised(source: Source, config: PreTrainedConfig, loading: Loading, saved: dict) -> PreTrainedModel:
    """A checkpoint that is quantised already stays as it is."""
    method = str(getattr(saved.get("quant_method"), "value", saved.get("quant_method")))
    if method == METHOD or method.startswith("bitsandbytes"):
        bits = 8 if saved.get("load_in_8bit") else 4
        require_bitsandbytes(bits)
        if loading.bits != bits:
            asked = f"load_in_{loading.bits}bit=True" if loading.bits < 16 else "load_in_4bit=False"
            warnings.warn(
                f"{source.name} is saved in {bits} bits and is loaded so; {asked} would need its original weights",
                stacklevel=6,
            )
    elif loading.bits < 16:
        warnings.warn(
            f"{source.name} is quantised already ({method}) and is loaded so: load_in_{loading.bits}bit=True has no "
            "effect on it",
            stacklevel=6,
        )
    arguments = _arguments(source, config, loading)
    if method == METHOD:
        register_nf4_experts()
        return load_in_4bit(source.name, auto_class=_auto_class(config), **arguments)
    model = _auto_class(config).from_pretrained(source.name, **arguments)
    left = [path for path, module, names in find_experts(model) if not _are_quantised(module, names)]
    if left and loading.bits < 16:
        warnings.warn(
            f"{source.name} has the experts of {len(left)} layers in 16 bits, which is how {method} saves them. "
            "unsloth_trl.load_in_4bit on the original weights quantises them too",
            stacklevel=6,
        )
    return model


def _are_quantised(module: torch.nn.Module, names: tuple[str, ...]) -> bool:
    return all(not module._parameters[name].is_floating_point() for name in names)


def _has_experts(config: PreTrainedConfig) -> bool:
    if getattr(config, "auto_map", None):
        return False  # code from the Hub, which transformers' experts interface does not reach
    return next(find_experts(meta_model(config)), None) is not None


def _auto_class(config: PreTrainedConfig) -> type:
    """The language model of a config; image-text models that have no other one are loaded whole."""
    name = config.model_type
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _from_gguf(source: Source, config: PreTrainedConfig, loading: Loading) -> PreTrainedModel:
    """
    A model that can be trained and saved. The one that transformers makes of a GGUF file counts as quantised, and
    refuses both.
    """
    if loading.quantization_config is not None:
        raise ValueError(
            "quantization_config is for checkpoints; a GGUF file takes load_in_4bit=True, load_in_8bit=True or neither"
        )
    in_file = getattr(transformers, "GgufConfig", None)  # newer versions can leave the weights as they are in the file
    options = dict(loading.options) | ({"quantization_config": in_file(dequantize=True)} if in_file else {})
    quantised = loading.bits < 16
    place = None if quantised else loading.device_map
    loaded = AutoModelForCausalLM.from_pretrained(
        source.name, dtype=loading.dtype, device_map=place, **source.kwargs, **options
    )
    config = _plain(loaded.config, config)
    with init_empty_weights(include_buffers=False):  # else all weights would be there twice
        model = AutoModelForCausalLM.from_config(config, dtype=loading.dtype, **loading.options)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.to(next(loaded.parameters()).device)  # buffers
    model.requires_grad_(True)
    model.generation_config = loaded.generation_config
    del loaded
    if not quantised:
        return model.eval()
    warnings.warn(
        f"{source.label}: its weights are dequantised and then quantised to {loading.bits} bits, which rounds them a "
        f"second time; load_in_{loading.bits}bit=False trains them as they are in the file",
        stacklevel=6,
    )
    with tempfile.TemporaryDirectory(prefix="unsloth_trl-gguf-") as folder:
        model.save_pretrained(folder)
        del model
        return _load(Source(folder), config, loading)


def _plain(loaded: PreTrainedConfig, config: PreTrainedConfig) -> PreTrainedConfig:
    """`config`, of what was read from the file, without what marks it as quantised."""
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config._name_or_path = ""
    # what transformers found out while loading, such as whether the head is tied
    config.tie_word_embeddings = loaded.tie_word_embeddings
    return config
