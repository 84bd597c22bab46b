"""The row kernels of a mixture: plain PyTorch against autograd, kernels against fp64 and compiled for each GPU."""

import pytest
import torch

from tests.patches.moe_rows_cases import CASES, KINDS, draw, to
from tests.targets import TARGETS, Recorder, in_interpreter, shared_memory
from unsloth_trl.patches.moe import rows
from unsloth_trl.patches.moe.counting_sort import launch_sort_rows, sort_rows
from unsloth_trl.patches.moe.reference import grouped_mm_reference
from unsloth_trl.patches.moe.routing import Routing, route


def naive_layer(x, index, weights, w_gate_up, w_down, a, b, a_down, b_down, kind):
    """One slot after the other; shares no line with the package."""
    out = torch.zeros_like(x)
    for t in range(index.shape[0]):
        for k in range(index.shape[1]):
            e = int(index[t, k])
            if e >= w_gate_up.shape[0]:
                continue
            gu = w_gate_up[e] @ x[t]
            if a is not None:
                gu = gu + (a[e] @ x[t]) @ b[e]
            if kind == "gpt_oss":
                gate, up = gu[::2].clamp(max=7.0), gu[1::2].clamp(-7.0, 7.0)
                h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                gate, up = gu.chunk(2)
                gelu = torch.nn.functional.gelu(gate, approximate="tanh")
                act = torch.nn.functional.silu(gate) if kind == "silu" else gelu
                h = act * up
            y = w_down[e] @ h
            if a_down is not None:
                y = y + (a_down[e] @ h) @ b_down[e]
            out[t] += weights[t, k] * y
    return out


@pytest.mark.parametrize("name", [*KINDS, "other-ranks", "no-gate-up-lora", "no-lora"])
def test_a_layer_of_steps_is_the_layer_in_fp64(name):
    i = to(draw(CASES[name], torch.float64), torch.float64)
    routing, kind, index, offsets = i["routing"], i["kind"], i["index"], i["routing"].offsets
    num_experts, hidden, inner = CASES[name][2], CASES[name][4], CASES[name][5]
    # gates of gpt-oss reach its clamps
    w_gate_up = torch.randn(num_experts, 2 * inner, hidden, dtype=torch.float64) * (1.0 if kind == "gpt_oss" else 0.2)
    w_down = torch.randn(num_experts, hidden, inner, dtype=torch.float64) * 0.2
    names = ("x", "weights", "a", "b", "a_down", "b_down")
    leaves = {n: i[n].clone().requires_grad_() for n in names if i[n] is not None}
    x, weights, a, b, a_down, b_down = (leaves.get(n) for n in names)
    expected = naive_layer(x, index, weights, w_gate_up, w_down, a, b, a_down, b_down, kind)
    dx, dweights = torch.autograd.grad(expected, (x, weights), i["grad"])
    x, weights, a, b, a_down, b_down = (None if i[n] is None else i[n] for n in names)

    def product(x, weight, xa, b):
        y = grouped_mm_reference(x, weight, offsets)
        y[offsets[-1] :] = float("nan")
        return y if b is None else rows.add_product_(y, xa, b, routing)

    xs, xa = rows.gather_project(x, routing, a)
    assert a is None or torch.equal(rows.project(x, routing, a), xa)
    gu = grouped_mm_reference(xs, w_gate_up.transpose(1, 2), offsets)
    h, ha = rows.gate_forward(gu, routing, kind, xa, b, a_down)
    out = rows.combine(product(h, w_down.transpose(1, 2), ha, b_down), routing, weights)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)

    ds, dyb = rows.gather_project(i["grad"], routing, b_down)
    dh = grouped_mm_reference(ds, w_down, offsets)
    dgu, again, dgub, found = rows.gate_backward_weighted(gu, dh, routing, kind, weights, xa, b, dyb, a_down)
    h = h * weights.reshape(-1)[routing.order, None]
    torch.testing.assert_close(found, dweights, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again[: offsets[-1]], h[: offsets[-1]], rtol=1e-12, atol=1e-12)
    dxs = product(dgu, w_gate_up, dgub, a)
    torch.testing.assert_close(rows.combine(dxs, routing), dx, rtol=1e-9, atol=1e-9)
    assert dx.norm() > 0 and dweights.norm() > 0


def test_on_the_cpu_sorting_is_route():
    index = torch.randint(0, 6, (11, 3))
    found, expected = sort_rows(index, 4), route(index, 4)
    assert torch.equal(found.order, expected.order) and torch.equal(found.tiles(16), expected.tiles(16))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda i: rows.gate_forward(i["gu"], i["routing"], "relu"), "kind is one of silu, gelu_tanh, gpt_oss"),
        (lambda i: rows.gate_forward(i["gu"], i["routing"], "silu", xa=i["xa"]), "xa and b come together"),
        (lambda i: rows.launch_gather_project(i["x"].t().contiguous().t(), i["routing"], None), "x has to be cont"),
        (
            lambda i: rows.launch_gather_project(i["x"], i["routing"], torch.zeros(5, 129, 50)),
            "1 to 128 here, not 129",
        ),
    ],
)
def test_refusals(call, match):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=match):
        call(draw(CASES["silu"], torch.float32))


@pytest.fixture(scope="module")
def interpreted():
    """What the kernels compute on the CPU, from a process of its own."""
    pytest.importorskip("triton")
    return in_interpreter("tests.patches.moe_rows_cases", "main")


@pytest.mark.parametrize("name", CASES)
def test_kernels_in_the_interpreter(interpreted, name):
    found = {key: ratios for key, ratios in interpreted["errors"].items() if key.split()[0] == name}
    assert len(found) == (2 if name in KINDS else 1)
    for key, ratios in found.items():
        assert name == "no-tokens" or len(ratios) >= 3
        assert {step: ratio for step, ratio in ratios.items() if not ratio <= 1} == {}, key


def test_the_counting_sort_is_route(interpreted):
    assert len(interpreted["sorts"]) == 5
    assert all(interpreted["sorts"].values()), interpreted["sorts"]


def record(monkeypatch, dtype, rank, kind):
    """All launches of a layer of Qwen3-30B-A3B's size, by kernel; nothing runs."""
    from unsloth_trl.patches.moe import counting_sort_kernels, row_kernels

    kernels = {}
    for module in (row_kernels, counting_sort_kernels):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            kernels[name] = (getattr(module, name), Recorder())
            monkeypatch.setattr(module, name, kernels[name][1])
    num_tokens, top_k, num_experts, hidden, inner = 4096, 8, 128, 2048, 768
    num_rows = num_tokens * top_k

    def f(*shape):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def i(*shape, dtype=torch.int64):
        return torch.empty(*shape, dtype=dtype, device="meta")

    routing = Routing(i(num_rows), i(num_tokens, top_k), i(num_experts, dtype=torch.int32))
    by_rank, by_token = f(num_rows, rank), f(num_tokens, hidden)
    lora = (by_rank, f(num_experts, rank, 2 * inner))
    down = f(num_experts, rank, inner)
    gu, h, y, weights = f(num_rows, 2 * inner), f(num_rows, inner), f(num_rows, hidden), f(num_tokens, top_k)
    factor = f(num_experts, rank, hidden)
    rows.launch_gather_project(by_token, routing, factor)
    rows.launch_gather_project(by_token, routing, factor, with_rows=False)
    rows.launch_gate_forward(gu, routing, kind, *lora, down, 1.702, 7.0)
    rows.launch_gate_backward(gu, h, routing, kind, weights, *lora, by_rank, down, 1.702, 7.0, True)
    rows.launch_combine(y, routing, weights)
    rows.launch_add_product_(y, by_rank, factor, routing)
    launch_sort_rows(i(num_tokens, top_k), num_experts, rows.TILE_ROWS, 128)
    return kernels


# ranks up to 64 take the same steps with larger factors: most shared memory, slow to compile, so for one limit only
@pytest.mark.parametrize(
    "target, rank, kind, dtype",
    [
        *((target, 16, "silu", target.dtype) for target in TARGETS),
        (TARGETS[4], 64, "gpt_oss", torch.bfloat16),
        (TARGETS[2], 128, "gpt_oss", torch.float32),
    ],
    ids=str,
)
def test_kernels_compile_for(target, rank, kind, dtype, monkeypatch):
    pytest.importorskip("triton")
    kernels = record(monkeypatch, dtype, rank, kind)
    assert len(kernels) == 7
    for name, (kernel, recorder) in kernels.items():
        assert len(recorder.launches) == (2 if name == "gather_project_kernel" else 1), name  # without rows too
        for _, args, kwargs in recorder.launches:
            # far below the 64 KiB of the smallest, on whatever target the rank of 64 is compiled for
            limit = target.shared if dtype == torch.float32 else min(t.shared for t in TARGETS)
            assert shared_memory(target, kernel, *args, **kwargs) <= limit, name
