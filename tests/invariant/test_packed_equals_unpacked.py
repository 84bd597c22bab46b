"""A packed row trains as its samples do in rows of their own."""

import functools

import pytest
from datasets import Dataset

import unsloth_trl
from tests.numerics import assert_updates_close, make_trainer, masked_rows, run_sft
from tests.tiny import ARCHITECTURES


TOLERANCE = 1e-4

ROWS = masked_rows(6, seed=3)
# All rows in one optimizer step, whatever the number of micro-batches, and a large update against its rounding.
# Adapters start at random: with B = 0 the first step would not move A.
ADAPTER = {"init_lora_weights": False}
ONE_STEP = {"gradient_accumulation_steps": 1, "rows": ROWS, "lora_kwargs": ADAPTER}


@functools.cache
def unpacked_run(model_type, lora):
    return run_sft(unsloth_trl, model_type, lora=lora, per_device_train_batch_size=6, **ONE_STEP)


def assert_same_step(run, expected):
    """One step each; the mean router loss of micro-batches is not the same number when they are cut otherwise."""
    assert len(run.logs) == len(expected.logs) == 1
    for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy"):
        assert run.logs[0][key] == pytest.approx(expected.logs[0][key], rel=TOLERANCE), key
    assert run.logs[0]["num_tokens"] == expected.logs[0]["num_tokens"] == sum(len(r["input_ids"]) for r in ROWS)
    assert_updates_close(run.updates, expected.updates, TOLERANCE)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_bfd_equals_unpacked(model_type, lora):
    run = run_sft(
        unsloth_trl, model_type, lora=lora, packing=True, max_length=24, per_device_train_batch_size=6, **ONE_STEP
    )
    lengths = run.trainer.train_dataset["seq_lengths"]
    assert len(lengths) < len(ROWS) and max(map(len, lengths)) > 1
    assert_same_step(run, unpacked_run(model_type, lora))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma4_text", "gpt_oss", "kimi_k25", "mixtral"])
def test_padding_free_equals_unpacked(model_type):
    run = run_sft(
        unsloth_trl,
        model_type,
        lora=True,
        padding_free=True,
        max_length=None,
        per_device_train_batch_size=6,
        **ONE_STEP,
    )
    assert run.trainer.patch_report["attention"].applied
    assert_same_step(run, unpacked_run(model_type, True))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_pad_to_multiple_of_equals_unpacked(model_type):
    """The closing segment changes neither the loss nor the router's; TRL counts its tokens, and so do we."""
    run = run_sft(
        unsloth_trl,
        model_type,
        lora=True,
        packing=True,
        max_length=24,
        pad_to_multiple_of=32,
        per_device_train_batch_size=6,
        **ONE_STEP,
    )
    batch = next(iter(run.trainer.get_train_dataloader()))
    layout = batch["packed_layout"]
    assert layout.num_padding > 0 and layout.num_tokens % 32 == 0
    expected = unpacked_run(model_type, True)
    for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy"):
        assert run.logs[0][key] == pytest.approx(expected.logs[0][key], rel=TOLERANCE), key
    if "aux_loss" in expected.logs[0]:
        assert run.logs[0]["aux_loss"] == pytest.approx(expected.logs[0]["aux_loss"], rel=TOLERANCE)
    assert_updates_close(run.updates, expected.updates, TOLERANCE)


def test_bfd_split_equals_its_fragments_unpacked():
    """Rows longer than max_length become fragments, and each fragment trains as a row of its own."""
    rows = masked_rows(5, seed=4, low=6, high=20)
    config = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16, "max_length": 8}
    config |= {"lora": True, "lora_kwargs": ADAPTER}
    run = run_sft(unsloth_trl, "smollm3", rows=rows, packing=True, packing_strategy="bfd_split", **config)
    fragments = []
    for row in run.trainer.train_dataset:
        start = 0
        for n in row["seq_lengths"]:
            fragments.append({key: row[key][start : start + n] for key in ("input_ids", "labels")})
            start += n
    assert len(fragments) > len(rows) and max(len(f["input_ids"]) for f in fragments) == 8
    assert sorted(t for f in fragments for t in f["input_ids"]) == sorted(t for r in rows for t in r["input_ids"])
    expected = run_sft(unsloth_trl, "smollm3", rows=fragments, **config)
    assert run.logs[0]["loss"] == pytest.approx(expected.logs[0]["loss"], rel=TOLERANCE)
    assert run.logs[0]["grad_norm"] == pytest.approx(expected.logs[0]["grad_norm"], rel=TOLERANCE)
    assert_updates_close(run.updates, expected.updates, TOLERANCE)


def test_order_of_samples_does_not_matter():
    """Which samples share a row is no part of the result."""
    runs = [
        run_sft(
            unsloth_trl,
            "mistral",
            rows=rows,
            lora=True,
            lora_kwargs=ADAPTER,
            packing=True,
            max_length=length,
            per_device_train_batch_size=6,
            gradient_accumulation_steps=1,
        )
        for rows, length in ((ROWS, 12), (ROWS[::-1], 30))
    ]
    assert_updates_close(runs[0].updates, runs[1].updates, TOLERANCE)


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama"])
def test_eval_packing_changes_no_eval_loss(model_type):
    losses, accuracies = {}, {}
    for eval_packing in (True, False):
        trainer = make_trainer(
            unsloth_trl,
            model_type,
            rows=ROWS,
            eval_rows=masked_rows(6, seed=9),
            packing=True,
            max_length=24,
            eval_packing=eval_packing,
            per_device_eval_batch_size=6,
        )
        assert ("seq_lengths" in trainer.eval_dataset.column_names) == eval_packing
        metrics = trainer.evaluate()
        losses[eval_packing], accuracies[eval_packing] = metrics["eval_loss"], metrics["eval_entropy"]
    assert losses[True] == pytest.approx(losses[False], abs=1e-5)
    assert accuracies[True] == pytest.approx(accuracies[False], rel=1e-5)


def test_packed_and_unpacked_batches_in_one_run():
    """Packed training with unpacked evaluation in between: a layout of one batch does not reach the next."""
    eval_rows = masked_rows(4, seed=9)
    config = {"rows": ROWS, "packing": True, "max_length": 24, "lora": True}
    quiet = run_sft(unsloth_trl, "llama", **config)
    trainer = make_trainer(
        unsloth_trl,
        "llama",
        eval_rows=eval_rows,
        eval_packing=False,
        eval_strategy="steps",
        eval_steps=1,
        **config,
    )
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == [step["loss"] for step in quiet.logs]
    plain = make_trainer(unsloth_trl, "llama", model=trainer.model, rows=ROWS, eval_rows=eval_rows)
    assert plain.evaluate()["eval_loss"] == pytest.approx(evaluated[-1], rel=1e-6)


def test_boundaries_reach_the_batch():
    """B04: the layout has the dataset's lengths, with unused columns removed and under PEFT."""
    for lora in (True, False):
        trainer = make_trainer(unsloth_trl, "llama", rows=ROWS, packing=True, max_length=24, lora=lora)
        assert trainer.args.remove_unused_columns
        expected = {tuple(n) for n in trainer.train_dataset["seq_lengths"]}
        seen = set()
        for batch in trainer.get_train_dataloader():
            lengths = batch["packed_layout"].seqlens
            assert sum(lengths) == batch["input_ids"].shape[1]
            while lengths:
                row = next(row for row in expected if lengths[: len(row)] == row)
                seen.add(row)
                lengths = lengths[len(row) :]
        assert seen == expected


def test_dataset_stays_what_it_was():
    rows = Dataset.from_list(ROWS)
    before = rows.to_list()
    make_trainer(unsloth_trl, "llama", rows=before, packing=True)
    assert rows.to_list() == before == ROWS
