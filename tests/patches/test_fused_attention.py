"""The fused attention kernel: its tables by hand, its numbers in Triton's interpreter, its code for each GPU."""

import contextlib
import time
from typing import get_args

import pytest
import torch

from tests.patches.fused_attention_cases import CASES
from tests.targets import TARGETS, Recorder, in_interpreter, shared_memory
from unsloth_trl.patches.attention import fused
from unsloth_trl.patches.attention.tables import WIDTHS, Tables, build_tables
from unsloth_trl.patches.layout import PackedLayout


FLOOR = {"float32": 4e-6, "float16": 1e-3}


def test_tables_of_a_group():
    """A prompt of five tokens with completions of three and none, blocks of four queries and of two keys."""
    tables = build_tables(PackedLayout([5, 3, 0, 2], [-1, 0, 0, -1]), 4, 8, 2)
    # the completion comes first: it has eight keys; of the prompt's two blocks the later one has five, the other four
    assert tables.q_tiles.tolist() == [[5, 8, 5, 5, 1, 3], [4, 5, 0, 0, 0, 1], [0, 5, 0, 0, 0, 1], [8, 10, 8, 0, 3, 4]]
    assert tables.d_tiles.tolist() == [[5, 8, 5, 5, 1, 3], [0, 5, 0, 0, 0, 1], [8, 10, 8, 0, 3, 4]]
    assert tables.q_spans.tolist() == [[0, 5, 0], [0, 5, 0], [5, 8, 5], [8, 10, 0]]
    # the prompt's keys are seen by itself, the later ones by fewer, and by the completion
    assert tables.k_tiles.tolist() == [
        [0, 5, 0, 0, 0, 2, 0, 2, -1],
        [2, 5, 0, 0, 0, 2, 0, 2, -1],
        [4, 5, 0, 0, 0, 2, 0, 2, -1],
        [5, 8, 5, 5, 2, 3, 0, 1, -1],
        [8, 10, 8, 0, 3, 4, 0, 1, -1],
        [7, 8, 5, 5, 2, 3, 0, 1, -1],
    ]
    assert not tables.k_sums.numel() and tables.num_slots == 0
    assert tables.k_spans.tolist() == [[0, 5, 0], [5, 8, 5], [5, 8, 5], [8, 10, 0]]
    assert all(table.dtype == torch.int32 for table in tables[:-1])


def test_tables_of_a_chain():
    """Every ancestor is a span of its own, with the position at which it begins."""
    tables = build_tables(PackedLayout([2, 3, 4], [-1, 0, 1]), 16, 16, 16)
    assert tables.q_tiles.tolist() == [[5, 9, 5, 5, 3, 6], [2, 5, 2, 2, 1, 3], [0, 2, 0, 0, 0, 1]]
    assert tables.q_spans.tolist() == [[0, 2, 0], [0, 2, 0], [2, 5, 2], [0, 2, 0], [2, 5, 2], [5, 9, 5]]
    assert tables.k_tiles.tolist() == [
        [0, 2, 0, 0, 0, 3, 0, 3, -1],
        [2, 5, 2, 2, 3, 5, 0, 2, -1],
        [5, 9, 5, 5, 5, 6, 0, 1, -1],
    ]


@pytest.mark.parametrize("seqlens", [[5, 3, 0, 2, 16], [26], [1] * 20, []], ids=str)
def test_tables_of_any_lengths(seqlens):
    """Those that a graph makes on its device are those of the host, and then empty ones."""
    layout = PackedLayout(seqlens, cu_seqlens_size=24)
    expected, found = (build_tables(x, 4, 8, 2, group=3) for x in (layout, layout.of_any_lengths()))
    for name in ("q_tiles", "d_tiles", "k_tiles"):
        mine, theirs = getattr(found, name).tolist(), getattr(expected, name).tolist()
        # their spans are numbered by the segment, those of the host by the segments that have tokens
        assert [row[:4] + row[6:] for row in mine[: len(theirs)]] == [row[:4] + row[6:] for row in theirs]
        assert [found.q_spans[row[4]].tolist() for row in mine[: len(theirs)]] == [
            expected.q_spans[row[4]].tolist() for row in theirs
        ]
        assert all(row[5] == row[4] + 1 for row in mine[: len(theirs)])
        assert not any(any(row) for row in mine[len(theirs) :])
    assert found.num_slots == 0 and all(table.dtype == torch.int32 for table in found[:-1])


def test_a_prompt_with_many_completions_is_divided():
    """
    Two query heads, a prompt of 4 that completions of 6 and 2 see: 24 rows of queries for its block, and 12 and 4 for
    theirs, 40 in all. A share of 10 cuts the prompt's six units, 4, 6 and 2 of either head, where 8, 16 and 24 thirds.
    """
    tables = build_tables(PackedLayout([4, 6, 2], [-1, 0, 0]), 16, 16, 16, group=2, programs=4, least_work=1)
    assert tables.k_spans.tolist() == [[0, 4, 0], [4, 10, 4], [10, 12, 4], [4, 10, 4], [10, 12, 4]]
    prompt, first, second = [0, 4, 0, 0, 0, 3], [4, 10, 4, 4, 3, 4], [10, 12, 10, 4, 4, 5]
    assert tables.k_tiles.tolist() == [
        [*prompt, 0, 2, 0],
        [*prompt, 4, 6, 2],
        [*prompt, 2, 4, 1],
        [*first, 0, 1, 3],
        [*first, 1, 2, 4],
        [*second, 0, 2, -1],
    ]
    assert tables.k_sums.tolist() == [[0, 4, 0, 3], [4, 10, 3, 5]]
    assert tables.num_slots == 5


def test_tables_of_many_completions_take_milliseconds():
    """They are made in every step, between two launches; in loops of Python's these took more than 100 ms."""
    layout = PackedLayout([8192] + [128] * 512, [-1] + [0] * 512)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        tables = build_tables(layout, 128, 128, 64, group=8, programs=132)
        took.append(time.perf_counter() - start)
    assert tables.num_slots > 128 and len(tables.q_tiles) == 64 + 512 and len(tables.k_spans) == 513 + 512
    assert min(took) < 0.03


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton")
    return in_interpreter("tests.patches.fused_attention_cases")


def test_selective_checkpointing_saves_what_the_kernel_gave(interpreted):
    """By TRL's rule: an op whose name has "flash_attn" is saved, all else runs again in the backward."""
    assert interpreted["launches"] == {"checkpoint": 1, "selective": 0}


def test_kernels_interpreted(interpreted):
    results = interpreted["numbers"]
    assert len(results) > len(CASES)
    for case, found in results.items():
        floor = FLOOR["float16" if "float16" in case else "float32"]
        for ours, eager in zip(found["ours"], found["eager"], strict=True):
            assert ours <= max(1.5 * eager, floor), (case, found)


class Shape:
    """A launch for a card that is not here: heads of one size, values of another."""

    def __init__(self, size, v_size, dtype, shared, kind):
        tokens, heads, kv_heads = 256, 8, 2
        window, softcap, sinks = (64, 30.0, True) if kind == "all" else (0, None, False)

        def empty(*shape, dtype=dtype):
            return torch.empty(shape, dtype=dtype, device="meta")

        self.query, self.key = empty(tokens, heads, size), empty(tokens, kv_heads, size)
        self.value, self.grad = empty(tokens, kv_heads, v_size), empty(tokens, heads, v_size)
        self.sinks = empty(heads) if sinks else None
        self.tables = Tables(*(empty(4, width, dtype=torch.int32) for width in WIDTHS), num_slots=4)
        self.settings = (0.1, softcap, window)
        size, long = max(size, v_size), kind == "long"
        self.blocks = [fused.blocks_for(shared, dtype, size, part, long) for part in get_args(fused.Part)]

    def launch(self):
        out, lse = fused.launch_forward(
            self.query,
            self.key,
            self.value,
            self.sinks,
            self.tables.q_tiles,
            self.tables.q_spans,
            *self.settings,
            self.blocks[0],
        )
        given = (self.grad, self.query, self.key, self.value, out, lse)
        fused.launch_backward(*given, self.tables, *self.settings, *self.blocks[1:])


EVERY, LARGE = (128, 128, "all"), (256, 256, "all")
# Where blocks and code are not another's: sm_89 and sm_120 have the blocks of sm_86, gfx1100 those of gfx942. On sm_75
# each of its sizes is at or near all of its shared memory.
SIZES = {
    "sm_75": [(64, 64, "plain"), EVERY, LARGE],
    "sm_80": [EVERY, LARGE],
    "sm_86": [(64, 64, "plain"), EVERY, LARGE],
    "sm_90": [EVERY, LARGE, (192, 128, "plain"), (512, 512, "plain"), (128, 128, "long")],
    "sm_100": [EVERY, LARGE],
    "gfx942": [EVERY, (512, 512, "plain")],
}


@pytest.mark.parametrize(
    "target, size, v_size, kind",
    [(target, *size) for target in TARGETS for size in SIZES.get(target.name, [EVERY])],
    ids=str,
)
def test_kernels_compile(target, size, v_size, kind, monkeypatch):
    pytest.importorskip("triton")
    from unsloth_trl.patches.attention import fused_kernels

    names = [name for name in vars(fused_kernels) if name.endswith("_kernel")]
    assert len(names) == 5
    kernels = [getattr(fused_kernels, name) for name in names]
    recorders = [Recorder() for _ in names]
    for name, recorder in zip(names, recorders, strict=True):
        monkeypatch.setattr(fused_kernels, name, recorder)
    Shape(size, v_size, target.dtype, target.shared, kind).launch()
    for kernel, recorder in zip(kernels, recorders, strict=True):
        ((_, args, kwargs),) = recorder.launches
        assert shared_memory(target, kernel, *args, **kwargs) <= target.shared, kernel.__name__


def test_b81_what_the_small_cards_have():
    """The bytes of shared memory that `test_kernels_compile` allows where there are fewest, and for which sizes."""
    found = {target.name: (target.shared, target.dtype) for target in TARGETS}
    assert found["sm_75"] == (65536, torch.float16)
    assert found["sm_86"][0] == found["sm_89"][0] == found["sm_120"][0] == 101376
    for name in ("sm_75", "sm_86"):
        assert [size for size, *_ in SIZES[name]] == [64, 128, 256]


def test_kernels_run_on_the_card_of_their_tensors(monkeypatch):
    """Triton launches on the current card, which need not be the one of a layer of a model on several."""
    pytest.importorskip("triton")
    from unsloth_trl.patches.attention import fused_kernels

    current, launched = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.append(current[-1:])

    names = [name for name in vars(fused_kernels) if name.endswith("_kernel")]
    for name in names:
        monkeypatch.setattr(fused_kernels, name, Kernel())
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    Shape(64, 64, torch.float16, 64 * 1024, "plain").launch()
    assert launched == [[torch.device("meta")]] * len(names)


def test_what_it_cannot_do_is_named(monkeypatch):
    """A card or a size that the kernel is not for is refused by name, and not run wrong."""
    query = torch.empty(1, 2, 3, 512, dtype=torch.float16)
    assert fused.fused_refusal(query, query, 0.0) == "device cpu"
    refused = {}
    for capability in ((7, 5), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        refused[capability] = [
            fused.refusal_on_cuda(torch.device("cuda"), dtype, size, dropout)
            for dtype, size, dropout in [
                (torch.float16, 512, 0.0),
                (torch.float16, 256, 0.0),
                (torch.float16, 520, 0.0),
                (torch.float64, 64, 0.0),
                (torch.float16, 64, 0.1),
            ]
        ]
    assert refused[7, 5] == [
        "head size 512 over 256 on a card before sm_80",
        None,
        "head size 520 over 256 on a card before sm_80",
        "dtype torch.float64",
        "attention dropout (0.1)",
    ]
    assert refused[9, 0][:3] == [None, None, "head size 520 over 512"]
