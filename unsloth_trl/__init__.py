"""Drop-in replacements for TRL's trainers: the same losses and adapters in less time and memory.

Importing this package imports neither torch nor any library that it extends; a public name is imported on first use.
"""

import importlib


__version__ = "0.1.0"

_PUBLIC = {
    "FastLanguageModel": "unsloth_trl.models.loading",
    "GRPOConfig": "unsloth_trl.config",
    "GRPOTrainer": "unsloth_trl.trainers.grpo",
    "PackedLayout": "unsloth_trl.patches.layout",
    "PatchConfig": "unsloth_trl.patches.config",
    "PatchReport": "unsloth_trl.patches.report",
    "SFTConfig": "unsloth_trl.config",
    "SFTTrainer": "unsloth_trl.trainers.sft",
    "UnsupportedArchitectureWarning": "unsloth_trl.models.support",
    "add_new_tokens": "unsloth_trl.models.vocabulary",
    "apply_patches": "unsloth_trl.patches.registry",
    "dequantize_experts": "unsloth_trl.patches.quantization.experts",
    "load_in_4bit": "unsloth_trl.patches.quantization.loading",
    "save_pretrained_merged": "unsloth_trl.hub.merge",
    "train_on_responses_only": "unsloth_trl.data.responses",
}

__all__ = [
    "FastLanguageModel",
    "GRPOConfig",
    "GRPOTrainer",
    "PackedLayout",
    "PatchConfig",
    "PatchReport",
    "SFTConfig",
    "SFTTrainer",
    "UnsupportedArchitectureWarning",
    "add_new_tokens",
    "apply_patches",
    "dequantize_experts",
    "load_in_4bit",
    "save_pretrained_merged",
    "train_on_responses_only",
]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'unsloth_trl' has no attribute '{name}'; it has {', '.join(__all__)}")
    from .versions import check_versions, found_and_supported

    check_versions()
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    except ImportError as error:
        raise ImportError(f"{error}; {found_and_supported()}") from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
