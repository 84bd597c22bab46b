"""GGUF files as a source: they become ordinary models, which train, save, and are found again by their adapters."""

import pytest
import torch
import transformers
from packaging.version import Version

from tests.hub.gguf_models import byte_level_tokenizer, model_folder, split_steps
from tests.models.test_loading import DENSE, ON_A_CPU
from tests.models.test_loading_adapters import lora, train
from tests.numerics import relative_error
from tests.tiny import tiny_model
from unsloth_trl import FastLanguageModel


pytest.importorskip("gguf", reason="the test extra has it")
IDS = torch.randint(6, 500, (2, 9), generator=torch.Generator().manual_seed(0))
# transformers 5.17 gives every qwen3 file Qwen's own split and end of text, whatever the file has
READS_SPLITS = Version(transformers.__version__) >= Version("5.24")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """For each architecture the original model, its tokenizer, and its GGUF file."""
    from unsloth_trl.hub.gguf import export_gguf

    models = {}
    for model_type in ("llama", "qwen3"):
        folder = tmp_path_factory.mktemp(model_type)
        tokenizer = byte_level_tokenizer(split_steps(None))
        overrides = {}
        if model_type == "qwen3":  # 128 is what transformers takes for the size of its heads, whatever the file says
            overrides = {"use_sliding_window": False, "tie_word_embeddings": True, "head_dim": 128}
        model = model_folder(folder, model_type, tokenizer, torch.float32, **overrides)
        (path,) = export_gguf(folder, folder / "gguf", "f32")
        models[model_type] = model, tokenizer, path
    return models


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("by", ["path", "folder"])
def test_the_model_is_the_one_in_the_file(made, model_type, by):
    expected, own, path = made[model_type]
    source = {"model_name": str(path)} if by == "path" else {"model_name": str(path.parent), "gguf_file": path.name}
    model, tokenizer = FastLanguageModel.from_pretrained(**source, **DENSE)
    assert type(model) is type(expected) and model.dtype == torch.float32 and not model.training
    assert relative_error(logits(model), logits(expected.eval())) < 1e-5
    assert not getattr(model, "is_quantized", False) and not hasattr(model.config, "quantization_config")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == expected.config.tie_word_embeddings and not any(p.is_meta for p in model.parameters())
    if READS_SPLITS or model_type == "llama":
        assert tokenizer("Hello, it's 42%")["input_ids"] == own("Hello, it's 42%")["input_ids"]
    assert model.name_or_path == str(path) and model.max_seq_length == 64


def test_it_trains_and_its_adapter_finds_it_again(made, tmp_path):
    _, _, path = made["llama"]
    model, tokenizer = FastLanguageModel.from_pretrained(str(path), **DENSE)
    model = FastLanguageModel.get_peft_model(model, r=4)
    before = {name: p.clone() for name, p in lora(model).items() if "lora_B" in name}
    trainer = train(model, tokenizer, tmp_path / "out")
    assert all(torch.isfinite(torch.tensor([e["loss"]])) for e in trainer.state.log_history if "loss" in e)
    assert not any(torch.equal(lora(model)[name], before[name]) for name in before)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), **DENSE)
    assert torch.allclose(logits(again), logits(model.eval()), atol=1e-5)


def test_all_weights_train_and_are_saved(made, tmp_path):
    expected, _, path = made["qwen3" if READS_SPLITS else "llama"]
    model, tokenizer = FastLanguageModel.from_pretrained(str(path), full_finetuning=True, **DENSE)
    before = model.get_input_embeddings().weight.detach().clone()
    train(model, tokenizer, tmp_path / "out")
    assert not torch.equal(model.get_input_embeddings().weight, before)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "model"), **DENSE)
    assert torch.allclose(logits(again), logits(model.eval()), atol=1e-5)
    assert relative_error(logits(again), logits(expected.eval())) > 1e-3


@pytest.mark.filterwarnings(ON_A_CPU)
def test_in_4_bits(made):
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    expected, _, path = made["llama"]
    with pytest.warns(UserWarning, match="dequantised and then quantised to 4 bits, which rounds them a second time"):
        model, _ = FastLanguageModel.from_pretrained(str(path), max_seq_length=64)
    assert [type(m).__name__ for m in model.modules()].count("Linear4bit") == 14
    assert model.name_or_path == model.config._name_or_path == str(path)
    assert 1e-3 < relative_error(logits(model), logits(expected.eval())) < 0.5
    with pytest.raises(ValueError, match="quantization_config is for checkpoints; a GGUF file takes load_in_4bit"):
        FastLanguageModel.from_pretrained(str(path), quantization_config={"load_in_4bit": True}, max_seq_length=64)


def test_16_bits(made):
    _, _, path = made["llama"]
    model, _ = FastLanguageModel.from_pretrained(str(path), dtype=torch.bfloat16, **DENSE)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    # a cast of the whole model would round the frequencies of RoPE
    assert torch.equal(model.model.rotary_emb.inv_freq, tiny_model("llama").model.rotary_emb.inv_freq)


def test_without_the_package(made, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ImportError, match=r"GGUF files are read with the package gguf: pip install 'unsloth_trl\[gguf\]'"
    ):
        FastLanguageModel.from_pretrained(str(made["llama"][2]), **DENSE)
