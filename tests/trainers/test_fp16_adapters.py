"""Adapters of quantised models under fp16, whose loss scaler takes no bf16 gradients."""

from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.tiny import lora_config, tiny_model
from unsloth_trl.trainers.construction import widen_adapters


def adapters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.fixture
def quantised(tmp_path):
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    tiny_model("llama").save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=nf4, device_map={"": "cpu"})
    model = get_peft_model(model, lora_config("llama"))
    for parameter in adapters(model).values():
        parameter.data = parameter.data.bfloat16()  # as TRL does
    return model


def test_adapters_become_fp32(quantised):
    before = {name: p.detach().clone() for name, p in adapters(quantised).items()}
    entry = widen_adapters(quantised, SimpleNamespace(fp16=True))
    assert entry.applied and f"{len(before)} weights" in entry.modules
    for name, parameter in adapters(quantised).items():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name].float())
    assert widen_adapters(quantised, SimpleNamespace(fp16=True)) is None


def test_bf16_stays(quantised):
    assert widen_adapters(quantised, SimpleNamespace(fp16=False)) is None
    assert {p.dtype for p in adapters(quantised).values()} == {torch.bfloat16}


def test_a_model_that_is_not_quantised_stays():
    model = get_peft_model(tiny_model("llama").bfloat16(), lora_config("llama"), autocast_adapter_dtype=False)
    assert widen_adapters(model, SimpleNamespace(fp16=True)) is None
    assert {p.dtype for p in adapters(model).values()} == {torch.bfloat16}
