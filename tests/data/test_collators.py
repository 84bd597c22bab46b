import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch.utils.data import DataLoader
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.tiny import PAD, tiny_rows
from unsloth_trl.data import PackedDataCollator, PackedLayout
from unsloth_trl.data.collators import label_positions


# The rows of TRL's own packing documentation, with completion labels (report B05).
IDS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
COMPLETION = [[0, 0, 1, 1, 1], [0, 1], [0, 0, 1], [1]]


def labelled(ids, masks):
    return [[i if m else -100 for i, m in zip(*pair, strict=True)] for pair in zip(ids, masks, strict=True)]


def packed_rows(strategy, ids=IDS, masks=COMPLETION, seq_length=4):
    dataset = Dataset.from_dict({"input_ids": ids, "labels": labelled(ids, masks)})
    return list(pack_dataset(dataset, seq_length, strategy))


def collator(**kwargs):
    return PackedDataCollator(**({"pad_token_id": PAD, "padding_free": True} | kwargs))


def predicted(batch):
    """The labels that `label_positions` points at, in order."""
    return batch["labels"].flatten()[batch["label_positions"] + 1].tolist()


def assert_consistent(batch):
    """What must hold for every flattened batch, however it was made."""
    layout, labels = batch["packed_layout"], batch["labels"]
    num_tokens = batch["input_ids"].numel()
    assert batch["input_ids"].shape == labels.shape == layout.position_ids.shape == (1, num_tokens)
    assert "attention_mask" not in batch and "position_ids" not in batch
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens[0] == 0 and layout.cu_seqlens[-1] == num_tokens == layout.num_tokens
    starts = layout.cu_seqlens[:-1].long()
    assert (labels[0, starts] == -100).all(), "the first token of a segment has a label"
    assert (layout.position_ids[0, starts] == 0).all()
    assert layout.max_seqlen == layout.cu_seqlens.diff().max()
    assert predicted(batch) == labels[labels != -100].tolist()


@pytest.mark.parametrize("per_batch", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_packed_batches_are_the_ones_of_trl(strategy, per_batch):
    rows = packed_rows(strategy)
    for start in range(0, len(rows), per_batch):
        examples = rows[start : start + per_batch]
        batch = collator()(examples)
        theirs = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)(examples)
        assert_consistent(batch)
        assert torch.equal(batch["input_ids"], theirs["input_ids"])
        assert torch.equal(batch["labels"], theirs["labels"])
        assert torch.equal(batch["packed_layout"].position_ids, theirs["position_ids"])
        assert torch.equal(batch["packed_layout"].cu_seqlens, theirs["cu_seq_lens_q"])
        assert batch["packed_layout"].max_seqlen == theirs["max_length_q"]


def test_completion_labels_survive_bfd():
    """B05: values of the report."""
    rows = packed_rows("bfd")
    assert [row["seq_lengths"] for row in rows] == [[4], [3, 1], [2]]
    batch = collator()(rows[:2])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 8, 9, 10, 11]]
    # token 11 starts its own segment: nothing predicts it
    assert batch["labels"].tolist() == [[-100, -100, 3, 4, -100, -100, 10, -100]]
    assert batch["packed_layout"].cu_seqlens.tolist() == [0, 4, 7, 8]
    assert batch["label_positions"].tolist() == [1, 2, 5]
    assert predicted(batch) == [3, 4, 10]


def test_bfd_split_keeps_every_token():
    rows = packed_rows("bfd_split")
    assert [row["seq_lengths"] for row in rows] == [[4], [3, 1], [2, 1]]
    batch = collator()(rows)
    assert_consistent(batch)
    assert sorted(batch["input_ids"].flatten().tolist()) == list(range(1, 12))
    # 5 was labelled but now starts a fragment
    assert predicted(batch) == [3, 4, 10, 7]
    assert batch["packed_layout"].seqlens == (4, 3, 1, 2, 1)


def test_wrapped_rows_stay_padded():
    rows = packed_rows("wrapped")
    assert "seq_lengths" not in rows[0]
    batch = collator(padding_free=False)(rows)
    assert "packed_layout" not in batch
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 3, 4], [5, -100, 7, -100], [-100, 10, 11, -100]]
    # the label on the first token of row 1 is not predicted by row 0
    assert batch["label_positions"].tolist() == [1, 2, 5, 8, 9]
    assert predicted(batch) == [3, 4, 7, 10, 11]


def test_wrapped_rows_under_padding_free_are_one_segment_each():
    batch = collator()(packed_rows("wrapped"))
    assert_consistent(batch)
    assert batch["packed_layout"].seqlens == (4, 4, 3)
    assert predicted(batch) == [3, 4, 7, 10, 11]


def test_padding_free_without_packing():
    batch = collator()([{"input_ids": [4, 5, 6]}, {"input_ids": [7, 8]}])
    assert_consistent(batch)
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8]]
    assert batch["labels"].tolist() == [[-100, 5, 6, -100, 8]]
    assert batch["label_positions"].tolist() == [0, 1, 3]
    assert batch["packed_layout"].position_ids.tolist() == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize("pad_to_multiple_of", [None, 4])
def test_unpacked_batches_are_the_ones_of_trl(pad_to_multiple_of):
    rows = tiny_rows(3, seed=0)
    rows[1]["labels"] = [-100, *rows[1]["input_ids"][1:-1], -100]
    ours = collator(padding_free=False, pad_to_multiple_of=pad_to_multiple_of)(rows)
    theirs = DataCollatorForLanguageModeling(pad_token_id=PAD, pad_to_multiple_of=pad_to_multiple_of)(rows)
    positions = ours.pop("label_positions")
    assert ours.keys() == theirs.keys() == {"input_ids", "labels", "attention_mask"}
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    shifted = torch.cat([ours["labels"][:, 1:], torch.full((3, 1), -100)], dim=1).flatten()
    assert positions.tolist() == [i for i, label in enumerate(shifted.tolist()) if label != -100]


def test_pad_to_multiple_of_adds_one_closing_segment():
    """B08: every tensor has the padded length, and the pads are one segment, not one each."""
    rows = [{"input_ids": list(range(3, 10))}, {"input_ids": list(range(10, 16))}]  # 7 + 6 tokens
    batch = collator(pad_to_multiple_of=8)(rows)
    assert_consistent(batch)
    layout = batch["packed_layout"]
    assert batch["input_ids"].shape == batch["labels"].shape == layout.position_ids.shape == (1, 16)
    assert layout.cu_seqlens.tolist() == [0, 7, 13, 16]
    assert layout.num_padding == 3
    assert layout.position_ids[0, 13:].tolist() == [0, 1, 2]
    assert batch["input_ids"][0, 13:].tolist() == [PAD] * 3
    assert batch["labels"][0, 13:].tolist() == [-100] * 3
    unpadded = collator()(rows)
    assert torch.equal(batch["label_positions"], unpadded["label_positions"])
    assert torch.equal(batch["labels"][:, :13], unpadded["labels"])


def test_pad_to_multiple_of_adds_nothing_to_a_full_batch():
    batch = collator(pad_to_multiple_of=8)([{"input_ids": list(range(3, 11))}])
    assert batch["packed_layout"].num_padding == 0
    assert batch["packed_layout"].cu_seqlens.tolist() == [0, 8]


def test_eval_packing_without_padding_free_is_flattened():
    """Rows packed by samples must never get a plain causal mask."""
    batch = collator(padding_free=False)(packed_rows("bfd"))
    assert_consistent(batch)
    assert batch["packed_layout"].seqlens == (4, 3, 1, 2)


def test_packed_and_plain_rows_in_one_batch():
    batch = collator()([{"input_ids": [4, 5, 6], "seq_lengths": [1, 2]}, {"input_ids": [7, 8], "seq_lengths": None}])
    assert_consistent(batch)
    assert batch["packed_layout"].seqlens == (1, 2, 2)


def test_label_positions_values():
    labels = torch.tensor([[5, -100, 7, 8], [9, 10, -100, -100], [-100, -100, -100, -100]])
    assert label_positions(labels).tolist() == [1, 2, 4]
    assert label_positions(torch.full((1, 1), 5)).tolist() == []
    assert label_positions(labels).dtype == torch.int64


def test_a_batch_without_labels_has_no_positions():
    batch = collator()([{"input_ids": [4, 5], "labels": [-100, -100]}, {"input_ids": [6]}])
    assert batch["label_positions"].shape == (0,)
    assert batch["labels"].tolist() == [[-100] * 3]


def test_uncached_leaves_the_positions_out():
    batch = collator(cached=False)(packed_rows("bfd"))
    assert "label_positions" not in batch
    assert not batch["packed_layout"].cached
    assert "label_positions" not in collator(cached=False, padding_free=False)([{"input_ids": [4, 5]}])


def test_from_trl_takes_every_setting():
    theirs = DataCollatorForLanguageModeling(
        pad_token_id=9, padding_free=True, return_position_ids=True, pad_to_multiple_of=4
    )
    ours = PackedDataCollator.from_trl(theirs, cached=False)
    assert (ours.pad_token_id, ours.padding_free, ours.return_position_ids) == (9, True, True)
    assert (ours.pad_to_multiple_of, ours.return_tensors, ours.cached) == (4, "pt", False)


@pytest.mark.parametrize("padding_free", [True, False])
def test_wrong_number_of_labels_names_the_row(padding_free):
    rows = [{"input_ids": [4, 5], "labels": [4, 5]}, {"input_ids": [6, 7, 8], "labels": [6, 7]}]
    with pytest.raises(ValueError, match="row 1: 2 labels for 3 input_ids"):
        collator(padding_free=padding_free)(rows)


@pytest.mark.parametrize(
    ("seq_lengths", "message"),
    [([2, 2], "row 1: seq_lengths add up to 4 but input_ids has 3 tokens"), ([3, 0], r"row 1: seq_lengths \[3, 0\]")],
)
def test_wrong_seq_lengths_name_the_row(seq_lengths, message):
    rows = [{"input_ids": [4, 5], "seq_lengths": [1, 1]}, {"input_ids": [6, 7, 8], "seq_lengths": seq_lengths}]
    with pytest.raises(ValueError, match=message):
        collator()(rows)


def test_send_to_device_moves_the_layout_once():
    """accelerate moves whatever has `to`; the meta device stands in for a GPU."""
    batch = collator()(packed_rows("bfd"))
    moved = send_to_device(batch, torch.device("meta"), non_blocking=True)
    assert moved.keys() == batch.keys()
    layout = moved["packed_layout"]
    assert isinstance(layout, PackedLayout)
    assert {t.device.type for t in (layout.cu_seqlens, layout.position_ids, moved["label_positions"])} == {"meta"}
    assert layout.seqlens == batch["packed_layout"].seqlens
    assert send_to_device(batch, torch.device("meta"))["packed_layout"] is layout
    assert send_to_device(batch, torch.device("cpu"))["packed_layout"] is batch["packed_layout"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_through_data_loader_workers(num_workers):
    ids = [row["input_ids"] for row in tiny_rows(20, seed=1)]
    rows = packed_rows("bfd", ids, [[1] * len(row) for row in ids], seq_length=24)
    loader = DataLoader(rows, batch_size=2, collate_fn=collator(), num_workers=num_workers)
    seen = []
    for batch in loader:
        assert_consistent(batch)
        seen.append((batch["input_ids"].tolist(), batch["packed_layout"].seqlens, batch["label_positions"].tolist()))
    direct = [collator()(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    expected = [(b["input_ids"].tolist(), b["packed_layout"].seqlens, b["label_positions"].tolist()) for b in direct]
    assert len(seen) > 2 and seen == expected


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
@pytest.mark.parametrize("padding_free", [True, False])
def test_rows_as_arrays_are_the_rows_as_lists(strategy, padding_free):
    dataset = Dataset.from_list(packed_rows(strategy))
    lists, arrays = list(dataset), list(dataset.with_format("numpy"))
    assert not isinstance(arrays[0]["input_ids"], list)
    expected, batch = (collator(padding_free=padding_free)(rows) for rows in (lists, arrays))
    assert batch.keys() == expected.keys()
    for key in batch.keys() - {"packed_layout"}:
        assert torch.equal(batch[key], expected[key]) and batch[key].dtype == expected[key].dtype, key
    if "packed_layout" in batch:
        assert batch["packed_layout"].seqlens == expected["packed_layout"].seqlens
