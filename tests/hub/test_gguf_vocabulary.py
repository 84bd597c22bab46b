"""Tokenizers in GGUF: how text is split, special tokens, padding; read back by transformers."""

import json

import gguf
import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer

from tests.hub.gguf_models import (
    TEXTS,
    VOCAB,
    byte_level_tokenizer,
    known_splits,
    model_folder,
    read_metadata,
    sentencepiece_tokenizer,
    split_steps,
)
from unsloth_trl.hub.gguf import export_gguf
from unsloth_trl.hub.gguf_vocabulary import PRE_TOKENIZERS, read_vocabulary


NAMES = {name: key for key, name in PRE_TOKENIZERS.items()}


def vocabulary_of(tokenizer, folder, **config):
    tokenizer.save_pretrained(folder)
    ids = {"eos_token_id": tokenizer.eos_token_id} | config
    config = AutoConfig.for_model("llama", **({"vocab_size": VOCAB, "bos_token_id": None} | ids))
    return read_vocabulary(folder, AutoTokenizer.from_pretrained(folder), config)


def tokenizer_of(name):
    steps, ignore_merges = NAMES[name]
    pattern = next((step for step in steps if step not in ("Digits", "ByteLevel")), None)
    return byte_level_tokenizer(split_steps(pattern, digits="Digits" in steps), ignore_merges)


def test_splits_are_those_of_the_families():
    """The patterns in the table, against those that transformers has."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert NAMES["qwen2"] == ((PRETOKENIZE_REGEX,), False)
    for name in ("llama-bpe", "smaug-bpe", "qwen2", "gpt-4o", "tekken"):
        if (known := known_splits()) is not None:
            assert NAMES[name][0] == (known[name],), name


@pytest.mark.parametrize("name", NAMES)
def test_each_way_to_split_is_read_back(name, tmp_path):
    tokenizer = tokenizer_of(name)
    model_folder(tmp_path, "llama", tokenizer, num_hidden_layers=1)
    (file,) = export_gguf(tmp_path, tmp_path)
    assert read_metadata(file)["tokenizer.ggml.pre"] == name
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert [again(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert any(len(tokenizer(text)["input_ids"]) < len(text) for text in TEXTS)


def test_ways_to_split_differ():
    """Else the test above would pass with any name."""
    ids = {name: [tuple(tokenizer_of(name)(text)["input_ids"]) for text in TEXTS] for name in NAMES}
    assert ids["llama-bpe"] != ids["qwen2"] != ids["gpt-4o"] != ids["tekken"] != ids["gpt-2"] != ids["smollm"]


def test_types_and_padding(tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    tokenizer.add_tokens(["<think>"])
    vocabulary = vocabulary_of(tokenizer, tmp_path)
    assert len(vocabulary.tokens) == len(vocabulary.types) == VOCAB > len(tokenizer)
    kinds = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert kinds["<|turn|>"] == kinds["<eos>"] == gguf.TokenType.CONTROL
    assert kinds["<think>"] == gguf.TokenType.USER_DEFINED
    assert kinds["a"] == gguf.TokenType.NORMAL
    assert vocabulary.tokens[-1] == f"[PAD{VOCAB - 1}]" and kinds[f"[PAD{VOCAB - 1}]"] == gguf.TokenType.UNUSED
    assert vocabulary.tokens.index("<think>") == tokenizer.convert_tokens_to_ids("<think>")


def test_a_tokenizer_that_transformers_loads_as_another(tmp_path):
    tokenizer = tokenizer_of("llama-bpe")
    tokenizer.save_pretrained(tmp_path)
    # for Qwen 2 transformers has a class of its own, which splits in its own way whatever the file says
    config = AutoConfig.for_model("qwen2", vocab_size=VOCAB, eos_token_id=tokenizer.eos_token_id)
    config.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    vocabulary = read_vocabulary(tmp_path, loaded, config)
    assert vocabulary.pre == "llama-bpe"
    if loaded("1234")["input_ids"] != tokenizer("1234")["input_ids"]:
        assert "splits text as 'llama-bpe' does, and so does the GGUF file, but the Qwen2" in vocabulary.notes[0]
    else:
        assert not vocabulary.notes


@pytest.mark.parametrize("normalizer, lost", [(normalizers.NFC(), False), (normalizers.Lowercase(), True)])
def test_normalizers(normalizer, lost, tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    tokenizer.backend_tokenizer.normalizer = normalizer
    if lost:
        with pytest.raises(ValueError, match=r'normalizer={"type": "Lowercase"} cannot be written to GGUF'):
            vocabulary_of(tokenizer, tmp_path)
    else:
        assert vocabulary_of(tokenizer, tmp_path).pre == "gpt-2"


def test_tokens_that_take_the_space_beside_them(tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    tokenizer.add_tokens([AddedToken("<image>", lstrip=True)])
    assert "['<image>'] take white space beside them" in vocabulary_of(tokenizer, tmp_path).notes[0]


def test_two_ids_of_one_text(tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    tokenizer.add_tokens([f"[PAD{VOCAB - 1}]"])
    with pytest.raises(ValueError, match=rf"two ids of the tokenizer have the text '\[PAD{VOCAB - 1}\]'"):
        vocabulary_of(tokenizer, tmp_path)


@pytest.mark.parametrize("gemma", [False, True])
def test_sentencepiece(gemma, tmp_path):
    tokenizer = sentencepiece_tokenizer(gemma)
    tokenizer.add_tokens(["\u2581\u2581"])
    vocabulary = vocabulary_of(tokenizer, tmp_path)
    # looked for in the raw text
    assert vocabulary.tokens[tokenizer.convert_tokens_to_ids("\u2581\u2581")] == "  "
    kinds = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert kinds["<0x0A>"] == gguf.TokenType.BYTE and vocabulary.add_space_prefix is not gemma
    assert kinds["<unk>"] == gguf.TokenType.UNKNOWN and vocabulary.merges == []
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    first, last = ("".join(merge) for merge in (model["merges"][0], model["merges"][-1]))
    first, last = (vocabulary.scores[model["vocab"][text]] for text in (first, last))
    assert first == -1.0 > last and not vocabulary.notes


def test_a_space_in_front_of_the_first_text_only(tmp_path):
    tokenizer = sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    vocabulary = vocabulary_of(tokenizer, tmp_path)
    assert vocabulary.add_space_prefix and "after each special token too" in vocabulary.notes[0]


def test_ids_that_end_a_text(tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    own, turn, end = tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<|turn|>", "<|end|>"])
    assert vocabulary_of(tokenizer, tmp_path).special["eos"] == own
    # the config's, where the tokenizer has another; runtimes stop at both
    special = vocabulary_of(tokenizer, tmp_path, eos_token_id=end).special
    assert (special["eos"], special["eot"]) == (end, own) and "eom" not in special
    special = vocabulary_of(tokenizer, tmp_path, eos_token_id=[end, own]).special
    assert (special["eos"], special["eot"]) == (own, end)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn, own, 7]}))
    vocabulary = vocabulary_of(tokenizer, tmp_path, eos_token_id=end)
    assert [vocabulary.special[role] for role in ("eos", "eot", "eom")] == [end, turn, own]
    assert vocabulary.notes == ["GGUF has room for three ids that end a text; [7] are left out"]


def test_no_id_that_ends_a_text(tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    tokenizer.eos_token = None
    vocabulary = vocabulary_of(tokenizer, tmp_path)
    assert "eos" not in vocabulary.special and "may never stop" in vocabulary.notes[0]


def test_b65_the_eos_id_is_that_of_the_config(tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    model_folder(tmp_path, "llama", tokenizer, eos_token_id=end, num_hidden_layers=1)
    said = read_metadata(export_gguf(tmp_path, tmp_path)[0])
    assert said["tokenizer.ggml.eos_token_id"] == end != tokenizer.eos_token_id
    assert f'PARAMETER stop "{tokenizer.eos_token}"\n' in (tmp_path / "Modelfile").read_text()


@pytest.mark.parametrize("end", [False, True])
def test_tokens_around_every_text(end, tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    single = "<bos> $A <eos>" if end else "<bos> $A"
    special = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=special)
    vocabulary = vocabulary_of(tokenizer, tmp_path)
    assert (vocabulary.add_bos, vocabulary.add_eos) == (True, end)
    turn = ("<|turn|>", tokenizer.convert_tokens_to_ids("<|turn|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|turn|> $A", special_tokens=[turn])
    with pytest.raises(ValueError, match=r"puts \['<\|turn\|>'\] before .* can only be the bos token \(1\)"):
        vocabulary_of(tokenizer, tmp_path)


def test_several_chat_templates(tmp_path):
    tokenizer = tokenizer_of("gpt-2")
    tokenizer.chat_template = {"default": "A{{ messages[0]['content'] }}", "tool_use": "B"}
    model_folder(tmp_path, "llama", tokenizer, num_hidden_layers=1)
    with pytest.warns(UserWarning, match="There is no TEMPLATE here"):
        said = read_metadata(export_gguf(tmp_path, tmp_path)[0])
    assert said["tokenizer.chat_template"].startswith("A{{") and said["tokenizer.chat_template.tool_use"] == "B"
