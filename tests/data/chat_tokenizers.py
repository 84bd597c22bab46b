"""Tokenizers of a few hundred entries with templates like those of public models; trained on the spot."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# no special token tells the turns apart, and the line feeds around the answer become one token with the marker's
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}### Response:\n{{ m['content'] }}"
    "{% else %}### Instruction:\n{{ m['content'] }}\n\n{% endif %}{% endfor %}{{ eos_token }}"
)
QUESTIONS = ["What is two and two?", "Name a colour, please.", "Who are you?", "Say it again: café 🎈."]
ANSWERS = ["It is four.", "Blue, like the sea.", "\n\nA model.", "Café 🎈 again."]

# template, BOS, EOS, special tokens, in front of a user's turn, in front of an answer, behind it
FAMILIES = {
    "chatml": (
        CHATML,
        None,
        "<|im_end|>",
        ["<|im_start|>"],
        "<|im_start|>user\n",
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
    "llama3": (
        LLAMA3,
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>"],
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "gemma": (
        GEMMA,
        "<bos>",
        "<eos>",
        ["<start_of_turn>", "<end_of_turn>"],
        "<start_of_turn>user\n",
        "<start_of_turn>model\n",
        "<end_of_turn>\n",
    ),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"], "[INST] ", " [/INST] ", "</s>"),
}


def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """`"gemma"` and `"mistral"` have spaces as SentencePiece has them, the others bytes; no padding token but EOS."""
    template, bos, eos, special, *_ = FAMILIES[family]
    return make_tokenizer(template, bos, eos, special, bytes_=family in ("chatml", "llama3"))


def make_tokenizer(
    template: str, bos: str | None, eos: str, special: list[str], bytes_: bool = True
) -> PreTrainedTokenizerFast:
    special = [token for token in (bos, eos, *special) if token]
    tokenizer = Tokenizer(models.BPE(byte_fallback=not bytes_, unk_token=None if bytes_ else "<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if bytes_ else []
    if bytes_:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special = ["<unk>", *special]
    corpus = [f"### Instruction:\n{q}\n\n### Response:\n{a}" for q, a in zip(QUESTIONS, ANSWERS, strict=True)] * 4
    corpus += ["user\n", "model\n", "assistant\n", "\n\n\n\n", ":\n\n", *(q.lower() for q in QUESTIONS)] * 4
    if not bytes_:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=eos, clean_up_tokenization_spaces=False
    )
    if bos:  # as the real ones do, in front of whatever text
        fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, fast.bos_token_id)]
        )
    fast.chat_template = template
    return fast
