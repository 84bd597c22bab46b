"""The checkpoint of a layer: called as torch's is, exact in every dtype, and nothing of it outlives its model."""

import copy
import gc
import weakref

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.tiny import tiny_model
from unsloth_trl import PatchConfig, apply_patches
from unsloth_trl.patches.checkpointing import offload, settings, slab
from unsloth_trl.patches.checkpointing.checkpoint import LayerCheckpoint, Offload
from unsloth_trl.patches.checkpointing.hook import _hooks, add_checkpointing, remove_checkpointing
from unsloth_trl.patches.checkpointing.offload import Offloader
from unsloth_trl.patches.checkpointing.patch import current_plan
from unsloth_trl.patches.checkpointing.policy import Plan


POLICIES = ["keep", "recompute", "offload"]


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    monkeypatch.setattr(settings, "ON_DEVICE", 0)
    monkeypatch.setattr(slab, "STEP", 1024)


def one_layer(policy_name="offload"):
    plan = Plan(policy_name, 1)
    return plan, LayerCheckpoint(plan, 0)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", ["whole", "transposed", "slice", "expanded"])
def test_bytes_in_are_bytes_out(dtype, view):
    torch.manual_seed(0)
    x = torch.randn(6, 4, 10).to(dtype)
    x[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    x = {"whole": x, "transposed": x.transpose(0, 2), "slice": x[:, 1:3, ::2], "expanded": x[:1].expand(5, 4, 10)}[
        view
    ]
    x = x.detach().requires_grad_()
    offloader = Offloader(max_pinned_gb=1)
    with Offload(offloader):
        out = x * x  # saves x, twice
    assert offloader.nbytes > 0
    saved = out.grad_fn._saved_self
    assert saved.dtype == dtype and saved.shape == x.shape
    if view != "expanded":
        assert torch.equal(saved.contiguous().view(torch.uint8), x.detach().contiguous().view(torch.uint8))
    else:
        assert torch.equal(saved.isnan(), x.isnan())


def called_as_torch_is(checkpoint, x, y):
    """Outputs and gradients of every form that callers use."""

    def f(x, y=None, k=1):
        hidden = nn.functional.dropout(x * k, 0.5)
        return hidden.sin() * hidden if y is None else hidden.sin() * y

    results = []
    for args, kwargs in (
        ((x,), {}),
        ((x, y), {}),
        ((x,), {"use_reentrant": False}),
        ((x,), {"preserve_rng_state": True}),
        ((x,), {"k": 3}),
        ((x, y), {"determinism_check": "none", "early_stop": False}),
    ):
        torch.manual_seed(1)
        kwargs = {"use_reentrant": False} | kwargs if checkpoint is torch_checkpoint else kwargs
        out = checkpoint(f, *args, **kwargs)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), args)))
    return results


@pytest.mark.parametrize("policy_name", POLICIES)
def test_b50_called_in_every_way_that_torch_checkpoint_is(policy_name):
    torch.manual_seed(0)
    x, y = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    expected = called_as_torch_is(torch_checkpoint, x, y)
    _, checkpoint = one_layer(policy_name)
    actual = called_as_torch_is(checkpoint, x, y)
    for a, e in zip(actual, expected, strict=True):
        assert len(a) == len(e)
        assert all(torch.equal(p, q) for p, q in zip(a, e, strict=True))


def test_b50_what_it_cannot_do_raises():
    x = torch.randn(3, 8, requires_grad=True)
    _, checkpoint = one_layer()
    with pytest.raises(TypeError, match="unknown"):
        checkpoint(lambda x: x.sin(), x, unknown=1)
    with pytest.raises(ValueError, match="use_reentrant=True"):
        checkpoint(lambda x: x.sin(), x, use_reentrant=True)
    # and what came before has left nothing behind
    (checkpoint(lambda x: x.sin(), x)).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.parametrize("policy_name", POLICIES)
def test_without_gradients_it_is_not_there(policy_name):
    plan, checkpoint = one_layer(policy_name)
    with torch.no_grad():
        assert torch.equal(checkpoint(lambda x, k: x * k, torch.ones(1, 5), k=2), torch.full((1, 5), 2.0))
    assert plan.offloader.nbytes == 0 and not plan.changes


class Layer(nn.Module):
    """A decoder layer that takes tensors in keyword arguments, also one that needs a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, *, position_embeddings, extra):
        cos, sin = position_embeddings
        return x + self.dropout(self.linear(x * cos + x.roll(1, -1) * sin)).tanh() * extra


@pytest.mark.parametrize("policy_name", POLICIES)
def test_b49_tensors_in_keyword_arguments(policy_name):
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    tables = torch.randn(2, 1, 5, 8)
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            add_checkpointing(layers, policy_name)
        torch.manual_seed(1)
        x = torch.randn(2, 5, 8, requires_grad=True)
        extra = torch.randn(2, 5, 8, requires_grad=True)
        layers.zero_grad()
        hidden = x
        for layer in layers:
            hidden = layer(hidden, position_embeddings=(tables[0], tables[1]), extra=extra)
        hidden.sum().backward()
        results.append([hidden.detach(), x.grad, extra.grad, *(p.grad.clone() for p in layers.parameters())])
    assert all(torch.equal(a, e) for a, e in zip(*results, strict=True))
    assert results[0][2].norm() > 0


class Recorder(ModelHook):
    def __init__(self):
        self.calls = []

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append("pre")
        return args, kwargs

    def post_forward(self, module, output):
        self.calls.append("post")
        return output


def test_hooks_on_layers_outside_of_transformers():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    own = layers[1].forward
    recorder = Recorder()
    add_hook_to_module(layers[0], recorder)
    plan = add_checkpointing(layers, "offload")
    x = torch.randn(4, 8, requires_grad=True)
    hidden = x
    for layer in layers:
        hidden = layer(hidden).tanh()
    assert plan.offloader.mover(x.device).slab.used >= 3 * x.numel() * 4
    hidden.sum().backward()
    assert recorder.calls == ["pre", "post"], "the recomputation is inside of other hooks"
    assert plan.offloader.mover(x.device).slab.used == 0
    remove_checkpointing(layers)
    assert layers[1].forward == own and layers[0]._hf_hook is recorder
    add_checkpointing(layers)
    add_hook_to_module(layers[1], Recorder(), append=True)
    with pytest.raises(ValueError, match="Linear is checkpointed already"):
        add_checkpointing(layers)
    remove_checkpointing(layers)
    assert layers[2].forward.__func__ is nn.Linear.forward and "_hf_hook" not in vars(layers[2])
    assert [type(h) for h in _hooks(layers[1])] == [Recorder] and len(_hooks(layers[0])) == 1
    with pytest.raises(ValueError, match="layers is empty"):
        add_checkpointing([])
    add_hook_to_module(layers[2], AlignDevicesHook(execution_device="cpu", offload=True, weights_map={}))
    with pytest.raises(ValueError, match="offloads the weights of Linear"):
        add_checkpointing(layers)


def checkpointed_model(model_type="llama", policy_name="offload", **config):
    model = tiny_model(model_type)
    report = apply_patches(model, PatchConfig(checkpoint_policy=policy_name, **config))
    model.gradient_checkpointing_enable()
    return model, report


def gradients(model):
    model.zero_grad()
    loss = model(input_ids=torch.arange(3, 23).view(2, 10), labels=torch.arange(3, 23).view(2, 10)).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual, expected):
    assert torch.equal(actual[0], expected[0]) and actual[1].keys() == expected[1].keys()
    assert all(torch.equal(actual[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.parametrize("kwargs", [{}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}])
def test_disabling_and_enabling_keeps_it(kwargs):
    model, _ = checkpointed_model()
    expected = gradients(model)
    used = current_plan(model).offloader.nbytes
    assert used > 0
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert_same(gradients(model), expected)
    model.gradient_checkpointing_enable(**kwargs)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_disable()
        model.activation_checkpointing_enable()
    assert all(isinstance(layer._gradient_checkpointing_func, LayerCheckpoint) for layer in model.model.layers)
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("option", ["use_reentrant", "offload", "every_n_layers"])
def test_another_checkpoint_that_is_asked_for_stays(option):
    model = tiny_model("llama")
    apply_patches(model, PatchConfig(checkpoint_policy="offload"))
    if option != "use_reentrant" and not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("transformers 5.17 takes these in the same dictionary only")
    if option != "use_reentrant":
        model.activation_checkpointing_enable(**{option: 2 if option == "every_n_layers" else True})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert not any(isinstance(layer._gradient_checkpointing_func, LayerCheckpoint) for layer in model.model.layers)


def test_removal_leaves_torchs_checkpoint():
    model, report = checkpointed_model()
    expected = gradients(model)
    report.remove()
    assert "gradient_checkpointing_enable" not in vars(model) and model.is_gradient_checkpointing
    for layer in model.model.layers:
        assert layer._gradient_checkpointing_func.func is torch_checkpoint
        assert not any("forward" in vars(module) for module in layer.modules())
    assert_same(gradients(model), expected)


def test_copies_do_not_meet():
    model, _ = checkpointed_model()
    expected = gradients(model)
    other = copy.deepcopy(model)
    plans = current_plan(model), current_plan(other)
    assert plans[0] is not plans[1]
    assert plans[1] is other.model.layers[0]._gradient_checkpointing_func.plan
    assert plans[1] is other.model.layers[0].mlp.forward.plan
    held = plans[0].offloader.nbytes
    assert_same(gradients(other), expected)
    assert plans[1].offloader.nbytes > 0 and plans[0].offloader.nbytes == held
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.zero_()
    assert_same(gradients(model), expected)


def test_two_models_in_turn():
    first, _ = checkpointed_model()
    second, _ = checkpointed_model("qwen3")
    expected = gradients(first), gradients(second)
    ids = torch.arange(3, 23).view(2, 10)
    losses = [model(input_ids=ids, labels=ids).loss for model in (first, second)]
    for model in (first, second):
        model.zero_grad()
    for loss in losses:  # both are in flight
        loss.backward()
    for model, (_, grads) in zip((first, second), expected, strict=True):
        assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())


def test_freed_with_the_model():
    model, report = checkpointed_model()
    gradients(model)
    plan = current_plan(model)
    buffers = [weakref.ref(piece.buffer) for m in plan.offloader._movers.values() for piece in m.slab._pieces]
    refs = [weakref.ref(model), weakref.ref(plan)]
    assert buffers
    gc.collect()
    gc.disable()
    try:
        del model, plan
        assert all(ref() is None for ref in refs + buffers), "kept by a cycle"
    finally:
        gc.enable()
    report.remove()  # of a model that is gone


def test_a_forward_without_a_backward_gives_its_memory_back():
    model, _ = checkpointed_model()
    mover = current_plan(model).offloader.mover(torch.device("cpu"))
    for _ in range(5):
        loss = model(input_ids=torch.arange(3, 13)[None], labels=torch.arange(3, 13)[None]).loss
        assert mover.slab.used > 0
        held = mover.slab.nbytes
        del loss
        assert mover.slab.used == 0
    assert mover.slab.nbytes == held


def test_b87_memory_is_bounded_over_many_shapes():
    model, _ = checkpointed_model()
    plan = current_plan(model)
    width = model.config.hidden_size * 4
    for i in range(500):
        length = 3 + (i * 7) % 29 if i > 29 else 3 + i  # at first each row is longer than the last
        ids = torch.arange(3, 3 + length)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        assert plan.offloader.mover(ids.device).slab.used == 0
    longest = -(-32 * width // 256) * 256
    # a quarter more than the longest row at most
    assert longest <= plan.offloader.nbytes / plan.num_layers <= 1.25 * longest + 256
    assert plan.planned_tokens == 32 and len(plan.changes) == 1


def test_no_host_memory_leaves_inputs_on_the_device(caplog):
    model, _ = checkpointed_model()
    expected = gradients(model)
    model, _ = checkpointed_model(max_pinned_gb=1e-7)
    assert_same(gradients(model), expected)
    assert_same(gradients(model), expected)
    plan = current_plan(model)
    assert plan.offloader.nbytes == 0
    warnings = [r.getMessage() for r in caplog.records if "stay on the device" in r.getMessage()]
    assert len(warnings) == 1 and "max_pinned_gb" in warnings[0]


class FakeDeviceMover(offload.DeviceMover):
    """Marks what it gives back with the device that it belongs to."""

    def load(self, saved):
        tensor = super().load(saved)
        self.loaded = getattr(self, "loaded", 0) + 1
        return tensor


def test_b52_each_device_has_its_own_memory(monkeypatch):
    """Tensors of two devices in one forward; the second is this machine's meta device, which copies nothing."""
    monkeypatch.setattr(offload, "DeviceMover", FakeDeviceMover)
    offloader = Offloader(max_pinned_gb=1, num_devices=2)
    here, there = torch.device("cpu"), torch.device("meta")
    first, second = offloader.mover(here), offloader.mover(there)
    assert first is not second and first.slab.limit == second.slab.limit == 2**29
    x = torch.randn(4, 4, requires_grad=True)
    with Offload(offloader):
        out = x.sin()
    out.sum().backward()
    assert x.grad.device == here and first.loaded == 1 and not hasattr(second, "loaded")


@pytest.mark.parametrize("policy_name", POLICIES)
def test_compiled(policy_name):
    model, _ = checkpointed_model(policy_name=policy_name)
    expected = gradients(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    loss, actual = gradients(compiled)
    assert loss == pytest.approx(expected[0].item(), rel=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[f"_orig_mod.{name}"], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model_type", ["gemma4_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "gemma3_text"])
def test_other_architectures(model_type):
    from tests.tiny import ARCHITECTURES

    if model_type not in ARCHITECTURES:
        pytest.fail(f"{model_type} is not among {list(ARCHITECTURES)}")
    results = []
    for policy_name in POLICIES:
        model, _ = checkpointed_model(model_type, policy_name)
        results.append(gradients(model))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
