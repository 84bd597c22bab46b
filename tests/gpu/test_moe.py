"""The experts op on a GPU: every backend against the loop in fp64, no question to the device, the same bits again."""

import functools

import pytest
import torch
from peft import get_peft_model

from tests.patches import test_moe_factors, test_moe_op
from tests.patches.test_moe import assert_same, experts_lora, fill, patch, step
from tests.patches.test_moe_op import by_token, gradients
from tests.tiny import tiny_model
from unsloth_trl.patches.moe.factors import factors_by_expert
from unsloth_trl.patches.moe.op import Gate, Projection, moe_experts
from unsloth_trl.patches.moe.weights import plain
from unsloth_trl.patches.quantization.experts import dequantize_experts, quantize_experts_


pytestmark = pytest.mark.gpu
# no clamp near the values: rounding moves some over the edge, where the gradient jumps
GATES = {"silu": Gate("silu"), "gelu_tanh": Gate("gelu_tanh"), "gpt_oss": Gate("gpt_oss", 1.702, 50.0)}
BACKENDS = ["grouped_mm", "triton", "native_torch"]
HIDDEN, INTERMEDIATE = 64, 48
# Frobenius-relative; the eager path's own error in the same dtype is measured beside it
CAPS = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}


def draw(num_tokens, *settings, dtype):
    """Numbers of `dtype`, in fp64 on the CPU."""
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "scale": 0.2}
    return test_moe_op.draw(num_tokens, *settings, seed=num_tokens, dtype=dtype, **sizes)


def on_device(inputs, dtype):
    def leaf(tensor):
        return None if tensor is None else tensor.detach().to("cuda", dtype).requires_grad_()

    x, index, weights, *projections = inputs
    return leaf(x), index.cuda(), leaf(weights), *(Projection(*map(leaf, p)) for p in projections)


def run(inputs, compute, grad_out):
    x, index, weights, gate_up, down = inputs
    out = compute(x, index, weights, gate_up, down)
    return {"out": out.detach()} | gradients(out, grad_out.to(out), x, weights, gate_up, down)


def ours(gate: Gate, transposed, backend):
    def compute(x, index, weights, *projections):
        projections = [p._replace(weight=plain(p.weight)) for p in projections]
        return moe_experts(x, index, weights, *projections, gate=gate, transposed=transposed, backend=backend)

    return compute


def distance(actual, expected):
    return ((actual.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", CAPS, ids=str)
@pytest.mark.parametrize(
    "gate, transposed, bias, rank, num_experts, top_k",
    [
        ("silu", False, False, 16, 8, 2),
        ("silu", False, False, 1, 128, 8),
        ("gelu_tanh", False, False, 3, 4, 1),
        ("gpt_oss", True, True, 8, 4, 2),
        ("silu", False, False, 0, 8, 8),
    ],
)
def test_error_against_the_loop_in_fp64(gate, transposed, bias, rank, num_experts, top_k, dtype, backend):
    inputs = draw(130, top_k, num_experts, rank, transposed, bias, dtype=dtype)
    loop = functools.partial(by_token, gate=GATES[gate], transposed=transposed)
    grad_out = torch.randn(130, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    truth = run(inputs, loop, grad_out)
    eager = run(on_device(inputs, dtype), loop, grad_out)
    actual = run(on_device(inputs, dtype), ours(GATES[gate], transposed, backend), grad_out)
    for name, expected in truth.items():
        error, allowed = distance(actual[name], expected), 1.5 * distance(eager[name], expected)
        assert error <= max(allowed, CAPS[dtype] / 10) and error <= CAPS[dtype], f"{name}: {error:.1e} > {allowed:.1e}"


@pytest.mark.parametrize("backend", ["grouped_mm", "triton"])
def test_asks_the_device_for_nothing_and_repeats_itself(backend):
    inputs = on_device(draw(200, 8, 16, 8, False, False, dtype=torch.bfloat16), torch.bfloat16)
    grad_out = torch.randn(200, HIDDEN, device="cuda")
    compute = ours(Gate("silu"), False, backend)
    first = run(inputs, compute, grad_out)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(inputs, compute, grad_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_and_none(backend, num_tokens):
    inputs = draw(num_tokens, 2, 4, 4, False, False, dtype=torch.bfloat16)
    grad_out = torch.ones(num_tokens, HIDDEN, dtype=torch.float64)
    actual = run(on_device(inputs, torch.bfloat16), ours(Gate("silu"), False, backend), grad_out)
    assert all(torch.isfinite(value).all() for value in actual.values())
    assert actual["gate_up.a"].abs().sum().item() == 0 if num_tokens == 0 else actual["gate_up.b"].abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_models_give_what_peft_computes(model_type, backend):
    """B37 on every backend: all adapters have a gradient, and it is PEFT's."""
    config = {"moe_intermediate_size": 32} if model_type == "qwen3_moe" else {}
    model = fill(get_peft_model(tiny_model(model_type, **config), experts_lora(r=8))).cuda()
    expected = step(model)
    report = patch(model, moe_backend=backend)
    assert report["moe"].detail.startswith(backend)
    assert_same(step(model), expected, 1e-4)


def test_experts_in_4_bits():
    def model(dense):
        made = tiny_model("qwen3_moe", moe_intermediate_size=32).cuda()
        quantize_experts_(made)
        if dense:
            dequantize_experts(made)
        return fill(get_peft_model(made, experts_lora(r=8))).cuda()

    quantised = model(dense=False)
    patch(quantised, moe_backend="triton")
    reference = model(dense=True)
    patch(reference, moe_backend="triton")
    actual, expected = step(quantised), step(reference)
    assert_same(actual, expected, 1e-6)


@pytest.mark.parametrize("num_experts, rank, n_in, n_out, scaling", test_moe_factors.CASES)
def test_factors_are_moved_without_a_change(num_experts, rank, n_in, n_out, scaling):
    factors = test_moe_factors.draw(num_experts, rank, n_in, n_out)
    a, b = (t.cuda().requires_grad_() for t in factors)
    grads = torch.randn(num_experts, rank, n_in), torch.randn(num_experts, rank, n_out)
    on_cpu = [t.requires_grad_() for t in factors]
    expected = factors_by_expert(*on_cpu, num_experts, scaling, torch.bfloat16)
    found = factors_by_expert(a, b, num_experts, scaling, torch.bfloat16)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.cpu(), y)
    expected = torch.autograd.grad(expected, on_cpu, [g.bfloat16() for g in grads])
    found = torch.autograd.grad(found, (a, b), [g.bfloat16().cuda() for g in grads])
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.cpu(), y)
