"""The row kernels of a mixture on a GPU, against fp64, beside plain PyTorch in the same dtype."""

import pytest
import torch

from tests.patches.moe_rows_cases import CASES, compare, draw, kernels, same_sort, steps
from unsloth_trl.patches.moe import rows
from unsloth_trl.patches.moe.counting_sort import sort_rows


pytestmark = pytest.mark.gpu

# both block sizes for rows, every power of two that ranks are padded to, widths that are no multiple of a block
LARGE = {
    "qwen3": (512, 8, 128, 128, 2048, 768, 16, 16, "silu"),
    "many-rows": (2600, 8, 16, 16, 320, 192, 16, 64, "silu"),
    "gemma": (300, 4, 20, 24, 1000, 392, 33, 7, "gelu_tanh"),
    "gpt-oss": (700, 4, 32, 32, 2880, 2880, 17, 17, "gpt_oss"),
    "rank-128": (200, 2, 8, 8, 512, 264, 128, 65, "silu"),
    "odd": (333, 3, 9, 9, 129, 77, 3, None, "gpt_oss"),
    "many-rows-no-lora": (4500, 4, 8, 8, 264, 136, None, None, "silu"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", [*(f"small-{name}" for name in CASES), *LARGE])
def test_error_against_fp64(name, dtype):
    case = LARGE.get(name) or CASES[name.removeprefix("small-")]
    ratios = compare(draw(case, dtype, "cuda"), dtype, kernels)
    assert {step: ratio for step, ratio in ratios.items() if not ratio <= 1} == {}


def test_runs_are_equal_bit_for_bit():
    inputs = draw(LARGE["gemma"], torch.bfloat16, "cuda")
    first, second = kernels(inputs), kernels(inputs)
    last = int(inputs["routing"].offsets[-1])
    for name, x in first.items():
        whole = name in ("out", "sum", "dweights")
        assert torch.equal(x if whole else x[:last], second[name] if whole else second[name][:last]), name


@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, in_all, block",
    [(1, 1, 1, 1, 16), (37, 4, 8, 8, 16), (301, 2, 130, 200, 64), (4096, 8, 128, 128, 32), (16384, 10, 512, 512, 128)],
)
def test_the_counting_sort_is_route(num_tokens, top_k, num_experts, in_all, block):
    index = torch.rand(num_tokens, in_all, device="cuda").topk(top_k, dim=1).indices.clamp(max=num_experts)
    assert same_sort(index, num_experts, block)
    assert same_sort(index.int(), num_experts, block)


def test_public_functions_take_the_kernels_and_do_not_synchronise():
    inputs = draw(LARGE["qwen3"], torch.bfloat16, "cuda")
    expected = kernels(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs["routing"] = sort_rows(inputs["index"], 128)
        found = steps(rows, "launch_", "", inputs)
        xs, xa = rows.gather_project(inputs["x"], inputs["routing"], inputs["a"])
        alone = rows.project(inputs["x"], inputs["routing"], inputs["a"])
        out = rows.combine(inputs["y"], inputs["routing"], inputs["weights"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(xs, expected["xs"]) and torch.equal(xa, expected["xa"]) and torch.equal(out, expected["out"])
    assert torch.equal(alone, expected["xa_alone"])
    assert all(torch.equal(x, found[name]) for name, x in expected.items())


def test_offsets_beyond_two_to_the_31():
    width, num_rows = 2**16, 2**15 + 64  # a little more than 2^31 elements, 4 GiB
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB")
    routing = sort_rows(torch.zeros(num_rows, 1, dtype=torch.int64, device="cuda"), 1)
    x = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(1, 16, width, device="cuda", dtype=torch.bfloat16)
    xs, xa = rows.gather_project(x, routing, a)
    assert torch.equal(xs[-64:], x[-64:])
    torch.testing.assert_close(xa[-64:].float(), x[-64:].float() @ a[0].float().t(), rtol=1e-2, atol=1.0)
    assert torch.equal(rows.combine(xs, routing)[-64:], x[-64:])
