"""Tiny models with adapters that do something, and what a saved folder holds."""

import copy
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from tests.tiny import EXPERT_ARCHITECTURES, EXPERT_PARAMETERS, lora_config, tiny_model


IDS = torch.randint(9, 128, (2, 12), generator=torch.Generator().manual_seed(0))


def stirred(model: PeftModel, seed: int = 1) -> PeftModel:
    """Give what PEFT trains values as training would: LoRA starts as nothing, and copies start as equal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def adapted(model_type: str, model: PreTrainedModel | None = None, dtype=torch.float32, **kwargs) -> PeftModel:
    """A LoRA on everything that `tests.tiny` targets, and on experts, over `model` or a tiny one."""
    model = tiny_model(model_type).to(dtype) if model is None else model
    if model_type in EXPERT_ARCHITECTURES:
        kwargs = {"target_parameters": EXPERT_PARAMETERS} | kwargs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return stirred(get_peft_model(model, lora_config(model_type, **kwargs)))


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    """In evaluation mode, fp32; the mode is put back."""
    mode = model.training
    out = model.eval()(input_ids=ids, use_cache=False).logits.float()
    model.train(mode)
    return out


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest relative difference over tokens."""
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).max().item()


def stock_merge(model: PeftModel, dtype=torch.float32) -> PreTrainedModel:
    """What PEFT alone makes of a copy, in fp32 throughout."""
    return copy.deepcopy(model).to(dtype).merge_and_unload()


def saved_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors in a folder, whatever its index says."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in found, f"{name} is in two files"
            found[name] = tensor
    return found


def names_in(folder: str | Path) -> list[str]:
    """Files and folders below, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
