"""Metrics and losses of our `SFTTrainer` beside TRL's: the same numbers, whenever they are logged."""

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback

import unsloth_trl
from tests.tiny import tiny_model
from tests.trainers import runs


TRAIN_METRICS = {
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
    "epoch",
    "step",
}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("logging_steps", [1, 3])
def test_metrics_are_the_ones_of_trl(tmp_path, logging_steps, packing):
    ours, _ = runs.train_both(tmp_path, logging_steps=logging_steps, max_steps=6, packing=packing)
    log = runs.log_of(ours)
    assert [entry["step"] for entry in log[:-1]] == list(range(logging_steps, 7, logging_steps))
    assert all(set(entry) == TRAIN_METRICS for entry in log[:-1])
    assert all(entry["entropy"] > 1 for entry in log[:-1])
    assert sum(entry["mean_token_accuracy"] for entry in log[:-1]) > 0
    tokens = [entry["num_tokens"] for entry in log[:-1]]
    assert tokens == sorted(set(tokens)), "num_tokens grows with every log line"


# TRL cannot be the reference for packed gpt_oss: transformers builds its masks without looking at the positions, and
# its samples see each other (5.24)
@pytest.mark.parametrize(
    ("model_type", "packing"),
    [("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", False), ("mixtral", True), ("gpt_oss", False)],
    ids=lambda value: value if isinstance(value, str) else "packed" if value else "padded",
)
def test_router_loss_is_logged_and_trained(tmp_path, model_type, packing):
    ours, theirs = runs.train_both(
        tmp_path,
        model=lambda: tiny_model(model_type),
        router_aux_loss_coef=0.5,
        packing=packing,
        max_steps=2,
    )
    assert ours.aux_loss_enabled and theirs.aux_loss_enabled
    log = runs.log_of(ours)
    assert set(log[0]) == TRAIN_METRICS | {"aux_loss"}
    assert log[0]["aux_loss"] > 0.5


def test_router_loss_is_off_at_zero(tmp_path):
    ours, _ = runs.train_both(tmp_path, model=lambda: tiny_model("mixtral"), router_aux_loss_coef=0.0, max_steps=2)
    assert set(runs.log_of(ours)[0]) == TRAIN_METRICS


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("named", [False, True], ids=["one-set", "two-sets"])
def test_evaluation_between_log_lines(tmp_path, packing, named):
    def init():
        sets = {"a": runs.dataset(7, seed=5), "b": runs.dataset(4, seed=6)}
        return {"eval_dataset": sets if named else sets["a"]}

    ours, _ = runs.train_both(
        tmp_path, init=init, packing=packing, eval_strategy="steps", eval_steps=2, logging_steps=3, max_steps=6
    )
    log = runs.log_of(ours)
    trained = [entry for entry in log if "loss" in entry]
    evaluated = [entry for entry in log if any(key.startswith("eval_") for key in entry)]
    assert [entry["step"] for entry in trained] == [3, 6]
    assert [entry["step"] for entry in evaluated] == ([2, 2, 4, 4, 6, 6] if named else [2, 4, 6])
    assert all(set(entry) == TRAIN_METRICS for entry in trained)
    prefixes = ["eval_a_", "eval_b_"] * 3 if named else ["eval_"] * 3
    for entry, prefix in zip(evaluated, prefixes, strict=True):
        assert entry[f"{prefix}loss"] > 0
        assert {"eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= set(entry)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_evaluate_before_training_and_of_another_set(tmp_path, packing):
    results = []
    for cls in (unsloth_trl.SFTTrainer, trl.SFTTrainer):
        trainer = runs.trainer(tmp_path, cls, init={"eval_dataset": runs.dataset(5, seed=5)}, packing=packing)
        results.append([trainer.evaluate(), trainer.evaluate(runs.dataset(3, seed=6), metric_key_prefix="test")])
    runs.assert_logs_equal(*[[runs.without_timings(r) for r in pair] for pair in results])
    assert results[0][1]["test_loss"] != results[0][0]["eval_loss"]


def test_a_bare_log_call_between_steps_loses_nothing(tmp_path):
    class Chatty(TrainerCallback):
        trainer = None

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % 2:
                self.trainer.log({"note": 1.0})

    def attach(trainer):
        chatty = Chatty()
        chatty.trainer = trainer
        trainer.add_callback(chatty)

    ours, _ = runs.train_both(tmp_path, before_training=attach, logging_steps=3, max_steps=6)
    assert sum("note" in entry for entry in ours.state.log_history) == 3


# -- what other code asks of compute_loss and prediction_step


def half_predicted(model, n):
    """Rows whose every second token is the one that `model` finds likeliest."""
    rows = []
    for ids in runs.dataset(n, seed=5)["input_ids"]:
        for i in range(1, len(ids), 2):
            with torch.no_grad():
                ids[i] = model(input_ids=torch.tensor([ids[:i]]), use_cache=False).logits[0, -1].argmax().item()
        rows.append({"input_ids": ids})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("preprocess", [False, True], ids=["logits", "argmax"])
def test_compute_metrics(tmp_path, packing, preprocess):
    data = half_predicted(tiny_model("llama").eval(), 6)
    shapes, results = [], []

    def compute_metrics(prediction):
        logits, labels = prediction
        shapes.append(np.shape(logits))
        hits = logits if preprocess else logits.argmax(-1)
        trained = labels[:, 1:] != -100
        return {"accuracy": float((hits[:, :-1] == labels[:, 1:])[trained].mean())}

    def take_argmax(logits, labels):
        return logits.argmax(-1)

    for cls in (unsloth_trl.SFTTrainer, trl.SFTTrainer):
        trainer = runs.trainer(
            tmp_path,
            cls,
            init={
                "eval_dataset": data,
                "compute_metrics": compute_metrics,
                "preprocess_logits_for_metrics": take_argmax if preprocess else None,
            },
            packing=packing,
            per_device_eval_batch_size=8,
        )
        results.append(runs.without_timings(trainer.evaluate()))
    runs.assert_logs_equal(results[:1], results[1:])
    assert shapes[0] == shapes[1] and len(shapes[0]) == (2 if preprocess else 3)
    assert 0.4 < results[0]["eval_accuracy"] < 0.9
    # one batch, so that both are means over the same labels
    assert results[0]["eval_mean_token_accuracy"] == pytest.approx(results[0]["eval_accuracy"])


def summed_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return 0.5 * loss / num_items_in_batch


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("fields", "init", "own_path"),
    [
        ({"label_smoothing_factor": 0.2}, {}, False),
        ({}, {"compute_loss_func": summed_loss}, False),
        ({"loss_type": "dft"}, {}, True),
        ({"loss_type": "dft", "label_smoothing_factor": 0.2}, {}, True),
    ],
    ids=["smoothing", "compute_loss_func", "dft", "dft-smoothing"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_other_losses(tmp_path, fields, init, own_path, packing):
    ours, _ = runs.train_both(tmp_path, init=lambda: init, packing=packing, max_steps=3, **fields)
    assert ours.patch_report["metrics"].applied is own_path
    plain, _ = runs.train_both(tmp_path, packing=packing, max_steps=1)
    assert runs.log_of(ours)[0]["loss"] != pytest.approx(runs.log_of(plain)[0]["loss"], rel=1e-3)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("num_items", [None, 37])
def test_return_outputs(tmp_path, packing, num_items):
    results = []
    for cls in (unsloth_trl.SFTTrainer, trl.SFTTrainer):
        trainer = runs.trainer(tmp_path, cls, packing=packing)
        batch = next(iter(trainer.get_train_dataloader()))
        for return_outputs in (True, False):
            trainer.current_gradient_accumulation_steps = 1
            inputs = trainer._prepare_inputs(dict(batch))
            items = None if num_items is None else torch.tensor(num_items)
            results.append(
                trainer.compute_loss(trainer.model, inputs, return_outputs=return_outputs, num_items_in_batch=items)
            )
    (our_loss, our_outputs), our_plain, (their_loss, their_outputs), their_plain = results
    assert torch.allclose(our_loss, their_loss, rtol=1e-5) and torch.allclose(our_plain, their_plain, rtol=1e-5)
    assert torch.allclose(our_loss, our_plain, rtol=1e-5) and our_loss > 0
    assert our_outputs.logits.shape == their_outputs.logits.shape
    assert torch.allclose(our_outputs.logits, their_outputs.logits, atol=1e-4)


# -- collators of others
