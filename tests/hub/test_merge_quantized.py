"""Merging over a base in 4 or 8 bits: which base, one rounding, and what the choice costs."""

import copy
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.hub.merge_runs import adapted, gap, logits, saved_tensors
from tests.tiny import EXPERT_PARAMETERS, tiny_model
from unsloth_trl import load_in_4bit
from unsloth_trl.hub.merge import save_pretrained_merged, write_merged


bnb = pytest.importorskip("bitsandbytes")

HALF_ULP = 2**-8  # of bf16, relative
NAME = "model.layers.1.mlp.up_proj"


def nf4(**kwargs) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        **kwargs,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A dense base in bf16 whose weights have a large norm."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", hidden_size=128, intermediate_size=256, head_dim=32).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture in bf16, one tensor per expert on disk."""
    folder = tmp_path_factory.mktemp("experts")
    tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qlora(base):
    """A LoRA of rank 2 over that base in 4 bits."""
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4(), dtype=torch.bfloat16)
    return adapted("llama", model, r=2, lora_alpha=5)


def parts(model) -> tuple[torch.Tensor, torch.Tensor]:
    """What bitsandbytes dequantises, and what the adapter adds, of one layer, in fp64."""
    layer = model.get_base_model().get_submodule(NAME)
    weight = layer.base_layer.weight
    dense = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).double()
    delta = 2.5 * layer.lora_B["default"].weight.detach().double() @ layer.lora_A["default"].weight.detach().double()
    return dense, delta


def test_b56_base_that_the_adapter_saw_and_original(base, qlora, tmp_path):
    """Both are exact in what they claim; their distances from the live model are measured and told."""
    dense, delta = parts(qlora)
    original = AutoModelForCausalLM.from_pretrained(base).get_parameter(NAME + ".weight").double()
    assert (dense - original).abs().max() > 0.01  # quantisation moved it
    saved = {}
    for choice, truth in (("auto", dense), ("quantized", dense), ("original", original), (str(base), original)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = write_merged(qlora, tmp_path / "merged", base=choice)
        merged = saved_tensors(tmp_path / "merged")[NAME + ".weight"].double()
        saved[choice] = report.verification
        error = (merged - (truth + delta)).abs()
        assert (error <= HALF_ULP * (truth + delta).abs() + 1e-6).all()
        told = [str(w.message) for w in caught if "dequantised" in str(w.message)]
        assert report.base == ("quantized" if truth is dense else str(base)) and len(told) == (truth is original)
        # the largest of all tokens, where the library takes their median
        distance = gap(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), live_logits(qlora))
        assert distance < 0.2 if truth is dense else distance > 0.4
        if told:
            assert f"{report.verification.gap:.2g}" in told[0]
            assert f"{report.verification.quantized_gap:.2g}" in told[0] and "base='quantized' keeps" in told[0]
    assert saved["auto"].passed and saved["auto"] == saved["quantized"]
    assert saved["original"].gap > 10 * saved["auto"].gap
    assert saved["original"].quantized_gap == pytest.approx(saved["auto"].gap, rel=0.3)


def live_logits(model) -> torch.Tensor:
    """Of a copy: in evaluation mode bitsandbytes may repack 4-bit weights for the CPU."""
    return logits(copy.deepcopy(model))


def test_b56_the_original_has_to_be_there(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4(), dtype=torch.bfloat16)
    model.name_or_path = model.config._name_or_path = "someone/elsewhere"
    model = adapted("llama", model)
    with pytest.raises(ValueError, match="base='original' needs the weights .*'someone/elsewhere': pass their folder"):
        save_pretrained_merged(model, tmp_path / "merged", base="original")
    with pytest.raises(ValueError, match="base='nowhere' is none of 'auto', 'quantized', 'original' and no folder"):
        save_pretrained_merged(model, tmp_path / "merged", base="nowhere")
    with pytest.raises(ValueError, match="has no model.safetensors: a checkpoint in safetensors is needed"):
        save_pretrained_merged(model, tmp_path / "merged", base=str(tmp_path))
    model.save_pretrained(tmp_path / "adapter")
    quantized = tmp_path / "quantized"
    AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4()).save_pretrained(quantized)
    with pytest.raises(ValueError, match=r"q_proj.weight in .*quantized is torch.uint8 .* not 16-bit weights"):
        save_pretrained_merged(model, tmp_path / "merged", base=str(quantized))
    assert not (tmp_path / "merged").exists()
    dora = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4(), dtype=torch.bfloat16)
    dora = adapted("llama", dora, use_dora=True)
    with pytest.raises(ValueError, match="base='original' cannot be used with DoraLinearVariant on .*q_proj.weight"):
        save_pretrained_merged(dora, tmp_path / "merged", base="original")
    save_pretrained_merged(dora, tmp_path / "merged")


def test_b57_four_bits_become_sixteen(qlora, tmp_path):
    """Without a method named: fp32 sum of the dequantised weight and the delta, rounded to bf16 once."""
    before = {name: value.clone() for name, value in qlora.state_dict().items()}
    report = write_merged(qlora, tmp_path / "merged")
    dense, delta = parts(qlora)
    merged = saved_tensors(tmp_path / "merged")[NAME + ".weight"]
    truth = dense + delta
    assert merged.dtype == torch.bfloat16 and delta.abs().max() > 0.1
    assert ((merged.double() - truth).abs() <= HALF_ULP * truth.abs() + 1e-6).all()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(loaded.config, "quantization_config") and type(loaded.get_submodule(NAME)) is torch.nn.Linear
    assert report.verification.passed
    # packed bytes, scales and adapters of the live model have the bits that they had
    after = qlora.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_b57_four_bits_again_only_with_force(qlora, tmp_path):
    with pytest.raises(ValueError, match="'merged_4bit' rounds the merged weights to 4 bits again.*pass force=True"):
        save_pretrained_merged(qlora, tmp_path / "merged", save_method="merged_4bit")
    assert not (tmp_path / "merged").exists()
    with pytest.warns(UserWarning, match=r"merged_4bit: .* rounded to 4 bits again, and logits differ .* by 0\.\d+"):
        report = write_merged(qlora, tmp_path / "merged", save_method="merged_4bit", force=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    weight = loaded.get_submodule(NAME).weight
    assert loaded.config.quantization_config.load_in_4bit and not (tmp_path / "merged" / "merged").exists()
    again = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).double()
    dense, delta = parts(qlora)
    # a digit of NF4 is up to an eighth of its block's largest weight wide
    assert 0.01 < (again - dense - delta).abs().max() < 0.2 * (dense + delta).abs().max()
    assert not report.verification.passed


@pytest.mark.parametrize("choice", ["quantized", "original"])
def test_experts_in_4_bits(experts, tmp_path, choice):
    """Stacked in memory in 4 bits, single on disk in 16."""
    model = load_in_4bit(str(experts), dtype=torch.bfloat16)
    stack = model.model.layers[0].mlp.experts.gate_up_proj.double()
    model = adapted("qwen3_moe", model)
    wrapper = next(m for m in model.modules() if getattr(m, "parameter_name", "") == "gate_up_proj")
    delta = wrapper.get_delta_weight("default").detach().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = write_merged(model, tmp_path / "merged", base=choice)
    ours, theirs = saved_tensors(tmp_path / "merged"), saved_tensors(experts)
    assert ours.keys() == theirs.keys() and any(".experts.3.up_proj" in name for name in ours)
    names = [f"model.layers.0.mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up")]
    for expert in range(4):
        if choice == "original":
            truth = torch.cat([theirs[name.format(expert)].double() for name in names]) + delta[expert]
        else:
            truth = stack[expert] + delta[expert]
        got = torch.cat([ours[name.format(expert)].double() for name in names])
        # PEFT's own delta comes in bf16
        assert ((got - truth).abs() <= HALF_ULP * (truth.abs() + 2 * delta[expert].abs()) + 1e-6).all()
        assert delta[expert].abs().max() > 0.05
    found = report.verification
    assert found.passed if choice == "quantized" else found.gap > 5 * found.quantized_gap
    # still in 4 bits, and as they were
    assert torch.equal(wrapper.get_base_layer().gate_up_proj.double(), stack)


def test_experts_in_4_bits_again(experts, tmp_path):
    model = adapted("qwen3_moe", load_in_4bit(str(experts), dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="rounded to 4 bits again"):
        save_pretrained_merged(model, tmp_path / "merged", save_method="merged_4bit", force=True)
    loaded = load_in_4bit(str(tmp_path / "merged"))
    assert loaded.model.layers[0].mlp.experts._parameters["gate_up_proj"].dtype == torch.uint8
    model_logits = logits(model)
    assert gap(logits(loaded), model_logits) < 1.2 and ((logits(loaded) - model_logits).abs().max() > 0)


def test_a_base_in_8_bits(base, tmp_path):
    config = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16)
    model = adapted("llama", model)
    layer = model.get_base_model().get_submodule(NAME)
    weight = layer.base_layer.weight
    dense = weight.data.double() * weight.SCB.double()[:, None] / 127
    delta = 2.0 * layer.lora_B["default"].weight.detach().double() @ layer.lora_A["default"].weight.detach().double()
    report = write_merged(model, tmp_path / "merged")
    merged = saved_tensors(tmp_path / "merged")[NAME + ".weight"]
    assert report.dtype == merged.dtype == torch.bfloat16 and report.verification.passed
    assert ((merged.double() - dense - delta).abs() <= HALF_ULP * (dense + delta).abs() + 1e-6).all()


def test_weights_that_bitsandbytes_has_repacked(qlora, tmp_path):
    """In evaluation mode, on CPUs with AVX-512 in bf16, bitsandbytes reorders digits and rounds scales to bf16."""
    model = copy.deepcopy(qlora)
    dense, delta = parts(model)
    logits(model)
    state = model.get_base_model().get_submodule(NAME).base_layer.weight.quant_state
    if not getattr(state, "packing_format_for_cpu", False):
        pytest.skip("bitsandbytes does not repack on this CPU")
    write_merged(model, tmp_path / "merged")
    merged = saved_tensors(tmp_path / "merged")[NAME + ".weight"].double()
    assert ((merged - dense - delta).abs() <= 2**-6 * dense.abs().max()).all()


def test_the_layer_that_was_left_in_16_bits(base, tmp_path):
    """`llm_int8_skip_modules`: some weights are quantised and others not."""
    config = nf4(llm_int8_skip_modules=["lm_head", "down_proj"])
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16)
    model = adapted("llama", model, target_modules=["down_proj", "up_proj"])
    with pytest.warns(UserWarning, match="dequantised"):
        write_merged(model, tmp_path / "merged", base="original")
    ours, theirs = saved_tensors(tmp_path / "merged"), saved_tensors(base)
    for part in ("down_proj", "up_proj"):
        layer = model.get_base_model().model.layers[0].mlp.get_submodule(part)
        truth = theirs[f"model.layers.0.mlp.{part}.weight"].double() + layer.get_delta_weight("default").double()
        assert (
            (ours[f"model.layers.0.mlp.{part}.weight"].double() - truth).abs() < HALF_ULP * truth.abs() + 1e-6
        ).all()
    # without an adapter, the original bits
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(ours[name], theirs[name])


def test_dequantised_by_hand_is_the_same(experts, tmp_path):
    """`dequantize_experts`, which a merge by PEFT needs, is not needed here, and is no harm."""
    from unsloth_trl import dequantize_experts

    model = adapted("qwen3_moe", load_in_4bit(str(experts), dtype=torch.bfloat16), target_parameters=EXPERT_PARAMETERS)
    save_pretrained_merged(model, tmp_path / "packed")
    dequantize_experts(model)
    save_pretrained_merged(model, tmp_path / "dense")
    packed, dense = saved_tensors(tmp_path / "packed"), saved_tensors(tmp_path / "dense")
    assert packed.keys() == dense.keys() and all(torch.equal(packed[name], dense[name]) for name in packed)
