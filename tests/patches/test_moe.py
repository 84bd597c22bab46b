"""Experts and their LoRA in models of transformers: what PEFT computes, through the op, and what is around it."""

import copy
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from transformers import AutoModelForCausalLM

from tests.largest import LargestTensor
from tests.tiny import EXPERT_ARCHITECTURES, EXPERT_PARAMETERS, tiny_model
from unsloth_trl import PatchConfig, apply_patches
from unsloth_trl.patches.moe import backends
from unsloth_trl.patches.moe.gates import recognise_gate
from unsloth_trl.patches.moe.split_lora import NAMES, SplitLoraForward
from unsloth_trl.patches.quantization.experts import is_experts


torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
SKIP = {"checkpointing": "not looked at", "attention": "not looked at", "lm_head": "not looked at"}
IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))


def experts_lora(parameters=EXPERT_PARAMETERS, **kwargs) -> LoraConfig:
    return LoraConfig(
        **({"r": 3, "lora_alpha": 7, "target_modules": ["o_proj"]} | kwargs), target_parameters=parameters
    )


@torch.no_grad()
def fill(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def with_lora(model_type, seed=0, parameters=EXPERT_PARAMETERS, **kwargs):
    return fill(get_peft_model(tiny_model(model_type), experts_lora(parameters, **kwargs)), seed)


def patch(model, **config):
    return apply_patches(model, PatchConfig(**config), skip=SKIP)


def step(model):
    """Logits, and the gradient of each trained weight."""
    model.zero_grad()
    ids = IDS.to(next(model.parameters()).device)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def assert_same(actual, expected, tolerance=3e-5):
    assert distance(actual[0], expected[0]) < tolerance
    assert actual[1].keys() == expected[1].keys()
    worst = {name: distance(actual[1][name], grad) for name, grad in expected[1].items()}
    assert max(worst.values()) < tolerance, worst
    assert all(grad.abs().max() > 0 for grad in expected[1].values())


def stacks(model):
    return [module for module in model.modules() if is_experts(module)]


@pytest.mark.parametrize("model_type", EXPERT_ARCHITECTURES)
def test_lora_on_experts_is_what_peft_computes(model_type):
    model = with_lora(model_type)
    expected = step(model)
    report = patch(model)
    number = len(stacks(model))
    assert f"LoRA of {2 * number} stacked weights as two thin products" in report["moe"].detail
    assert_same(step(model), expected)
    report.remove()
    logits, grads = step(model)
    assert torch.equal(logits, expected[0])
    assert all(torch.equal(grads[name], grad) for name, grad in expected[1].items())
    assert not any(isinstance(m.__dict__.get("forward"), SplitLoraForward) for m in model.modules())


@pytest.mark.parametrize("model_type", EXPERT_ARCHITECTURES)
def test_full_training_is_what_transformers_computes(model_type):
    model = tiny_model(model_type)
    expected = step(model)
    assert any("experts" in name for name in expected[1])
    patch(model)
    # Gemma 4 has layers without keys of their own, whose gradients are not reached
    expected[1].update({})
    actual = step(model)
    assert distance(actual[0], expected[0]) < 1e-5
    assert max(distance(actual[1][name], grad) for name, grad in expected[1].items() if grad.abs().max() > 0) < 2e-5


@pytest.mark.parametrize("sizes", [(32, 48), (32, 16), (32, 12), (32, 32)], ids=str)
def test_narrow_and_square_experts(sizes):  # B39
    hidden, intermediate = sizes
    config = {"hidden_size": hidden, "moe_intermediate_size": intermediate, "head_dim": 8}
    model = fill(get_peft_model(tiny_model("qwen3_moe", **config), experts_lora()))
    expected = step(model)
    patch(model)
    assert_same(step(model), expected)
    merged = copy.deepcopy(model).merge_and_unload()
    with torch.no_grad():
        assert distance(merged(input_ids=IDS).logits, expected[0]) < 1e-5


@pytest.mark.parametrize("parameters", [EXPERT_PARAMETERS[:1], EXPERT_PARAMETERS[1:]], ids=["gate_up", "down"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_one_projection_alone(model_type, parameters):
    model = with_lora(model_type, parameters=parameters)
    expected = step(model)
    patch(model)
    assert_same(step(model), expected)


@pytest.mark.parametrize("rank", [1, 4, 5])
def test_ranks_equal_to_the_number_of_experts_and_not(rank):
    model = with_lora("qwen3_moe", r=rank)  # of 4 experts
    expected = step(model)
    patch(model)
    assert_same(step(model), expected)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_adapters_go_to_plain_peft_and_come_from_it(model_type, tmp_path):
    model = with_lora(model_type)
    patch(model)
    with torch.no_grad():
        ours = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == sorted(EXPERT_PARAMETERS) and "custom" not in str(config).lower()
    plain = PeftModel.from_pretrained(tiny_model(model_type), tmp_path)
    assert not any(isinstance(m.__dict__.get("forward"), SplitLoraForward) for m in plain.modules())
    with torch.no_grad():
        assert distance(plain(input_ids=IDS).logits, ours) < 1e-5
        loaded = PeftModel.from_pretrained(tiny_model(model_type), tmp_path, is_trainable=True)
        patch(loaded)
        assert distance(loaded(input_ids=IDS).logits, ours) < 1e-5
        assert distance(loaded.merge_and_unload()(input_ids=IDS).logits, ours) < 1e-5


def test_merging_and_back_in_a_patched_model():
    model = with_lora("qwen3_moe")
    patch(model)
    with torch.no_grad():
        ours = model(input_ids=IDS).logits
        model.merge_adapter()
        assert distance(model(input_ids=IDS).logits, ours) < 1e-5
        model.unmerge_adapter()
        assert distance(model(input_ids=IDS).logits, ours) < 1e-5
        with model.disable_adapter():
            off = model(input_ids=IDS).logits
        assert distance(off, tiny_model("qwen3_moe")(input_ids=IDS).logits) < 1e-6
        assert distance(ours, off) > 1e-2


def test_adapters_change_in_the_middle():
    def run(ours: bool):
        model = with_lora("qwen3_moe")
        model.add_adapter("ref", experts_lora(r=2, lora_alpha=1))
        fill(model, seed=5)
        if ours:
            patch(model)
        model.set_adapter("default")
        outs = [step(model)]
        model.set_adapter("ref")
        outs.append(step(model))
        with torch.no_grad(), model.disable_adapter():
            outs.append((model(input_ids=IDS).logits, {}))
        model.set_adapter("default")
        outs.append(step(model))
        model.base_model.set_adapter(["default", "ref"])
        outs.append(step(model))
        return outs

    for actual, expected in zip(run(True), run(False), strict=True):
        if expected[1]:
            assert_same(actual, expected)
        else:
            assert distance(actual[0], expected[0]) < 1e-6


def test_another_experts_function_keeps_the_lora():
    model = with_lora("qwen3_moe")
    expected = step(model)
    patch(model)
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.get_base_model().set_experts_implementation(name)
        assert_same(step(model), expected)
    model.get_base_model().set_experts_implementation(NAMES["native_torch"])
    assert_same(step(model), expected)


def test_a_replaced_forward_does_not_lose_the_lora():
    model = with_lora("qwen3_moe")
    patch(model)
    experts = stacks(model)[0]
    experts.forward = lambda hidden, index, weights: hidden
    with pytest.raises(RuntimeError, match="LoRA of (gate_up|down)_proj was left out.*split_lora=False"):
        model(input_ids=IDS)


def test_split_lora_can_be_turned_off():
    model = with_lora("qwen3_moe")
    expected = step(model)
    report = patch(model, split_lora=False)
    assert "split_lora=False" in report["moe"].detail
    assert_same(step(model), expected)


def test_copies_have_their_own_weights():
    model = with_lora("qwen3_moe")
    patch(model)
    expected = step(model)
    other = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    third = torch.load(buffer, weights_only=False)
    fill(model, seed=3)
    for twin in (other, third):
        wrappers = [m for m in twin.modules() if isinstance(m, ParamWrapper)]
        assert wrappers and all(m.forward.owner is m for m in wrappers)
        assert_same(step(twin), expected)
    assert distance(step(model)[0], expected[0]) > 1e-3


def test_the_config_on_disk_does_not_name_the_function(tmp_path):
    model = tiny_model("qwen3_moe")
    patch(model)
    model.save_pretrained(tmp_path)
    assert "unsloth_trl" not in (tmp_path / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_nothing_as_large_as_the_stacked_weights_is_made(model_type):
    number = {"num_local_experts": 32} if model_type == "gpt_oss" else {"num_experts": 32, "moe_intermediate_size": 64}
    model = fill(get_peft_model(tiny_model(model_type, **number), experts_lora(r=1)))
    limit = stacks(model)[0].down_proj.numel()

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def largest():
        with LargestTensor(lambda tensor: tensor.untyped_storage().data_ptr() not in own) as made:
            model(input_ids=IDS[:1, :4], labels=IDS[:1, :4]).loss.backward()
        return made.numel

    assert largest() >= limit  # PEFT's own makes the sum of weight and product
    patch(model)
    assert largest() < limit


@pytest.mark.parametrize(
    "model_type, kind", [("qwen3_moe", "silu"), ("gemma4_text", "gelu_tanh"), ("gpt_oss", "gpt_oss")]
)
def test_activations_are_recognised(model_type, kind):
    gate = recognise_gate(stacks(tiny_model(model_type))[0])
    assert gate.kind == kind
    if kind == "gpt_oss":  # B41
        assert (gate.alpha, gate.limit) == (1.702, 7.0)
        module = stacks(tiny_model(model_type))[0]
        out = module._apply_gate(torch.tensor([[8.0, -8.0]], dtype=torch.float64))
        torch.testing.assert_close(out, torch.tensor([[-42.0]], dtype=torch.float64), rtol=0, atol=5e-4)


def test_an_unknown_activation_is_left_to_the_model():
    class Squared(torch.nn.Module):
        def forward(self, x):
            return x.relu() ** 2

    model = with_lora("qwen3_moe")
    for module in stacks(model):
        module.act_fn = Squared()
    expected = step(model)
    report = patch(model)
    assert "activation of the model's own" in report["moe"].detail
    assert_same(step(model), expected)


def test_backend_comes_from_the_field_the_variable_or_the_card(monkeypatch):
    model = tiny_model("qwen3_moe")
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    assert patch(model)["moe"].detail.startswith("native_torch (the default)")
    monkeypatch.setenv(backends.VARIABLE, "native_torch")
    detail = patch(model)["moe"].detail
    assert detail.startswith("native_torch (the environment variable UNSLOTH_MOE_BACKEND=native_torch)")
    detail = patch(model, moe_backend="grouped_mm")["moe"].detail
    assert detail.startswith("grouped_mm (moe_backend='grouped_mm')")
    assert model.config._experts_implementation == NAMES["grouped_mm"]
    assert backends.requested_backend(None)[0] == "native_torch"
    monkeypatch.setenv(backends.VARIABLE, "unsloth_triton")
    assert backends.requested_backend(None)[0] == "triton"
    monkeypatch.setenv(backends.VARIABLE, "cutlass")
    choices = "auto, grouped_mm, triton, native_torch, unsloth_triton"
    with pytest.raises(ValueError, match=f"UNSLOTH_MOE_BACKEND='cutlass' is unknown; choose from {choices}"):
        patch(model)
    assert patch(model, moe_backend="native_torch")["moe"].applied
    with pytest.raises(ValueError, match="moe_backend='cutlass' is unknown; choose from 'auto', 'grouped_mm'"):
        PatchConfig(moe_backend="cutlass")


def test_a_backend_that_cannot_is_refused_by_name():
    model = tiny_model("qwen3_moe")
    with pytest.raises(
        ValueError, match="moe_backend='triton' cannot do a device of type 'cpu'; set moe_backend='auto'"
    ):
        patch(model, moe_backend="triton")
    assert backends.refusal("grouped_mm", torch.device("cpu"), torch.bfloat16, (64, 12)).startswith("a width of 12")
    assert backends.refusal("grouped_mm", torch.device("cpu"), torch.float64, (64, 16)) == "dtype torch.float64"


def test_torchs_grouped_product_gives_the_same():
    model = with_lora("qwen3_moe", r=4)
    expected = step(model)
    patch(model, moe_backend="grouped_mm")
    assert_same(step(model), expected)


def test_models_without_experts_have_nothing_to_patch():
    assert patch(tiny_model("llama"))["moe"].detail == "the model has no stacked experts"


def test_a_router_is_trained_only_when_asked():
    model = with_lora("qwen3_moe")
    patch(model)
    assert not any("gate.weight" in n or "router" in n for n, p in model.named_parameters() if p.requires_grad)
    asked = fill(get_peft_model(tiny_model("qwen3_moe"), experts_lora([*EXPERT_PARAMETERS, "mlp.gate.weight"])))
    expected = step(asked)
    assert any("mlp.gate" in name for name in expected[1])
    patch(asked)
    assert_same(step(asked), expected)


def test_a_refusal_leaves_the_model_as_it_was(monkeypatch):
    model = with_lora("qwen3_moe")
    expected = step(model)
    attention = model.config._attn_implementation
    with pytest.raises(ValueError, match="moe_backend='triton' cannot do"):
        apply_patches(model, PatchConfig(moe_backend="triton"))
    monkeypatch.setenv(backends.VARIABLE, "cutlass")
    with pytest.raises(ValueError, match="is unknown"):
        apply_patches(model, PatchConfig())
    assert (model.config._experts_implementation, model.config._attn_implementation) == ("grouped_mm", attention)
    assert not any(isinstance(m.__dict__.get("forward"), SplitLoraForward) for m in model.modules())
    assert torch.equal(step(model)[0], expected[0])


@pytest.mark.parametrize("limit", [2.0, 16.0, 100.0])
def test_clamps_far_out_are_seen(limit):
    model = with_lora("qwen3_moe")
    for module in stacks(model):
        module._apply_gate = lambda x, m=module: m.act_fn(x.chunk(2, -1)[0].clamp(max=limit)) * x.chunk(2, -1)[1]
    assert all(recognise_gate(module) is None for module in stacks(model))
    expected = step(model)
    patch(model)
    assert_same(step(model), expected)


def test_an_activation_that_changes_is_seen():
    model = with_lora("gpt_oss")
    patch(model)
    step(model)
    for module in stacks(model):
        module.limit = 0.5
    actual = step(model)
    other = with_lora("gpt_oss")
    for module in stacks(other):
        module.limit = 0.5
    assert_same(actual, step(other))


@pytest.mark.parametrize("wide", ["gate_up_proj_bias", "down_proj_bias", "down_proj"])
def test_parameters_of_two_dtypes(wide):
    def run(ours):
        model = tiny_model("gpt_oss").to(torch.bfloat16)
        for module in stacks(model):
            getattr(module, wide).data = getattr(module, wide).data.float()
        if ours:
            patch(model)
        return step(model)

    actual, expected = run(True), run(False)
    assert distance(actual[0].float(), expected[0].float()) < 3e-2
    assert {n: g.dtype for n, g in actual[1].items()} == {n: g.dtype for n, g in expected[1].items()}


def test_models_with_one_config_restore_it_together():
    first = tiny_model("qwen3_moe")
    second = AutoModelForCausalLM.from_config(first.config)
    assert second.config is first.config
    one, two = patch(first), patch(second)
    one.remove()
    assert first.config._experts_implementation == NAMES["auto"]  # the second still has it
    two.remove()
    assert first.config._experts_implementation == "grouped_mm"
    three = patch(first)
    first.set_experts_implementation("eager")
    three.remove()
    assert first.config._experts_implementation == "eager"


def test_factors_that_are_offloaded_are_refused():
    """Their hooks bring them for the forward of their own layers, which nobody calls here."""
    model = with_lora("qwen3_moe")
    patch(model)
    wrapper = next(m for m in model.modules() if isinstance(m, ParamWrapper))
    wrapper.lora_A["default"].to("meta")
    with pytest.raises(RuntimeError, match="LoRA of down_proj is on meta and its tokens are on cpu"):
        model(input_ids=IDS)


def test_pickled_models_run_in_a_fresh_process(tmp_path):
    saved = []
    for model in (with_lora("qwen3_moe"), tiny_model("llama")):
        apply_patches(model)
        with torch.no_grad():
            saved.append({"model": model, "ids": IDS, "logits": model(input_ids=IDS).logits})
    torch.save(saved, tmp_path / "models.pt")
    code = (
        f"import torch\nfor d in torch.load({str(tmp_path / 'models.pt')!r}, weights_only=False):\n"
        "    with torch.no_grad(): out = d['model'](input_ids=d['ids']).logits\n"
        "    assert torch.equal(out, d['logits'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
