"""`FastLanguageModel` on a GPU: the calls of a notebook as they stand there, memory while loading, fp16."""

import gc

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from tests.data.chat_tokenizers import ANSWERS, QUESTIONS, chat_tokenizer
from tests.tiny import tiny_model
from unsloth_trl import FastLanguageModel, SFTConfig, SFTTrainer, train_on_responses_only


pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    path = tmp_path_factory.mktemp("llama")
    tokenizer = chat_tokenizer("llama3")
    tiny_model("llama", vocab_size=512, eos_token_id=tokenizer.eos_token_id).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def conversations():
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in zip(QUESTIONS, ANSWERS, strict=True)
        ]
        * 8
    )


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_a_notebook(folder, dtype, packing, tmp_path):
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=128, dtype=dtype, load_in_4bit=True)
    assert model.device == torch.device("cuda", torch.cuda.current_device())
    assert model.dtype == (dtype or torch.bfloat16)
    model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, use_gradient_checkpointing="unsloth")
    args = SFTConfig(
        str(tmp_path),
        packing=packing,
        max_steps=12,
        learning_rate=2e-2,
        fp16=dtype == torch.float16,
        bf16=dtype is None,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    trainer = SFTTrainer(model, args, train_dataset=conversations(), processing_class=tokenizer)
    trainer = train_on_responses_only(trainer)
    assert trainer.args.max_length == 128 and trainer.args.checkpoint_policy == "offload"
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12 and torch.isfinite(torch.tensor(losses)).all() and losses[-1] < 0.8 * losses[0]
    trained = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    assert trained == {torch.float32 if dtype == torch.float16 else torch.bfloat16}
    FastLanguageModel.for_inference(model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    with torch.autocast("cuda", model.dtype):
        generated = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert generated.shape[1] > prompt["input_ids"].shape[1]


def test_the_adapter_s_seed_leaves_the_card_s_random_state(folder):
    model, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=128, load_in_4bit=False)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = FastLanguageModel.get_peft_model(model, r=4)
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], torch.cuda.get_rng_state())
    torch.manual_seed(5)
    again, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=128, load_in_4bit=False)
    again = FastLanguageModel.get_peft_model(again, r=4)
    pairs = zip(first.named_parameters(), again.named_parameters(), strict=True)
    assert all(torch.equal(a, b) for (name, a), (_, b) in pairs if "lora_A" in name)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_there_is_no_peak_of_16_bit_weights(model_type, tmp_path):
    """A checkpoint of several shards, quantised weight by weight."""
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    shape = {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16}
    if model_type == "llama":
        shape |= {"intermediate_size": 8192}
    else:
        shape |= {"intermediate_size": 1024, "moe_intermediate_size": 512, "num_experts": 16, "head_dim": 128}
    config = AutoConfig.for_model(model_type, vocab_size=512, bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="200MB")
    full = sum(p.numel() * p.element_size() for p in model.parameters())
    chat_tokenizer("llama3").save_pretrained(tmp_path)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path), max_seq_length=128)
    peak = torch.cuda.max_memory_allocated() - before
    layer = full / 8
    print(f"{model_type}: {full / 2**20:.0f} MiB in 16 bits, peak {peak / 2**20:.0f} MiB while loading")
    assert model.dtype == torch.bfloat16 and peak < 0.3 * full + 2 * layer
