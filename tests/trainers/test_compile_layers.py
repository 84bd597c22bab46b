"""`compile_layers="on"` trains as without it, compiles once for all layers, and stays out of where it must."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import unsloth_trl
from tests.numerics import assert_runs_close, make_trainer, run_sft
from tests.patches.test_policy import FakeProbe
from tests.tiny import tiny_model
from tests.trainers.grpo_runs import run_ours
from unsloth_trl.patches.attention import compiled, dispatch, patch
from unsloth_trl.patches.attention import op as attention_op
from unsloth_trl.patches.checkpointing import settings
from unsloth_trl.patches.checkpointing.checkpoint import MEASURED
from unsloth_trl.patches.checkpointing.patch import current_plan
from unsloth_trl.patches.checkpointing.tiles import TiledForward
from unsloth_trl.patches.compilation import layers
from unsloth_trl.patches.compilation import patch as compilation
from unsloth_trl.patches.config import PatchConfig
from unsloth_trl.patches.layout import PackedLayout
from unsloth_trl.patches.registry import apply_patches, base_model


# MoE layers come apart into more graphs than dense ones
SEVERAL = ["llama", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"]
PACKED = {
    "packing": True,
    "max_length": 24,
    "per_device_train_batch_size": 2,
    "gradient_checkpointing": True,
    "checkpoint_policy": "recompute",
}


PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.unsloth_trl.lora_linear.default,
    torch.ops.unsloth_trl.lora_linear_backward.default,
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def untranslated(monkeypatch):
    """Graphs that run as they are: what dynamo and autograd make of a layer, without a compiler's minutes."""
    monkeypatch.setattr(compilation, "apply", functools.partial(compilation.apply, backend="aot_eager"))


def entry(trainer):
    return trainer.patch_report["compilation"]


def num_graphs(trainer) -> int:
    layer = layers_of(trainer.model)[0]
    return layer.__dict__["forward"].compiler.num_graphs


def layers_of(model):
    return [m for m in base_model(model).modules() if isinstance(m.__dict__.get("forward"), layers.CompiledForward)]


@pytest.mark.parametrize("model_type, lora", [*((name, True) for name in SEVERAL), ("llama", False)], ids=str)
def test_sft_is_the_same(model_type, lora, untranslated):
    on = run_sft(unsloth_trl, model_type, lora=lora, compile_layers="on", **PACKED)
    off = run_sft(unsloth_trl, model_type, lora=lora, compile_layers="off", **PACKED)
    assert entry(on.trainer).applied and not entry(off.trainer).applied
    assert num_graphs(on.trainer) > 0
    assert_runs_close(on, off, 1e-4)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_inductor_is_the_same(model_type):
    on = run_sft(unsloth_trl, model_type, lora=True, compile_layers="on", **PACKED)
    off = run_sft(unsloth_trl, model_type, lora=True, compile_layers="off", **PACKED)
    assert num_graphs(on.trainer) > 0
    assert_runs_close(on, off, 1e-4)


@pytest.mark.parametrize(
    "config", [{"packing": False}, {"gradient_checkpointing": False}, {"checkpoint_policy": "offload"}], ids=str
)
def test_padded_rows_and_no_checkpoint(config, untranslated):
    changed = PACKED | config
    on = run_sft(unsloth_trl, "llama", lora=True, compile_layers="on", **changed)
    off = run_sft(unsloth_trl, "llama", lora=True, compile_layers="off", **changed)
    assert num_graphs(on.trainer) > 0
    assert_runs_close(on, off, 1e-4)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe"])
def test_grpo_is_the_same(model_type, untranslated):
    fields = {"lora": True, "beta": 0.1, "num_iterations": 2, "gradient_checkpointing": True}
    on, off = (run_ours(model_type, compile_layers=value, **fields) for value in ("on", "off"))
    assert entry(on.trainer).applied
    assert_runs_close(on, off, 1e-4)


@pytest.fixture
def in_graph(monkeypatch):
    """The attention op within the graph, which is there for GPUs, with its reference on the CPU."""

    def refusal(query, value, softcap, sinks, dropout):
        return None if softcap is None and sinks is None and not dropout else "no reference"

    monkeypatch.setattr(dispatch, "refusal_of_any_layout", refusal)


def test_a_plan_measures_some_layers_and_the_peak_of_the_others(in_graph, untranslated):
    model, plain = (tiny_model("llama", num_hidden_layers=7).train() for _ in range(2))
    for each, compile_layers in ((model, "on"), (plain, "off")):
        each.gradient_checkpointing_enable()
        apply_patches(each, PatchConfig(compile_layers=compile_layers))
    plan = current_plan(model)
    plan.measures, plan._probe = True, FakeProbe(40 * 2**30)
    inputs = {"input_ids": torch.arange(9, 21)[None], "packed_layout": PackedLayout([5, 7]), "use_cache": False}
    for each in (model, plain):
        each(**inputs).logits.square().mean().backward()
    assert plan.watch.num_runs == MEASURED == 5
    assert not layers_of(model)[0].__dict__["forward"].compiler.apart
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_attention_within_the_graph(in_graph, untranslated):
    on = run_sft(unsloth_trl, "llama", lora=True, compile_layers="on", **PACKED)
    off = run_sft(unsloth_trl, "llama", lora=True, compile_layers="off", **PACKED)
    assert_runs_close(on, off, 1e-4)
    # of any length; one for the first layer, whose input needs no gradient, and one for the others
    assert num_graphs(on.trainer) <= 2


@pytest.mark.parametrize(
    "model_type, lora, expected",
    [
        # 7 linears, each an op; 4 inputs, each with one product with all of its A. Again: all but the last linear;
        # and the backward of both
        ("llama", True, {"forward": 7 + 4, "backward": 6 + 4 + 7 + 4}),
        ("llama", False, {"forward": 7, "backward": 20}),  # 6 of 7 again and 2 gradients each
        ("gemma2", True, None),  # soft caps interrupt the graph here, so the checkpoint stays around it
        ("qwen3_moe", True, None),
    ],
)
def test_a_backward_computes_no_output_again(model_type, lora, expected, in_graph, monkeypatch):
    """The checkpoint is in the graph, whose backward leaves out what only the layer's output needs."""
    products = {}

    def compiler(name):
        def count(graph, inputs):
            found = sum(node.target in PRODUCTS for node in graph.graph.nodes)
            products.setdefault(name, set()).add(found)
            return make_boxed_func(graph.forward)

        return count

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: backend)
    on = run_sft(unsloth_trl, model_type, lora=lora, compile_layers="on", **PACKED)
    off = run_sft(unsloth_trl, model_type, lora=lora, compile_layers="off", **PACKED)
    assert_runs_close(on, off, 1e-4)
    apart = layers_of(on.trainer.model)[0].__dict__["forward"].compiler.apart
    if expected is None:
        assert sum(map(max, products.values())) > 0
        assert bool(apart) is (model_type == "gemma2")
    else:
        assert products == {name: {number} for name, number in expected.items()} and not apart


@pytest.mark.parametrize(
    "seqlens, parents", [([3, 1, 5], None), ([4, 3, 2, 5], [-1, 0, 0, -1])], ids=["plain", "tree"]
)
def test_attention_op(seqlens, parents, in_graph):
    layout = PackedLayout(seqlens, parents)
    if parents is not None:
        layout = PackedLayout([4, 5, 3, 2], [-1, -1, 0, 0])
    generator = torch.Generator().manual_seed(0)
    shape = (1, 4, layout.num_tokens, 8)
    query, key, value = (torch.randn(shape, generator=generator)[:, :heads].requires_grad_() for heads in (4, 2, 2))
    handle = compiled.hold(layout)
    out = compiled.flash_attn_by_layout(query, key, value, handle, 0.3, None)
    expected = patch._packed_attention(
        "sdpa",
        query,
        key,
        value,
        layout,
        scale=0.3,
        window=None,
        softcap=None,
        sinks=None,
        dropout=0.0,
        position_ids=None,
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(out.shape, generator=generator)
    for mine, theirs in zip(
        *(torch.autograd.grad(o, (query, key, value), grad) for o in (out, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    arguments = tuple(x.detach().requires_grad_() for x in (query, key, value))
    torch.library.opcheck(torch.ops.unsloth_trl.flash_attn_by_layout, (*arguments, None, handle, 0.3, 0, 0.0, "auto"))


def test_queries_in_any_order_in_memory(monkeypatch, untranslated, in_graph):
    """A kernel gives the strides of its queries, as `torch.cat` of rotated halves leaves them."""
    real, real_backward = attention_op.varlen_attention_reference, attention_op.varlen_attention_backward_reference

    def like(found, given):
        return torch.empty_like(given).copy_(found)

    def forward(query, *rest):
        out, lse = real(query, *rest)
        return like(out, query), lse

    def backward(grad, *rest):
        return tuple(like(*pair) for pair in zip(real_backward(grad, *rest), rest, strict=False))

    monkeypatch.setattr(attention_op, "varlen_attention_reference", forward)
    monkeypatch.setattr(attention_op, "varlen_attention_backward_reference", backward)
    handle = compiled.hold(PackedLayout([3, 4]))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, n, 7, 8, generator=generator).requires_grad_() for n in (4, 2, 2)]

    def attend(query, key, value):
        return compiled.flash_attn_by_layout(query, key, value, handle, 0.3, None).reshape(1, 7, -1) * 2

    expected, found = attend(*inputs), torch.compile(attend, backend="aot_eager")(*inputs)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_layout_that_is_gone_says_what_to_change():
    layout = PackedLayout([3])
    handle = compiled.hold(layout)
    others = [PackedLayout([n + 1]) for n in range(compiled.HELD)]
    for other in others:
        compiled.hold(other)
    with pytest.raises(RuntimeError, match="set compile_layers='off'"):
        compiled.layout_of(handle)
    assert compiled.layout_of(compiled.hold(layout)) is layout  # held once more
    assert len(compiled._LAYOUTS) == compiled.HELD


def test_generation_is_not_compiled(untranslated):
    trainer = make_trainer(unsloth_trl, "llama", lora=True, compile_layers="on", **PACKED)
    ids = torch.tensor([[9, 10, 11]])
    before = make_trainer(unsloth_trl, "llama", lora=True, compile_layers="off", **PACKED).model.eval()
    expected = before.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(trainer.model.eval().generate(input_ids=ids, max_new_tokens=5, do_sample=False), expected)
    assert num_graphs(trainer) == 0


def test_removed_copied_and_pickled(untranslated):
    model = tiny_model("qwen3_moe")
    ids = torch.arange(9, 21)[None]
    expected = model(input_ids=ids).logits
    report = apply_patches(model, PatchConfig(compile_layers="on"))
    assert len(layers_of(model)) == model.config.num_hidden_layers
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(layer.__dict__["forward"].owner is layer for layer in layers_of(other))
        torch.testing.assert_close(other(input_ids=ids, use_cache=False).logits, expected)
    report.remove()
    assert not layers_of(model) and all("forward" not in m.__dict__ for m in model.modules())
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_long_rows_are_cut_into_tiles_and_not_compiled(untranslated, monkeypatch):
    for name, value in (("TILE", 4), ("TILE_FROM", 8), ("SMALLEST_TILE", 4)):
        monkeypatch.setattr(settings, name, value)
    on = run_sft(unsloth_trl, "llama", lora=True, compile_layers="on", **PACKED)
    off = run_sft(unsloth_trl, "llama", lora=True, compile_layers="off", **PACKED)
    assert "in tiles of 4" in str(on.trainer.patch_report["checkpointing"].detail)
    assert num_graphs(on.trainer) == 0
    assert_runs_close(on, off, 1e-4)


@pytest.mark.parametrize("whole", [False, True], ids=["several graphs", "one graph"])
@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_a_compiler_that_fails_leaves_the_run_as_it_is(policy, whole, monkeypatch, caplog, request):
    if whole:
        request.getfixturevalue("in_graph")

    def broken(graph, inputs):
        raise FileNotFoundError("no C compiler here")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: broken)
    config = PACKED | {"gradient_checkpointing": True, "checkpoint_policy": policy}
    on = run_sft(unsloth_trl, "llama", lora=True, compile_layers="on", **config)
    off = run_sft(unsloth_trl, "llama", lora=True, compile_layers="off", **config)
    assert_runs_close(on, off, 1e-6)
    assert "no C compiler here" in str(entry(on.trainer).detail)
    assert "compile_layers='off'" in caplog.text


def logits(model, **kwargs):
    ids = {} if "inputs_embeds" in kwargs else {"input_ids": torch.arange(9, 21)[None]}
    return model(**ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_a_part_of_one_layer(when, untranslated):
    """One graph serves all layers: a layer with hooks inside runs as it is, and the others without them."""

    def double(module, args, output):
        return output * 2

    found = []
    for compile_layers in ("off", "on"):
        model = tiny_model("llama")
        apply_patches(model, PatchConfig(compile_layers=compile_layers))
        if when == "after":
            plain = logits(model)
        model.model.layers[1].mlp.register_forward_hook(double)
        found.append(logits(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    if when == "after":
        assert (found[1] - plain).abs().max() > 1e-3


def test_a_forward_that_is_there_already(untranslated):
    model = tiny_model("llama")
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 3
    expected = logits(model)
    report = apply_patches(model, PatchConfig(compile_layers="on"))
    assert report["compilation"].modules == ("1 layers, 1 others keep their own forward",)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("failing", [2, 3])
def test_a_compiler_that_fails_later(failing, monkeypatch):
    """Layers that ran compiled are recomputed compiled."""
    calls = []
    real = torch._dynamo.lookup_backend("aot_eager")

    def lookup(name):
        def compile_graph(graph, inputs, **kwargs):
            calls.append(len(calls))
            if len(calls) == failing:
                raise FileNotFoundError("no space left")
            return real(graph, inputs, **kwargs)

        return compile_graph

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lookup)
    on = run_sft(unsloth_trl, "llama", lora=True, compile_layers="on", **PACKED)
    off = run_sft(unsloth_trl, "llama", lora=True, compile_layers="off", **PACKED)
    assert len(calls) == failing and "no space left" in str(entry(on.trainer).detail)
    assert_runs_close(on, off, 1e-4)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_models_of_one_class_do_not_share_a_limit(checkpointed, in_graph, untranslated):
    """Dynamo compiles a piece of code so often and no more; a sweep of runs in one process would get there."""
    compilers = []
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            model = tiny_model("llama")
            if checkpointed:
                model.gradient_checkpointing_enable()
            apply_patches(model, PatchConfig(compile_layers="on", checkpoint_policy="recompute"))
            logits(model, inputs_embeds=torch.ones(1, 12, 64).requires_grad_()).sum().backward()
            compiler = layers_of(model)[0].__dict__["forward"].compiler
            assert (compiler.num_graphs, compiler.apart, compiler.failure) == (1, set(), None)
            compilers.append(weakref.ref(compiler))
    del model, compiler
    gc.collect()
    assert [compiler() for compiler in compilers] == [None, None]


def test_more_kinds_of_layers_than_dynamo_compiles(in_graph, untranslated):
    kinds = {"target_modules": r".*layers\.0.*q_proj|.*layers\.1.*(v|up)_proj"}
    with torch._dynamo.config.patch(recompile_limit=1):
        on, off = (
            run_sft(unsloth_trl, "llama", lora=True, lora_kwargs=kinds, compile_layers=value, **PACKED)
            for value in ("on", "off")
        )
    assert_runs_close(on, off, 1e-4)
    assert str(entry(on.trainer).detail) == (
        "one by one, each class once; 2 graphs compiled so far; checkpoints stay around LlamaDecoderLayer, "
        "not one graph"
    )


def tiled(model) -> int:
    return sum(isinstance(m.__dict__.get("forward"), TiledForward) for m in layers_of(model)[0].modules())


def test_tiles_come_back_where_nothing_is_compiled(untranslated):
    models = [tiny_model("llama") for _ in range(2)]
    for model, value in zip(models, ("off", "on"), strict=True):
        apply_patches(model, PatchConfig(compile_layers=value))
    expected = sum(isinstance(m.__dict__.get("forward"), TiledForward) for m in models[0].model.layers[0].modules())
    copied = copy.deepcopy(models[1])
    assert expected > 0 and tiled(models[1]) == tiled(copied) == 0
    for model in (models[1], copied):
        layers_of(model)[0].__dict__["forward"].compiler.give_up(RuntimeError("no compiler"))
        assert tiled(model) == expected


# parallel blocks, heads of two sizes, shared experts, a wrapper, fused projections, norms behind
@pytest.mark.parametrize("model_type", ["cohere", "gemma4_text", "glm4_moe", "kimi_k25", "phi3", "olmo2"])
def test_other_architectures_run_compiled(model_type, untranslated):
    model = tiny_model(model_type)
    layout = PackedLayout([5, 7])
    ids = torch.arange(9, 21)[None]
    apply_patches(model, PatchConfig(compile_layers="off"))
    with torch.no_grad():
        expected = model(input_ids=ids, packed_layout=layout).logits
        apply_patches(model, PatchConfig(compile_layers="on"))
        torch.testing.assert_close(model(input_ids=ids, packed_layout=layout).logits, expected, rtol=1e-4, atol=1e-5)
    assert layers_of(model)[0].__dict__["forward"].compiler.failure is None
