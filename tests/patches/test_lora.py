"""Plain LoRA layers without needless casts: bit for bit PEFT's under autocast, PEFT's own path for anything else."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.tiny import lora_config, tiny_model
from unsloth_trl import PatchConfig, apply_patches
from unsloth_trl.patches.lora.patch import PlainLoraForward


IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
SKIP = {"attention": "not tested here", "lm_head": "not tested here"}


def model_with_lora(config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama").to(dtype), config)
    fill(model)
    return model


def fill(model):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def run(model, autocast=True, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(a, b):
    return len(a) == len(b) > 1 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_autocast_is_bit_for_bit_pefts():
    model = model_with_lora(LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "down_proj"]))
    stock, stock_plain = run(model), run(model, autocast=False)
    report = apply_patches(model, PatchConfig(), skip=SKIP)
    assert report["lora"].applied
    assert equal(run(model), stock)
    assert equal(run(model, autocast=False), stock_plain)
    report.remove()
    assert equal(run(model), stock)
    assert not any("forward" in m.__dict__ or "_cast_input_dtype" in m.__dict__ for m in model.modules())


def test_scaling_inside_the_addition():
    model = model_with_lora(lora_config("llama"), torch.float32)
    stock = run(model, autocast=False)
    apply_patches(model, PatchConfig(), skip=SKIP)
    for a, e in zip(run(model, autocast=False), stock, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_does_not_multiply_by_the_last_weight_again():
    """Nothing of it is saved for the backward, and the checkpoint ends with the last thing that is."""
    model = model_with_lora(LoraConfig(r=4, lora_alpha=4, target_modules=["gate_proj", "down_proj"]))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.train()
    stock = run(model)
    runs = {}
    for name, module in model.named_modules():
        if name.endswith("base_layer"):
            module.register_forward_hook(lambda *_, name=name: runs.update({name: runs.get(name, 0) + 1}))
    apply_patches(model, PatchConfig(checkpoint_policy="recompute"), skip=SKIP)
    assert equal(run(model), stock)
    assert {name.split(".")[-2]: number for name, number in runs.items()} == {"gate_proj": 2, "down_proj": 1}


@pytest.mark.parametrize("added", [{"lora_dropout": 0.5}, {"use_dora": True}], ids=["dropout", "dora"])
def test_an_adapter_added_later_runs_as_in_peft(added):
    model = model_with_lora(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]), torch.float32)
    report = apply_patches(model, PatchConfig(), skip=SKIP)
    model.add_adapter("other", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], **added))
    model.set_adapter("other")
    fill(model)
    model.train()
    patched = run(model, autocast=False)
    report.remove()
    assert equal(patched, run(model, autocast=False))


def test_disabled_merged_and_copied():
    model = model_with_lora(lora_config("llama"), torch.float32)
    with torch.no_grad():
        with model.disable_adapter():
            base = model(input_ids=IDS).logits
        tuned = model(input_ids=IDS).logits
        apply_patches(model, PatchConfig(), skip=SKIP)
        with model.disable_adapter():
            assert torch.equal(model(input_ids=IDS).logits, base)
        model.merge_adapter()
        torch.testing.assert_close(model(input_ids=IDS).logits, tuned, rtol=1e-4, atol=1e-4)
        model.unmerge_adapter()
        twin = copy.deepcopy(model)
        for name, parameter in twin.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
        torch.testing.assert_close(twin(input_ids=IDS).logits, base, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(input_ids=IDS).logits, tuned, rtol=1e-4, atol=1e-4)
    assert (tuned - base).abs().max() > 0.1


def test_dropout_and_switch_are_reported():
    model = model_with_lora(LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1))
    assert "lora_dropout=0" in apply_patches(model, PatchConfig(), skip=SKIP)["lora"].detail
    assert apply_patches(model, PatchConfig(lean_lora=False), skip=SKIP)["lora"].detail == "lean_lora=False"


@pytest.mark.parametrize("autocast", [False, True])
def test_nf4_weights(autocast, tmp_path):
    """PEFT copies the base output of these layers; without the copy and with one rounding less it is the same."""
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    tiny_model("llama").save_pretrained(tmp_path)
    dtype = torch.bfloat16 if autocast else torch.float32
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=nf4, device_map={"": "cpu"}, dtype=dtype
    )
    torch.manual_seed(0)
    model = get_peft_model(model, lora_config("llama"))
    fill(model)
    stock = run(model, autocast)
    report = apply_patches(model, PatchConfig(), skip=SKIP)
    assert report["lora"].applied
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    assert type(layer).__name__ == "Linear4bit" and isinstance(layer.forward, PlainLoraForward)
    for a, e in zip(run(model, autocast), stock, strict=True):
        assert (a - e).norm() <= (3e-2 if autocast else 1e-5) * e.norm()
    report.remove()
    assert equal(run(model, autocast), stock)
