"""Target names of dense layers, on models whose layers are stacked experts."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import tiny_model
from unsloth_trl.models.targets import expand_targets


torch.set_num_threads(1)
MLP = ["gate_proj", "up_proj", "down_proj"]


def adapted(model_type, targets, **kwargs):
    """Where the adapters are, without the layer's number."""
    model = tiny_model(model_type)
    config = LoraConfig(r=2, target_modules=targets, **kwargs)
    before = (set(config.target_modules), config.target_parameters)
    expanded = expand_targets(model, config)
    assert (set(config.target_modules), config.target_parameters) == before  # the user's own config stays
    names = [n for n, p in get_peft_model(model, expanded).named_parameters() if p.requires_grad]
    return {name.split("layers.")[1].split(".", 1)[1].split(".lora")[0] for name in names}


STACKS = {"mlp.experts", "mlp.experts.base_layer"}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_names_of_dense_layers_reach_the_experts(model_type):  # B43
    assert adapted(model_type, ["q_proj", *MLP]) == {"self_attn.q_proj", *STACKS}
    assert adapted(model_type, ["q_proj", "down_proj"]) == {"self_attn.q_proj", "mlp.experts"}


def test_dense_layers_beside_the_experts_have_theirs_too():
    dense = {f"mlp.{name}" for name in MLP}
    assert adapted("gemma4_text", ["o_proj", *MLP]) == {"self_attn.o_proj", "experts", "experts.base_layer", *dense}
    shared = {f"mlp.shared_experts.{name}" for name in MLP}
    assert adapted("kimi_linear", ["o_proj", *MLP]) == {"self_attn.o_proj", *STACKS, *dense, *shared}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_dense_layers_that_peft_leaves_out_are_named(model_type):
    with pytest.warns(
        UserWarning, match="its dense layers of the names .*'down_proj', 'gate_proj', 'up_proj'.* get no"
    ):
        assert adapted(model_type, ["o_proj", *MLP]) == {"self_attn.o_proj", *STACKS}


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_half_of_a_fused_weight_is_refused(model_type):
    with pytest.raises(ValueError, match="gate_proj.*without.*up_proj"):
        expand_targets(tiny_model(model_type), LoraConfig(target_modules=["q_proj", "gate_proj"]))


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe", "llama"])
def test_a_target_that_matches_nothing_is_refused(model_type):
    with pytest.raises(ValueError, match=r"target_modules=\['qproj'\] match no module of .*; it has .*q_proj"):
        expand_targets(tiny_model(model_type), LoraConfig(target_modules=["qproj", "k_proj"]))


def test_dropout_on_experts_is_refused_by_name():
    for config in (
        LoraConfig(target_modules=["q_proj", *MLP], lora_dropout=0.1),
        LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"], lora_dropout=0.1),
    ):
        with pytest.raises(ValueError, match=r"lora_dropout=0.1 .*; set lora_dropout=0"):
            expand_targets(tiny_model("gpt_oss"), config)


def test_what_needs_no_translation_stays_the_same_object():
    for targets in (["q_proj", *MLP], r".*q_proj", "all-linear", None):
        config = LoraConfig(target_modules=targets)
        assert expand_targets(tiny_model("llama"), config) is config
    config = LoraConfig(target_modules=[], target_parameters=["experts.down_proj"])
    assert expand_targets(tiny_model("qwen3_moe"), config) is config
