"""Short runs of our trainer and of TRL's with the same settings, on the CPU in fp32."""

import math

import pytest
import torch
import trl
from datasets import Dataset

import unsloth_trl
from tests.tiny import tiny_model, tiny_rows, tiny_tokenizer


TIMINGS = ("train_runtime", "runtime", "samples_per_second", "steps_per_second", "total_flos", "preparation_time")


def config(output_dir, cls=unsloth_trl.SFTConfig, **fields):
    defaults = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": 4,
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
    }
    return cls(**(defaults | fields))


def dataset(n=24, seed=0, vocab=16, **kwargs):
    return Dataset.from_list(tiny_rows(n, seed, vocab=vocab, **kwargs))


def trainer(output_dir, cls=unsloth_trl.SFTTrainer, model=None, data=None, init=None, **fields):
    """A trainer; `fields` go to its config, `init` to the trainer itself."""
    config_cls = unsloth_trl.SFTConfig if issubclass(cls, unsloth_trl.SFTTrainer) else trl.SFTConfig
    return cls(
        tiny_model("llama") if model is None else model,
        config(output_dir, config_cls, **fields),
        train_dataset=dataset() if data is None else data,
        **({"processing_class": tiny_tokenizer()} | (init or {})),
    )


def without_timings(metrics):
    return {key: value for key, value in metrics.items() if not key.endswith(TIMINGS)}


def log_of(trained):
    """What was logged, without timings."""
    return [without_timings(entry) for entry in trained.state.log_history]


def assert_logs_equal(ours, theirs, rel=2e-4, **kwargs):
    """The same entries with the same names and values, in the same order."""
    assert [sorted(entry) for entry in ours] == [sorted(entry) for entry in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            if isinstance(value, float) and math.isnan(value):
                assert math.isnan(mine[key]), (key, mine, other)
            else:
                assert mine[key] == pytest.approx(value, rel=rel, abs=1e-7, **kwargs), (key, mine, other)


def updates(model, before):
    """How much each trained tensor moved."""
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters() if name in before}


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_updates_equal(ours, theirs, tolerance=1e-3):
    """
    Per tensor; what the reference leaves alone is left alone, and it moves nearly everything outside vision towers. An
    update is a difference of rounded weights, so the tolerance is above fp32's own.
    """
    assert ours.keys() == theirs.keys()
    text = [name for name in theirs if "vision" not in name]
    moved = [name for name, update in theirs.items() if update.norm() > 0]
    assert len(moved) >= 0.9 * len(text) > 0, f"not trained: {sorted(set(text) - set(moved))}"
    for name, update in theirs.items():
        if name not in moved:
            assert not ours[name].any(), f"{name} was trained, and not by TRL"
            continue
        error = (ours[name] - update).norm() / update.norm()
        assert error < tolerance, f"{name}: relative difference {error:.1e}"


def train_both(tmp_path, model=None, data=None, init=None, before_training=None, **fields):
    """Train ours and TRL's from the same weights; both trainers, after asserting equal logs and updates."""
    pair, moved = [], []
    for name, cls in (("ours", unsloth_trl.SFTTrainer), ("trl", trl.SFTTrainer)):
        torch.manual_seed(0)
        built = trainer(
            tmp_path / name,
            cls,
            model=None if model is None else model(),
            data=None if data is None else data(),
            init=None if init is None else init(),
            **fields,
        )
        if before_training:
            before_training(built)
        start = snapshot(built.model)
        built.train()
        pair.append(built)
        moved.append(updates(built.model, start))
    ours, theirs = pair
    assert_logs_equal(log_of(ours), log_of(theirs))
    assert_updates_equal(*moved)
    return ours, theirs
