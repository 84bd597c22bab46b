"""Labels on responses only: where the parts come from, which tokens are learned, and what a trainer then has."""

import random

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, PreTrainedTokenizerFast

import unsloth_trl
from tests.data.chat_tokenizers import ANSWERS, FAMILIES, PLAIN, QUESTIONS, chat_tokenizer, make_tokenizer
from tests.numerics import CPU
from tests.tiny import tiny_model, tiny_tokenizer
from unsloth_trl import train_on_responses_only
from unsloth_trl.data.chat_parts import ChatParts, find_parts, first_tokens
from unsloth_trl.data.responses import ResponseMask


IGNORE = -100
GENERATION = "{% generation %}{{ message['content'] }}{% endgeneration %} <eos> "


def chat(turns, seed=0):
    rng = random.Random(seed)
    pairs = [(rng.choice(QUESTIONS), rng.choice(ANSWERS)) for _ in range(turns)]
    return [
        {"role": role, "content": content}
        for pair in pairs
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]


def answers_of(messages, family):
    """What has to be learned of a conversation: each answer with the token that ends it."""
    trimmed = family in ("llama3", "gemma")
    end = FAMILIES[family][6].strip()
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return [(content.strip() if trimmed else content) + end for content in said]


def runs(tokenizer, ids, labels):
    """The texts of tokens that are learned in a row."""
    texts, run = [], []
    for token, label in zip([*ids, None], [*labels, IGNORE], strict=True):
        if label == IGNORE:
            texts += [tokenizer.decode(run)] if run else []
            run = []
        else:
            assert label == token
            run.append(token)
    return texts


def trainer_of(tokenizer, rows, output_dir, library=unsloth_trl, eval_dataset=None, **config):
    settings = CPU | {"max_length": 256, "per_device_train_batch_size": 2, "max_steps": 1} | config
    return library.SFTTrainer(
        tiny_model("llama", vocab_size=max(len(tokenizer), 128), eos_token_id=tokenizer.eos_token_id),
        library.SFTConfig(str(output_dir), **settings),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )


def words(n, seed):
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10, 100)}" for _ in range(n))


def word_rows(n=12):
    roles = ("user", "assistant", "user", "assistant")
    return [
        {"messages": [{"role": role, "content": words(3 + i % 3, 10 * i + j)} for j, role in enumerate(roles)]}
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def tokenizers():
    return {family: chat_tokenizer(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_found_in_the_template(tokenizers, family):
    *_, instruction, response, end = FAMILIES[family]
    parts = find_parts(tokenizers[family])
    assert (parts.instruction, parts.response, parts.end) == (instruction, response, end)
    assert first_tokens(tokenizers[family], parts.end) == {tokenizers[family].convert_tokens_to_ids(end.strip())}


def test_turns_of_tools_and_systems_are_found(tokenizers):
    assert find_parts(tokenizers["chatml"]).others == ("<|im_start|>tool\n", "<|im_start|>system\n")
    assert find_parts(tokenizers["mistral"]).others == ()  # raises for both


TRL_PARTS = {
    "qwen3": ("<|im_start|>user\n", "<|im_start|>assistant\n"),
    "qwen2_5": ("<|im_start|>user\n", "<|im_start|>assistant\n"),
    "llama3_2": (FAMILIES["llama3"][4], FAMILIES["llama3"][5]),
    "gemma3": ("<start_of_turn>user\n", "<start_of_turn>model\n"),
    "phi3": ("<|user|>\n", "<|assistant|>\n"),
    "gptoss": ("<|start|>user<|message|>", "<|start|>assistant"),
    "deepseekv3": ("<｜User｜>", "<｜Assistant｜>"),
    "glm4moe": ("<|user|>\n", "<|assistant|>"),
    "cohere": ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
}


@pytest.mark.parametrize("name", TRL_PARTS)
def test_parts_of_public_templates(name):
    from importlib import resources

    template = (resources.files(trl) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    # "<|user|>" and "<|endoftext|>" begin alike: a part must not end in the middle of them
    tokenizer = tiny_tokenizer("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
    parts = find_parts(tokenizer, template)
    assert (parts.instruction, parts.response) == TRL_PARTS[name]


def test_templates_without_parts_are_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template.*pass instruction_part and response_part"):
        find_parts(tokenizer)
    with pytest.raises(ValueError, match="two questions with an answer each.*'Uzquestion1Azanswer1"):
        find_parts(tokenizer, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ValueError, match="TemplateError: alone.*Pass instruction_part"):
        find_parts(tokenizer, "{{ raise_exception('alone') }}")


@pytest.mark.parametrize("given", [False, True], ids=["found", "given"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation(tokenizers, family, given):
    tokenizer = tokenizers[family]
    *_, instruction, response, end = FAMILIES[family]
    parts = ChatParts(instruction, response, (), end) if given else find_parts(tokenizer)
    mask = ResponseMask(tokenizer, parts, first_tokens(tokenizer, end))
    messages = [m for q, a in zip(QUESTIONS, ANSWERS, strict=True) for m in _pair(q, a)]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    learned = runs(tokenizer, ids, mask.mask(ids, ids)[0])
    expected = answers_of(messages, family)
    # where the tokenizer joins the last line feed of the marker to the answer's, the answer wins
    assert [text.lstrip("\n") for text in learned] == [text.lstrip("\n") for text in expected]
    assert all(text.startswith("\n") for text, e in zip(learned, expected, strict=True) if e.startswith("\n"))


def _pair(question, answer):
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


def test_markers_that_merge_with_their_surroundings():
    tokenizer = make_tokenizer(PLAIN, None, "<eos>", [])
    parts = find_parts(tokenizer)
    assert parts == ChatParts("### Instruction:\n", "### Response:\n")
    messages = [m for q, a in zip(QUESTIONS, ANSWERS, strict=True) for m in _pair(q, a)]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    # a search for the marker's own tokens finds less than there is
    marker = tokenizer(parts.response)["input_ids"]
    found = sum(ids[i : i + len(marker)] == marker for i in range(len(ids)))
    assert found < len(ANSWERS)
    learned = runs(tokenizer, ids, ResponseMask(tokenizer, parts, {tokenizer.eos_token_id}).mask(ids, ids)[0])
    assert [text.strip() for text in learned] == [*map(str.strip, ANSWERS[:3]), ANSWERS[3] + "<eos>"]


def test_a_token_with_the_end_of_a_response_and_the_next_marker():
    """It is learned: without it the response would not end as it does."""
    merges = [("!", "#"), ("!#", "#")]
    alphabet = sorted({*"### Q:\n### A:\nBlue!Who?", *"<eos>"})
    vocab = {token: i for i, token in enumerate(["<eos>", *alphabet, "!#", "!##"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab, merges)), eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    text = "### Q:\nWho?### A:\nBlue!### Q:\nWho?### A:\nBlue<eos>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and "!##" in tokenizer.convert_ids_to_tokens(ids)
    mask = ResponseMask(tokenizer, ChatParts("### Q:\n", "### A:\n"), {tokenizer.eos_token_id})
    assert runs(tokenizer, ids, mask.mask(ids, ids)[0]) == ["Blue!##", "Blue<eos>"]


@pytest.mark.parametrize("family", ["chatml", "gemma"])
def test_tokens_that_the_tokenizer_would_not_make(tokenizers, family):
    """Cut by hand, or in the middle of a character: the text is the same, and so is what is learned of it."""
    tokenizer = tokenizers[family]
    mask = ResponseMask(
        tokenizer, find_parts(tokenizer), {tokenizer.convert_tokens_to_ids(FAMILIES[family][6].strip())}
    )
    messages = [m for q, a in zip(QUESTIONS[:3], ANSWERS[:3], strict=True) for m in _pair(q, a)]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    single = []
    for i in ids:
        special = i in tokenizer.get_added_vocab().values()
        single += [i] if special else [p for c in tokenizer.decode([i]) for p in _plain(tokenizer, c)]
    assert len(single) > len(ids) and tokenizer.decode(single) == tokenizer.decode(ids)
    assert runs(tokenizer, single, mask.mask(single, single)[0]) == answers_of(messages, family)
    rocket = tokenizer.apply_chat_template([*_pair("Who?", "Blue 🚀")], return_dict=True)["input_ids"]
    cut = next(rocket[:n] for n in range(1, len(rocket)) if tokenizer.decode(rocket[:n]).endswith("\ufffd"))
    labels, found = mask.mask(cut, cut)
    assert found and tokenizer.decode([x for x in labels if x != IGNORE]) == "Blue \ufffd"


def _plain(tokenizer, character):
    return tokenizer(character, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma"])
def test_b61_a_trainer_learns_answers_and_their_ends(tokenizers, family, packing, tmp_path):
    tokenizer = tokenizers[family]
    assert tokenizer.pad_token == tokenizer.eos_token
    rows = [{"messages": chat(1 + i % 3, i)} for i in range(9)]
    config = {"packing": packing, "max_length": 512, "shuffle_dataset": False}
    trainer = trainer_of(tokenizer, rows, tmp_path, eval_dataset=Dataset.from_list(rows[:2]), **config)
    assert train_on_responses_only(trainer) is trainer
    learned = [text for row in trainer.train_dataset for text in runs(tokenizer, row["input_ids"], row["labels"])]
    expected = [text for row in rows for text in answers_of(row["messages"], family)]
    assert sorted(text.strip("\n") for text in learned) == sorted(text.strip("\n") for text in expected)
    assert len(trainer.train_dataset) < len(rows) if packing else len(trainer.train_dataset) == len(rows)
    count = trainer.response_counts["train"]
    assert count.labels == sum(x != IGNORE for row in trainer.train_dataset for x in row["labels"])
    assert 0.1 < count.share < 0.9 and count.labels < count.labels_before
    assert (count.dropped_rows, count.without_response, count.repeated) == (0, 0, 0)
    # what the model gets: ends are learned though they are the padding token too, and padding is not
    batch = next(iter(trainer.get_train_dataloader()))
    ids, labels = batch["input_ids"], batch["labels"]
    end = tokenizer.convert_tokens_to_ids(FAMILIES[family][6].strip())
    assert (labels == end).sum() == sum(
        text.endswith(FAMILIES[family][6].strip()) for text in _texts(batch, tokenizer)
    )
    if not packing:
        assert (labels[batch["attention_mask"] == 0] == IGNORE).all()
        assert (batch["attention_mask"] == 0).any() and (
            ids[batch["attention_mask"] == 0] == tokenizer.eos_token_id
        ).all()
    evaluated = [text for row in trainer.eval_dataset for text in runs(tokenizer, row["input_ids"], row["labels"])]
    assert len(evaluated) == sum(len(row["messages"]) // 2 for row in rows[:2])
    if family == "llama3":
        assert trainer.train().training_loss > 0


def _texts(batch, tokenizer):
    return [
        text
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        for text in runs(tokenizer, ids, labels)
    ]


def _masks_end_in_white_space() -> bool:
    """transformers 5.17 lets a mask go on to the end if the last character of an answer is in no token."""
    chat = [{"role": role, "content": "w9"} for role in ("user", "assistant", "user", "assistant")]
    made = tiny_tokenizer().apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    right = made["assistant_masks"] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert right or Version(transformers.__version__) < Version("5.24")
    return right


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_equals_trl_s_assistant_masks(packing, tmp_path):
    """A template with generation markers: the parts found in it give the labels that TRL takes from the markers."""
    if not _masks_end_in_white_space():
        pytest.skip("this transformers masks too much with this tokenizer")
    config = {"packing": packing, "max_length": 64, "shuffle_dataset": False}
    marked = trainer_of(tiny_tokenizer(), word_rows(), tmp_path, assistant_only_loss=True, **config)
    masked = train_on_responses_only(trainer_of(tiny_tokenizer(), word_rows(), tmp_path, **config))
    assert list(masked.train_dataset["input_ids"]) == list(marked.train_dataset["input_ids"])
    assert list(masked.train_dataset["labels"]) == list(marked.train_dataset["labels"])
    before = list(marked.train_dataset["labels"])
    train_on_responses_only(marked)  # its masks are TRL's already
    assert list(marked.train_dataset["labels"]) == before
    assert marked.response_counts == {
        "train": masked.response_counts["train"]._replace(labels_before=masked.response_counts["train"].labels)
    }


def test_b61_markers_that_leave_out_the_end(tmp_path):
    tokenizer = tiny_tokenizer()
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace(
        "{% generation %}{{ message['content'] }} <eos> {% endgeneration %}", GENERATION
    )
    assert tokenizer.chat_template != template
    trainer = trainer_of(tokenizer, word_rows(4), tmp_path, assistant_only_loss=True)
    assert tokenizer.eos_token_id not in {x for row in trainer.train_dataset for x in row["labels"]}
    train_on_responses_only(trainer)
    for row in trainer.train_dataset:
        assert row["labels"].count(tokenizer.eos_token_id) == row["input_ids"].count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_b61_eos_is_learned_without_any_mask(tokenizers, kind, packing, tmp_path):
    """EOS is the padding token; each sample ends on it and learns it, padding does not."""
    tokenizer = tokenizers["llama3"]
    pad = eos = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == pad
    texts = [{"text": f"{q} {a}"} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    rows = (
        texts if kind == "text" else [{"messages": list(_pair(q, a))} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    )
    trainer = trainer_of(tokenizer, rows, tmp_path, packing=packing, per_device_train_batch_size=4)
    samples = list(_samples(trainer.train_dataset))
    assert [ids.count(tokenizer.bos_token_id) for ids in samples] == [1] * 4
    assert [ids.count(eos) for ids in samples] == [1 if kind == "text" else 2] * 4
    assert all(ids[-1] == eos for ids in samples)
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["labels"]
    assert (labels == eos).sum() == sum(ids.count(eos) for ids in samples)
    if not packing:
        padding = batch["attention_mask"] == 0
        assert padding.any() and (batch["input_ids"][padding] == pad).all() and (labels[padding] == IGNORE).all()


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_b61_one_bos_and_one_eos(tokenizers, packing, tmp_path):
    """Texts that were rendered with the template, as in many notebooks: TRL adds another BOS and EOS."""
    for family in ("llama3", "chatml"):
        tokenizer = tokenizers[family]
        texts = [tokenizer.apply_chat_template(chat(2, i), tokenize=False) for i in range(6)]
        trainer = trainer_of(tokenizer, [{"text": text} for text in texts], tmp_path, packing=packing, max_length=256)
        samples = list(_samples(trainer.train_dataset))
        if family == "llama3":
            assert all(ids[:2] == [tokenizer.bos_token_id] * 2 for ids in samples)
        else:
            assert all(tokenizer.decode(ids).endswith("<|im_end|>\n<|im_end|>") for ids in samples)
        train_on_responses_only(trainer)
        assert trainer.response_counts["train"].repeated == 6
        # a template's own line feed after the last turn goes with the second EOS
        assert sorted(tokenizer.decode(ids) for ids in _samples(trainer.train_dataset)) == sorted(
            text.rstrip("\n") for text in texts
        )
        ends = [label for row in trainer.train_dataset for label in row["labels"] if label == tokenizer.eos_token_id]
        assert len(ends) == 12
        assert trainer.train().training_loss > 0


def _samples(dataset):
    for row in dataset:
        start = 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            yield row["input_ids"][start : start + length]
            start += length
        assert start == len(row["input_ids"]) == len(row["labels"])


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_given_parts_and_truncated_samples(tokenizers, packing, tmp_path):
    tokenizer = tokenizers["llama3"]
    whole = [*_pair(QUESTIONS[0], ANSWERS[0]), *_pair(QUESTIONS[1], ANSWERS[1] * 3)]
    ids = tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"]
    asked_only = list(_pair("Who are you? " * 40, ANSWERS[2]))
    config = {"max_length": len(ids) - 4, "packing": packing, "shuffle_dataset": False}
    trainer = trainer_of(tokenizer, [{"messages": whole}, {"messages": asked_only}], tmp_path, **config)
    train_on_responses_only(trainer, FAMILIES["llama3"][4], FAMILIES["llama3"][5])
    (row,) = trainer.train_dataset
    assert row["input_ids"] == ids[:-4] and tokenizer.eos_token_id not in row["labels"][-10:]
    first, second = runs(tokenizer, row["input_ids"], row["labels"])
    assert first == ANSWERS[0] + "<|eot_id|>"
    assert (ANSWERS[1] * 3).startswith(second) and tokenizer.decode(ids[:-4]).endswith("\n\n" + second)
    count = trainer.response_counts["train"]
    assert (count.without_response, count.dropped_rows, count.rows) == (1, 1, 1)


def test_a_marker_that_is_cut_in_half(tokenizers):
    tokenizer = tokenizers["chatml"]
    mask = ResponseMask(tokenizer, find_parts(tokenizer), {tokenizer.eos_token_id})
    ids = tokenizer.apply_chat_template([*_pair("Who?", "Me."), *_pair("Why?", "So.")], return_dict=True)["input_ids"]
    second = [i for i, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|im_start|>")][3]
    for cut in (ids[: second + 1], ids[: second + 2]):
        assert tokenizer.decode(cut).endswith(("<|im_start|>", "<|im_start|>u", "<|im_start|>user"))
        assert runs(tokenizer, cut, mask.mask(cut, cut)[0]) == ["Me.<|im_end|>"]


def test_labels_that_were_masked_stay_masked(tokenizers, tmp_path):
    tokenizer = tokenizers["llama3"]
    rows = [{"prompt": chat(2, i)[:3], "completion": chat(2, i)[3:]} for i in range(4)]
    trainer = trainer_of(tokenizer, rows, tmp_path)
    train_on_responses_only(trainer)
    learned = [text for row in trainer.train_dataset for text in runs(tokenizer, row["input_ids"], row["labels"])]
    assert learned == [answers_of(row["completion"], "llama3")[0] for row in rows]


def test_turns_of_others_end_a_response(tokenizers):
    tokenizer = tokenizers["chatml"]
    mask = ResponseMask(tokenizer, find_parts(tokenizer), {tokenizer.eos_token_id})
    turns = [
        *_pair("Who?", "Wait."),
        {"role": "tool", "content": "It is four."},
        {"role": "assistant", "content": "Four."},
    ]
    ids = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert runs(tokenizer, ids, mask.mask(ids, ids)[0]) == ["Wait.<|im_end|>", "Four.<|im_end|>"]


def test_nothing_to_learn_is_an_error(tokenizers, tmp_path):
    trainer = trainer_of(tokenizers["chatml"], [{"messages": chat(1, i)} for i in range(3)], tmp_path)
    before = trainer.train_dataset
    with pytest.raises(
        ValueError,
        match=r"nothing would be learned from the train dataset: instruction_part='### User:' and "
        r"response_part='### Answer:' leave no label.*first row begins '<\|im_start\|>system\\nBe brief",
    ):
        train_on_responses_only(trainer, "### User:", "### Answer:")
    assert trainer.train_dataset is before and not hasattr(trainer, "response_counts")
    with pytest.raises(ValueError, match="response_part=' ' is empty"):
        train_on_responses_only(trainer, "### User:", " ")
    with pytest.raises(ValueError, match="are the same text, 'a'"):
        train_on_responses_only(trainer, "a", "a")
    with pytest.raises(TypeError, match="is for SFTTrainer; object has no labels"):
        train_on_responses_only(object())


def test_evaluation_sets_by_name(tokenizers, tmp_path):
    tokenizer = tokenizers["llama3"]
    rows = [{"messages": chat(1, i)} for i in range(4)]
    evaluated = {"a": Dataset.from_list(rows[:1]), "b": Dataset.from_list(rows[1:])}
    trainer = train_on_responses_only(trainer_of(tokenizer, rows, tmp_path, eval_dataset=evaluated))
    assert list(trainer.response_counts) == ["train", "eval/a", "eval/b"]
    for name, expected in (("a", rows[:1]), ("b", rows[1:])):
        learned = [t for row in trainer.eval_dataset[name] for t in runs(tokenizer, row["input_ids"], row["labels"])]
        assert learned == [answers_of(row["messages"], "llama3")[0] for row in expected]
    assert {"eval_a_loss", "eval_b_loss"} <= set(trainer.evaluate())


def test_streams(tokenizers, tmp_path):
    tokenizer = tokenizers["llama3"]
    rows = [{"messages": chat(2, i)} for i in range(6)]
    stream = Dataset.from_list(rows).to_iterable_dataset()
    trainer = train_on_responses_only(trainer_of(tokenizer, stream, tmp_path))
    learned = [text for row in trainer.train_dataset for text in runs(tokenizer, row["input_ids"], row["labels"])]
    assert learned == [text for row in rows for text in answers_of(row["messages"], "llama3")]
    assert trainer.response_counts == {} and trainer.train().training_loss > 0
    with pytest.raises(ValueError, match="from the first 6 rows of the train dataset"):
        train_on_responses_only(trainer, "### User:", "### Answer:")


def test_streams_lose_rows_without_a_label(tokenizers, tmp_path):
    """Such a batch is a step with a gradient of zero, which moves the optimizer all the same."""
    tokenizer = tokenizers["llama3"]
    rows = [{"messages": chat(2, i)[: 1 if i in (1, 4) else None]} for i in range(6)]
    trainer = trainer_of(tokenizer, Dataset.from_list(rows).to_iterable_dataset(), tmp_path, shuffle_dataset=False)
    before = [row["input_ids"] for row in trainer.train_dataset]
    after = list(train_on_responses_only(trainer).train_dataset)
    assert all(any(x != IGNORE for x in row["labels"]) for row in after)
    assert [row["input_ids"] for row in after] == [before[i] for i in (0, 2, 3, 5)]


def test_a_collator_that_makes_labels_of_its_own(tokenizers, tmp_path):
    tokenizer, rows = tokenizers["llama3"], [{"messages": chat(1, 0)}] * 2
    trainer = trainer_of(tokenizer, rows, tmp_path)
    trainer.data_collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    with pytest.raises(ValueError, match="data_collator=DataCollatorForLanguageModeling of transformers makes labels"):
        train_on_responses_only(trainer)
    trainer.data_collator = DataCollatorForSeq2Seq(tokenizer)
    batch = next(iter(train_on_responses_only(trainer).get_train_dataloader()))
    assert (batch["labels"] != IGNORE).sum() == trainer.response_counts["train"].labels > 0


def test_works_with_trl_s_own_trainer(tokenizers, tmp_path):
    rows = [{"messages": chat(2, i)} for i in range(6)]
    config = {"packing": True, "max_length": 128, "shuffle_dataset": False}
    ours = train_on_responses_only(trainer_of(tokenizers["llama3"], rows, tmp_path, **config))
    theirs = train_on_responses_only(trainer_of(tokenizers["llama3"], rows, tmp_path, trl, **config))
    assert ours.train_dataset[:] == theirs.train_dataset[:]
    losses = [trainer.train().training_loss for trainer in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_smollm2_learns_to_stop(smollm2):
    """The real template of ChatML, whose padding token is its EOS."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    parts = find_parts(tokenizer)
    assert (parts.instruction, parts.response, parts.end) == FAMILIES["chatml"][4:]
    mask = ResponseMask(tokenizer, parts, {tokenizer.eos_token_id})
    messages = [m for q, a in zip(QUESTIONS, ANSWERS, strict=True) for m in _pair(q, a)]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    learned = runs(tokenizer, ids, mask.mask(ids, ids)[0])
    assert [text.lstrip("\n") for text in learned] == [a.lstrip("\n") + "<|im_end|>" for a in ANSWERS]
    assert torch.tensor(ids).eq(tokenizer.eos_token_id).sum() == 9  # the system's, four questions, four answers
