"""What the trainers take over from a model of `FastLanguageModel`, and what their own config says against it."""

import copy
import dataclasses
import pickle

import pytest
import trl
from datasets import Dataset

import unsloth_trl
from tests.tiny import tiny_model, tiny_rows, tiny_tokenizer
from tests.trainers import runs
from unsloth_trl import FastLanguageModel, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


def told(max_seq_length=48, use_gradient_checkpointing="auto"):
    model = FastLanguageModel.get_peft_model(
        tiny_model("llama"),
        r=4,
        max_seq_length=max_seq_length,
        use_gradient_checkpointing=use_gradient_checkpointing,
    )
    return model


def sft(model, output_dir, library=unsloth_trl, **fields):
    settings = {"output_dir": str(output_dir), "use_cpu": True, "bf16": False, "report_to": "none"} | fields
    return SFTTrainer(
        model,
        library.SFTConfig(**settings),
        train_dataset=Dataset.from_list(tiny_rows(8, 0, 40, 60)),
        processing_class=tiny_tokenizer(),
    )


@pytest.mark.parametrize("library", [unsloth_trl, trl], ids=["ours", "trl"])
def test_the_longest_sample(tmp_path, library):
    trainer = sft(told(), tmp_path, library)
    assert trainer.args.max_length == 48
    assert max(len(row["input_ids"]) for row in trainer.train_dataset) == 48
    trainer = sft(told(), tmp_path, library, max_length=50)
    assert trainer.args.max_length == 50 and max(len(row["input_ids"]) for row in trainer.train_dataset) == 50


def test_a_default_that_was_given_is_kept(tmp_path):
    trainer = sft(told(), tmp_path, max_length=1024, checkpoint_policy="auto")
    assert trainer.args.max_length == 1024
    trainer = sft(told(use_gradient_checkpointing="unsloth"), tmp_path, checkpoint_policy="auto")
    assert trainer.args.checkpoint_policy == "auto"
    trainer = sft(told(use_gradient_checkpointing=False), tmp_path, gradient_checkpointing=True)
    assert trainer.args.gradient_checkpointing
    for copied in (copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))):
        assert "max_length" in copied(SFTConfig(str(tmp_path), max_length=1024, bf16=False))._given


@pytest.mark.parametrize(
    ("choice", "policy", "checkpoints"),
    [("auto", "auto", True), (True, "recompute", True), ("unsloth", "offload", True), (False, "auto", False)],
    ids=str,
)
def test_gradient_checkpointing(tmp_path, choice, policy, checkpoints):
    config = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, save_strategy="no")
    model = told(use_gradient_checkpointing=choice)
    trainer = SFTTrainer(model, config, train_dataset=runs.dataset(), processing_class=tiny_tokenizer())
    assert (trainer.args.checkpoint_policy, trainer.args.gradient_checkpointing) == (policy, checkpoints)
    assert trainer.patch_report["checkpointing"].applied == checkpoints
    assert (config.checkpoint_policy, config.gradient_checkpointing) == ("auto", True), "the user's own stays"
    trainer.train()
    assert trainer.model.get_base_model().is_gradient_checkpointing == checkpoints
    plan = str(trainer.patch_report)
    assert ("host memory" in plan) == (choice == "unsloth")


def test_a_config_that_a_parser_made(tmp_path):
    """It passes all fields, of which the user gave two."""
    options = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--report_to", "none"]
    for more, expected in (([], (48, "offload")), (["--max_length", "50"], (50, "offload"))):
        (config,) = trl.TrlParser((SFTConfig,)).parse_args_and_config([*options, *more])
        model = told(use_gradient_checkpointing="unsloth")
        trainer = SFTTrainer(model, config, train_dataset=runs.dataset(), processing_class=tiny_tokenizer())
        assert (trainer.args.max_length, trainer.args.checkpoint_policy) == expected
    config = dataclasses.replace(SFTConfig(**options_of(tmp_path)), seed=1)
    assert SFTTrainer(told(), config, None, runs.dataset(), processing_class=tiny_tokenizer()).args.max_length == 48


def test_a_field_that_was_set_afterwards(tmp_path):
    config = SFTConfig(**options_of(tmp_path))
    config.max_length = 50
    trainer = SFTTrainer(told(), config, None, runs.dataset(), processing_class=tiny_tokenizer())
    assert trainer.args.max_length == 50


def options_of(output_dir):
    return {"output_dir": str(output_dir), "use_cpu": True, "bf16": False, "report_to": "none"}


def test_grpo_too(tmp_path):
    config = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", num_generations=2, per_device_train_batch_size=2
    )
    trainer = GRPOTrainer(
        told(use_gradient_checkpointing=False),
        lambda completions, **_: [0.0] * len(completions),
        config,
        train_dataset=Dataset.from_list([{"prompt": "w10 w11"}] * 4),
        processing_class=tiny_tokenizer(),
    )
    assert not trainer.args.gradient_checkpointing and not trainer.patch_report["checkpointing"].applied


def test_models_that_were_told_nothing(tmp_path):
    config = runs.config(tmp_path)
    trainer = SFTTrainer(tiny_model("llama"), config, train_dataset=runs.dataset(), processing_class=tiny_tokenizer())
    assert trainer.args is config
