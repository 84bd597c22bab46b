"""What users reported about cards and precision (B73, B74), each at the level of config and trainer."""

import pytest
import torch
import trl
from transformers.utils import import_utils

import unsloth_trl
from tests.tiny import tiny_model
from tests.trainers import cards, runs


T4, A100 = (7, 5), (8, 0)


def precision(args):
    return {"fp16": args.fp16, "bf16": args.bf16, "mixed_precision": args.mixed_precision}


HALF = {"fp16": True, "bf16": False, "mixed_precision": "fp16"}
BRAIN = {"fp16": False, "bf16": True, "mixed_precision": "bf16"}
FULL = {"fp16": False, "bf16": False, "mixed_precision": "no"}


@pytest.mark.parametrize("emulates", [True, False])
def test_b73_a_t4_trains_in_fp16_by_default(monkeypatch, emulates):
    cards.pretend(monkeypatch, T4, emulates_bf16=emulates)
    assert precision(unsloth_trl.SFTConfig("out")) == HALF
    assert precision(unsloth_trl.SFTConfig("out", fp16=True)) == HALF


@pytest.mark.parametrize("emulates", [True, False])
def test_b73_bf16_on_a_t4_is_one_line(monkeypatch, emulates):
    cards.pretend(monkeypatch, T4, emulates_bf16=emulates)
    with pytest.raises(ValueError, match=r"bf16=True .*Tesla T4.*fp16=True") as error:
        unsloth_trl.SFTConfig("out", bf16=True)
    assert "\n" not in str(error.value)


def test_b73_the_choice_is_made_once(monkeypatch):
    """A copy of the config, as Trainer and checkpoints make them, is the same again."""
    cards.pretend(monkeypatch, T4)
    args = unsloth_trl.SFTConfig("out")
    assert precision(unsloth_trl.SFTConfig(**args.to_dict())) == HALF


def test_b73_command_line(monkeypatch):
    cards.pretend(monkeypatch, T4)
    parser = trl.TrlParser(unsloth_trl.SFTConfig)
    assert precision(parser.parse_args_and_config(["--output_dir", "out"])[0]) == HALF
    with pytest.raises(ValueError, match="bf16=True"):
        parser.parse_args_and_config(["--output_dir", "out", "--bf16", "true"])


def test_b73_other_cards_have_the_default_of_trl(monkeypatch):
    cards.pretend(monkeypatch, A100)
    for fields in ({}, {"fp16": True}, {"bf16": True}, {"bf16": False}):
        assert precision(unsloth_trl.SFTConfig("out", **fields)) == precision(trl.SFTConfig("out", **fields))
    assert precision(unsloth_trl.SFTConfig("out")) == BRAIN


def test_b73_the_cpu_has_the_default_of_trl_where_that_is_valid(monkeypatch):
    cards.pretend_none(monkeypatch)
    for fields in ({}, {"bf16": False}, {"bf16": True}):
        ours, theirs = (
            unsloth_trl.SFTConfig("out", use_cpu=True, **fields),
            trl.SFTConfig("out", use_cpu=True, **fields),
        )
        assert precision(ours) == precision(theirs)


def test_b70_the_default_config_works_without_a_gpu(monkeypatch):
    """TRL's own raises there: its default is bf16, for which it wants a GPU or use_cpu."""
    cards.pretend_none(monkeypatch)
    assert precision(unsloth_trl.SFTConfig("out")) == FULL
    with pytest.raises(ValueError, match="bf16"):
        unsloth_trl.SFTConfig("out", bf16=True)


def test_b74_fp32_on_a_t4_stays_fp32(monkeypatch):
    cards.pretend(monkeypatch, T4)
    assert precision(unsloth_trl.SFTConfig("out", bf16=False)) == FULL
    assert precision(unsloth_trl.SFTConfig("out", bf16=False, fp16=False)) == FULL


def test_pretending_leaves_nothing_behind(monkeypatch):
    """Whatever transformers remembers about the machine is about the real one."""
    remembered = [import_utils.is_torch_cuda_available, import_utils.is_torch_bf16_gpu_available]
    before = [function() for function in remembered]
    for function in remembered:
        function.cache_clear()
    cards.pretend(monkeypatch, A100)
    unsloth_trl.SFTConfig("out")
    monkeypatch.undo()
    assert [function() for function in remembered] == before
    assert unsloth_trl.SFTConfig("out", use_cpu=True).device.type == "cpu"


def autocasts(tmp_path, packing=True, **fields):
    """Whether autocast was on in the forwards of one training step and one evaluation, and the trainer."""
    trainer = runs.trainer(
        tmp_path, init={"eval_dataset": runs.dataset(4, seed=3)}, packing=packing, max_steps=1, **fields
    )
    seen = set()
    trainer.model.model.layers[1].register_forward_pre_hook(
        lambda module, args: seen.add((torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")))
    )
    trainer.train()
    trainer.evaluate()
    return seen, trainer


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_b74_no_autocast_without_either_flag(tmp_path, packing):
    seen, trainer = autocasts(tmp_path, packing)
    assert seen == {(False, False)}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_b74_precision_does_not_leak_into_the_next_trainer(tmp_path):
    assert autocasts(tmp_path, bf16=True)[0] == {(True, False)}
    assert not torch.is_autocast_enabled("cpu")
    assert autocasts(tmp_path)[0] == {(False, False)}
    assert torch.get_default_dtype() == torch.float32


def test_b74_large_activations_stay_finite_in_fp32(tmp_path):
    """1e5 is beyond fp16."""
    model = tiny_model("llama")
    largest = []
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(1e5)
    model.model.layers[1].register_forward_pre_hook(lambda module, args: largest.append(args[0].abs().max().item()))
    trainer = runs.trainer(tmp_path, model=model, packing=True, max_steps=2)
    trainer.train()
    assert max(largest) > 65504
    for entry in trainer.state.log_history[:2]:
        assert torch.isfinite(torch.tensor([entry["loss"], entry["grad_norm"]])).all()
    assert all(torch.isfinite(p).all() for p in model.parameters())
