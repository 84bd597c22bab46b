"""Grouped products in Triton: values in its interpreter, in a process of its own; code for GPUs that are not here.

The interpreter must be chosen before triton is imported, so that this file is also the script which it runs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.targets import TARGETS, Recorder, Target, compile_for, in_interpreter, mend_interpreter
from unsloth_trl.patches.moe import gemm
from unsloth_trl.patches.moe.gemm import Configuration, configuration, gram_configuration, row_block
from unsloth_trl.patches.moe.reference import grouped_gram_reference, grouped_mm_reference
from unsloth_trl.patches.moe.routing import max_tiles, route


ROOT = Path(__file__).parents[2]
# of the eager path's own error; below the floor the ratio says nothing
FACTOR = 1.5
FLOOR = {"float32": 2e-7, "float16": 1e-4}
CAP = {"float32": 1e-6, "float16": 2e-3}

SMALL = Configuration(16, 16, 16, num_warps=1, num_stages=1, group=2)
DESCRIPTORS = Configuration(16, 32, 16, num_warps=1, num_stages=1, group=3, descriptors=True)
# rows of each expert, and those of none
RAGGED, NONE, ONE, FULL = ([5, 0, 17, 1, 0, 33], 6), ([0, 0, 0], 3), ([0, 1, 0], 0), ([16, 32], 0)

MM = {
    "ragged": {"routed": RAGGED, "widths": (40, 24)},
    "odd widths": {"routed": RAGGED, "widths": (37, 19)},
    "transposed": {"routed": RAGGED, "widths": (24, 40), "layout": "transposed"},
    "experts last": {"routed": RAGGED, "widths": (24, 18), "layout": "experts last"},
    "default configuration": {"routed": RAGGED, "widths": (72, 100), "config": None},
    "no expert has rows": {"routed": NONE, "widths": (16, 16), "rank": 4},
    "one row": {"routed": ONE, "widths": (33, 16), "bias": True, "rank": 1},
    "no rows": {"routed": ([0, 0], 0), "widths": (16, 16), "bias": True},
    "full blocks": {"routed": FULL, "widths": (32, 32)},
    "gathered": {"routed": RAGGED, "widths": (40, 24), "gather": True},
    "bias": {"routed": RAGGED, "widths": (40, 24), "bias": True},
    "rank 5": {"routed": RAGGED, "widths": (40, 24), "rank": 5},
    "rank 70": {"routed": ([3, 18], 2), "widths": (16, 20), "rank": 70},
    "rank 80": {"routed": ([3, 18], 2), "widths": (16, 20), "rank": 80},
    "everything": {"routed": RAGGED, "widths": (37, 19), "gather": True, "bias": True, "rank": 16},
    "scale 0": {"routed": ONE, "widths": (16, 16), "rank": 4, "scale": 0.0},
    "tables": {"routed": RAGGED, "widths": (40, 24), "table": True},
    "descriptors": {"routed": RAGGED, "widths": (40, 24), "config": DESCRIPTORS, "rank": 16},
    "descriptors, transposed": {
        "routed": RAGGED,
        "widths": (24, 40),
        "config": DESCRIPTORS,
        "layout": "transposed",
        "gather": True,
        "bias": True,
    },
    "no descriptors for these strides": {"routed": RAGGED, "widths": (37, 19), "config": DESCRIPTORS},
}
GRAM = {
    "ragged": {"routed": RAGGED, "widths": (40, 24)},
    "odd widths": {"routed": RAGGED, "widths": (37, 19)},
    "default configuration": {"routed": RAGGED, "widths": (72, 100), "config": None},
    "default configuration, narrow": {"routed": RAGGED, "widths": (72, 5), "config": None},
    "narrow first": {"routed": RAGGED, "widths": (5, 70)},
    "no expert has rows": {"routed": NONE, "widths": (16, 20)},
    "one row": {"routed": ONE, "widths": (33, 16)},
    "no rows": {"routed": ([0, 0], 0), "widths": (16, 16)},
    "gathered x": {"routed": RAGGED, "widths": (40, 24), "gather": "x", "scale": 0.75},
    "gathered y": {"routed": RAGGED, "widths": (5, 70), "gather": "y"},
    "gathered both": {"routed": RAGGED, "widths": (18, 70), "gather": "xy"},
    "in fp32": {"routed": RAGGED, "widths": (40, 24), "out_dtype": torch.float32},
    "descriptors": {"routed": RAGGED, "widths": (40, 24), "config": DESCRIPTORS},
    "descriptors, narrow first": {"routed": FULL, "widths": (16, 40), "config": DESCRIPTORS},
    "no rows for descriptors": {"routed": ([0, 0], 0), "widths": (16, 32), "config": DESCRIPTORS},
}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN counts as infinitely wrong; without anything to expect, the norm itself."""
    error = (got.double() - expected).norm() / (expected.norm() or 1)
    return float("inf") if error.isnan() else error.item()


def sorted_rows(routed, width, dtype, gather):
    """Rows, NaN where nothing should look, and which of them each sorted row is (`None` without `gather`)."""
    live, past = sum(routed[0]), routed[1]
    total = live + past
    if not gather:
        x = torch.randn(total, width).to(dtype)
        x[live:] = float("nan")
        return x, None
    rows = torch.randint(0, 2 * total, (total,))
    x = torch.full((2 * total, width), float("nan")).to(dtype)
    x[rows[:live]] = torch.randn(live, width).to(dtype)
    return x, rows


def mm_errors(
    dtype, routed, widths, layout="plain", config=SMALL, gather=False, bias=False, rank=0, scale=0.3, table=False
):
    counts, _ = routed
    offsets = torch.tensor(counts).cumsum(0).int()
    shape = (len(counts), *widths)
    weight = torch.randn(shape).to(dtype)
    weight[torch.tensor(counts) == 0] = float("nan")
    if layout == "transposed":
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "experts last":
        weight = weight.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    x, rows = sorted_rows(routed, widths[0], dtype, gather)
    extra = {"bias": torch.randn(len(counts), widths[1]).to(dtype)} if bias else {}
    if rank:
        xa, _ = sorted_rows(routed, rank, dtype, False)
        extra |= {"xa": xa, "b": torch.randn(rank, widths[1], len(counts)).permute(2, 0, 1).to(dtype), "scale": scale}
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    tables = {"tiles": lambda block: gemm._tiles(offsets, num_rows, block)} if table else {}
    out = torch.full((num_rows, widths[1]), float("nan"), dtype=dtype)
    got = gemm.triton_grouped_mm(x, weight, offsets, rows=rows, out=out, config=config, **extra, **tables)
    assert got is out

    def eager(dtype):
        live = int(offsets[-1])
        picked = (x if rows is None else x[rows])[:live].to(dtype)
        result = grouped_mm_reference(picked, weight.to(dtype), offsets)
        if rank and scale:
            result = result + scale * grouped_mm_reference(xa[:live].to(dtype), extra["b"].to(dtype), offsets)
        if bias:
            result = result + extra["bias"].to(dtype).repeat_interleave(torch.tensor(counts), dim=0)
        return torch.cat([result, result.new_zeros(num_rows - live, widths[1])])

    truth = eager(torch.float64)
    return relative(got, truth), relative(eager(dtype), truth), truth.norm().item()


def gram_errors(dtype, routed, widths, config=SMALL, gather="", scale=1.0, out_dtype=None):
    counts, _ = routed
    offsets = torch.tensor(counts).cumsum(0).int()
    x, x_rows = sorted_rows(routed, widths[0], dtype, "x" in gather)
    y, y_rows = sorted_rows(routed, widths[1], dtype, "y" in gather)
    got = gemm.triton_grouped_gram(
        x, y, offsets, x_rows=x_rows, y_rows=y_rows, scale=scale, dtype=out_dtype, config=config
    )
    assert got.dtype == (out_dtype or dtype) and got.is_contiguous()

    def eager(dtype):
        left, right = (t if rows is None else t[rows] for t, rows in ((x, x_rows), (y, y_rows)))
        return scale * grouped_gram_reference(left.to(dtype), right.to(dtype), offsets)

    truth = eager(torch.float64)
    return relative(got, truth), relative(eager(dtype), truth), truth.norm().item()


def main() -> dict[str, tuple[float, float, float]]:
    mend_interpreter()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    found = {}
    for dtype in (torch.float32, torch.float16):
        for kind, cases, errors in (("mm", MM, mm_errors), ("gram", GRAM, gram_errors)):
            for name, case in cases.items():
                found[f"{kind}/{name}/{str(dtype).removeprefix('torch.')}"] = errors(dtype, **case)
    return found


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton")
    return in_interpreter("tests.patches.test_moe_gemm", "main")


@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("case", [*(f"mm/{name}" for name in MM), *(f"gram/{name}" for name in GRAM)])
def test_error_against_fp64(case, dtype, interpreted):
    error, eager, norm = interpreted[f"{case}/{dtype}"]
    if norm == 0:
        assert "rows" in case and error == 0
    assert error <= min(max(FACTOR * eager, FLOOR[dtype]), CAP[dtype]), (error, eager)


class Launches:
    """What the launchers run on a `target`, given tensors of 128 experts; recorded, not run."""

    num_experts = 128

    def __init__(self, monkeypatch, target: Target):
        kernels = pytest.importorskip("unsloth_trl.patches.moe.kernels")
        self.target = target
        self.kernels = {name: getattr(kernels, name) for name in ("grouped_mm_kernel", "grouped_gram_kernel")}
        self.recorders = {name: Recorder() for name in self.kernels}
        for name, recorder in self.recorders.items():
            monkeypatch.setattr(kernels, name, recorder)
        monkeypatch.setattr(gemm, "_device", lambda device: (target.capability, 132))

    def empty(self, *shape, dtype=None):
        return torch.empty(shape, dtype=dtype or self.target.dtype, device="meta")

    def mm(self, in_features, out_features, mean_rows=256, *, transposed=False, gather=False, rank=0, bias=False):
        num_rows = self.num_experts * mean_rows
        weight = self.empty(self.num_experts, in_features, out_features)
        if transposed:
            weight = self.empty(self.num_experts, out_features, in_features).transpose(1, 2)
        extra = {"rows": self.empty(num_rows, dtype=torch.int64)} if gather else {}
        if rank:
            extra |= {"xa": self.empty(num_rows, rank), "b": self.empty(self.num_experts, rank, out_features)}
        if bias:
            extra["bias"] = self.empty(self.num_experts, out_features)
        offsets = self.empty(self.num_experts, dtype=torch.int32)
        gemm.triton_grouped_mm(self.empty(num_rows, in_features), weight, offsets, **extra)
        return self.last("grouped_mm_kernel")

    def gram(self, in_features, out_features, mean_rows=256):
        num_rows = self.num_experts * mean_rows
        offsets = self.empty(self.num_experts, dtype=torch.int32)
        gemm.triton_grouped_gram(self.empty(num_rows, in_features), self.empty(num_rows, out_features), offsets)
        return self.last("grouped_gram_kernel")

    def last(self, name):
        """The kernel, its grid, and its arguments by name."""
        (((grid,), args, kwargs),) = self.recorders[name].launches
        self.recorders[name].launches.clear()
        kernel = self.kernels[name]
        return kernel, grid, dict(zip(kernel.arg_names, args, strict=False)) | kwargs


LAUNCHES = {
    "fused": lambda launches: launches.mm(2048, 1536, rank=64, bias=True),
    "gathered, few rows": lambda launches: launches.mm(768, 2048, 64, transposed=True, gather=True),
    "gradient": lambda launches: launches.gram(2048, 1536),
    "gradient of an adapter": lambda launches: launches.gram(2048, 16),
}


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles_within_shared_memory(name, target, monkeypatch):
    kernel, _, arguments = LAUNCHES[name](Launches(monkeypatch, target))
    code = compile_for(target, kernel, **arguments)
    assert code.metadata.shared <= target.shared
    if target.backend == "cuda" and target.capability >= (8, 0):
        # on tensor cores; a kernel that Triton gave up on, compiled to a trap, has none
        assert any(mma in code.asm["ptx"] for mma in ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))
    if target.name == "sm_90":
        # a loop that waits for all of its products takes turns with its loads
        assert "pendings = 1" in code.asm["ttgir"]


SM_90 = next(target for target in TARGETS if target.name == "sm_90")


def test_one_table_serves_all_products_of_a_layer():
    for target in TARGETS:
        for mean_rows in (0.1, 20, 64, 256, 1024):
            block = row_block(target.capability, target.dtype, mean_rows)
            for widths in ((2048, 1536), (1536, 2048), (768, 2048), (2048, 16), (16, 2048), (3, 5)):
                config = configuration(target.capability, target.dtype, mean_rows, *widths)
                assert config.block_m == block
                assert config.block_k // 2 < max(widths[0], 16) and config.block_n // 2 < max(widths[1], 16)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_narrow_products_read_the_wide_operand_once(target):
    for mean_rows in (64, 1024):
        for rank in (1, 16, 48, 64):
            assert configuration(target.capability, target.dtype, mean_rows, 2048, rank).block_n >= rank
            assert gram_configuration(target.capability, target.dtype, mean_rows, 2048, rank).block_n >= rank


def test_a_narrow_first_operand_changes_places(monkeypatch):
    launches = Launches(monkeypatch, SM_90)
    for widths in ((2048, 16), (16, 2048)):
        _, grid, arguments = launches.gram(*widths)
        assert (arguments["width_x"], arguments["width_y"]) == (2048, 16)
        assert grid == launches.num_experts * 2048 // arguments["BLOCK_M"]
        assert (arguments["stride_om"] == 1) == (widths[0] == 16)


def test_persistent_programs_fill_the_card_and_no_more(monkeypatch):
    launches = Launches(monkeypatch, SM_90)
    _, grid, arguments = launches.mm(2048, 1536)
    assert grid == 132 and arguments["FLATTEN"]
    monkeypatch.setattr(launches, "num_experts", 2)
    _, grid, arguments = launches.mm(2048, 16, 32)
    assert grid == max_tiles(64, 2, arguments["BLOCK_M"]) == 3


def test_descriptors_only_where_the_accelerator_can_read(monkeypatch):
    launches = Launches(monkeypatch, SM_90)

    def used(*args, **kwargs):
        arguments = launches.mm(*args, **kwargs)[2]
        return tuple(arguments[name] is not None for name in ("x_desc", "weight_desc"))

    assert used(2048, 1536) == used(2048, 1536, transposed=True) == used(2048, 1536, 64) == (True, True)
    assert used(2048, 1536, gather=True) == (False, True)
    assert used(2044, 1536) == used(2048, 1532) == (False, False)  # rows that do not begin at 16 bytes
    others = [target for target in TARGETS if target.name not in ("sm_90", "sm_100")]
    for target in others:
        for mean_rows in (64, 1024):
            assert not configuration(target.capability, target.dtype, mean_rows, 2048, 1536).descriptors
            assert not gram_configuration(target.capability, target.dtype, mean_rows, 2048, 1536).descriptors


def test_without_tensor_descriptors_plain_loads_run_and_one_warning_says_so(monkeypatch, recwarn):
    language = pytest.importorskip("triton.language")
    launches = Launches(monkeypatch, SM_90)
    monkeypatch.delattr(language, "make_tensor_descriptor")
    gemm._descriptor_class.cache_clear()
    try:
        for _ in range(2):
            arguments = launches.mm(2048, 1536)[2]
            assert arguments["x_desc"] is None and arguments["weight_desc"] is None
        assert launches.gram(2048, 1536)[2]["x_desc"] is None
    finally:
        gemm._descriptor_class.cache_clear()
    assert [str(w.message) for w in recwarn if "Triton 3.4" in str(w.message)] == [str(recwarn[0].message)]


def test_tables_of_other_blocks_are_refused(monkeypatch):
    launches = Launches(monkeypatch, SM_90)
    routing = route(torch.randint(0, 8, (2048, 2)), 8)
    x, weight = torch.empty(4096, 32, dtype=torch.bfloat16), torch.empty(8, 32, 32, dtype=torch.bfloat16)
    for tiles in (routing.tiles, routing.tiles(128)):
        gemm.triton_grouped_mm(x, weight, routing.offsets, tiles=tiles)
        assert launches.last("grouped_mm_kernel")[2]["tiles"] is routing.tiles(128)
    with pytest.raises(ValueError, match=r"made for blocks of 128 rows \(`row_block`\)"):
        gemm.triton_grouped_mm(x, weight, routing.offsets, tiles=routing.tiles(64))


def test_what_cannot_be_multiplied_is_refused(monkeypatch):
    x, weight, offsets = torch.empty(4, 16), torch.empty(2, 16, 16), torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="triton_grouped_mm takes tensors of one dtype.*not float32, float16"):
        gemm.triton_grouped_mm(x, weight.half(), offsets)
    with pytest.raises(ValueError, match="triton_grouped_gram takes tensors of one dtype"):
        gemm.triton_grouped_gram(x.double(), x.double(), offsets)
    with pytest.raises(ValueError, match="no in_features"):
        gemm.triton_grouped_mm(x[:, :0], weight[:, :0], offsets)
    with pytest.raises(ValueError, match="xa and b are the two halves of one product"):
        gemm.triton_grouped_mm(x, weight, offsets, xa=x)
    monkeypatch.setattr(gemm, "_device", lambda device: ((7, 5), 40))
    with pytest.raises(ValueError, match="needs float16 on this GPU"):
        gemm.triton_grouped_mm(x.bfloat16(), weight.bfloat16(), offsets)


def test_imports_without_triton():
    code = "import sys\nsys.modules['triton'] = None\nimport unsloth_trl.patches.moe.gemm"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=300)
