"""The grouped products in Triton against fp64, beside a loop over the experts in the same dtype."""

import pytest
import torch

from unsloth_trl.patches.moe.gemm import Configuration, triton_grouped_gram, triton_grouped_mm
from unsloth_trl.patches.moe.reference import grouped_gram_reference, grouped_mm_reference


pytestmark = pytest.mark.gpu

CAP = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# few rows, many rows and some in between take different blocks; the last two rows are nobody's
ROUTED = {
    "few": [0, 3, 64, 1, 0, 65, 130, 17],
    "more": [0, 260, 128, 1, 300, 77],
    "many": [1024, 0, 1500, 513],
    "one": [0, 1, 0],
    "nobody": [0, 0, 0],
}
# widths, transposed weight, gathered rows, rank, bias
MM = [
    ((512, 768), False, False, 0, False),
    ((512, 768), True, True, 0, False),
    ((512, 768), False, False, 16, False),
    ((512, 768), True, False, 80, True),
    ((200, 1000), False, True, 5, True),
    ((61, 37), True, True, 24, True),
    ((61, 37), False, False, 0, False),
    ((16, 520), True, False, 0, False),
    ((520, 16), False, True, 0, False),
    ((72, 5), False, False, 0, True),
]
GRAM = [
    ((512, 768), ""),
    ((512, 768), "x"),
    ((200, 1000), "y"),
    ((61, 37), "xy"),
    ((520, 16), ""),
    ((16, 520), "x"),
    ((72, 5), "y"),
]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d).removeprefix("torch.")
)


def relative(got, expected):
    error = (got.double() - expected).norm() / (expected.norm() or 1)
    return float("inf") if error.isnan() else error.item()


def assert_close(got, eager, truth, summands):
    # a chain of fp32 sums, where PyTorch's is a tree
    floor = 2**-24 * summands**0.5 if got.dtype == torch.float32 else 1e-4
    assert got.dtype == eager.dtype and got.shape == truth.shape
    assert relative(got, truth) <= min(max(1.5 * relative(eager, truth), floor), CAP[got.dtype])


def draw(routed, in_features, dtype):
    """Rows, of which the last two are NaN and nobody's, and where the rows of each expert end."""
    counts = torch.tensor(ROUTED[routed], device="cuda")
    x = torch.randn(int(counts.sum()) + 2, in_features, device="cuda").to(dtype)
    x[-2:] = float("nan")
    return x, counts.cumsum(0).int()


@DTYPES
@pytest.mark.parametrize("routed", ROUTED)
@pytest.mark.parametrize("widths, transposed, gather, rank, bias", MM)
def test_grouped_mm_error_against_fp64(widths, transposed, gather, rank, bias, routed, dtype):
    if dtype == torch.float32 and routed == "many":
        pytest.skip("one block size for fp32")
    torch.manual_seed(0)
    x, offsets = draw(routed, widths[0], dtype)
    num_rows, num_experts, scale = x.shape[0], offsets.shape[0], 0.7
    weight = torch.randn(num_experts, *widths, device="cuda").to(dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    extra = {}
    if gather:
        extra["rows"] = torch.randint(0, max(1, num_rows - 2), (num_rows,), device="cuda")
    if rank:
        xa, _ = draw(routed, rank, dtype)
        b = torch.randn(rank, widths[1], num_experts, device="cuda").to(dtype).permute(2, 0, 1)
        extra |= {"xa": xa, "b": b, "scale": scale}
    if bias:
        extra["bias"] = torch.randn(num_experts, widths[1], device="cuda").to(dtype)
    out = torch.full((num_rows, widths[1]), float("nan"), device="cuda", dtype=dtype)
    got = triton_grouped_mm(x, weight, offsets, out=out, **extra)

    def eager(dtype):
        picked = (x[extra["rows"]] if gather else x)[:-2].to(dtype)
        result = grouped_mm_reference(picked, weight.to(dtype), offsets)
        if rank:
            result = result + scale * grouped_mm_reference(xa[:-2].to(dtype), b.to(dtype), offsets)
        if bias:
            expert = torch.bucketize(torch.arange(num_rows - 2, device="cuda"), offsets, right=True)
            result = result + extra["bias"][expert].to(dtype)
        return torch.cat([result, result.new_zeros(2, widths[1])])

    assert_close(got, eager(dtype), eager(torch.float64), widths[0] + rank)
    assert torch.equal(got, triton_grouped_mm(x, weight, offsets, **extra))  # to the bit, each time


@DTYPES
@pytest.mark.parametrize("routed", ROUTED)
@pytest.mark.parametrize("widths, gather", GRAM)
def test_grouped_gram_error_against_fp64(widths, gather, routed, dtype):
    torch.manual_seed(0)
    (x, offsets), (y, _) = draw(routed, widths[0], dtype), draw(routed, widths[1], dtype)
    rows = torch.randint(0, max(1, x.shape[0] - 2), (2, x.shape[0]), device="cuda")
    extra = {f"{name}_rows": rows[i] for i, name in enumerate("xy") if name in gather}
    got = triton_grouped_gram(x, y, offsets, scale=0.7, **extra)

    def eager(dtype):
        left, right = (t[extra[f"{n}_rows"]] if n in gather else t for n, t in (("x", x), ("y", y)))
        return 0.7 * grouped_gram_reference(left.to(dtype), right.to(dtype), offsets)

    assert_close(got, eager(dtype), eager(torch.float64), max(ROUTED[routed]) + 1)
    assert torch.equal(got, triton_grouped_gram(x, y, offsets, scale=0.7, **extra))


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("block_n, num_warps", [(128, 4), (256, 8)])
def test_each_variant_is_right(block_n, num_warps, flatten, descriptors):
    if descriptors and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs the tensor memory accelerator")
    torch.manual_seed(0)
    config = Configuration(128, block_n, 32, num_warps, 2, descriptors=descriptors, flatten=flatten)
    x, offsets = draw("more", 328, torch.float16)
    y, _ = draw("more", 520, torch.float16)
    xa, _ = draw("more", 16, torch.float16)
    num_experts = offsets.shape[0]
    weight = torch.randn(num_experts, 328, 520, device="cuda", dtype=torch.float16)
    b = torch.randn(num_experts, 16, 520, device="cuda", dtype=torch.float16)
    x64, y64, xa64 = x[:-2].double(), y[:-2].double(), xa[:-2].double()
    truth = grouped_mm_reference(x64, weight.double(), offsets)
    low_rank = 0.7 * grouped_mm_reference(xa64, b.double(), offsets)
    assert relative(triton_grouped_mm(x, weight, offsets, config=config)[:-2], truth) < 4e-4
    got = triton_grouped_mm(x, weight, offsets, xa=xa, b=b, scale=0.7, config=config)
    assert relative(got[:-2], truth + low_rank) < 4e-4 and not got[-2:].any()
    truth = grouped_gram_reference(x64, y64, offsets)
    assert relative(triton_grouped_gram(x, y, offsets, config=config), truth) < 4e-4


def test_asks_the_device_for_nothing():
    x, offsets = draw("many", 256, torch.bfloat16)
    weight = torch.randn(offsets.shape[0], 256, 320, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = triton_grouped_mm(x, weight, offsets)
        triton_grouped_gram(x, out, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("large", ["rows", "weights"])
def test_offsets_beyond_31_bits(large):
    needed = 14 if large == "rows" else 12
    if torch.cuda.get_device_properties(0).total_memory < needed * 2**30:
        pytest.skip(f"needs {needed} GiB")
    shape = (2_100_000, 2, 1040, 16) if large == "rows" else (300, 140, 4096, 4096)
    num_rows, num_experts, in_features, out_features = shape
    x = torch.randn(num_rows, in_features, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(num_experts, in_features, out_features, device="cuda", dtype=torch.bfloat16)
    assert max(x.numel(), weight.numel()) > 2**31
    offsets = torch.full((num_experts,), 5, device="cuda", dtype=torch.int32)
    offsets[-1] = num_rows
    out = triton_grouped_mm(x, weight, offsets)
    torch.testing.assert_close(out[-99:], x[-99:] @ weight[-1], rtol=2e-2, atol=2e-1)
    last = torch.full((num_rows,), num_rows - 1, device="cuda")
    gram = triton_grouped_gram(x, out, torch.arange(1, 3, device="cuda", dtype=torch.int32), x_rows=last[:2])
    torch.testing.assert_close(gram[1], x[-1:].t() @ out[1:2], rtol=2e-2, atol=2e-1)
    if large == "weights":  # and a gradient as large
        gram = triton_grouped_gram(x, out, offsets)
        torch.testing.assert_close(gram[-1], x[5:].t() @ out[5:], rtol=2e-2, atol=30)
