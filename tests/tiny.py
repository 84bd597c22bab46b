"""Tiny random models, tokenizer, rows and adapters, made from configs and code: nothing is downloaded."""

import random

import torch
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)


VOCAB = 128
PAD, BOS, EOS, UNK = 0, 1, 2, 3

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

_DEEPSEEK_V3 = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,  # unlike the 16 of queries and keys, as in the real model
}

# What differs from _BASE. Sliding windows are shorter than a row and soft caps are near the scores, so that losing one
# of them shows. Qwen 2 and 3 and SmolLM3 mix windowed with full layers.
_CONFIGS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
        "attn_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Everything that the released sizes have between them: per-layer embeddings, layers that read the keys and values
    # of an earlier layer, a wide MLP in those, another head size and KV-head count in global layers, values taken from
    # the keys, and experts beside the dense MLP.
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "sliding_window": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 30.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        "use_qk_norm": True,
    },
    "phi3": {"sliding_window": 4},
    "olmo2": {},
    "cohere": {"logit_scale": 1.0, "use_qk_norm": True},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.5,
    },
    "smollm3": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "no_rope_layers": [1, 0],
        "no_rope_layer_interval": 2,
    },
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3"} | _BASE | _DEEPSEEK_V3,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 2,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
    # These two keep state between tokens: packing must refuse them.
    "qwen3_next": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
}

STATEFUL = ("kimi_linear", "qwen3_next")
ARCHITECTURES = tuple(name for name in _CONFIGS if name not in STATEFUL)

# Those whose experts are stacked parameters behind transformers' experts interface, and how PEFT's configs name these.
EXPERT_ARCHITECTURES = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "gemma4_text",
    "kimi_linear",
    "qwen3_next",
)
EXPERT_PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]

_WRAPPERS = ("kimi_k25",)
# SDPA drops soft caps and attention sinks, so only eager is a reference for these two.
_EAGER_ONLY = ("gemma2", "gpt_oss")

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
_MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
# gpt_oss, mixtral and qwen3_moe have no dense MLP: their experts are 3-D parameters, not linear layers.
_TARGETS = {
    "deepseek_v3": _MLA + _MLP,
    "glm4": [*_ATTENTION, "gate_up_proj", "down_proj"],
    "gpt_oss": _ATTENTION,
    "kimi_k25": r".*language_model\..*\.(" + "|".join(_MLA + _MLP) + ")",
    "kimi_linear": [*_ATTENTION, "kv_a_proj_with_mqa", "kv_b_proj", *_MLP],
    "mixtral": _ATTENTION,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "qwen3_moe": _ATTENTION,
    "qwen3_next": _ATTENTION,
}


def tiny_config(model_type: str, **config_overrides):
    base = {} if model_type in _WRAPPERS else _BASE
    return AutoConfig.for_model(model_type, **(base | _CONFIGS[model_type] | config_overrides))


def tiny_model(model_type: str, seed: int = 0, **config_overrides):
    """A random fp32 model of a few thousand weights, in training mode, the same for the same seed.

    An `attn_implementation` among the overrides is passed on; without one it is eager where SDPA is not exact.
    """
    attn_implementation = config_overrides.pop("attn_implementation", "eager" if model_type in _EAGER_ONLY else None)
    auto_class = AutoModelForImageTextToText if model_type in _WRAPPERS else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(model_type, **config_overrides)
        model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
        randomize(model, model_type)
    return model.train()


@torch.no_grad()
def randomize(model, model_type: str) -> None:
    """Draw the weights so that attention is far from uniform and the output depends on it.

    The initialisers of transformers give scores near zero: every mask then looks like every other one.
    """
    std = 0.15 if model_type == "gpt_oss" else 0.2
    for name, parameter in model.named_parameters():
        if model_type == "gpt_oss" and ("sinks" in name or "bias" in name):
            parameter.normal_(0, 0.5)
        elif parameter.dim() > 1:
            parameter.normal_(0, std)


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<assistant> {% generation %}{{ message['content'] }} <eos> {% endgeneration %}"
    "{% else %}"
    "<{{ message['role'] }}> {{ message['content'] }} <end> "
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_tokenizer(*extra_special: str) -> PreTrainedTokenizerFast:
    """Whitespace word level: 8 special tokens, then `extra_special`, and every other id i is the word `w<i>`."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<end>", *extra_special]
    words = special + [f"w{i}" for i in range(len(special), VOCAB)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special[4:],
        model_max_length=256,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_rows(n: int, seed: int, low: int = 3, high: int = 12, vocab: int = VOCAB) -> list[dict[str, list[int]]]:
    """Rows of `low` to `high` random ids, both included; ids start at 3, after pad, bos and eos."""
    rng = random.Random(seed)
    return [{"input_ids": [rng.randrange(3, vocab) for _ in range(rng.randint(low, high))]} for _ in range(n)]


def lora_config(model_type: str, **kwargs) -> LoraConfig:
    defaults = {
        "r": 4,
        "lora_alpha": 8,  # unlike r, so that a lost scaling shows
        "lora_dropout": 0.0,
        "target_modules": _TARGETS.get(model_type, _ATTENTION + _MLP),
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**(defaults | kwargs))


VLM_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}> "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}"
    "{% if message['role'] == 'assistant' %}<eos> {% else %}<end> {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_vlm(seed: int = 0):
    """A LLaVA of a few thousand weights, its processor, and rows of one image, a prompt and a completion."""
    image_size, patch_size = 8, 4
    tokenizer = tiny_tokenizer("<image>")
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama"} | _BASE,
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": image_size,
            "patch_size": patch_size,
            "projection_dim": 32,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(image_size // patch_size) ** 2,
        vision_feature_select_strategy="default",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        randomize(model, "llava")
    side = {"height": image_size, "width": image_size}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer=tokenizer,
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which the strategy drops again
        chat_template=VLM_CHAT_TEMPLATE,
    )
    rng = random.Random(seed)
    rows = [
        {
            "images": [Image.frombytes("RGB", (image_size, image_size), rng.randbytes(3 * image_size**2))],
            "prompt": [{"role": "user", "content": _words(rng, 2, 5)}],
            "completion": [{"role": "assistant", "content": _words(rng, 2, 7)}],
        }
        for _ in range(6)
    ]
    return model.train(), processor, rows


def _words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(f"w{rng.randrange(9, VOCAB)}" for _ in range(rng.randint(low, high)))
