"""Loading and saving a model whose linear layers and experts are in 4 bits.

transformers' 4-bit quantizer takes linear layers only and leaves experts that are 3-D parameters in 16 bits. Ours is
that quantizer with one more kind of parameter, registered under a name of its own through `register_quantizer` and
`register_quantization_config`. Each weight is quantised as soon as transformers has merged it from the checkpoint, so
that there is never more than one layer's experts in 16 bits. `save_pretrained` writes 4 bits in bitsandbytes' format;
the folder loads again with `load_in_4bit`, or with `from_pretrained` after `register_nf4_experts`.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from .experts import find_experts, make_quantized, packed_parameter, parameter_from_state, show_packed


METHOD = "bitsandbytes_4bit_experts"
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
# in this order in the converter's list; the last is the packed tensor itself
_SCALES = (
    ".nested_absmax",
    ".nested_quant_map",
    ".quant_map",
    ".absmax",
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
)


class NF4ExpertsConfig(BitsAndBytesConfig):
    """
    `BitsAndBytesConfig` in 4 bits, for experts too.

    Args:
        bnb_4bit_quant_type (`str`, *optional*, defaults to `"nf4"`): Or `"fp4"`.
        bnb_4bit_use_double_quant (`bool`, *optional*, defaults to `True`): Quantise the scales too.
        **kwargs: As for `BitsAndBytesConfig`; `llm_int8_skip_modules` names modules of experts as well.
    """

    def __init__(self, bnb_4bit_quant_type: str = "nf4", bnb_4bit_use_double_quant: bool = True, **kwargs):
        for name in ("quant_method", "load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit"):
            kwargs.pop(name, None)
        super().__init__(
            load_in_4bit=True,
            bnb_4bit_quant_type=bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=bnb_4bit_use_double_quant,
            **kwargs,
        )
        self.quant_method = METHOD

    @classmethod
    def from_bnb(cls, config: BitsAndBytesConfig) -> "NF4ExpertsConfig":
        """
        Args:
            config (`BitsAndBytesConfig`): With `load_in_4bit=True`.

        Raises:
            ValueError: If it is for 8 bits, or packs into another dtype than uint8.
        """
        if not config.load_in_4bit:
            raise ValueError("quantization_config must have load_in_4bit=True: experts have no 8-bit form")
        if config.bnb_4bit_quant_storage != torch.uint8:
            raise ValueError(
                f"bnb_4bit_quant_storage={config.bnb_4bit_quant_storage}: experts are packed as uint8 only"
            )
        return config if isinstance(config, cls) else cls(**config.to_dict())

    def to_dict(self) -> dict[str, Any]:
        # transformers takes a dict with these for its own configuration, whatever its method says
        names = ("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit")
        return {key: value for key, value in super().to_dict().items() if key not in names}


class _Quantize(ConversionOps):
    """Quantises what has just been merged from a checkpoint: linear layers as transformers does, experts as we do."""

    def __init__(self, hf_quantizer: "NF4ExpertsQuantizer"):
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], model: nn.Module | None = None, **kwargs) -> dict[str, Any]:
        result = {}
        config = self.hf_quantizer.quantization_config
        # popped, so that a 16-bit weight goes before the next one is quantised
        for name in list(input_dict):
            value = input_dict.pop(name)
            if name not in self.hf_quantizer.experts:
                quantize = super(NF4ExpertsQuantizer, self.hf_quantizer).get_quantize_ops()
                needed = self.hf_quantizer.param_needs_quantization(model, name)
                result |= quantize.convert({name: value}, model=model, **kwargs) if needed else {name: value}
                continue
            value = value[0] if isinstance(value, list) else value
            result[name] = packed_parameter(
                value,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
            del value
            _make_room(model, name)
        return result


class _Deserialize(ConversionOps):
    """Puts a packed weight and its scales from a 4-bit checkpoint together."""

    def __init__(self, hf_quantizer: "NF4ExpertsQuantizer"):
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        target_patterns: list[str] | None = None,
        full_layer_name: str | None = None,
        model: nn.Module | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        target = target_patterns[0]
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        packed = parts.pop(target)
        if not parts:  # experts that the checkpoint has in 16 bits
            return {target: packed}
        _make_room(model, full_layer_name)
        return {target: parameter_from_state(packed, parts)}


def _make_room(model: nn.Module, name: str) -> None:
    """The module that transformers is about to put a packed parameter into becomes one that reads it, later."""
    module = model.get_submodule(name.rpartition(".")[0])
    make_quantized(module)
    # transformers looks at each parameter again, to draw those that it did not find
    show_packed(module, True)


class NF4ExpertsQuantizer(Bnb4BitHfQuantizer):
    """transformers' 4-bit quantizer, and experts; `experts` are the full names of their parameters."""

    def __init__(self, quantization_config: NF4ExpertsConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.experts: frozenset[str] = frozenset()

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs):
        super()._process_model_before_weight_loading(model, **kwargs)
        self.experts = frozenset(
            f"{path}.{name}"
            for path, _, names in find_experts(model)
            if should_convert_module(path, self.modules_to_not_convert)
            for name in names
        )
        return model

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs) -> bool:
        return param_name in self.experts or super().param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def get_weight_conversions(self) -> list:
        conversions = super().get_weight_conversions()
        if not self.pre_quantized:
            return conversions
        # "mlp.experts.down_proj" and not just "experts.down_proj", which "shared_experts.down_proj.weight" ends on too
        targets = {".".join(name.split(".")[-3:]) for name in self.experts}
        ours = [
            WeightConverter([target + scale for scale in _SCALES] + [target], target, [_Deserialize(self)])
            for target in sorted(targets)
        ]
        # before bitsandbytes' own, whose patterns are as short as "weight"
        return ours + conversions

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs):
        model = super()._process_model_after_weight_loading(model, **kwargs)
        for path in {name.rpartition(".")[0] for name in self.experts}:
            show_packed(model.get_submodule(path), False)
        # what transformers asks for where it treats 4-bit models apart
        model.quantization_method = QuantizationMethod.BITS_AND_BYTES
        # saving reverses what was done to the weights: it cannot cut experts in 4 bits into single ones, and reading
        # 4 bits has no way back and needs none
        model._weight_conversions = [
            conversion for conversion in model._weight_conversions if not self._irreversible(conversion)
        ]
        return model

    def _irreversible(self, conversion) -> bool:
        if not isinstance(conversion, WeightConverter):
            return False
        if any(hasattr(operation, "hf_quantizer") for operation in conversion.operations):
            return True
        return any(target in name for target in conversion.target_patterns for name in self.experts)


def register_nf4_experts() -> None:
    """Make our configuration and quantizer known to transformers, in this process. Twice is no harm."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(NF4ExpertsConfig)
        register_quantizer(METHOD)(NF4ExpertsQuantizer)


def load_in_4bit(
    model_name_or_path: str,
    *,
    auto_class: type = AutoModelForCausalLM,
    quantization_config: BitsAndBytesConfig | None = None,
    **kwargs,
) -> PreTrainedModel:
    """
    A model with linear layers and experts in 4 bits, from a checkpoint in 16 bits or from one that was saved so.

    Args:
        model_name_or_path (`str`): Folder or name on the Hub.
        auto_class (`type`, *optional*, defaults to `AutoModelForCausalLM`): Whose `from_pretrained` loads it.
        quantization_config (`BitsAndBytesConfig`, *optional*): With `load_in_4bit=True`. By default NF4 with double
            quantisation, and what `dtype` among `kwargs` says as the dtype of the computation, bf16 without. A model
            that was saved in 4 bits keeps its own.
        **kwargs: For `from_pretrained`.

    Returns:
        `PreTrainedModel`: In evaluation mode, as `from_pretrained` returns it.

    Raises:
        ValueError: If the checkpoint is quantised in another way; without ours, its experts are in 16 bits.
    """
    register_nf4_experts()
    hub = {key: kwargs[key] for key in _HUB if key in kwargs}
    saved = PreTrainedConfig.get_config_dict(model_name_or_path, **hub)[0].get("quantization_config")
    method = saved and saved.get("quant_method")
    if saved and method != METHOD:
        raise ValueError(
            f"{model_name_or_path} is quantised already ({method}): load it with {auto_class.__name__}."
            "from_pretrained and call quantize_experts_(model), or load a checkpoint in 16 bits"
        )
    if quantization_config is None and not saved:
        dtype = kwargs.get("dtype")
        dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        quantization_config = NF4ExpertsConfig(bnb_4bit_compute_dtype=dtype or torch.bfloat16)
    if quantization_config is not None:
        kwargs["quantization_config"] = NF4ExpertsConfig.from_bnb(quantization_config)
    return auto_class.from_pretrained(model_name_or_path, **kwargs)
