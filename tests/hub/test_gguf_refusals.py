"""What cannot be exported says so before anything is written, and a failure leaves the folder as it was."""

import errno
import importlib
import json
import os
import shutil
import sys
import warnings

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hub.gguf_models import byte_level_tokenizer, model_folder, read_metadata, split_steps
from tests.tiny import tiny_model, tiny_tokenizer
from unsloth_trl.hub.gguf import export_gguf, resolve_methods, save_pretrained_gguf
from unsloth_trl.hub.llama_cpp import LlamaCppNotFoundError


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer(split_steps(None))


@pytest.fixture(scope="module")
def llama_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model_folder(folder, "llama", tokenizer)
    return folder


@pytest.fixture
def copied(llama_folder, tmp_path):
    return shutil.copytree(llama_folder, tmp_path / "merged")


def refused(folder, message, error=ValueError, **options):
    """The export raises, and makes not even the output folder."""
    output = folder.parent / "out"
    with pytest.raises(error, match=message):
        export_gguf(folder, output, **options)
    assert not output.exists()


@pytest.mark.parametrize(
    "model_type, config, message",
    [
        ("olmo2", {}, r"model_type='olmo2' is not among .*gemma2, gemma3_text, gpt_oss, llama, mistral, qwen2.*"
         r"merged_16bit.*python convert_hf_to_gguf.py FOLDER"),
        ("qwen3_moe", {"norm_topk_prob": False}, "qwen3_moe with norm_topk_prob=False"),
        ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("gemma2", {"query_pre_attn_scalar": 32}, "gemma2 with query_pre_attn_scalar=32 .* with 16 only"),
        ("llama", {"hidden_act": "gelu"}, "llama with hidden_act='gelu' .* with 'silu' only"),
        ("qwen3", {"attention_bias": True}, "qwen3 with attention_bias=True"),
        ("qwen2", {"head_dim": 32}, "qwen2 with head_dim=32"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "gpt_oss with swiglu_limit=5.0"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "gpt_oss with layer_types=.* windows in some of the lay"),
        (
            "llama",
            {"rope_parameters": YARN | {"beta_fast": 16.0}},
            "RoPE with beta_fast=16.0 cannot be exported to GGUF, whose runtimes take the default of 32",
        ),
        ("llama", {"rope_parameters": YARN | {"mscale": 0.7}}, "RoPE with mscale=0.7 .* whose runtimes take none"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type='dynamic' cannot be exported .* default, linear, yarn, llama3 can",
        ),
    ],
)  # fmt: skip
def test_what_gguf_has_no_place_for(model_type, config, message, tokenizer, tmp_path):
    model_folder(tmp_path / "merged", model_type, tokenizer, **config)
    refused(tmp_path / "merged", message)


def test_windows_that_runtimes_ignore(tokenizer, tmp_path):
    model_folder(tmp_path, "mistral", tokenizer, sliding_window=64)
    with pytest.warns(UserWarning, match="mistral has sliding_window=64, which GGUF runtimes ignore.* past 64 tokens"):
        export_gguf(tmp_path, tmp_path)
    model_folder(tmp_path, "qwen3", tokenizer, use_sliding_window=True, sliding_window=32)
    with pytest.warns(UserWarning, match="qwen3 has sliding_window=32, which GGUF runtimes ignore"):
        export_gguf(tmp_path, tmp_path)
    # longer than the context it is no window
    model_folder(tmp_path, "mistral", tokenizer, sliding_window=256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_gguf(tmp_path, tmp_path)


def test_folders_that_are_not_a_merged_model(copied, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "adapter", "adapter has an adapter; merge it first", FileNotFoundError)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    refused(copied, r"quantised \(quantization_config\).*merged_16bit")
    (copied / "config.json").write_text(json.dumps(config))
    os.rename(copied / "model.safetensors", copied / "elsewhere.safetensors")
    refused(copied, "has no model.safetensors", FileNotFoundError)


def test_incomplete_and_strange_checkpoints(copied):
    weights = load_file(copied / "model.safetensors")

    def write(change):
        save_file(change, copied / "model.safetensors")

    write({name: value for name, value in weights.items() if "layers.1.mlp.up_proj" not in name})
    refused(copied, "not complete: blk.1.ffn_up.weight would be missing")
    write({name: value for name, value in weights.items() if name != "lm_head.weight"})
    refused(copied, "not complete: output.weight would be missing")
    write(weights | {"model.layers.0.mystery.weight": torch.zeros(3)})
    refused(copied, "tensor model.layers.0.mystery.weight has no name")
    write(weights | {"lm_head.weight": torch.zeros(100, 64)})
    refused(copied, r"output.weight has shape \(100, 64\), where vocab_size and hidden_size say \(512, 64\)")


def test_a_missing_shard(copied):
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(copied, "has no model-00002-of-00002.safetensors", FileNotFoundError)


@pytest.mark.parametrize(
    "value, method, message",
    [
        (7e4, "f16", "blk.1.ffn_down.weight has a value of size 7.*too large for fp16; take 'bf16' or 'f32'"),
        (float("nan"), "bf16", "blk.1.ffn_down.weight has values that are not finite"),
        (float("inf"), "q8_0", "blk.1.ffn_down.weight has values that are not finite"),
    ],
)
def test_values_that_a_file_cannot_hold(value, method, message, copied):
    weights = load_file(copied / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, copied / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        export_gguf(copied, copied.parent / "out", method)
    assert os.listdir(copied.parent / "out") == []


def test_a_failed_write_leaves_the_older_files(llama_folder, tmp_path, monkeypatch):
    first = export_gguf(llama_folder, tmp_path, ["bf16", "q8_0"])
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    assert len(before) == 3 and all(file.name in before for file in first)
    write, calls = gguf.GGUFWriter.write_tensor_data, []

    def full(self, tensor, *args):
        calls.append(len(calls))
        if len(calls) == 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, tensor, *args)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    # the first file is whole by then, and is not put in place either
    with pytest.raises(OSError, match="No space left"):
        export_gguf(llama_folder, tmp_path, ["f32", "q8_0"])
    assert len(calls) == 30
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_interrupted(llama_folder, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_gguf(llama_folder, tmp_path)
    assert os.listdir(tmp_path) == []


def test_free_disk_is_checked_first(llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40 - 2**20, 2**20))
    with pytest.raises(OSError, match=r"output_directory='.*' has 0.00 GiB free, and q8_0 need 0.03 GiB") as raised:
        export_gguf(llama_folder, tmp_path)
    assert raised.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []


def test_a_file_of_the_same_name_is_replaced(llama_folder, tmp_path):
    (tmp_path / "model-Q8_0.gguf").write_text("old")
    (file,) = export_gguf(llama_folder, tmp_path)
    assert read_metadata(file)["general.architecture"] == "llama"


def test_tokenizers_that_do_not_fit(llama_folder, copied, tmp_path):
    tiny_tokenizer().save_pretrained(copied)
    refused(copied, "a tokenizer of type WordLevel cannot be written to GGUF here; BPE can")
    for path in copied.glob("tokenizer*"):
        path.unlink()
    refused(copied, "has no tokenizer.json, and a GGUF file holds its tokenizer", FileNotFoundError)
    byte_level_tokenizer(split_steps(r"\w+|\W+")).save_pretrained(copied)
    refused(copied, r"how this tokenizer splits text.*\\\\w\+.*none of those that are known here \(llama-bpe, .*gpt-2")
    big = byte_level_tokenizer(split_steps(None))
    big.add_tokens([f"<{i}>" for i in range(512)])
    big.save_pretrained(copied)
    refused(copied, r"a token of id \d+, and the model only vocab_size=512 rows; call model.resize_token_embeddings")


@pytest.mark.parametrize("name", ["", "a/b", ".."])
def test_names_that_are_no_file(name, llama_folder, tmp_path):
    with pytest.raises(ValueError, match="is no name for a file"):
        export_gguf(llama_folder, tmp_path, name=name)


def test_methods():
    assert resolve_methods("Q8_0").names == ("q8_0",)
    assert resolve_methods(["not_quantized", "fast_quantized", "f16", "BF16"]).names == ("f16", "q8_0", "bf16")
    with pytest.raises(
        ValueError, match=r"quantization_method='q9_z' is not known; take one of f32, f16, bf16, q8_0, "
    ):
        resolve_methods(["q8_0", "q9_z"])
    with pytest.raises(ValueError, match="quantization_method is empty"):
        resolve_methods([])
    with pytest.raises(LlamaCppNotFoundError, match="quantization_method='q4_k_m' needs"):
        resolve_methods("quantized", "/nowhere")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokenizer": None}, "tokenizer=None: a GGUF file holds its tokenizer"),
        ({"tokenizer": tiny_tokenizer()}, "a tokenizer of type WordLevel"),
        ({"model": "olmo2"}, "model_type='olmo2' is not among"),
        ({"save_method": "lora"}, "save_method='lora': GGUF files are made of a 'merged_16bit' model"),
        ({"name": "a/b"}, "name='a/b' is no name for a file"),
        ({"tokenizer": object()}, "a object has no tokenizer.json"),
        ({"quantization_method": "int4"}, "quantization_method='int4' is not known"),
    ],
)
def test_refused_before_merging(change, message, tokenizer, tmp_path):
    options = {"tokenizer": tokenizer} | change
    model = tiny_model(options.pop("model", "llama"), vocab_size=512)
    with pytest.raises(ValueError, match=message):
        save_pretrained_gguf(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_old_gguf_package(monkeypatch):
    monkeypatch.delattr(gguf.GGUFWriter, "add_rope_freq_base_swa")
    monkeypatch.delitem(sys.modules, "unsloth_trl.hub.gguf")
    with pytest.raises(ImportError, match=r"pip install -U 'gguf>=0.18'"):
        importlib.import_module("unsloth_trl.hub.gguf")


def test_without_the_gguf_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "unsloth_trl.hub.gguf")
    with pytest.raises(ImportError, match=r"with the package gguf: pip install 'unsloth_trl\[gguf\]'"):
        importlib.import_module("unsloth_trl.hub.gguf")
