"""The planner on a real card: what it keeps fits, and a real out-of-memory error ends in a lower setting."""

import gc
import tempfile

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import unsloth_trl
from tests.tiny import lora_config, tiny_tokenizer


pytestmark = pytest.mark.gpu

LENGTH, LAYERS = 2048, 8


def make(gib: float, **config):
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    ).to("cuda", torch.bfloat16)
    rows = [{"input_ids": [3 + (i * 7 + j) % 60 for j in range(LENGTH)]} for i in range(64)]
    return unsloth_trl.SFTTrainer(
        model,
        unsloth_trl.SFTConfig(
            tempfile.mkdtemp(),
            max_length=LENGTH,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            packing=True,
            **config,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        peft_config=lora_config("llama", r=8),
    )


@pytest.fixture(autouse=True)
def whole_card():
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_auto_keeps_what_fits():
    roomy = make(100)
    roomy.train()
    assert roomy._plan.actions == ["keep"] * LAYERS
    measured = roomy._plan.measured
    # between the checkpointed peak and that of keeping all layers
    room = measured.peak + 3 * measured.kept + 600 * 2**20
    tight = make(room / 2**30)
    tight.train()
    kept = tight._plan.notch.keep
    assert 1 <= kept < LAYERS and not tight._plan.fixed, tight._plan.changes
    assert losses(tight) == pytest.approx(losses(roomy), rel=1e-3)


def test_out_of_memory_steps_down():
    roomy = make(100, checkpoint_policy="keep")
    torch.cuda.reset_peak_memory_stats()
    roomy.train()
    keep_peak = torch.cuda.max_memory_allocated()
    expected = losses(roomy)
    del roomy
    trainer = make(0.7 * keep_peak / 2**30, checkpoint_policy="keep")
    trainer.train()
    assert any("out of memory" in line for line in trainer._plan.changes)
    assert 0 <= trainer._plan.notch.keep < LAYERS
    assert losses(trainer) == pytest.approx(expected, rel=1e-3)
