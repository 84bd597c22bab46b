"""Names of a `LoraConfig`'s targets, where the layers that they mean are stacked experts.

Since version 5 transformers keeps the experts of a layer in two stacked parameters. PEFT reaches those through
`target_parameters`; `target_modules=["gate_proj", "up_proj", "down_proj"]` matches nothing there, or only the dense
layers beside them. For some architectures PEFT translates such names itself. Where they match nothing, this does it;
where they match dense layers, they mean what they mean to PEFT, and a warning says what is left out.
"""

import copy
import re
import warnings

from peft import LoraConfig, PeftConfig
from peft.utils.transformers_weight_conversion import (
    convert_peft_config_for_transformers,
    get_model_conversion_mapping,
)
from torch import nn

from ..patches.quantization.experts import is_experts, stacked_shape


# what a stacked parameter was made of
STACKED_FROM = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


def expand_targets(model: nn.Module, peft_config: PeftConfig) -> PeftConfig:
    """
    A config whose targets reach the experts that its names mean.

    Args:
        model (`nn.Module`): The model that the adapter is for; on the meta device will do.
        peft_config (`PeftConfig`): As the user wrote it; not changed.

    Returns:
        `PeftConfig`: `peft_config` itself if there is nothing to translate, else a copy.

    Raises:
        ValueError: If one of its `target_modules` matches nothing in the model, if only a part of a fused weight is
            asked for, or if `lora_dropout` is asked for on stacked experts.
    """
    if not isinstance(peft_config, LoraConfig) or not isinstance(peft_config.target_modules, list | set | tuple):
        return _checked(model, peft_config)
    names = set(peft_config.target_modules)
    stacks = [(n, k) for n, m in model.named_modules() if is_experts(m) for k in STACKED_FROM if _is_stack(m, k)]
    dense = {name for name in names if _matches(model, name)}
    meant = {part for _, parameter in stacks for part in STACKED_FROM[parameter]}
    translated = _translated_by_peft(model, peft_config)
    left = names if translated is None else set(translated.target_modules or ())
    if unknown := sorted(left - dense - meant):
        raise ValueError(
            f"target_modules={unknown} match no module of {type(model).__name__}; it has {_linear_names(model)}"
        )
    if translated is not None:
        if lost := sorted((names - left) & dense):
            warnings.warn(
                f"PEFT reads target_modules={sorted(names - left)} as this model's stacked experts alone: its dense "
                f"layers of the names {lost} get no adapter",
                stacklevel=3,
            )
        return _checked(model, peft_config, bool(translated.target_parameters))
    if (beside := sorted(names & meant & dense)) and not peft_config.target_parameters:
        parameters = sorted({f"{path.rpartition('.')[2]}.{parameter}" for path, parameter in stacks})
        warnings.warn(
            f"target_modules={beside} match dense layers of {type(model).__name__}, which get adapters as in PEFT; "
            f"its stacked experts get none. Add target_parameters={parameters} to train those too",
            stacklevel=3,
        )
    if not (wanted := (names & meant) - dense):
        return _checked(model, peft_config)
    expanded = copy.copy(peft_config)
    expanded.target_modules = names - wanted
    expanded.target_parameters = _parameters_of(peft_config, stacks, wanted)
    return _checked(model, expanded)


def _parameters_of(peft_config: LoraConfig, stacks: list[tuple[str, str]], wanted: set[str]) -> list[str]:
    """The `target_parameters` that `wanted` names mean, in the layers that the config chooses."""
    patterns = {**peft_config.rank_pattern, **peft_config.alpha_pattern}
    if parts := sorted(key for key in patterns if _last(key) in wanted):
        raise ValueError(
            f"rank_pattern or alpha_pattern has {parts}, which are a part of one weight of the experts here; use the "
            "name of that weight, gate_up_proj or down_proj"
        )
    chosen = [(path, parameter) for path, parameter in stacks if _is_chosen(peft_config, path)]
    parameters = set(peft_config.target_parameters or ())
    for path, parameter in chosen:
        asked = [part for part in STACKED_FROM[parameter] if part in wanted]
        if not asked:
            continue
        if missing := sorted(set(STACKED_FROM[parameter]) - set(asked)):
            raise ValueError(
                f"target_modules has {asked} without {missing}, but they are one weight of the experts, {parameter}; "
                f"add {missing}, or leave all of them out"
            )
        # a suffix means all layers
        parameters.add(f"{path if len(chosen) < len(stacks) else _last(path)}.{parameter}")
    return sorted(parameters)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_chosen(peft_config: LoraConfig, path: str) -> bool:
    """Whether `exclude_modules` and `layers_to_transform` leave this module in, by PEFT's rules for modules."""
    excluded = peft_config.exclude_modules
    if isinstance(excluded, str):
        if re.fullmatch(excluded, path):
            return False
    elif any(path == name or path.endswith(f".{name}") for name in excluded or ()):
        return False
    layers = peft_config.layers_to_transform
    if layers is None:
        return True
    patterns = peft_config.layers_pattern or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = next((m for p in patterns if (m := re.match(rf".*\.{p}\.(\d+)\.", path))), None)
    return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def _checked(model: nn.Module, peft_config: PeftConfig, on_experts: bool | None = None) -> PeftConfig:
    """`peft_config`, if PEFT can do what it asks for on experts."""
    if on_experts is None:
        on_experts = bool(getattr(peft_config, "target_parameters", None))
    dropout = getattr(peft_config, "lora_dropout", 0)
    if on_experts and dropout:
        raise ValueError(
            f"lora_dropout={dropout} with LoRA on the stacked experts of {type(model).__name__}, which PEFT applies "
            "to weights and not to activations; set lora_dropout=0"
        )
    return peft_config


def _is_stack(module: nn.Module, name: str) -> bool:
    return len(stacked_shape(module, name) or ()) == 3


def _matches(model: nn.Module, target: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules())


def _linear_names(model: nn.Module) -> str:
    found = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
    return ", ".join(found)


def _translated_by_peft(model: nn.Module, peft_config: PeftConfig) -> PeftConfig | None:
    """What PEFT makes of the config for this architecture, or `None` if it leaves the names as they are."""
    trial = copy.deepcopy(peft_config)
    convert_peft_config_for_transformers(trial, model=model, conversions=get_model_conversion_mapping(model))
    return None if set(trial.target_modules or ()) == set(peft_config.target_modules) else trial
