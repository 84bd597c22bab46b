"""A checkpoint in a compiled layer keeps the layer's input and nothing else, autograd functions within it or not."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from peft import LoraConfig, get_peft_model
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import BitsAndBytesConfig

from tests.tiny import tiny_model
from unsloth_trl.patches.compilation import patch as compilation
from unsloth_trl.patches.compilation import recompute
from unsloth_trl.patches.config import PatchConfig
from unsloth_trl.patches.registry import apply_patches


# without a compiler's minutes; what is kept is decided here as it is there
UNTRANSLATED = aot_autograd(
    decompositions=select_decomp_table(),
    fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
    bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
    partition_fn=min_cut_rematerialization_partition,
)
TOKENS = 48  # no size of the model


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        twice = x + x
        twice *= grad
        return twice


class Written(Squared):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        one = torch.zeros_like(x)
        one += 1
        return x * x * one


def keep_products(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


THEIRS = functools.partial(create_selective_checkpoint_contexts, keep_products)


@pytest.mark.parametrize(
    "function, options, expected",
    [
        (Squared.apply, {}, 1),
        (torch.square, {}, 0),
        (Written.apply, {}, 0),
        (Squared.apply, {"context_fn": THEIRS}, 0),
    ],
    ids=["function", "no function", "writes", "a policy of its own"],
)
def test_which_checkpoints_are_changed(function, options, expected, monkeypatch):
    monkeypatch.setattr(recompute, "MARKS_ALL", False)
    weight = torch.randn(6, 6, requires_grad=True)
    x = torch.randn(5, 6, requires_grad=True)
    found, policies = [], []

    def backend(graph, inputs):
        found.append(recompute.recompute_functions(graph))
        policies.extend(m.meta.get("_checkpoint_context_fn") for m in graph.modules() if m is not graph)
        with recompute.without_advice():
            return UNTRANSLATED(graph, inputs)

    def run(x):
        return checkpoint(lambda x: function(x @ weight).sin(), x, use_reentrant=False, **options)

    actual = torch.compile(run, backend=backend, fullgraph=True)(x)
    expected_out = function(x @ weight).sin()
    torch.testing.assert_close(actual, expected_out)
    grads = (torch.autograd.grad(out.sum(), (x, weight)) for out in (actual, expected_out))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    assert found == [expected]
    if options:
        assert [policy.args for policy in policies if policy is not None] == [THEIRS.args]
    else:
        assert (recompute._contexts in policies) is bool(expected)


def kept(model, **switches):
    """Bytes of what a forward keeps that has tokens, aside from weights and the mask that layers share."""
    report = apply_patches(model, PatchConfig(checkpoint_policy="recompute", **switches))
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        if tensor.shape.count(TOKENS) == 1 and tensor.untyped_storage().data_ptr() not in weights:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    input_ids = torch.arange(TOKENS)[None] % 32
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(input_ids=input_ids, labels=input_ids).loss
    loss.backward()
    compiled = next(e for e in report.entries if e.name == "compilation").applied
    report.remove()
    return sum(seen.values()), compiled


@pytest.mark.parametrize(
    "model_type, targets, lean_lora",
    [
        ("llama", ["q_proj", "v_proj"], True),
        ("llama", "all-linear", False),
        ("qwen2", "all-linear", True),  # with biases
    ],
)
def test_a_layer_in_4_bits_keeps_its_input(model_type, targets, lean_lora, monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(compilation, "apply", functools.partial(compilation.apply, backend=UNTRANSLATED))
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda backend: backend)
    model = tiny_model(model_type).to(torch.bfloat16)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="nf4"
    )
    model = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        quantization_config=quantization,
        dtype=torch.bfloat16,
    )
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    plain, compiled = kept(model, lean_lora=lean_lora)
    assert plain > 0 and not compiled
    actual, compiled = kept(model, lean_lora=lean_lora, compile_layers="on")
    config = model.config
    rope = 2 * TOKENS * (config.hidden_size // config.num_attention_heads) * 2  # cos and sin
    assert compiled and plain <= actual <= plain + rope
