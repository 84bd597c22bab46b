"""SFT of stacked experts: the steps of TRL with PEFT, adapters that plain PEFT reads, and what users reported."""

import json

import pytest
import torch
import trl
from peft import PeftModel
from safetensors.torch import load_file

import unsloth_trl
from tests.numerics import ADAMW, EXPERTS, assert_runs_close, make_trainer, run_sft, snapshot
from tests.tiny import EXPERT_ARCHITECTURES, STATEFUL, tiny_model, tiny_tokenizer


# the eager mask of gpt_oss ignores position_ids, so TRL's own packed samples see each other; the others have a state
UNPACKED = ("gpt_oss", *STATEFUL)


@pytest.mark.filterwarnings("ignore::unsloth_trl.UnsupportedArchitectureWarning")
@pytest.mark.parametrize("model_type", EXPERT_ARCHITECTURES)
def test_lora_on_experts_trains_as_in_trl(model_type):
    kwargs = EXPERTS | {"packing": model_type not in UNPACKED, "router_aux_loss_coef": 0.0}
    ours, theirs = run_sft(unsloth_trl, model_type, **kwargs), run_sft(trl, model_type, **kwargs)
    assert_runs_close(ours, theirs, 1e-4)
    assert "as two thin products" in ours.trainer.patch_report["moe"].detail
    assert sum("experts" in name for name in ours.updates) >= 4


@pytest.mark.parametrize(
    "config", [{"gradient_checkpointing": True}, ADAMW, {"checkpoint_policy": "offload"}], ids=str
)
def test_other_settings_train_as_in_trl(config):
    ours = run_sft(unsloth_trl, "qwen3_moe", **EXPERTS, packing=True, **config)
    stock = {key: value for key, value in config.items() if key != "checkpoint_policy"}
    assert_runs_close(ours, run_sft(trl, "qwen3_moe", **EXPERTS, packing=True, **stock), 1e-4)


@pytest.mark.parametrize("backend", ["native_torch", "grouped_mm"])
def test_b37_every_adapter_of_every_expert_moves(backend):
    trainer = make_trainer(unsloth_trl, "qwen3_moe", **EXPERTS, packing=True, moe_backend=backend)
    assert f"moe_backend={backend!r}" in trainer.patch_report["moe"].detail
    before = snapshot(trainer.model)
    trainer.train()
    moved = {name: p.detach() - before[name] for name, p in trainer.model.named_parameters() if name in before}
    stacked = {name: update for name, update in moved.items() if "experts" in name}
    assert len(stacked) == 8
    for name, update in stacked.items():
        rows = update if "lora_A" in name else update.t()  # the experts' rows in A, their columns in B
        parts = rows.view(4, 4, -1) if "lora_A" in name else rows.reshape(4, 4, -1).transpose(0, 1)
        assert all(part.abs().max() > 0 for part in parts), name


def test_adapters_on_disk_are_those_of_peft(tmp_path):
    """B45: the same keys, shapes and targets as TRL with PEFT writes, and the same logits from plain PEFT."""
    written = {}
    for library in (unsloth_trl, trl):
        run = run_sft(library, "qwen3_moe", **EXPERTS, packing=True)
        run.trainer.save_model(str(tmp_path / library.__name__))
        weights = load_file(tmp_path / library.__name__ / "adapter_model.safetensors")
        config = json.loads((tmp_path / library.__name__ / "adapter_config.json").read_text())
        written[library] = {name: tuple(w.shape) for name, w in weights.items()}, sorted(config["target_parameters"])
    assert written[unsloth_trl] == written[trl]
    ids = torch.arange(5, 16).unsqueeze(0)
    plain = PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path / "unsloth_trl")
    trained = make_trainer(
        unsloth_trl, "qwen3_moe", model=PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path / "unsloth_trl")
    ).model
    with torch.no_grad():
        expected = plain.eval()(input_ids=ids).logits
        ours = trained.eval()(input_ids=ids).logits
        merged = trained.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    assert (expected - tiny_model("qwen3_moe").eval()(input_ids=ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("named", [False, True], ids=["object", "name"])
def test_b43_names_of_dense_layers_train_the_experts(named, tmp_path):
    targets = {"lora": True, "lora_kwargs": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}}
    if named:
        tiny_model("gpt_oss").save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)

    def model():
        return str(tmp_path) if named else tiny_model("gpt_oss")

    trainer = make_trainer(unsloth_trl, "gpt_oss", model=model(), **targets)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert sum("experts" in name for name in trained) == 8 and sum("q_proj" in name for name in trained) == 4
    with pytest.raises(ValueError, match=r"target_modules=\['w1'\] match no module of GptOssForCausalLM"):
        make_trainer(
            unsloth_trl, "gpt_oss", model=model(), lora=True, lora_kwargs={"target_modules": ["q_proj", "w1"]}
        )


def test_b42_the_correction_bias_chooses_and_does_not_weigh(tmp_path):
    run = run_sft(unsloth_trl, "deepseek_v3", **EXPERTS, packing=True)
    model = run.trainer.model
    gate = next(m for name, m in model.named_modules() if name.endswith("mlp.gate"))
    before = next(m for name, m in tiny_model("deepseek_v3").named_modules() if name.endswith("mlp.gate"))
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(gate.e_score_correction_bias, before.e_score_correction_bias)
    assert torch.equal(gate.weight, before.weight) and not gate.weight.requires_grad
