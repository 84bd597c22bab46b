"""A tokenizer as the vocabulary of a GGUF file.

Two kinds can be written: byte-level BPE (`tokenizer.ggml.model = "gpt2"`), for which the file names how text is split
before merging, and BPE over characters with bytes to fall back on, which is SentencePiece's (`"llama"`). GGUF has no
place for a normalizer, so the Unicode normalization of Qwen is left to whoever calls the runtime, as in other exports.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import gguf
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"

_LLAMA3 = _WORDS + "|" + _START + r"\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _WORDS + "|" + _START + r"\p{L}+|\p{N}" + _TAIL
_GPT4O = f"{_START}{_UPPER}*{_LOWER}+{_WORDS}?|{_START}{_UPPER}+{_LOWER}*{_WORDS}?" + r"|\p{N}{1,3}" + _TAIL_WITH_SLASH
_TEKKEN = f"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _TAIL_WITH_SLASH

# How text is split, and whether a word that is a token skips the merges, by the names that runtimes know. The splits
# are those of the published tokenizer.json of each family; `"gpt-2"` is the pattern of byte-level BPE itself. The
# merges of "gpt-4o" and "tekken" make every word that is a token, so that skipping them changes nothing.
_GPT2_SPLIT = ("ByteLevel",)
PRE_TOKENIZERS: dict[tuple[tuple, bool], str] = {
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_QWEN2,), False): "qwen2",
    ((_GPT4O,), False): "gpt-4o",
    ((_GPT4O,), True): "gpt-4o",
    ((_TEKKEN,), False): "tekken",
    ((_TEKKEN,), True): "tekken",
    (_GPT2_SPLIT, False): "gpt-2",
    (("Digits", *_GPT2_SPLIT), False): "smollm",
}


@dataclass
class Vocabulary:
    """
    What a file says about its tokenizer.

    Args:
        model (`str`): `"gpt2"` or `"llama"`.
        pre (`str`): How text is split before merging; one of the names that llama.cpp knows.
        tokens (`list` of `str`): One per row of the embeddings.
        types (`list` of `int`): `gguf.TokenType` of each.
        merges (`list` of `str`): Of byte-level BPE, best first.
        scores (`list` of `float`): Of SentencePiece, higher first.
        special (`dict` of `str` to `int`): Ids by the name of their role: `bos`, `eos`, `eot`, `eom`, `unk`, `pad`.
        add_bos (`bool`): The tokenizer starts every text with `bos`.
        add_eos (`bool`): The tokenizer ends every text with `eos`.
        add_space_prefix (`bool`): The tokenizer puts a space in front of every text.
        chat_template (`str`, `list` or `None`): Of the tokenizer, in jinja.
        notes (`list` of `str`): What could not be said in full.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    chat_template: str | list[dict[str, str]] | None = None
    notes: list[str] = field(default_factory=list)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Write all of it as metadata."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.model == "gpt2":
            writer.add_token_merges(self.merges)
        else:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.add_space_prefix)
        for role, token_id in self.special.items():
            getattr(writer, f"add_{role}_token_id")(token_id)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; raises `FileNotFoundError` if there is no `tokenizer.json`."""
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json, and a GGUF file holds its tokenizer; save the tokenizer there with "
            "tokenizer.save_pretrained"
        )
    return AutoTokenizer.from_pretrained(folder)


def read_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> Vocabulary:
    """
    The vocabulary of the tokenizer in a folder.

    Args:
        folder (`Path`): With `tokenizer.json`.
        tokenizer (`PreTrainedTokenizerBase`): Loaded from there.
        config (`PretrainedConfig`): Of its model; says how many tokens there are, and which are special.

    Raises:
        ValueError: If GGUF cannot express the tokenizer, or if it has more tokens than the model.
    """
    serialized = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = serialized["model"]
    if model["type"] != "BPE":
        raise ValueError(f"a tokenizer of type {model['type']} cannot be written to GGUF here; BPE can")
    # a token written "▁" for a space and bytes as <0x0A> is SentencePiece's; byte-level BPE spells bytes as letters
    if model.get("byte_fallback"):
        vocabulary = _sentencepiece(serialized, config)
    else:
        vocabulary = _byte_level(serialized, tokenizer, config)
    _set_special(vocabulary, tokenizer, config, folder)
    if greedy := [added["content"] for added in serialized["added_tokens"] if added["lstrip"] or added["rstrip"]]:
        vocabulary.notes.append(f"the tokens {greedy[:5]} take white space beside them, which GGUF cannot say")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    vocabulary.chat_template = template or None
    return vocabulary


def _byte_level(serialized: dict, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> Vocabulary:
    model = serialized["model"]
    key = (_split(serialized.get("pre_tokenizer")), bool(model.get("ignore_merges")))
    pre = PRE_TOKENIZERS.get(key)
    if pre is None:
        raise ValueError(
            f"how this tokenizer splits text, pre_tokenizer={json.dumps(serialized.get('pre_tokenizer'))} with "
            f"ignore_merges={key[1]}, is none of those that are known here ({', '.join(PRE_TOKENIZERS.values())}), "
            "and a runtime that splits otherwise gives other tokens; convert the merged 16-bit folder with "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ValueError("a BPE tokenizer with continuing_subword_prefix or end_of_word_suffix cannot be exported")
    # composed characters are what almost all text has already
    if (normalizer := serialized.get("normalizer")) is not None and normalizer["type"] != "NFC":
        raise ValueError(f"normalizer={json.dumps(normalizer)} cannot be written to GGUF with a byte-level tokenizer")
    tokens, types = _tokens(serialized, config)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    vocabulary = Vocabulary("gpt2", pre, tokens, types, merges=merges)
    if _split(json.loads(tokenizer.backend_tokenizer.to_str()).get("pre_tokenizer")) != key[0]:
        vocabulary.notes.append(
            f"tokenizer.json splits text as {pre!r} does, and so does the GGUF file, but the "
            f"{type(tokenizer).__name__} that transformers loads from this folder splits it in another way"
        )
    return vocabulary


def _split(pre_tokenizer: dict | None) -> tuple:
    """What is done before byte-level BPE: patterns that cut words out, or names of steps; `()` for anything else."""
    if pre_tokenizer is None:
        return ()
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    found = []
    for step in steps:
        kind = step["type"]
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            found.append(step["pattern"]["Regex"])
        elif kind == "Digits" and step["individual_digits"]:
            found.append("Digits")
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            found += _GPT2_SPLIT if step.get("use_regex", True) else ()
        else:
            return ()
    return tuple(found) if steps[-1]["type"] == "ByteLevel" else ()


def _sentencepiece(serialized: dict, config: PretrainedConfig) -> Vocabulary:
    model = serialized["model"]
    tokens, types = _tokens(serialized, config)
    ids = model["vocab"]
    # The runtime joins the neighbours whose union has the highest score, here the one with the earliest merge. Tokens
    # that no merge makes are single characters, bytes or added ones.
    scores = [0.0] * len(tokens)
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        made = ids[left + right]
        if not scores[made]:
            scores[made] = -1.0 - rank
    for byte in range(256):
        if (token_id := ids.get(f"<0x{byte:02X}>")) is None:
            raise ValueError(f"the tokenizer falls back to bytes, but has no token <0x{byte:02X}>")
        types[token_id] = int(gguf.TokenType.BYTE)
    if (unk := ids.get(model.get("unk_token"))) is not None:
        types[unk] = int(gguf.TokenType.UNKNOWN)
    prefix = _space_prefix(serialized)
    # the runtime's name for no splitting at all; a tokenizer that splits at spaces gives the same tokens
    vocabulary = Vocabulary("llama", "default", tokens, types, scores=scores, add_space_prefix=prefix != "never")
    if prefix == "first":
        vocabulary.notes.append(
            "the tokenizer puts a space in front of the text only; GGUF runtimes put one after each special token too"
        )
    return vocabulary


def _space_prefix(serialized: dict) -> str:
    """
    Where a space is put in front: of each text between special tokens, of the first one, or never.

    Raises `ValueError` if the text is changed in any other way.
    """
    steps = [serialized.get("normalizer"), serialized.get("pre_tokenizer")]
    flat = []
    for step in steps:
        if step is not None:
            flat += step.get("normalizers") or step.get("pretokenizers") or [step]
    prefix = "never"
    for step in flat:
        kind = step["type"]
        if kind == "Prepend" and step["prepend"] == "\u2581":
            prefix = "always"
        elif kind == "Metaspace" and step["replacement"] == "\u2581":
            prefix = step.get("prepend_scheme", "always")
        elif kind == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "\u2581":
            pass
        elif kind == "Split" and step["pattern"] == {"String": " "} and step["behavior"] == "MergedWithPrevious":
            pass  # of Gemma: after the replacement there are no spaces to split at
        else:
            raise ValueError(f"the tokenizer's step {json.dumps(step)} cannot be written to GGUF")
    return prefix


def _tokens(serialized: dict, config: PretrainedConfig) -> tuple[list[str], list[int]]:
    """Texts and types of all ids of the model; the rows without a token, which pad the embeddings, are unused ones."""
    kinds = gguf.TokenType
    by_id = {token_id: (text, kinds.NORMAL) for text, token_id in serialized["model"]["vocab"].items()}
    byte_level = not serialized["model"].get("byte_fallback")
    for added in serialized["added_tokens"]:
        text = added["content"]
        if not added["special"]:
            # they are looked for in the raw text
            text = text if byte_level else text.replace("\u2581", " ")
        by_id[added["id"]] = (text, kinds.CONTROL if added["special"] else kinds.USER_DEFINED)
    if (largest := max(by_id)) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer has a token of id {largest}, and the model only vocab_size={config.vocab_size} rows; call "
            "model.resize_token_embeddings before training"
        )
    rows = [by_id.get(token_id, (f"[PAD{token_id}]", kinds.UNUSED)) for token_id in range(config.vocab_size)]
    tokens = [text for text, _ in rows]
    if len(set(tokens)) != len(tokens):
        twice = next(text for text in tokens if tokens.count(text) > 1)
        raise ValueError(f"two ids of the tokenizer have the text {twice!r}, and runtimes refuse such a file")
    return tokens, [int(kind) for _, kind in rows]


def _set_special(
    vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, folder: Path
) -> None:
    """Ids of special tokens: the config's, which generation stops at, before the tokenizer's."""
    special = vocabulary.special
    for role in ("bos", "pad"):
        token_id = getattr(config, f"{role}_token_id", None)
        token_id = getattr(tokenizer, f"{role}_token_id") if token_id is None else token_id
        if token_id is not None and 0 <= token_id < len(vocabulary.tokens):
            special[role] = token_id
    if tokenizer.unk_token_id is not None and vocabulary.model == "llama":
        special["unk"] = tokenizer.unk_token_id
    ends = _ids(config.eos_token_id)
    generation = folder / "generation_config.json"
    stops = (
        _ids(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")) if generation.is_file() else []
    )
    own = _ids(tokenizer.eos_token_id)
    # with several, the one that ends a text comes first; runtimes stop at the others just as well
    first = own if set(own) & set(ends) else ends
    ordered = list(dict.fromkeys([*first, *ends, *stops, *own]))
    if ordered and max(ordered) >= len(vocabulary.tokens):
        raise ValueError(f"eos_token_id={max(ordered)} is outside of vocab_size={len(vocabulary.tokens)}")
    special |= dict(zip(("eos", "eot", "eom"), ordered, strict=False))
    if not ordered:
        vocabulary.notes.append(
            "neither the config nor the tokenizer has an eos token: runtimes then take a default, and may never stop"
        )
    if len(ordered) > 3:
        vocabulary.notes.append(f"GGUF has room for three ids that end a text; {ordered[3:]} are left out")
    _set_added(vocabulary, tokenizer)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _set_added(vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerBase) -> None:
    """What the tokenizer puts around every text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
    before, after = (full[:start], full[start + len(bare) :]) if start is not None else (full, full)
    bos, eos = [vocabulary.special.get("bos")], [vocabulary.special.get("eos")]
    if before not in ([], bos) or after not in ([], eos):
        raise ValueError(
            f"the tokenizer puts {tokenizer.convert_ids_to_tokens(before)} before and "
            f"{tokenizer.convert_ids_to_tokens(after)} after a text; in GGUF that can only be the bos token "
            f"({bos[0]}) and the eos token ({eos[0]})"
        )
    vocabulary.add_bos, vocabulary.add_eos = bool(before), bool(after)
