"""The experts as one op: output and every gradient against a loop over tokens, in fp64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from unsloth_trl.patches.moe import op
from unsloth_trl.patches.moe.op import Gate, Projection, moe_experts
from unsloth_trl.patches.moe.routing import route
from unsloth_trl.patches.moe.weights import plain


GATES = {"silu": Gate("silu"), "gelu_tanh": Gate("gelu_tanh"), "gpt_oss": Gate("gpt_oss", 1.702, 0.7)}
HIDDEN, INTERMEDIATE = 24, 16


def activation(gate: Gate, row):
    if gate.kind == "gpt_oss":
        g, u = row[::2].clamp(max=gate.limit), row[1::2].clamp(-gate.limit, gate.limit)
        return (u + 1) * g * torch.sigmoid(g * gate.alpha)
    g, u = row.chunk(2)
    return (
        torch.nn.functional.silu(g) if gate.kind == "silu" else torch.nn.functional.gelu(g, approximate="tanh")
    ) * u


def by_token(x, index, weights, gate_up: Projection, down: Projection, gate: Gate, transposed: bool):
    def project(row, p: Projection, e: int):
        weight = p.weight[e].t() if transposed else p.weight[e]
        y = weight @ row
        if p.a is not None:
            y = y + p.b[e].t() @ (p.a[e] @ row)
        return y if p.bias is None else y + p.bias[e]

    out = []
    for t in range(x.shape[0]):
        total = x.new_zeros(x.shape[1])
        for k in range(index.shape[1]):
            e = int(index[t, k])
            total = total + weights[t, k] * project(activation(gate, project(x[t], gate_up, e)), down, e)
        out.append(total)
    return torch.stack(out) if out else x * 1


def unequal_routing(num_tokens: int, top_k: int, num_experts: int, generator) -> torch.Tensor:
    """Different experts for each token; the first ones are taken far more often, and some never."""
    scores = torch.randn(num_tokens, num_experts, generator=generator) - torch.arange(num_experts) * 6.0 / num_experts
    return scores.topk(top_k, dim=-1).indices


def draw(
    num_tokens,
    top_k,
    num_experts,
    rank,
    transposed,
    bias,
    seed=0,
    hidden=HIDDEN,
    intermediate=INTERMEDIATE,
    scale=0.4,
    dtype=torch.float64,
):
    """Inputs of the op in fp64, numbers that `dtype` has too."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, std=scale):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) * std
        return drawn.to(dtype).double().requires_grad_()

    def projection(n_in, n_out):
        sides = (n_in, n_out) if transposed else (n_out, n_in)
        return Projection(
            randn(num_experts, *sides),
            randn(num_experts, rank, n_in) if rank else None,
            randn(num_experts, rank, n_out) if rank else None,
            randn(num_experts, n_out) if bias else None,
        )

    index = unequal_routing(num_tokens, top_k, num_experts, generator)
    x, weights = randn(num_tokens, hidden, std=1), randn(num_tokens, top_k, std=1)
    return x, index, weights, projection(hidden, 2 * intermediate), projection(intermediate, hidden)


def gradients(out, grad_out, x, weights, *projections):
    leaves = {"x": x, "weights": weights}
    for name, p in zip(("gate_up", "down"), projections, strict=True):
        leaves |= {f"{name}.{field}": t for field, t in p._asdict().items() if t is not None}
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), grads, strict=True)
    }


def assert_equals_loop(num_tokens, top_k, num_experts, rank, transposed=False, bias=False, gate="silu", index=None):
    x, drawn, weights, gate_up, down = draw(num_tokens, top_k, num_experts, rank, transposed, bias)
    index = drawn if index is None else index
    gate = GATES[gate]
    expected = by_token(x, index, weights, gate_up, down, gate, transposed)
    projections = [p._replace(weight=plain(p.weight)) for p in (gate_up, down)]
    actual = moe_experts(x, index, weights, *projections, gate=gate, transposed=transposed, backend="native_torch")
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)
    grad_out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=x.dtype)
    expected, actual = (gradients(out, grad_out, x, weights, gate_up, down) for out in (expected, actual))
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )
    return actual


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("num_experts", [4, 8, 128])
@pytest.mark.parametrize("rank", [0, 1, 4, 8])
def test_equals_a_loop_over_tokens(num_experts, top_k, rank):
    assert_equals_loop(33, min(top_k, num_experts), num_experts, rank)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_layouts_biases_and_activations(gate, transposed, bias, rank):
    assert_equals_loop(33, 2, 6, rank, transposed, bias, gate)


def test_all_tokens_to_one_expert():
    grads = assert_equals_loop(5, 1, 4, 2, index=torch.zeros(5, 1, dtype=torch.long))
    for name in ("gate_up.weight", "gate_up.a", "gate_up.b", "down.weight", "down.a", "down.b"):
        assert grads[name][0].abs().max() > 0 and (grads[name][1:] == 0).all(), name


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_one_token_and_none(num_tokens):
    grads = assert_equals_loop(num_tokens, 2, 4, 2, bias=True)
    assert all(torch.isfinite(g).all() for g in grads.values())


def test_routing_sorts_stably_and_comes_back():
    generator = torch.Generator().manual_seed(1)
    index = unequal_routing(33, 2, 5, generator)
    routing = route(index, 5)
    assert routing.expert.tolist() == sorted(index.flatten().tolist())
    slots = [sorted(routing.order[routing.expert == e].tolist()) for e in range(5)]
    assert routing.order.tolist() == [slot for part in slots for slot in part]
    assert torch.equal(routing.order[routing.place].flatten(), torch.arange(66))
    assert routing.offsets.tolist() == torch.bincount(index.flatten(), minlength=5).cumsum(0).tolist()


@pytest.mark.parametrize("block", [1, 4, 16, 100])
@pytest.mark.parametrize("num_experts", [1, 5, 40])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_tiles_hold_one_expert_each(num_tokens, num_experts, block):
    index = unequal_routing(num_tokens, 1, num_experts, torch.Generator().manual_seed(2))
    routing = route(index, num_experts)
    tiles = routing.tiles(block)
    assert tiles is routing.tiles(block) and tiles.dtype == torch.int32
    expected, start = [], 0
    for expert, end in enumerate(routing.offsets.tolist()):
        expected += [[expert, first, min(first + block, end)] for first in range(start, end, block)]
        start = end
    live = tiles[:, 2] > 0
    assert tiles[live].tolist() == expected
    assert live.tolist() == sorted(live.tolist(), reverse=True)


@pytest.mark.parametrize("norm_behind, products", [(False, 3), (True, 4)])
def test_a_checkpoint_stops_before_the_second_product(monkeypatch, norm_behind, products):
    """Two products of the backward, and one of the recomputation; two of that where something behind needs them."""
    x, index, weights, gate_up, down = draw(9, 2, 4, 3, False, True)
    projections = [p._replace(weight=plain(p.weight)) for p in (gate_up, down)]
    calls, real = [], op.grouped_mm
    monkeypatch.setattr(op, "grouped_mm", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))

    def layer(x, weights):
        settings = {"gate": GATES["silu"], "transposed": False, "backend": "native_torch"}
        out = x + moe_experts(x, index, weights, *projections, **settings)
        return torch.nn.functional.rms_norm(out, out.shape[-1:]) if norm_behind else out

    expected = layer(x, weights)
    actual = checkpoint(layer, x, weights, use_reentrant=False)
    grad_out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=x.dtype)
    expected = gradients(expected, grad_out, x, weights, gate_up, down)
    calls.clear()
    actual = gradients(actual, grad_out, x, weights, gate_up, down)
    assert len(calls) == products
    for name in expected:
        assert torch.equal(actual[name], expected[name]) and expected[name].any(), name


def test_op_is_one_that_compile_understands():
    x, index, weights, gate_up, down = draw(5, 2, 4, 2, False, True)
    tensors = [*gate_up[1:], *down[1:]]
    for leaf in (x, weights, gate_up.weight, down.weight, *tensors):
        leaf.data = leaf.data.float()
    torch.library.opcheck(
        torch.ops.unsloth_trl.moe_experts.default,
        (
            x,
            index,
            weights,
            gate_up.weight,
            down.weight,
            *tensors,
            [],
            [],
            *(plain(p.weight).meta for p in (gate_up, down)),
        )
        + (False, "silu", 1.0, 0.0, "native_torch"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
