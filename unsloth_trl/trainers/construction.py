"""What both trainers do around TRL's constructor."""

from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl.trainer.utils import get_config_model_id

from ..config import GRPOConfig
from ..patches.registry import base_model, current_report
from ..patches.report import PatchEntry


def default_name(model: str | PreTrainedModel, task: str) -> str:
    """The `output_dir` of a run without a config, as TRL names it."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-{task}"


def setting(args: Any, name: str) -> Any:
    """A field of this package's configs, its default where `args` is TRL's own config."""
    return getattr(args, name, getattr(GRPOConfig, name))


def refuse_empty(trl_args: tuple, trl_kwargs: dict) -> None:
    """
    Look at the train dataset among a constructor's other arguments, of which it is the first.

    Raises:
        ValueError: If it has no row. TRL looks at its first one, or trains for no step without a word.
    """
    train_dataset = trl_args[0] if trl_args else trl_kwargs.get("train_dataset")
    if isinstance(train_dataset, Dataset) and not len(train_dataset):
        raise ValueError("the train dataset is empty")


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
