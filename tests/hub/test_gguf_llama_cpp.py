"""llama.cpp itself reads the files, where llama-cpp-python is installed: the same logits, the same tokens."""

import pytest
import torch

from tests.hub.gguf_models import TEXTS, byte_level_tokenizer, model_folder, sentencepiece_tokenizer, split_steps
from unsloth_trl.hub.gguf import export_gguf
from unsloth_trl.hub.gguf_vocabulary import PRE_TOKENIZERS


pytest.importorskip("llama_cpp")  # no dependency: it is built from source when installed

FULL = {"use_sliding_window": False}
# gpt-oss with another RoPE than its own, which llama.cpp rounds
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES = {
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {"rope_parameters": PLAIN_ROPE},
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": FULL,
    "qwen3": FULL,
    "qwen3_moe": {"norm_topk_prob": True},
}


def tokenizer_for(model_type):
    if model_type in ("gemma2", "gemma3_text", "mistral"):
        return sentencepiece_tokenizer(gemma=model_type != "mistral")
    name = "llama-bpe" if model_type == "llama" else "qwen2"
    (pattern,), ignore_merges = next(key for key, value in PRE_TOKENIZERS.items() if value == name)
    return byte_level_tokenizer(split_steps(pattern), ignore_merges)


@pytest.mark.parametrize("model_type", CASES)
def test_llama_cpp_computes_the_same(model_type, tmp_path):
    import llama_cpp

    tokenizer = tokenizer_for(model_type)
    model = model_folder(tmp_path, model_type, tokenizer, **CASES[model_type])
    (file,) = export_gguf(tmp_path, tmp_path, "f32")
    runtime = llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, verbose=False, n_threads=1)
    assert runtime.token_eos() == tokenizer.eos_token_id
    for text in TEXTS:
        assert runtime.tokenize(text.encode(), add_bos=True, special=True) == tokenizer(text)["input_ids"], text
    ids = torch.arange(10, 40)
    runtime.eval(ids.tolist())
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    got = torch.tensor(runtime.scores[: len(ids)])
    # keys and values are cached in fp16 there; 4e-4 to 1.1e-3 was seen
    assert ((got - expected).norm() / expected.norm()).item() < 5e-3
