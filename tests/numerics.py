"""Runs a trainer for a few steps on a tiny model and compares what came out: logs and weight updates."""

import copy
import random
import tempfile
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from datasets import Dataset

from tests.tiny import EXPERT_PARAMETERS, lora_config, tiny_model, tiny_rows, tiny_tokenizer


torch.set_num_threads(1)
datasets.disable_progress_bars()

LOGGED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss")

# One epoch of these rows is 7 micro-batches of 2 with a last window of one, 4 steps, with 14 packed rows (max_length
# 16) or 13 unpacked ones.
EPOCH = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 1,
    "max_length": 16,
}
STEPS = 4

# The update is a difference of rounded weights. With rates this high the rounding is far below the tolerances.
SGD = {"optim": "sgd", "learning_rate": 0.05}
SGD_LORA = {"optim": "sgd", "learning_rate": 0.2}
ADAMW = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-2}

# Arguments of `run_sft` for an adapter on the experts
EXPERTS = {"lora": True, "lora_kwargs": {"target_modules": ["o_proj"], "target_parameters": EXPERT_PARAMETERS}}

# Every step logged, nothing clipped, nothing written.
CPU = {
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "lr_scheduler_type": "constant",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "max_grad_norm": 1e9,  # the norm is logged, and no clipping hides a wrong scale
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}

# Rows of text do not reach the vision half of a wrapper.
_VISION = ("vision_tower", "mm_projector")


class Run(NamedTuple):
    """What `run_sft` returns: the trainer, its training logs by step, and w_after - w_before by tensor."""

    trainer: Any
    logs: list[dict[str, float]]
    updates: dict[str, torch.Tensor]


def masked_rows(n: int, seed: int = 1, low: int = 3, high: int = 12) -> list[dict[str, list[int]]]:
    """Rows whose prompt, a random part of at least one token, carries no label; the completion has two or more."""
    rng = random.Random(seed)
    rows = tiny_rows(n, seed, low, high)
    for row in rows:
        prompt = rng.randint(1, len(row["input_ids"]) - 2)
        row["labels"] = [-100] * prompt + row["input_ids"][prompt:]
    return rows


def epoch_rows(packing: bool) -> list[dict[str, list[int]]]:
    """Rows of which one epoch under `EPOCH` is `STEPS` steps, the last with one micro-batch."""
    return masked_rows(25 if packing else 13)


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def updates_since(before: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    after = snapshot(model)
    assert after.keys() == before.keys()
    return {name: after[name] - before[name] for name in before}


def make_trainer(
    library: Any,
    model_type: str | None,
    *,
    model: torch.nn.Module | None = None,
    rows: list[dict] | None = None,
    eval_rows: list[dict] | None = None,
    lora: bool = False,
    lora_kwargs: dict | None = None,
    trainer_kwargs: dict | None = None,
    **config: Any,
):
    """
    An `SFTTrainer` on the CPU in fp32, the same model, rows and order for the same arguments.

    Args:
        library: A module with `SFTTrainer` and `SFTConfig`: `trl` or `unsloth_trl`.
        model_type (`str`, *optional*): One of `tests.tiny.ARCHITECTURES`.
        model (*optional*): A model to use instead of a new one; with `lora`, `model_type` is still needed.
        rows, eval_rows (*optional*): Tokenised rows; by default those of `epoch_rows`.
        lora (`bool`): Train an adapter, else all weights.
        lora_kwargs, trainer_kwargs, config: For `LoraConfig`, the trainer and its config.
    """
    settings = {
        **CPU,
        **EPOCH,
        **(SGD_LORA if lora else SGD),
        **config,
    }
    settings.setdefault("output_dir", tempfile.mkdtemp(prefix="unsloth_trl_test_"))
    if rows is None:
        rows = epoch_rows(settings.get("packing", False))
    torch.manual_seed(0)
    return library.SFTTrainer(
        tiny_model(model_type) if model is None else model,
        library.SFTConfig(**settings),
        train_dataset=Dataset.from_list(copy.deepcopy(rows)),
        eval_dataset=None if eval_rows is None else Dataset.from_list(copy.deepcopy(eval_rows)),
        processing_class=tiny_tokenizer(),
        peft_config=lora_config(model_type, **(lora_kwargs or {})) if lora else None,
        **(trainer_kwargs or {}),
    )


def training_logs(trainer) -> list[dict[str, float]]:
    """The logged loss and metrics of each step."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: float(entry[key]) for key in LOGGED if key in entry} for entry in history]


def run_sft(library: Any, model_type: str | None, **kwargs: Any) -> Run:
    """Train; arguments as in `make_trainer`."""
    trainer = make_trainer(library, model_type, **kwargs)
    before = snapshot(trainer.model)
    trainer.train()
    return Run(trainer, training_logs(trainer), updates_since(before, trainer.model))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`, which must not be zero."""
    norm = expected.double().norm()
    assert norm > 0, "the reference is zero: nothing is compared"
    return ((actual.double() - expected.double()).norm() / norm).item()


def update_errors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """
    `relative_error` per tensor. A tensor that the reference leaves alone (an expert without tokens) must be left
    alone; the reference must have moved nine text tensors in ten.
    """
    assert actual.keys() == expected.keys()
    text = [name for name in expected if not any(part in name for part in _VISION)]
    moved = [name for name, update in expected.items() if update.norm() > 0]
    assert len(moved) >= 0.9 * len(text) > 0, f"not updated: {sorted(set(text) - set(moved))[:3]}"
    for name in expected.keys() - set(moved):
        assert not actual[name].any(), f"{name} was updated, and not in the reference"
    return {name: relative_error(actual[name], expected[name]) for name in moved}


def assert_updates_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tol: float) -> None:
    errors = update_errors(actual, expected)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tol, f"update of {worst}: relative error {errors[worst]:.2e} > {tol:.0e}"


def assert_logs_close(actual: list[dict[str, float]], expected: list[dict[str, float]], tol: float) -> None:
    """Same number of steps, the same keys, each value within `tol` relative (and absolute below 1e-2)."""
    assert len(actual) == len(expected) > 0
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.keys() == e.keys(), f"step {step}: {sorted(a)} are logged, expected {sorted(e)}"
        for key in e:
            assert a[key] == pytest.approx(e[key], rel=tol, abs=1e-2 * tol), f"{key} of step {step}"


def assert_runs_close(actual: Run, expected: Run, tol: float) -> None:
    assert_logs_close(actual.logs, expected.logs, tol)
    assert_updates_close(actual.updates, expected.updates, tol)
