"""PEFT's layout of stacked LoRA factors and the op's: by number, through autograd, interpreted, compiled."""

import pytest
import torch

from tests.targets import TARGETS, Recorder, in_interpreter, shared_memory
from unsloth_trl.patches.moe import factors
from unsloth_trl.patches.moe.factors import _by_column, _by_expert, _launch, factors_by_expert


CASES = [(4, 3, 10, 7, 1.0), (3, 1, 5, 130, 0.5), (128, 16, 8, 96, 2.0), (5, 5, 6, 6, 1.0)]


def draw(num_experts, rank, n_in, n_out, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_experts + rank)
    a = torch.randn(num_experts * rank, n_in, generator=generator).to(dtype)
    return a, torch.randn(n_out, rank * num_experts, generator=generator).to(dtype)


@pytest.mark.parametrize("num_experts, rank, n_in, n_out, scaling", CASES)
def test_each_number_is_where_peft_has_it(num_experts, rank, n_in, n_out, scaling):
    a, b = draw(num_experts, rank, n_in, n_out)
    first, second = factors_by_expert(a, b, num_experts, scaling, torch.float32)
    assert first.is_contiguous() and second.is_contiguous()
    for e in range(num_experts):
        # the product that PEFT adds to the weight of expert e
        delta = b.view(n_out, rank, num_experts)[:, :, e] @ a.view(num_experts, rank, n_in)[e] * scaling
        torch.testing.assert_close(second[e].t() @ first[e], delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", [1.0, 0.3])
def test_gradients_are_those_of_the_reshapes(dtype, scaling):
    a, b = (t.requires_grad_() for t in draw(6, 2, 9, 11))
    grads = [torch.randn(6, 2, 9).to(dtype), torch.randn(6, 2, 11).to(dtype)]
    expected = (a.view(6, 2, 9).to(dtype), (b.view(11, 2, 6).permute(2, 1, 0) * scaling).to(dtype))
    found = factors_by_expert(a, b, 6, scaling, dtype)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y) and x.dtype == dtype
    expected, found = (torch.autograd.grad(outs, (a, b), grads, retain_graph=True) for outs in (expected, found))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y) and x.dtype == torch.float32
    (only_b,) = torch.autograd.grad(factors_by_expert(a, b, 6, scaling, dtype)[1], b, grads[1])
    assert torch.equal(only_b, expected[1])


def interpreted() -> dict[str, bool]:
    """Whether the kernel is the reshape, both ways; run with TRITON_INTERPRET."""
    from tests.targets import mend_interpreter

    mend_interpreter()
    equal = {}
    for num_experts, rank, n_in, n_out, scaling in CASES:
        _, b = draw(num_experts, rank, n_in, n_out)
        for dtype in (torch.float32, torch.float16):
            there = _launch(b, num_experts, scaling, dtype, inverse=False)
            back = _launch(there, num_experts, scaling, torch.float32, inverse=True)
            same = torch.equal(there, _by_expert(b, num_experts, scaling, dtype))
            same &= torch.equal(back, _by_column(there, scaling, torch.float32))
            equal[f"{num_experts}x{rank}x{n_out} {scaling} {dtype}"] = same and bool(there.abs().max() > 0)
    return equal


def test_kernel_interpreted():
    pytest.importorskip("triton")
    equal = in_interpreter("tests.patches.test_moe_factors")
    assert len(equal) == 2 * len(CASES) and all(equal.values()), equal


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_kernel_compiles(target, inverse, monkeypatch):
    pytest.importorskip("triton")
    from unsloth_trl.patches.moe import factor_kernels

    kernel, recorder = factor_kernels.move_factor_kernel, Recorder()
    monkeypatch.setattr(factor_kernels, "move_factor_kernel", recorder)
    shape = (128, 16, 1536) if inverse else (1536, 2048)
    dtypes = (target.dtype, torch.float32) if inverse else (torch.float32, target.dtype)
    factors._launch(torch.empty(shape, dtype=dtypes[0], device="meta"), 128, 2.0, dtypes[1], inverse=inverse)
    ((grid, args, kwargs),) = recorder.launches
    assert grid == (32, 24)
    assert shared_memory(target, kernel, *args, **kwargs) <= target.shared
