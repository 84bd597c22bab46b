"""What both trainers do around TRL's constructor."""

import copy
import inspect
from dataclasses import fields
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import get_config_model_id

from ..config import GRPOConfig
from ..models.memory_terms import meta_model
from ..models.targets import expand_targets
from ..patches.registry import base_model, current_report
from ..patches.report import PatchEntry


logger = get_logger(__name__)


def default_name(model: str | PreTrainedModel, task: str) -> str:
    """The `output_dir` of a run without a config, as TRL names it."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-{task}"


def setting(args: Any, name: str) -> Any:
    """A field of this package's configs, its default where `args` is TRL's own config."""
    return getattr(args, name, getattr(GRPOConfig, name))


def follow_model(model: Any, args: Any) -> Any:
    """
    `args`, or a copy with what `FastLanguageModel` was told about this model, where `args` itself was not told.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): `max_seq_length` becomes `max_length`;
            `use_gradient_checkpointing=False` turns `gradient_checkpointing` off, `True` is
            `checkpoint_policy="recompute"`, and `"unsloth"` is `"offload"`.
        args: The trainer's config. Fields that it was made with, or that are not the default, stay; in TRL's own
            config, and in one that a parser made, which do not say what they were told, the latter.
    """
    if isinstance(model, str):
        return args
    own = vars(model.get_base_model() if hasattr(model, "get_base_model") else model)
    wanted = {}
    if own.get("max_seq_length") is not None and hasattr(args, "max_length"):
        wanted["max_length"] = own["max_seq_length"]
    choice = own.get("use_gradient_checkpointing", "auto")
    if choice is False:
        wanted["gradient_checkpointing"] = False
    elif choice != "auto" and hasattr(args, "checkpoint_policy"):
        wanted["checkpoint_policy"] = "recompute" if choice is True else "offload"
    changes = {
        name: value for name, value in wanted.items() if getattr(args, name) != value and not _given(args, name)
    }
    if not changes:
        return args
    args = copy.copy(args)
    for name, value in changes.items():
        setattr(args, name, value)
    if "gradient_checkpointing" in changes and hasattr(args, "activation_checkpointing"):
        args.activation_checkpointing = False  # what newer transformers read
    told = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    logger.warning(f"{told}, as FastLanguageModel was told; set it in {type(args).__name__} for something else")
    return args


def _given(args: Any, name: str) -> bool:
    if getattr(args, name) != getattr(type(args), name):
        return True
    given = set(getattr(args, "_given", ()))
    # a parser of the command line and `dataclasses.replace` pass every field, told or not
    if given.issuperset(field.name for field in fields(args) if field.init):
        return False
    return name in given or (name == "gradient_checkpointing" and "activation_checkpointing" in given)


def refuse_empty(trl_args: tuple, trl_kwargs: dict) -> None:
    """
    Look at the train dataset among a constructor's other arguments, of which it is the first.

    Raises:
        ValueError: If it has no row. TRL looks at its first one, or trains for no step without a word.
    """
    train_dataset = trl_args[0] if trl_args else trl_kwargs.get("train_dataset")
    if isinstance(train_dataset, Dataset) and not len(train_dataset):
        raise ValueError("the train dataset is empty")


def named_config(model: str, args: Any) -> PreTrainedConfig:
    """The config of a model that TRL is going to load by its name."""
    init = args.model_init_kwargs or {}
    return AutoConfig.from_pretrained(
        model,
        trust_remote_code=init.get("trust_remote_code", args.trust_remote_code),
        **{key: init[key] for key in ("revision", "token", "cache_dir", "subfolder", "gguf_file") if key in init},
    )


def reach_experts(stock: type, model: Any, args: Any, trl_args: tuple, trl_kwargs: dict) -> tuple[tuple, dict]:
    """
    A constructor's other arguments with a `peft_config` whose targets reach stacked experts; see `expand_targets`.

    Args:
        stock (`type`): TRL's trainer.
        model (`str`, `PreTrainedModel` or `PeftModel`): Its first argument.
        args: Its config.
        trl_args, trl_kwargs: What comes after the three arguments that ours names itself.
    """
    place = list(inspect.signature(stock).parameters).index("peft_config") - 3
    by_place = place < len(trl_args)
    peft_config = trl_args[place] if by_place else trl_kwargs.get("peft_config")
    if peft_config is None or hasattr(model, "peft_config"):
        return trl_args, trl_kwargs
    if isinstance(model, str):
        config = named_config(model, args)
        if getattr(config, "auto_map", None):
            return trl_args, trl_kwargs  # code from the Hub: TRL asks about it
        model = meta_model(config)
    expanded = expand_targets(model, peft_config)
    if by_place:
        return (*trl_args[:place], expanded, *trl_args[place + 1 :]), trl_kwargs
    return trl_args, trl_kwargs | {"peft_config": expanded}


def take_off_earlier_patches(model: str | PreTrainedModel) -> None:
    """Remove the patches of an earlier trainer, before TRL wraps this model's forward again."""
    if not isinstance(model, str) and (earlier := current_report(model)) is not None:
        earlier.remove()


def widen_adapters(model: torch.nn.Module, args: Any) -> PatchEntry | None:
    """
    Give the adapters of a quantised model fp32 weights where fp16 is trained in.

    TRL makes them bf16, whose gradients the loss scaler of fp16 does not take, and cards that need fp16 do not compute
    with. To be called before the optimizer is made.

    Returns:
        `PatchEntry`: What was done, or `None` if there was nothing to do.
    """
    if not args.fp16 or not getattr(base_model(model), "is_quantized", False):
        return None
    narrow = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    for parameter in narrow:
        parameter.data = parameter.data.float()
    if not narrow:
        return None
    return PatchEntry("adapters", (f"{len(narrow)} weights",), "fp32 for the loss scaler of fp16=True", undo=keep)


def keep(model: PreTrainedModel) -> None:
    """The `undo` of the trainer's own parts: they are not in the model, so there is nothing to take out of it."""
