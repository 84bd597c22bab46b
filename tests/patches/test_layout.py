import copy
import pickle
import random
import weakref

import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from transformers import Trainer

from unsloth_trl.patches.attention.segments import build_buckets
from unsloth_trl.patches.layout import PackedLayout


def assert_same(actual: PackedLayout, expected: PackedLayout) -> None:
    for name in ("seqlens", "parents", "num_tokens", "num_padding", "max_seqlen", "cached", "num_segments"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert torch.equal(actual.cu_seqlens, expected.cu_seqlens)
    assert torch.equal(actual.position_ids, expected.position_ids)


def test_plain_segments():
    layout = PackedLayout([3, 1, 4])
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 8] and layout.cu_seqlens.dtype == torch.int32
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]] and layout.position_ids.dtype == torch.int64
    assert (layout.num_tokens, layout.num_segments, layout.max_seqlen, layout.num_padding) == (8, 3, 4, 0)
    assert type(layout.max_seqlen) is int and layout.parents is None and layout.cached
    assert layout.cu_seqlens.is_contiguous() and layout.position_ids.is_contiguous()
    assert repr(layout) == "PackedLayout(seqlens=[3, 1, 4], device='cpu')"


@pytest.mark.parametrize("num_tokens", [7, 8])
@pytest.mark.parametrize("num_segments", [1, 2, 3])
def test_boundaries_for_odd_and_even_sizes(num_tokens, num_segments):
    """The boundaries lie behind the positions in one buffer, two to a word."""
    lengths = [1] * (num_segments - 1) + [num_tokens - num_segments + 1]
    layout = PackedLayout(lengths)
    assert layout.cu_seqlens.tolist() == [*range(num_segments), num_tokens]
    assert layout.position_ids.shape == (1, num_tokens)


def test_empty_segments():
    layout = PackedLayout([0, 2, 0, 1, 0])
    assert layout.cu_seqlens.tolist() == [0, 0, 2, 2, 3, 3]
    assert layout.position_ids.tolist() == [[0, 1, 0]]
    assert PackedLayout([]).cu_seqlens.tolist() == [0] and PackedLayout([]).max_seqlen == 0


def test_parents_of_depth_four():
    """A tree of turns: positions continue where the parent ends, also two and three levels up."""
    layout = PackedLayout([3, 2, 4, 1, 2, 5], parents=[-1, 0, 1, 2, 0, -1])
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 0, 1, 2, 3, 4]]
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 9, 10, 12, 17]
    assert layout.parents == (-1, 0, 1, 2, 0, -1)
    assert "parents=[-1, 0, 1, 2, 0, -1]" in repr(layout)
    padded = PackedLayout([3, 2], parents=[-1, 0], pad_to=7)
    assert padded.parents == (-1, 0, -1) and padded.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert PackedLayout([3, 2], parents=[-1, -1]).parents is None


def test_static_shapes():
    layout = PackedLayout([3, 2], pad_to=8, cu_seqlens_size=7, max_seqlen_multiple=4)
    assert layout.seqlens == (3, 2, 3) and layout.num_padding == 3 and layout.num_tokens == 8
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 8, 8, 8, 8]
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert layout.max_seqlen == 4
    full = PackedLayout([5, 3], pad_to=8, cu_seqlens_size=3, max_seqlen_multiple=5)
    assert full.num_padding == 0 and full.seqlens == (5, 3) and full.max_seqlen == 5
    assert PackedLayout([5, 3], max_seqlen_multiple=128).max_seqlen == 128
    assert PackedLayout([1], pad_to=9).max_seqlen == 8  # the closing segment counts


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PackedLayout([2, -1]), "segment 1 has length -1; lengths must not be negative"),
        (lambda: PackedLayout([2, 1], parents=[-1]), "1 parents for 2 segments"),
        (
            lambda: PackedLayout([2, 1], parents=[1, -1]),
            "segment 0 has parent 1; a parent is an earlier segment or -1",
        ),
        (lambda: PackedLayout([2, 1], parents=[-1, 1]), "segment 1 has parent 1"),
        (lambda: PackedLayout([2, 1], parents=[-1, -2]), "segment 1 has parent -2"),
        (lambda: PackedLayout([2, 1], pad_to=2), "pad_to=2 is smaller than the 3 tokens of the batch"),
        (
            lambda: PackedLayout([2, 1], pad_to=4, cu_seqlens_size=3),
            "cu_seqlens_size=3 is smaller than the 4 boundaries of the batch",
        ),
        (
            lambda: PackedLayout.from_rows([[4], [2, 3]], [4, 6]),
            "row 1: seq_lengths add up to 5 but input_ids has 6 tokens",
        ),
        (lambda: PackedLayout.from_rows([[3, 0]], [3]), r"row 0: seq_lengths \[3, 0\] has a sample without tokens"),
        (lambda: PackedLayout.from_rows([[3], [2]], [3]), "seq_lengths describes 2 rows, the batch has 1"),
        (lambda: PackedLayout([7]).check(6), "packed_layout describes 7 tokens but the attention got 6"),
        (
            lambda: PackedLayout.from_position_ids(torch.tensor([[0, 1], [3, 4]])),
            "row 1: position_ids starts at 3, expected 0",
        ),
    ],
)
def test_errors_name_what_is_wrong(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_multi_axis_positions_are_refused():
    """B09: three axes of 256 positions are not three samples."""
    positions = torch.arange(256).expand(3, 1, 256)
    with pytest.raises(ValueError, match=r"position_ids of shape \(3, 1, 256\): boundaries can only be read from 2-D"):
        PackedLayout.from_position_ids(positions)
    assert PackedLayout.from_position_ids(positions[0]).cu_seqlens.tolist() == [0, 256]


def test_from_position_ids_finds_the_layout_again():
    layout = PackedLayout([3, 1, 1, 4])
    assert_same(PackedLayout.from_position_ids(layout.position_ids), layout)
    two_rows = PackedLayout.from_position_ids(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]))
    assert two_rows.seqlens == (2, 2, 4)


def test_second_batch_of_the_same_size_is_not_the_first_answer():
    """B03: two rows of 16 tokens, split differently, then two others."""
    first = PackedLayout.from_rows([[7, 9], [5, 11]], [16, 16])
    first_buckets = first.derived("buckets", build_buckets)
    positions = first.position_ids.clone()
    second = PackedLayout.from_rows([[8, 8], [3, 13]], [16, 16])
    assert first.cu_seqlens.tolist() == [0, 7, 16, 21, 32]
    assert second.cu_seqlens.tolist() == [0, 8, 16, 19, 32]
    assert torch.equal(first.position_ids, positions) and not torch.equal(second.position_ids, positions)
    assert second.derived("buckets", build_buckets) is not first_buckets
    assert first.derived("buckets", build_buckets) is first_buckets


def test_layouts_own_their_buffers():
    lengths = [3, 2]
    first, second = PackedLayout(lengths), PackedLayout(lengths)
    lengths.append(9)
    first.position_ids.fill_(7)
    assert second.position_ids.tolist() == [[0, 1, 2, 0, 1]] and second.seqlens == (3, 2)
    copied = copy.deepcopy(second)
    copied.position_ids.fill_(7)
    assert second.position_ids.tolist() == [[0, 1, 2, 0, 1]]


def test_pickle_carries_the_numbers_and_not_the_caches():
    layout = PackedLayout([3, 2, 4], parents=[-1, 0, -1], pad_to=12, cu_seqlens_size=9, max_seqlen_multiple=8)
    layout.to("meta")
    layout.derived("key", lambda layout: "value")
    loaded = pickle.loads(pickle.dumps(layout))
    assert_same(loaded, layout)
    assert loaded.derived("key", lambda layout: "again") == "again"
    assert loaded.to("meta") is not layout.to("meta")
    uncached = pickle.loads(pickle.dumps(PackedLayout([2], cached=False)))
    assert uncached.cached is False


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(context):
    lengths = [3, 1, 4, 1, 5, 2]
    loader = DataLoader(lengths, batch_size=2, collate_fn=PackedLayout, num_workers=1, multiprocessing_context=context)
    layouts = list(loader)
    assert [layout.seqlens for layout in layouts] == [(3, 1), (4, 1), (5, 2)]
    for layout in layouts:
        assert_same(layout, PackedLayout(layout.seqlens))


def test_move_is_one_copy_and_remembered(monkeypatch):
    layout = PackedLayout([3, 2])
    assert layout.to("cpu") is layout and layout.to(None) is layout  # as tensors do
    copies = []
    tensor_to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **kwargs: copies.append(1) or tensor_to(*args, **kwargs))
    moved = layout.to(torch.device("meta"), non_blocking=True)
    assert moved is not layout and moved.device.type == "meta"
    assert moved.cu_seqlens.shape == (3,) and moved.position_ids.shape == (1, 5) and moved.seqlens == (3, 2)
    assert layout.to("meta") is moved and moved.to("meta") is moved
    assert len(copies) == 1
    assert layout.device.type == "cpu" and layout.cu_seqlens.tolist() == [0, 3, 5]


def test_derived_belongs_to_a_device():
    layout = PackedLayout([3, 2])
    assert layout.derived("device", lambda layout: layout.device.type) == "cpu"
    assert layout.to("meta").derived("device", lambda layout: layout.device.type) == "meta"
    assert layout.derived("device", lambda layout: "built twice") == "cpu"


def test_accelerate_and_the_trainer_carry_it():
    layout = PackedLayout([3, 2])
    batch = {"input_ids": torch.zeros(1, 5), "packed_layout": layout}
    moved = send_to_device(batch, torch.device("meta"), non_blocking=True)["packed_layout"]
    assert isinstance(moved, PackedLayout) and moved.device.type == "meta"
    assert send_to_device(batch, torch.device("cpu"))["packed_layout"] is layout
    trainer = Trainer.__new__(Trainer)
    trainer.args = type("Args", (), {"device": torch.device("cpu")})()
    trainer.is_deepspeed_enabled = False
    assert_same(trainer._prepare_input(batch)["packed_layout"], layout)


def test_pin_memory_gives_a_buffer_of_its_own(monkeypatch):
    """Page-locking itself needs a GPU; here a copy stands in for it, through the data loader's own function."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: pinned.append(self) or self.clone())
    layout = PackedLayout([3, 2])
    other = pin_memory({"packed_layout": layout})["packed_layout"]
    assert len(pinned) == 1, "one copy for the whole layout"
    assert other is not layout
    assert_same(other, layout)
    other.position_ids.fill_(9)
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 1]]


def test_500_split_patterns_leave_nothing_behind():
    """B87: what is derived from a layout goes with it, without the garbage collector's help."""
    rng = random.Random(0)
    first = PackedLayout([1, 2, 61]).derived("buckets", build_buckets)
    references = []
    for _ in range(500):
        lengths = []
        while sum(lengths) < 64:
            lengths.append(rng.randint(1, 64 - sum(lengths)))
        layout = PackedLayout(lengths)
        buckets, restore = layout.derived("buckets", build_buckets)
        layout.to("meta")
        references += [weakref.ref(layout), weakref.ref(layout.to("meta"))]
        references += [weakref.ref(b.gather) for b in buckets if b.gather is not None]
        if restore is not None:
            references.append(weakref.ref(restore))
            assert sorted(set(restore.tolist())) == sorted(restore.tolist()), "every token has a slot of its own"
    del layout, buckets, restore
    assert len(references) > 2000
    assert sum(reference() is not None for reference in references) == 0
    again = PackedLayout([1, 2, 61]).derived("buckets", build_buckets)
    for a, b in zip(again[0], first[0], strict=True):
        assert a[:2] == b[:2] and torch.equal(a.gather, b.gather)
    assert torch.equal(again[1], first[1])


@pytest.mark.parametrize(
    "seqlens, parents, expected",
    [([4], None, 2.5), ([5, 3], [-1, 0], 4.5), ([2, 1, 2], [-1, 0, 1], (3 + 3 + 9) / 5), ([0], None, 0.0)],
)
def test_mean_context(seqlens, parents, expected):
    """Every token sees itself and what is before it: 1 + 2 + 3 + 4 of 4; 15 of a prompt, 6 + 7 + 8 behind it."""
    assert PackedLayout(seqlens, parents).mean_context == expected
