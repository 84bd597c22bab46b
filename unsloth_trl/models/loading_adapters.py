"""Adapters of a loaded model: what a new one is put on, and what one from disk needs of its base."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import peft
import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..patches.quantization.experts import find_experts
from .loading_sources import Source, adapter_vocabulary
from .loading_weights import Loading, load_weights
from .targets import STACKED_FROM
from .vocabulary import fit_to_adapter


TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ROUTERS = {"gate", "router", "shared_expert_gate"}


def default_targets(model: PreTrainedModel) -> list[str]:
    decoder = (model.get_decoder() if hasattr(model, "get_decoder") else None) or model
    dense = {name.rpartition(".")[2] for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    stacks = {part for _, _, names in find_experts(model) for name in names for part in STACKED_FROM.get(name, ())}
    if set(TARGETS) <= dense | stacks:
        return list(TARGETS)
    names = sorted((dense | stacks) - _ROUTERS)
    warnings.warn(
        f"{type(model).__name__} has no {', '.join(sorted(set(TARGETS) - dense - stacks))}; the LoRA goes on {names}. "
        "Set target_modules to choose",
        stacklevel=3,
    )
    return names


def is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def with_new_tokens(
    model: PreTrainedModel, targets: Sequence[str] | str, modules_to_save: list[str] | None, indices: Any
) -> list[str] | None:
    """`modules_to_save`, with embedding and head if tokens were added that nothing else would train or save."""
    added = getattr(model, "added_token_ids", [])
    embedding, head = (
        next(name.rpartition(".")[2] for name, module in model.named_modules() if module is wanted)
        for wanted in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    trained = {*(modules_to_save or ()), *((targets,) if isinstance(targets, str) else targets)}
    if not added or embedding in trained or indices:
        return modules_to_save
    needed = [embedding] if is_tied(model) else [embedding, head]
    warnings.warn(
        f"{len(added)} tokens were added: modules_to_save gets {needed}, so that their rows are trained and saved. "
        "Set modules_to_save yourself to choose",
        stacklevel=3,
    )
    return [*(modules_to_save or ()), *(name for name in needed if name not in (modules_to_save or ()))]


def same_adapter(
    model: PeftModel, r: int, lora_alpha: int, use_rslora: bool, target_modules: Sequence[str] | str
) -> str:
    """What to say about a model that has this adapter already; raises if it is another one."""
    name = model.active_adapter
    own = model.peft_config[name]
    asked = {"r": r, "lora_alpha": lora_alpha, "use_rslora": use_rslora}
    different = {key: getattr(own, key, None) for key, value in asked.items() if getattr(own, key, None) != value}
    if target_modules is not TARGETS and not isinstance(target_modules, str):
        found = set(own.target_modules or ()) if not isinstance(own.target_modules, str) else {own.target_modules}
        if not found <= set(target_modules):
            different["target_modules"] = sorted(found)
    if different:
        raise ValueError(
            f"the model has an adapter already ({name!r} with {different}), and another one was asked for; load the "
            "base model for a new adapter, or leave get_peft_model out to train this one on"
        )
    return f"the model has this adapter already ({name!r}): it is trained on"


def load_tokenizer(source: Source, trust_remote_code: bool, adapter: Source | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a source, or that of the adapter on it where the source was saved without one."""
    try:
        return AutoTokenizer.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.kwargs)
    except (OSError, ValueError):
        if adapter is None or adapter.file("tokenizer_config.json") is None:
            raise
        return load_tokenizer(adapter, trust_remote_code)


def load_whole(
    source: Source,
    config: PreTrainedConfig,
    loading: Loading,
    trust_remote_code: bool,
    adapter: peft.PeftConfig | None = None,
    adapter_source: Source | None = None,
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """A model, with the adapter around it if there is one, and its tokenizer."""
    model = load_weights(source, config, loading)
    # PEFT reads the attribute, transformers writes the config
    model.name_or_path = model.config._name_or_path = source.label
    tokenizer = load_tokenizer(source, trust_remote_code, None if adapter is None else adapter_source)
    if adapter is None:
        return model, tokenizer
    return with_adapter(model, tokenizer, adapter, adapter_source, trust_remote_code)


def with_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapter: peft.PeftConfig,
    source: Source,
    trust_remote_code: bool,
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The base with the adapter around it, and the adapter's own tokenizer if it has one."""
    base_tokenizer, own = tokenizer, source.file("tokenizer_config.json") is not None
    if own:
        tokenizer = load_tokenizer(source, trust_remote_code)
    embeddings = tuple(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if module is model.get_input_embeddings() or module is model.get_output_embeddings()
    )
    rows, highest = adapter_vocabulary(adapter, source, embeddings)
    fit_to_adapter(model, base_tokenizer, tokenizer if own else None, rows, highest, source.name)
    if adapter.is_prompt_learning:
        kind = adapter.peft_type.value
        warnings.warn(f"{source.name} is a {kind}, which PEFT loads for inference only", stacklevel=4)
    trainable = not adapter.is_prompt_learning
    wrapped = PeftModel.from_pretrained(model, source.name, is_trainable=trainable, **source.hub)
    match_dtypes(wrapped)
    return wrapped, tokenizer


def match_dtypes(model: PeftModel) -> None:
    """
    Let layers that are trained whole compute beside a base in another dtype, where autocast does not see to it.

    They are fp32 on an fp16 base, for the loss scaler, or what TRL makes of them on a quantised one; `generate` then
    meets two dtypes.
    """
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.register_forward_pre_hook(_to_weight)
            module.register_forward_hook(_to_base)


def _to_weight(module: nn.Module, args: tuple) -> tuple | None:
    weight = getattr(module, "weight", None)
    if weight is None or not args or not args[0].is_floating_point() or args[0].dtype == weight.dtype:
        return None
    return None if torch.is_autocast_enabled(args[0].device.type) else (args[0].to(weight.dtype), *args[1:])


def _to_base(module: nn.Module, args: tuple, output: Any) -> Any:
    if isinstance(module.original_module, nn.Embedding) and isinstance(output, torch.Tensor):
        return output.to(module.original_module.weight.dtype)
    return None


@contextlib.contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """The random state of `seed` on the CPU and the model's cards, and afterwards the one that was before."""
    cards = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=cards):
        torch.default_generator.manual_seed(seed)
        for card in cards:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(seed)
        yield
