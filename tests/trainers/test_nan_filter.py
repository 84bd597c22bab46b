"""`logging_nan_inf_filter` without a host synchronisation: what is logged, and who sees which value of the flag."""

import numpy as np
import pytest
import torch
import trl
from transformers import TrainerCallback

import unsloth_trl
from tests.trainers import runs


def poisoned(cls, value, at, mode="train"):
    """A trainer class whose loss is `value` in the given calls of a mode, with the gradients as they were."""

    class Poisoned(cls):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            if (mode == "train") == self.model.training:
                self.calls += 1
                if self.calls in at:
                    return result + torch.tensor(value)
            return result

    return Poisoned


@pytest.mark.parametrize(
    ("flag", "value", "at", "logging_steps"),
    [
        (True, "nan", (3,), 1),
        (True, "nan", (3,), 3),
        (True, "nan", (1,), 3),
        (True, "inf", (4,), 3),
        (True, "-inf", (5, 6, 7), 3),
        (False, "nan", (3,), 3),
        (False, "inf", (4,), 1),
    ],
    ids=str,
)
def test_logged_loss_with_a_bad_micro_step(tmp_path, flag, value, at, logging_steps):
    logs = []
    for cls in (unsloth_trl.SFTTrainer, trl.SFTTrainer):
        trainer = runs.trainer(
            tmp_path,
            poisoned(cls, float(value), at),
            logging_nan_inf_filter=flag,
            logging_steps=logging_steps,
            max_steps=6,
        )
        trainer.train()
        assert trainer.calls == 12
        logs.append(runs.log_of(trainer))
    runs.assert_logs_equal(*logs)
    finite = [np.isfinite(entry["loss"]) for entry in logs[0] if "loss" in entry]
    assert all(finite) is flag


@pytest.mark.parametrize("flag", [True, False])
def test_eval_loss_with_a_bad_batch(tmp_path, flag):
    results = []
    for cls in (unsloth_trl.SFTTrainer, trl.SFTTrainer):
        trainer = runs.trainer(
            tmp_path,
            poisoned(cls, float("nan"), (2,), mode="eval"),
            init={"eval_dataset": runs.dataset(6, seed=5)},
            logging_nan_inf_filter=flag,
            eval_strategy="steps",
            eval_steps=2,
            max_steps=2,
        )
        trainer.train()
        results.append(runs.log_of(trainer))
    runs.assert_logs_equal(*results)
    (entry,) = [entry for entry in results[0] if "eval_loss" in entry]
    assert np.isfinite(entry["eval_loss"]) == flag


EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class FlagWatch(TrainerCallback):
    def __init__(self):
        self.seen = {}


def _watch(name):
    def event(self, args, state, control, **kwargs):
        self.seen.setdefault(name, set()).add(args.logging_nan_inf_filter)

    return event


for _name in EVENTS:
    setattr(FlagWatch, _name, _watch(_name))


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("when", ["constructor", "add_callback"])
def test_others_see_the_users_nan_filter(tmp_path, flag, when):
    """Callbacks (before and after ours), evaluation, training_args.bin and the args object afterwards."""
    watch = FlagWatch()
    trainer = runs.trainer(
        tmp_path,
        init={
            "eval_dataset": runs.dataset(4, seed=5),
            "callbacks": [watch] if when == "constructor" else None,
        },
        logging_nan_inf_filter=flag,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=2,
    )
    if when == "add_callback":
        trainer.add_callback(watch)
    trainer.train()
    assert {"on_step_end", "on_substep_end", "on_log", "on_evaluate", "on_save", "on_prediction_step"} <= set(
        watch.seen
    )
    assert watch.seen == dict.fromkeys(watch.seen, {flag})
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter is flag
    assert trainer.args.logging_nan_inf_filter is flag


def test_the_nan_filter_is_the_users_after_an_error(tmp_path):
    class Broken(unsloth_trl.SFTTrainer):
        def training_step(self, *args, **kwargs):
            super().training_step(*args, **kwargs)
            raise RuntimeError("broken")

    trainer = runs.trainer(tmp_path, Broken)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert trainer.args.logging_nan_inf_filter is True
