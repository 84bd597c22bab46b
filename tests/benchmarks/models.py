"""Random-weight models with the shapes of public ones, and a tokenizer, for speed and memory measurements."""

import os
import re
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config, Qwen3MoeConfig


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

SHAPES = {
    "qwen3-0.6b": (
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
        },
    ),
    "llama-1b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
        },
    ),
    "llama-8b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3-14b": (
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
        },
    ),
    # Qwen3-30B-A3B has 48 layers; build it in memory (57 GiB), 12 layers are enough for the comparison
    "qwen3-30b-a3b-12l": (
        Qwen3MoeConfig,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "decoder_sparse_step": 1,
        },
    ),
}
SHAPES["qwen3-30b-a3b"] = (Qwen3MoeConfig, {**SHAPES["qwen3-30b-a3b-12l"][1], "num_hidden_layers": 48})


def config(name: str):
    """Configuration of a shape, of which `-8l` at the end of a name takes eight layers."""
    whole, layers = name, {}
    if name not in SHAPES and (match := re.fullmatch(r"(.+)-(\d+)l", name)):
        whole, layers = match[1], {"num_hidden_layers": int(match[2])}
    config_class, kwargs = SHAPES[whole]
    return config_class(**kwargs | layers, bos_token_id=1, eos_token_id=2, pad_token_id=2)


def build(name: str, tokenizer_dir: str, root: str | None = None) -> str:
    """Save the random-weight model `name` with the tokenizer beside it, once, and return its folder."""
    path = os.path.join(root or os.path.join(tempfile.gettempdir(), "models"), name)
    if not os.path.exists(os.path.join(path, "ok")):
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16)
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(path)
        open(os.path.join(path, "ok"), "w").close()
        del model
        torch.cuda.empty_cache()
    return path
