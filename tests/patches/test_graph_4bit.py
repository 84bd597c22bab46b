"""Products with weights in 4 bits that have no adapter, or one that is not fused: one op of a compiled graph."""

import pytest
import torch

from tests.numerics import relative_error
from tests.patches.test_lora_graph import four_bits, run, stand_in_for_the_kernel
from unsloth_trl.patches.lora import op_4bit
from unsloth_trl.patches.lora.graph import fuse_lora
from unsloth_trl.patches.lora.graph_4bit import replace_products


def compiled(model, lean=True):
    """The model as graphs that are traced, rewritten and run as they are; what was fused, and what replaced."""
    torch._dynamo.reset()
    found = []

    def backend(graph, inputs):
        found.append((fuse_lora(graph) if lean else 0, replace_products(graph)))
        graph.graph.lint()
        assert "gemm_4bit" not in graph.code
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(model, backend=backend), found


def rows(number=9, dtype=torch.bfloat16):
    return torch.randn(1, number, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("targets, lean, expected", [(("down",), True, (1, 2)), (("gate", "up"), False, (0, 3))])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain scales", "nested scales"])
def test_errors_are_those_of_bitsandbytes(nested, bias, targets, lean, expected):
    model, truth = four_bits(nested, bias, targets)
    x = rows()
    right = run(truth, x.double())
    stock = run(model, x, autocast=True)
    other, found = compiled(model, lean)
    actual = run(other, x, autocast=True)
    assert found == [expected]
    for name, value in right.items():
        assert actual[name].dtype == stock[name].dtype
        errors = [relative_error(run[name], value) for run in (actual, stock)]
        assert errors[0] <= 1.2 * errors[1] + 1e-3 and errors[1] < 0.05, (name, errors)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_model_in_fp32_computes_as_uncompiled(bias, autocast):
    """What autocast makes of a product within bitsandbytes' op; its dtype alone would be fp32, and slow."""
    model, truth = four_bits(True, bias)
    model.float()
    for layer in (model.base_model.model.gate, model.base_model.model.up, model.base_model.model.down):
        layer.base_layer.compute_dtype = torch.float32
        layer.base_layer.weight.quant_state.dtype = torch.float32
    x = rows(dtype=torch.float32)
    right = run(truth, x.double())
    stock = run(model, x, autocast)
    other, found = compiled(model)
    actual = run(other, x, autocast)
    assert found == [(0, 3) if autocast else (3, 0)]
    for name, value in right.items():
        assert actual[name].dtype == stock[name].dtype == torch.float32
        errors = [relative_error(run[name], value) for run in (actual, stock)]
        if autocast:
            assert errors[0] <= 1.2 * errors[1] + 1e-3 and errors[1] < 0.05, (name, errors)
        else:
            assert relative_error(actual[name], stock[name]) < 1e-6, name
    if autocast:
        assert relative_error(actual["out"], stock["out"]) < 1e-3 < relative_error(stock["out"], right["out"])


def test_a_bias_that_is_trained():
    model, _ = four_bits(True, bias=True)
    trained = model.base_model.model.up.base_layer.bias.requires_grad_()
    x = rows()
    run(model, x, autocast=True)
    expected = trained.grad.clone()
    other, found = compiled(model)
    run(other, x, autocast=True)
    assert found == [(2, 1)]
    assert expected.abs().max() > 0 and relative_error(trained.grad, expected) <= 1e-2


class Other(torch.autograd.Function):
    """Somebody's function around the same op, with another result or another gradient."""

    @staticmethod
    def forward(ctx, x, packed, shape, absmax, blocksize, factor, slope):
        ctx.slope, ctx.shape = slope, x.shape
        out = torch.ops.bitsandbytes.gemm_4bit.default(x, packed, shape, absmax, blocksize, "nf4")
        return out * factor if factor != 1 else out

    @staticmethod
    def backward(ctx, grad):
        return ctx.slope * grad.sum() * grad.new_ones(ctx.shape), None, None, None, None, None, None


@pytest.mark.parametrize("factor, slope", [(2.0, 0.5), (1.0, 0.1)], ids=["result", "gradient"])
def test_functions_of_others_stay(factor, slope):
    model, _ = four_bits(False)
    weight = model.base_model.model.gate.base_layer.weight
    state = weight.quant_state

    def function(x):
        return Other.apply(x, weight.data, list(state.shape), state.absmax, state.blocksize, factor, slope)

    found, results = [], []

    def backend(graph, inputs):
        found.append(replace_products(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    for callable in (function, torch.compile(function, backend=backend)):
        x = rows().requires_grad_()
        out = callable(x)
        out.float().sum().backward()
        results.append((out.detach(), x.grad))
    assert found == [0]
    for one, other in zip(*results, strict=True):
        assert one.abs().max() > 0 and torch.equal(one, other)


@pytest.mark.parametrize("compute, around, within", [("float32", True, False), ("float16", True, True)])
def test_the_dtype_that_autocast_gives_there(compute, around, within):
    """A region within the graph that turns it off, and a product that fp16 cannot hold."""
    model, truth = four_bits(True)
    layer = model.base_model.model.gate.base_layer
    layer.compute_dtype = getattr(torch, compute)
    layer.weight.quant_state.dtype = layer.compute_dtype
    x = rows(dtype=torch.float32)
    if compute == "float16":
        x = x.sign() * 1e-3 + 3e4 * truth.base_model.model.gate.base_layer.weight[0].sign().float()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            return layer(x)

    torch._dynamo.reset()
    found, outs = [], []

    def backend(graph, inputs):
        found.append(replace_products(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for callable in (function, torch.compile(function, backend=backend)):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            outs.append(callable(x.clone().requires_grad_()).detach())
    assert found == [1] and outs[0].isfinite().all() and (compute == "float32" or outs[0].abs().max() > 65504)
    # uncompiled, a weight is rounded to fp16 on its way to bf16
    assert outs[0].dtype == outs[1].dtype
    assert relative_error(outs[1], outs[0]) < (1e-6 if compute == "float32" else 3e-3)


def test_a_product_of_a_product():
    """Without the casts of a layer between them: the second one's input is in autocast's dtype."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, _ = four_bits(True)
    weights = [getattr(model.base_model.model, name).base_layer.weight for name in ("gate", "down")]

    def function(x):
        for weight in weights:
            x = bitsandbytes.matmul_4bit(x, weight.data, weight.quant_state)
        return x

    other, found = compiled(function)
    results = []
    for callable in (function, other):
        x = rows(dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = callable(x)
        out.float().square().sum().backward()
        results.append((out.detach(), x.grad))
    assert found == [(0, 2)]
    for one, expected in zip(*reversed(results), strict=True):
        assert one.dtype == expected.dtype and relative_error(one, expected) < 1e-2


def test_without_gradients():
    """There bitsandbytes calls its op itself."""
    model, truth = four_bits(True, bias=True, targets=("down",))
    x = rows()
    other, found = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outs = [callable(x) for callable in (other, model)]
    assert found == [(1, 2)]
    right = truth(x.double())
    errors = [relative_error(out, right) for out in outs]
    assert errors[0] <= 1.2 * errors[1] + 1e-3 and errors[1] < 0.05


def test_our_way_back_from_4_bits(monkeypatch):
    """As on a GPU, where the kernel is in the reference's place."""
    model, _ = four_bits(True, targets=("down",))
    x = rows(op_4bit.FEW_ROWS + 1)
    stock = run(model, x, autocast=True)
    calls = stand_in_for_the_kernel(monkeypatch)
    other, _ = compiled(model)
    actual = run(other, x, autocast=True)
    wide, tall = torch.Size([128, 64]), torch.Size([64, 128])
    assert calls == [wide, wide, tall, tall, wide, wide]  # forward, then backward
    for name, value in stock.items():
        assert relative_error(actual[name], value) <= 1e-2, name


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_op(has_bias):
    model, _ = four_bits(True, has_bias)
    layer = model.base_model.model.down.base_layer
    state = layer.weight.quant_state
    scales = (state.state2.absmax, state.blocksize, state.quant_type, state.absmax, state.state2.code, state.offset)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    torch.library.opcheck(
        torch.ops.unsloth_trl.linear_4bit,
        (x, layer.weight.data, list(state.shape), *scales, layer.bias.detach() if has_bias else None),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
