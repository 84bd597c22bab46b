"""Tiny tokenizers, model folders and readings of GGUF files that the tests of the export share."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_model


SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<|turn|>", "<|end|>"]
CORPUS = [
    "The quick brown fox jumps over 1234567 lazy dogs, doesn't it?\n\n  Yes: it's 42% done (or 3/4).",
    "def f(x):\n    return x  # I'LL see\r\n\tnaïve Grüße и привет, 你好 世界 \u0e2a\u0e27\u0e31\u0e2a",
    "HTTPServer aBc ABC camelCase 12 345 6789 ... !!! --- <tag/> $x^2_{i}$",
] * 3
TEXTS = [
    *CORPUS[:3],
    "  leading and   inner spaces, don't WE'RE 2024-11-30",
    "<|turn|>user\nHi<|end|>",
    "\u00e9\u4f60 \U0001f600 emoji\n\n\n",
    "x=10000;y=1",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
VOCAB = 512


def known_splits() -> dict[str, str] | None:
    """How transformers splits text for the names in GGUF files; `None` if an older one ignores them."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return None
    return GGUF_PRE_TOKENIZER_SPLITS


def split_steps(pattern: str | None, digits: bool = False) -> pre_tokenizers.PreTokenizer:
    """The steps before byte-level BPE: cut by a pattern, or by that of GPT-2."""
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        first.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    return pre_tokenizers.Sequence([*first, byte_level]) if first else byte_level


def byte_level_tokenizer(
    steps: pre_tokenizers.PreTokenizer, ignore_merges: bool = False, vocab_size: int = 500
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on a few lines; the ids after the six special tokens are learned."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = steps
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend)


def sentencepiece_tokenizer(gemma: bool = False) -> PreTrainedTokenizerFast:
    """BPE over characters with bytes to fall back on, as Llama 2 (a space in front) or Gemma (none) have it."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<bos>", "<eos>"]
    special = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    learner.normalizer = replace if gemma else normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    learner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=490, special_tokens=special, show_progress=False, limit_alphabet=60)
    )
    # bytes are tokens of the vocabulary, not added ones
    state = json.loads(learner.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in pieces]
    state["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL[4:]])
    return _wrapped(backend)


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    pad = {"pad_token": "<pad>"} if backend.token_to_id("<pad>") is not None else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", **pad
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_folder(
    folder: Path, model_type: str, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype = torch.bfloat16, **config
) -> torch.nn.Module:
    """Save a tiny random model and a tokenizer like a merged 16-bit model; returns it in fp32 and eval mode."""
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids["pad_token_id"] = tokenizer.pad_token_id
    options = {"vocab_size": VOCAB, **ids, **config}
    model = tiny_model(model_type, **options).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms of one or zero would hide a lost shift, and biases of zero a lost one
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(0.2 * noise.to(parameter.dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # read again: a cast to 16 bits rounds RoPE's frequencies too
    kind = type(model)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=model.config._attn_implementation)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file by name, in fp32."""
    reader = gguf.GGUFReader(path)
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}


def read_metadata(path: Path) -> dict:
    """The metadata of a GGUF file."""
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
