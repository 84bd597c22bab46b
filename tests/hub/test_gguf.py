"""Files that are read back have the model's logits: through transformers, or tensor by tensor where it cannot."""

import weakref

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from tests.hub.gguf_models import (
    TEXTS,
    VOCAB,
    byte_level_tokenizer,
    known_splits,
    model_folder,
    read_metadata,
    read_tensors,
    sentencepiece_tokenizer,
    split_steps,
)
from unsloth_trl.hub.gguf import export_gguf, save_pretrained_gguf
from unsloth_trl.hub.gguf_tensors import Checkpoint
from unsloth_trl.hub.gguf_vocabulary import PRE_TOKENIZERS


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
FULL = {"use_sliding_window": False}

# model_type, tokenizer, config
RELOADED = {
    "llama": ("llama", "llama-bpe", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", "llama", {"head_dim": 32}),
    "qwen2": ("qwen2", "qwen2", FULL),
    "qwen3-tied": ("qwen3", "qwen2", {**FULL, "tie_word_embeddings": True}),
    "qwen3-yarn": ("qwen3", "qwen2", {**FULL, "rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", "qwen2", {"norm_topk_prob": True}),
    "gemma2": ("gemma2", "gemma", {}),
    "gemma3": ("gemma3_text", "gemma", {}),
}
# Relative distance of logits. Weights of the checkpoint are bf16, so bf16 and f32 files lose nothing; f16 has more
# digits but less range: 1e-4 at most was seen. Q8_0 gave 0.016 to 0.038.
LOSSLESS, HALF, EIGHT_BITS = 1e-6, 1e-3, 0.08


@pytest.fixture(scope="module")
def tokenizers():
    patterns = {name: key for key, name in PRE_TOKENIZERS.items()}
    made = {"llama": sentencepiece_tokenizer(), "gemma": sentencepiece_tokenizer(gemma=True)}
    for name in ("llama-bpe", "qwen2", "gpt-4o"):
        (pattern,), ignore_merges = patterns[name]
        made[name] = byte_level_tokenizer(split_steps(pattern), ignore_merges)
    return made


@torch.no_grad()
def logits(model, ids=None):
    ids = torch.arange(10, 40)[None] if ids is None else ids
    return model(ids, use_cache=False).logits


def distance(got, expected):
    assert expected.norm() > 1
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("case", RELOADED)
def test_reloaded_logits_and_tokens(case, tokenizers, tmp_path):
    model_type, kind, config = RELOADED[case]
    tokenizer = tokenizers[kind]
    model = model_folder(tmp_path, model_type, tokenizer, **config)
    files = export_gguf(tmp_path, tmp_path / "out", ["f32", "bf16", "f16", "q8_0"], name="tiny")
    assert [file.name for file in files] == ["tiny-F32.gguf", "tiny-BF16.gguf", "tiny-F16.gguf", "tiny-Q8_0.gguf"]
    found = {}
    for file in files:
        # transformers does not read all of a config back, such as Llama 3's RoPE: test_metadata looks at these
        reloaded = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            config=model.config,
            attn_implementation=model.config._attn_implementation,
        )
        found[file.name[5:-5]] = distance(logits(reloaded), logits(model))
    print(case, found)
    assert found["F32"] < LOSSLESS and found["BF16"] < LOSSLESS
    assert found["F16"] < HALF
    assert 1e-3 < found["Q8_0"] < EIGHT_BITS
    if known_splits() is None:
        return
    again = AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name)
    # transformers' tokenizer for such files puts no space before a text that starts with one, or after special tokens;
    # the exported one does, and so does llama.cpp
    texts = [text for text in TEXTS if kind != "llama" or not text.startswith((" ", "<|"))]
    assert len(texts) >= 5
    assert [again(text)["input_ids"] for text in texts] == [tokenizer(text)["input_ids"] for text in texts]
    assert again.eos_token_id == model.config.eos_token_id and again.bos_token_id == model.config.bos_token_id
    assert again.chat_template == tokenizer.chat_template


def test_config_is_read_back_without_help(tokenizers, tmp_path):
    model = model_folder(tmp_path, "llama", tokenizers["llama"], head_dim=32)
    (file,) = export_gguf(tmp_path, tmp_path, "f32")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert distance(logits(reloaded), logits(model)) < LOSSLESS
    assert reloaded.config.vocab_size == VOCAB and reloaded.config.head_dim == 32


def test_mistral_tensor_by_tensor(tokenizers, tmp_path):
    """transformers has no way back from GGUF's llama to Mistral, except for its inverse of the permutation."""
    model = model_folder(tmp_path, "mistral", tokenizers["llama"], sliding_window=None)
    (file,) = export_gguf(tmp_path, tmp_path, "bf16")
    undo = LlamaTensorProcessor(config={"num_attention_heads": 4, "num_key_value_heads": 2})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    tensors = {name: undo.process(value, name).weights for name, value in read_tensors(file).items()}
    state = {name: tensors.pop(names.get_name(name, (".weight",))) for name in model.state_dict()}
    assert not tensors
    assert_state_equal(model, state)


def test_gpt_oss_tensor_by_tensor(tokenizers, tmp_path):
    """transformers does not read gpt-oss files of its own config (RoPE scaling raises)."""
    model = model_folder(tmp_path, "gpt_oss", tokenizers["gpt-4o"])
    with pytest.warns(UserWarning, match="truncate=False"):
        (file,) = export_gguf(tmp_path, tmp_path, "bf16")
    tensors = read_tensors(file)
    state = {}
    for layer in range(2):
        block, prefix = f"blk.{layer}", f"model.layers.{layer}"
        for end in ("weight", "bias"):
            gate, up, down = (tensors.pop(f"{block}.ffn_{part}_exps.{end}") for part in ("gate", "up", "down"))
            both = np.stack([gate, up], 2).reshape(4, 256, *gate.shape[2:])  # rows in turn
            if end == "weight":
                both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
            suffix = "" if end == "weight" else "_bias"
            state[f"{prefix}.mlp.experts.gate_up_proj{suffix}"] = both
            state[f"{prefix}.mlp.experts.down_proj{suffix}"] = down
            state[f"{prefix}.mlp.router.{end}"] = tensors.pop(f"{block}.ffn_gate_inp.{end}")
            for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
                state[f"{prefix}.self_attn.{ours}_proj.{end}"] = tensors.pop(f"{block}.attn_{theirs}.{end}")
        state[f"{prefix}.self_attn.sinks"] = tensors.pop(f"{block}.attn_sinks.weight")
        state[f"{prefix}.input_layernorm.weight"] = tensors.pop(f"{block}.attn_norm.weight")
        state[f"{prefix}.post_attention_layernorm.weight"] = tensors.pop(f"{block}.post_attention_norm.weight")
    state["model.embed_tokens.weight"] = tensors.pop("token_embd.weight")
    state["model.norm.weight"] = tensors.pop("output_norm.weight")
    state["lm_head.weight"] = tensors.pop("output.weight")
    assert not tensors
    assert_state_equal(model, state)


def assert_state_equal(model, state):
    """The tensors are the model's, bit by bit, and so are the logits of a model that has them."""
    state = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    other = type(model)(model.config).eval()
    other.load_state_dict(state)
    assert distance(logits(other), logits(model)) < LOSSLESS


def test_gpt_oss_with_a_tied_head_has_a_head(tokenizers, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = model_folder(tmp_path, "gpt_oss", tokenizers["gpt-4o"], tie_word_embeddings=True, rope_parameters=rope)
    tensors = read_tensors(export_gguf(tmp_path, tmp_path, "f32")[0])
    assert torch.equal(torch.from_numpy(tensors["output.weight"].copy()), model.lm_head.weight.data)


def test_rope_factors_are_those_of_llama_3(tokenizers, tmp_path):
    model = model_folder(tmp_path, "llama", tokenizers["llama-bpe"], rope_parameters=LLAMA3_ROPE, head_dim=64)
    factors = read_tensors(export_gguf(tmp_path, tmp_path, "f16")[0])["rope_freqs.weight"]
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(plain / factors, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
    # the published rule: wavelengths below 64 / 4 stay, those above 64 / 1 are stretched by the factor
    wavelengths = 2 * np.pi / plain
    assert (factors[wavelengths < 16] == 1).all() and (wavelengths < 16).sum() > 2
    np.testing.assert_allclose(factors[wavelengths > 64], 8, rtol=1e-6)


def test_metadata(tokenizers, tmp_path):
    tokenizer = tokenizers["gemma"]
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model_folder(tmp_path, "gemma3_text", tokenizer, rope_parameters=rope)
    said = read_metadata(export_gguf(tmp_path, tmp_path, "q8_0", name="my-gemma")[0])
    expected = {
        "general.architecture": "gemma3",
        "general.name": "my-gemma",
        "general.type": "model",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "gemma3.context_length": 256,
        "gemma3.embedding_length": 64,
        "gemma3.block_count": 2,
        "gemma3.feed_forward_length": 128,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 2,
        "gemma3.attention.key_length": 16,
        "gemma3.attention.value_length": 16,
        "gemma3.attention.sliding_window": 4,
        "gemma3.attention.sliding_window_pattern": [True, False],
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.freq_base_swa": 1e4,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.vocab_size": VOCAB,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    assert {key: said.get(key) for key in expected} == expected
    assert said["gemma3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def test_metadata_of_experts_and_yarn(tokenizers, tmp_path):
    rope = YARN | {"attention_factor": 1.5}
    model_folder(tmp_path, "qwen3_moe", tokenizers["qwen2"], norm_topk_prob=True, rope_parameters=rope)
    said = read_metadata(export_gguf(tmp_path, tmp_path)[0])
    assert said["qwen3moe.expert_count"] == 4 and said["qwen3moe.expert_used_count"] == 2
    assert said["qwen3moe.expert_feed_forward_length"] == 32
    assert said["qwen3moe.rope.scaling.type"] == "yarn" and said["qwen3moe.rope.scaling.factor"] == 4.0
    assert said["qwen3moe.rope.scaling.original_context_length"] == 64
    # on top of 0.1 ln(factor) + 1
    assert said["qwen3moe.rope.scaling.attn_factor"] == pytest.approx(1.5 / 1.1386294361)


def test_encodings(tokenizers, tmp_path):
    model_folder(tmp_path, "qwen3_moe", tokenizers["qwen2"], norm_topk_prob=True)
    reader = gguf.GGUFReader(export_gguf(tmp_path, tmp_path, "q8_0")[0])
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.1.ffn_down_exps.weight"] == kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.attn_q_norm.weight"] == "F32"


def test_rows_that_are_no_whole_number_of_blocks(tokenizers, tmp_path):
    model_folder(tmp_path, "llama", tokenizers["llama-bpe"], intermediate_size=80)
    with pytest.warns(UserWarning, match=r"2 tensors stay in fp16 in the q8_0 file.*blk.0.ffn_down.* has rows of 80"):
        (file,) = export_gguf(tmp_path, tmp_path, "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_shards_and_stacked_experts_give_the_same_file(tokenizers, tmp_path):
    model = model_folder(tmp_path / "one", "qwen3_moe", tokenizers["qwen2"], norm_topk_prob=True)
    one = export_gguf(tmp_path / "one", tmp_path / "a")[0].read_bytes()
    # in shards
    model.to(torch.bfloat16).save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    tokenizers["qwen2"].save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert export_gguf(tmp_path / "shards", tmp_path / "b")[0].read_bytes() == one
    # as transformers holds them in memory
    weights = load_file(tmp_path / "one" / "model.safetensors")
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = {
            p: torch.stack([weights.pop(f"{experts}.{e}.{p}.weight") for e in range(4)])
            for p in ("gate_proj", "up_proj", "down_proj")
        }
        weights[f"{experts}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        weights[f"{experts}.down_proj"] = parts["down_proj"]
    save_file(weights, tmp_path / "one" / "model.safetensors")
    assert export_gguf(tmp_path / "one", tmp_path / "c")[0].read_bytes() == one


def test_pieces_give_the_same_file(tokenizers, tmp_path, monkeypatch):
    model_folder(tmp_path, "llama", tokenizers["llama-bpe"])
    whole = [file.read_bytes() for file in export_gguf(tmp_path, tmp_path / "a", ["bf16", "f16", "q8_0"])]
    monkeypatch.setattr("unsloth_trl.hub.gguf_tensors.CHUNK", 300)
    assert [file.read_bytes() for file in export_gguf(tmp_path, tmp_path / "b", ["bf16", "f16", "q8_0"])] == whole


@pytest.mark.parametrize("experts", [False, True])
def test_one_tensor_in_memory_at_a_time(experts, tokenizers, tmp_path, monkeypatch):
    model_type, config = ("qwen3_moe", {"norm_topk_prob": True}) if experts else ("llama", {})
    model_folder(tmp_path, model_type, tokenizers["qwen2"], **config)
    alive, peak, load = [], [], Checkpoint.load

    def counting(self, name):
        tensor = load(self, name)
        alive[:] = [reference for reference in alive if reference() is not None] + [weakref.ref(tensor)]
        peak.append(len(alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "load", counting)
    export_gguf(tmp_path, tmp_path, "q8_0")
    # all experts of one projection become one tensor of the file
    assert len(peak) > 20 and max(peak) == (4 if experts else 1)


def test_a_folder_in_the_home_directory(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenizer = tokenizers["llama-bpe"]
    model_folder(tmp_path / "base", "llama", tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    (made,) = save_pretrained_gguf(model, "~/out", tokenizer, "f16", verify=False)
    assert made == tmp_path / "out" / "model-F16.gguf" and made.is_file()
    (again,) = export_gguf("~/out/merged_16bit", "~/again", "f16")
    assert again.read_bytes() == made.read_bytes() and again == tmp_path / "again" / "model-F16.gguf"
