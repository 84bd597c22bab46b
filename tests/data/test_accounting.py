import logging
from types import SimpleNamespace

import pytest
from datasets import Dataset
from trl import pack_dataset

import unsloth_trl
from tests.tiny import tiny_model, tiny_tokenizer
from unsloth_trl.data.accounting import TokenCount, count_tokens, describe_losses


X = -100


def rows(ids, labels=None):
    return Dataset.from_dict({"input_ids": ids, "labels": ids if labels is None else labels})


def limits(max_length=4, packing_strategy="bfd", **kwargs):
    return SimpleNamespace(max_length=max_length, packing_strategy=packing_strategy, **kwargs)


def prepare(caplog, tmp_path, ids, **config):
    """The rows that a trainer would train on, and what it says about what it took away."""
    args = unsloth_trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **config)
    dataset = ids if isinstance(ids, Dataset) else Dataset.from_dict({"input_ids": ids})
    with caplog.at_level(logging.WARNING, "unsloth_trl"):
        trainer = unsloth_trl.SFTTrainer(
            tiny_model("llama"), args, train_dataset=dataset, processing_class=tiny_tokenizer()
        )
    messages = [r.getMessage().removeprefix("[RANK 0] ") for r in caplog.records if r.name.startswith("unsloth_trl")]
    return trainer.train_dataset, messages


def test_count_tokens_values():
    dataset = rows([[1, 2, 3], [4], [5, 6], [7, 8]], [[X, 2, 3], [4], [X, X], [7, X]])
    # the label of a row's first token is predicted by nothing: rows 1 and 3 train nothing either
    assert count_tokens(dataset) == TokenCount(rows=4, tokens=8, labels=2, unlabelled_rows=3)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 1000])
def test_count_tokens_does_not_depend_on_the_batch(batch_size):
    ids = [list(range(n)) for n in (5, 1, 3, 2, 4, 1, 7)]
    labels = [[X if (i + j) % 3 == 0 else t for j, t in enumerate(row)] for i, row in enumerate(ids)]
    trained = [sum(label != X for label in row[1:]) for row in labels]
    expected = TokenCount(7, 23, sum(trained), sum(n == 0 for n in trained))
    assert expected.labels > 0 and expected.unlabelled_rows > 0
    assert count_tokens(rows(ids, labels), batch_size) == expected
    # a selection keeps its indices apart from the table
    assert count_tokens(rows(ids[::-1], labels[::-1]).select(range(6, -1, -1)), batch_size) == expected


def test_count_tokens_with_empty_rows_and_without_rows():
    assert count_tokens(rows([[], [1, 2], []])) == TokenCount(3, 2, 1, 2)
    assert count_tokens(rows([[1, 2]]).select([])) == TokenCount(0, 0, 0, 0)
    assert count_tokens(rows([])) == TokenCount(0, 0, 0, 0)


def test_count_tokens_reads_other_columns_and_formats():
    dataset = rows([[1, 2, 3], [4, 5]]).add_column("text", ["a", "b"])
    assert count_tokens(dataset.with_format("torch")) == TokenCount(2, 5, 3, 0)


def test_describe_losses_says_nothing_when_nothing_is_lost():
    count = TokenCount(3, 30, 27, 0)
    assert describe_losses(count, count, limits(), packing=True, name="train") == []
    assert describe_losses(count, count, limits(), packing=False, name="train") == []


def test_describe_losses_values():
    before = TokenCount(rows=2000, tokens=40_000, labels=30_000, unlabelled_rows=500)
    packed = TokenCount(rows=300, tokens=39_000, labels=29_000, unlabelled_rows=0)
    assert describe_losses(before, packed, limits(128), packing=True, name="train") == [
        "train dataset: packing with packing_strategy='bfd' at max_length=128 drops 1,000 of 40,000 tokens (2.5%)",
        "train dataset: 500 of 2,000 samples (25.0%) have no label; packing keeps them, as TRL does",
    ]
    cut = TokenCount(rows=1500, tokens=30_000, labels=29_000, unlabelled_rows=0)
    assert describe_losses(before, cut, limits(20), packing=False, name="eval") == [
        "eval dataset: truncation at max_length=20 drops 10,000 of 40,000 tokens (25.0%); 500 samples have no label "
        "left and are dropped"
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_describe_losses_raises_when_no_label_is_left(packing):
    masked = TokenCount(3, 30, 0, 3)
    with pytest.raises(ValueError, match=r"no label is left in the train dataset: all 30 tokens of its 3 samples"):
        describe_losses(masked, masked, limits(), packing, "train")
    with pytest.raises(ValueError, match=r"the eval dataset is empty"):
        describe_losses(TokenCount(0, 0, 0, 0), TokenCount(0, 0, 0, 0), limits(), packing, "eval")
    with pytest.raises(ValueError, match=r"after cutting at max_length=4: .* Raise max_length") as error:
        describe_losses(TokenCount(3, 30, 9, 0), TokenCount(0, 0, 0, 0), limits(), packing, "train")
    assert ("keep_end" in str(error.value)) is not packing


def test_bfd_drops_the_overflow_and_says_how_much(caplog, tmp_path):
    """B06: lengths 13 and 10 at 10, three tokens dropped, never a fragment without its prompt."""
    ids = [list(range(10, 23)), list(range(30, 40))]
    packed, messages = prepare(caplog, tmp_path, ids, packing=True, max_length=10)
    assert packed["seq_lengths"] == [[10], [10]]
    assert {row[0] for row in packed["input_ids"]} == {10, 30}
    assert messages == [
        "train dataset: packing with packing_strategy='bfd' at max_length=10 drops 3 of 23 tokens (13.0%)"
    ]


def test_bfd_split_requeues_the_overflow(caplog, tmp_path):
    """B06, the other strategy: nothing is lost, nothing is said."""
    ids = [list(range(10, 23)), list(range(30, 40))]
    packed, messages = prepare(caplog, tmp_path, ids, packing=True, packing_strategy="bfd_split", max_length=10)
    assert packed["seq_lengths"] == [[10], [10], [3]]
    assert sorted(sum(packed["input_ids"], [])) == sorted(sum(ids, []))
    assert messages == []


@pytest.mark.parametrize(
    ("strategy", "seq_lengths", "input_ids"),
    [
        ("bfd", [[3], [3], [2, 1]], [[1, 2, 3], [7, 8, 9], [5, 6, 10]]),
        ("bfd_split", [[3], [3], [2, 1], [1]], [[1, 2, 3], [7, 8, 9], [5, 6, 4], [10]]),
    ],
)
def test_short_max_length(caplog, tmp_path, strategy, seq_lengths, input_ids):
    """B07: the report's rows, and the loss in words."""
    packed, messages = prepare(
        caplog,
        tmp_path,
        [[1, 2, 3, 4], [5, 6], [7, 8, 9], [10]],
        packing=True,
        packing_strategy=strategy,
        max_length=3,
    )
    assert packed["seq_lengths"] == seq_lengths
    assert packed["input_ids"] == input_ids
    # the one-token sample has nothing to predict
    expected = ["train dataset: 1 of 4 samples (25.0%) have no label; packing keeps them, as TRL does"]
    if strategy == "bfd":
        lost = "train dataset: packing with packing_strategy='bfd' at max_length=3 drops 1 of 10 tokens (10.0%)"
        expected.insert(0, lost)
    assert messages == expected


def test_truncation_says_how_much(caplog, tmp_path):
    ids, labels = [[4, 5, 6, 7], [8, 9], [3, 4, 5, 6, 7]], [[4, 5, 6, 7], [8, 9], [X, X, X, 6, 7]]
    kept, messages = prepare(caplog, tmp_path, rows(ids, labels), max_length=3)
    assert kept["input_ids"] == [[4, 5, 6], [8, 9]]
    assert messages == [
        "train dataset: truncation at max_length=3 drops 6 of 11 tokens (54.5%); 1 samples have no label left and "
        "are dropped"
    ]


def test_unlabelled_samples_are_counted_under_packing(caplog, tmp_path):
    ids = [[4, 5, 6], [7, 8], [9, 10, 11]]
    labels = [[X, 5, 6], [X, X], [X, X, X]]
    packed, messages = prepare(caplog, tmp_path, rows(ids, labels), packing=True, max_length=8)
    assert sorted(sum(packed["input_ids"], [])) == list(range(4, 12))
    assert messages == ["train dataset: 2 of 3 samples (66.7%) have no label; packing keeps them, as TRL does"]


@pytest.mark.parametrize("packing", [True, False])
def test_an_all_masked_dataset_is_an_error(caplog, tmp_path, packing):
    with pytest.raises(ValueError, match="no label is left in the train dataset: all 5 tokens of its 2 samples"):
        prepare(caplog, tmp_path, rows([[4, 5, 6], [7, 8]], [[X] * 3, [X] * 2]), packing=packing, max_length=8)


@pytest.mark.parametrize("packing", [True, False])
def test_prompts_that_fill_max_length_are_an_error(caplog, tmp_path, packing):
    data = rows([[4, 5, 6, 7], [8, 9, 10]], [[X, X, X, 7], [X, X, 10]])
    with pytest.raises(ValueError, match="no label is left in the train dataset after cutting at max_length=2"):
        prepare(caplog, tmp_path, data, packing=packing, max_length=2)


@pytest.mark.parametrize("data", [{"text": []}, {"input_ids": []}], ids=["text", "tokens"])
@pytest.mark.parametrize("packing", [True, False])
def test_an_empty_dataset_is_an_error(caplog, tmp_path, packing, data):
    with pytest.raises(ValueError, match="the train dataset is empty"):
        prepare(caplog, tmp_path, Dataset.from_dict(data), packing=packing, max_length=8)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_samples_longer_than_max_length(caplog, tmp_path, strategy):
    ids = [list(range(3, 103)), list(range(3, 8))]
    packed, messages = prepare(caplog, tmp_path, ids, packing=True, packing_strategy=strategy, max_length=16)
    tokens = sum(map(len, packed["input_ids"]))
    assert max(map(len, packed["input_ids"])) == 16
    if strategy == "bfd":
        assert tokens == 21
        assert messages == [
            "train dataset: packing with packing_strategy='bfd' at max_length=16 drops 84 of 105 tokens (80.0%)"
        ]
    else:
        assert tokens == 105 and messages == []


def test_packing_is_the_one_of_trl(caplog, tmp_path):
    ids = [list(range(3, 3 + n)) for n in (4, 9, 2, 7, 5)]
    packed, _ = prepare(caplog, tmp_path, ids, packing=True, max_length=12)
    theirs = pack_dataset(rows(ids), 12, "bfd")
    assert packed["input_ids"] == theirs["input_ids"] and packed["seq_lengths"] == theirs["seq_lengths"]
