"""A linear layer and its LoRA as one op of a compiled graph: the same numbers, and nowhere else."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.numerics import relative_error
from unsloth_trl.patches.lora import op_4bit
from unsloth_trl.patches.lora.graph import fuse_lora
from unsloth_trl.patches.lora.op import lora_linear
from unsloth_trl.patches.quantization.reference import dequantize_nf4_reference


class Gated(nn.Module):
    """Three linear layers as in an MLP, one of them with a bias."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 20, bias=False)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def with_lora(dtype, **config):
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["gate", "up", "down"]} | config
    model = get_peft_model(Gated().to(dtype), LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def compiled(model, nodes=None):
    """The model as graphs that are traced, rewritten and run as they are, and how many layers each had."""
    torch._dynamo.reset()
    found = []

    def backend(graph, inputs):
        found.append(fuse_lora(graph))
        graph.graph.lint()
        if nodes is not None:
            nodes.extend(graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(model, backend=backend), found


def run(model, x, autocast=False):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    out.float().square().sum().backward()
    parameters = ((name.removeprefix("_orig_mod."), p) for name, p in model.named_parameters())
    grads = {name: p.grad for name, p in parameters if p.grad is not None}
    return {"out": out.detach(), "x": x.grad} | grads


@pytest.fixture
def x():
    return torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scaling", [1.0, 1.5])
def test_the_op(scaling):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 5, 12), "weight": (8, 12), "bias": (8,), "lora_A": (3, 12), "lora_B": (8, 3)}
    given = {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}
    trained = [given[name].requires_grad_() for name in ("x", "lora_A", "lora_B")]
    thin = given["x"].detach() @ given["lora_A"].t()
    out = lora_linear(*given.values(), thin, scaling)
    expected = torch.nn.functional.linear(given["x"], given["weight"], given["bias"])
    expected = expected + given["x"] @ given["lora_A"].t() @ given["lora_B"].t() * scaling
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for a, e in zip(*(torch.autograd.grad(o, trained, grad) for o in (out, expected)), strict=True):
        torch.testing.assert_close(a, e)
    thin = thin.detach().requires_grad_()
    torch.library.opcheck(torch.ops.unsloth_trl.lora_linear, (*given.values(), thin, scaling))


def test_an_input_is_read_once(x):
    """Layers of one input have one product with all of their first factors, and so one with their gradients."""
    model = with_lora(torch.float32, r=5)
    expected, nodes = run(model, x), []
    fused, found = compiled(model, nodes)
    actual = run(fused, x)
    assert found == [3]
    thin = [n.args[1].target for n in nodes if n.target is torch.nn.functional.linear]
    assert len(thin) == 2 and torch.cat in thin
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_are_one_op_each(x, autocast):
    model = with_lora(torch.float32)
    expected = run(model, x, autocast)
    fused, found = compiled(model)
    actual = run(fused, x, autocast)
    assert found == [3]
    tolerance = 1e-2 if autocast else 1e-6
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        other = expected[name]
        assert value.dtype == other.dtype
        assert relative_error(value, other) <= tolerance


def test_bf16_error_is_pefts(x):
    """Against fp64, the error of each is at most 1.2 times that of the layers as PEFT has them."""
    model = with_lora(torch.float32)
    truth = run(copy.deepcopy(model).double(), x.double())
    stock = run(model, x, autocast=True)
    fused, found = compiled(model)
    actual = run(fused, x, autocast=True)
    assert found == [3]
    for name, value in truth.items():
        mine = actual[name]
        errors = [(v.double() - value).norm() / value.norm() for v in (mine, stock[name])]
        assert errors[0] <= 1.2 * errors[1] + 1e-3, (name, errors)


@pytest.mark.parametrize(
    "config, expected",
    [({"bias": "lora_only"}, 2), ({"lora_dropout": 0.5}, 0), ({"use_dora": True}, 0), ({"target_modules": ["up"]}, 1)],
    ids=str,
)
def test_what_is_left_as_it_is(x, config, expected):
    """A bias that is trained, dropout, another arithmetic, layers without an adapter."""
    model = with_lora(torch.float32, **config)
    fused, found = compiled(model)
    torch.manual_seed(0)
    before = run(model, x)
    torch.manual_seed(0)
    after = run(fused, x)
    assert sum(found) == expected  # DoRA comes in several graphs
    if "lora_dropout" not in config:
        for name, value in before.items():
            other = after[name]
            torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-5)


def add_one(x):
    x += 1


@pytest.mark.parametrize(
    "write",
    [
        add_one,
        torch.relu_,
        lambda x: torch.nn.functional.relu(x, inplace=True),
        lambda x: torch.nn.functional.leaky_relu(x, 0.1, True),
        lambda x: torch.neg(x, out=x),
        lambda x: x.mul_(2),
    ],
    ids=["+=", "relu_", "inplace=True", "inplace", "out", "mul_"],
)
@pytest.mark.parametrize("where", ["between layers", "within a layer"])
def test_an_input_that_is_written_to_is_read_again(x, write, where):
    """With gradients that is an error, here as in PyTorch."""
    model = with_lora(torch.float32, target_modules=["gate", "up"])
    gated = model.base_model.model

    def between(x):
        x = x * 1.0
        gate = gated.gate(x)
        write(x)
        return gate + gated.up(x)

    def within(x):
        x = x * 1.0
        base, gate = gated.gate.base_layer(x), gated.gate
        adapter = gate.lora_B["default"](gate.lora_A["default"](x))
        write(x)
        return base + adapter * 1.5 + x.sum()

    function, nodes = between if where == "between layers" else within, []
    fused, found = compiled(function, nodes)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), function(x))
    assert found == [2 if function is between else 0]
    assert not [n for n in nodes if n.target is torch.cat]


def test_layers_that_differ_in_scaling_share_a_graph(x):
    """Which then has it as a symbol; a graph for each would be more of them than dynamo compiles."""
    model = with_lora(torch.float32, target_modules=["gate", "up"])
    fused, found = compiled(model)
    for scaling in (1.5, 0.75, 2.25, 0.3):
        model.base_model.model.gate.scaling["default"] = scaling
        expected, actual = run(model, x), run(fused, x)
        for name, value in expected.items():
            other = actual[name]
            torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-5)
    assert found == [2, 2]


def test_other_products_by_name_are_left_alone(x):
    """`torch.nn.functional.linear` may be given its arguments by name, beside a layer or in its place."""
    weight = torch.randn(12, 12, generator=torch.Generator().manual_seed(3))
    model = with_lora(torch.float32)

    def scaled(x):
        return model(x) + torch.nn.functional.linear(input=x, weight=weight) * 0.5

    fused, found = compiled(scaled)
    torch.testing.assert_close(fused(x), scaled(x))
    assert found == [3]


@pytest.mark.parametrize("between, same", [(torch.float64, True), (torch.bfloat16, False), (torch.int64, False)])
def test_an_input_that_a_cast_has_rounded_is_another(x, between, same):
    model = with_lora(torch.float32, target_modules=["gate", "up"])
    gated, nodes = model.base_model.model, []

    def both(x):
        return gated.gate(x) + gated.up(x.to(between).to(torch.float32))

    fused, found = compiled(both, nodes)
    torch.testing.assert_close(fused(x), both(x))
    assert found == [2]
    assert len([n for n in nodes if n.target is torch.cat]) == same


def test_what_writes_into_a_tensor_stays(x):
    """Such a node has no user, and is not dead."""
    model = with_lora(torch.float32)

    def halved(x):
        out = model(x)
        found = torch.empty_like(out)
        found[..., 6:] = out[..., 6:]
        found[..., :6] = 0.5 * out[..., :6]
        return found

    expected = halved(x)
    fused, found = compiled(halved)
    torch.testing.assert_close(fused(x), expected)
    assert found == [3]


def test_several_adapters_and_a_trained_weight(x):
    model = with_lora(torch.float32)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["gate"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    model.base_model.model.down.base_layer.weight.requires_grad_(True)
    expected = run(model, x)
    fused, found = compiled(model)
    actual = run(fused, x)
    assert found == [2]  # the first adapter of `gate`, and `up`
    for name, value in expected.items():
        other = actual[name]
        torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-5)


def four_bits(nested, bias=False, targets=("gate", "up", "down")):
    """A model whose linear layers are in 4 bits, and the same in fp64 with the numbers that these stand for."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = Wide(bias).to(torch.bfloat16)
    for name, layer in list(model.named_children()):
        quantized = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=bias,
            compute_dtype=torch.bfloat16,
            compress_statistics=nested,
            quant_type="nf4",
        )
        quantized.bias = layer.bias
        quantized.weight = bnb.nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=nested, quant_type="nf4"
        )
        setattr(model, name, quantized.to("cpu"))
    config = LoraConfig(r=4, lora_alpha=6, target_modules=list(targets))
    truth = Wide(bias).double()
    for name, layer in truth.named_children():
        weight, shift = getattr(model, name).weight, getattr(model, name).bias
        layer.weight.data = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).double()
        if bias:
            layer.bias.data = shift.detach().double()
    model, truth = get_peft_model(model, config), get_peft_model(truth, config)
    for (name, parameter), other in zip(model.named_parameters(), truth.parameters(), strict=True):
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
            other.data = parameter.detach().double()
    return model, truth


def stand_in_for_the_kernel(monkeypatch):
    """As on a GPU, with the reference in the kernel's place; the shapes of the weights that it is called for."""
    calls = []

    def dequantize(*arguments):
        calls.append(arguments[-1].shape)
        dequantize_nf4_reference(*arguments)

    monkeypatch.setattr(op_4bit, "use_kernels", lambda tensor: True)
    monkeypatch.setattr(op_4bit, "dequantize_nf4_triton", dequantize)
    return calls


class Wide(Gated):
    def __init__(self, bias):
        nn.Module.__init__(self)
        self.gate = nn.Linear(64, 128, bias=bias)
        self.up = nn.Linear(64, 128, bias=bias)
        self.down = nn.Linear(128, 64, bias=bias)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain scales", "nested scales"])
def test_a_weight_in_4_bits(nested, bias):
    model, truth = four_bits(nested, bias)
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = run(truth, x.double())
    stock = run(model, x, autocast=True)
    fused, found = compiled(model)
    actual = run(fused, x, autocast=True)
    assert found == [3]
    for name, value in expected.items():
        mine = actual[name]
        assert mine.dtype == stock[name].dtype
        errors = [relative_error(other, value) for other in (mine, stock[name])]
        assert errors[0] <= 1.2 * errors[1] + 1e-3 and errors[1] < 0.05, (name, errors)


def test_a_bias_that_is_trained_beside_a_weight_in_4_bits():
    model, _ = four_bits(True, bias=True)
    trained = model.base_model.model.up.base_layer.bias.requires_grad_()
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    run(model, x, autocast=True)
    expected = trained.grad.clone()
    model.zero_grad()
    fused, found = compiled(model)
    run(fused, x, autocast=True)
    assert found == [2]  # the others
    assert expected.abs().max() > 0 and relative_error(trained.grad, expected) <= 1e-2


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain scales", "nested scales"])
@pytest.mark.parametrize("rows", [op_4bit.FEW_ROWS, op_4bit.FEW_ROWS + 1])
def test_our_way_back_from_4_bits(nested, rows, bias, monkeypatch):
    """As on a GPU, where the kernel is in the reference's place: its numbers, and for many rows its only."""
    model, _ = four_bits(nested, bias)
    x = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    stock = run(model, x, autocast=True)
    calls = stand_in_for_the_kernel(monkeypatch)
    fused, found = compiled(model)
    actual = run(fused, x, autocast=True)
    assert found == [3]
    wide, tall = torch.Size([128, 64]), torch.Size([64, 128])
    assert calls == [wide, wide, tall][: 3 * (rows > op_4bit.FEW_ROWS)] + [tall, wide, wide]
    for name, value in stock.items():
        mine = actual[name]
        assert relative_error(mine, value) <= 1e-2, name


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_op_in_4_bits(has_bias):
    model, _ = four_bits(True, has_bias)
    layer = model.base_model.model.down
    bias = layer.base_layer.bias.detach() if has_bias else None
    state = layer.base_layer.weight.quant_state
    generator = torch.Generator().manual_seed(2)
    x, lora_A, lora_B = (torch.randn(s, generator=generator).bfloat16() for s in ((3, 128), (4, 128), (64, 4)))
    thin = (x @ lora_A.t()).requires_grad_()
    scales = (state.state2.absmax, state.blocksize, state.quant_type, state.absmax, state.state2.code, state.offset)
    trained = [tensor.requires_grad_() for tensor in (x, lora_A, lora_B)]
    torch.library.opcheck(
        torch.ops.unsloth_trl.lora_linear_4bit,
        (trained[0], layer.base_layer.weight.data, list(state.shape), *scales, bias, *trained[1:], thin, 1.5),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
