"""Target names of dense layers, on models whose layers are stacked experts."""

import warnings

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


def test_dense_layers_beside_the_experts_keep_their_names():
    """As in TRL with PEFT, and a warning says what would train the experts too."""
    dense = {f"mlp.{name}" for name in MLP}
    with pytest.warns(
        UserWarning, match=r"stacked experts get none. Add target_parameters=\['experts.down_proj', 'ex"
    ):
        assert adapted("gemma4_text", ["o_proj", *MLP]) == {"self_attn.o_proj", *dense}
    shared = {f"mlp.shared_experts.{name}" for name in MLP}
    with pytest.warns(UserWarning, match="stacked experts get none"):
        assert adapted("kimi_linear", ["o_proj", *MLP], lora_dropout=0.1) == {"self_attn.o_proj", *dense, *shared}
    both = {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, config = tiny_model("gemma4_text"), LoraConfig(target_modules=MLP, **both)
        assert expand_targets(model, config) is config


def test_names_of_mixtral_on_disk_are_those_of_peft():
    assert adapted("mixtral", ["q_proj", "w1", "w2", "w3"]) == {"self_attn.q_proj", *STACKS}


@pytest.mark.parametrize(
    "choice, layers",
    [
        ({"layers_to_transform": [1]}, {1}),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, {0}),
        ({"exclude_modules": ["layers.0.mlp.experts"]}, {1}),
        ({"exclude_modules": r".*1\.mlp\.experts"}, {0}),
        ({"exclude_modules": ["experts"]}, set()),
    ],
    ids=str,
)
def test_layers_that_the_config_chooses(choice, layers):
    config = LoraConfig(r=2, target_modules=["q_proj", *MLP], **choice)
    model = tiny_model("gpt_oss")
    expanded = expand_targets(model, config)
    assert expanded.target_parameters == sorted(
        f"model.layers.{i}.mlp.experts.{name}" for i in layers for name in ("down_proj", "gate_up_proj")
    )
    names = [n for n, p in get_peft_model(model, expanded).named_parameters() if p.requires_grad and "experts" in n]
    assert {int(name.split("layers.")[1].split(".")[0]) for name in names} == layers


def test_patterns_of_a_part_of_a_weight_are_refused():
    config = LoraConfig(target_modules=MLP, rank_pattern={"up_proj": 4})
    with pytest.raises(ValueError, match=r"rank_pattern or alpha_pattern has \['up_proj'\]"):
        expand_targets(tiny_model("gpt_oss"), config)


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
