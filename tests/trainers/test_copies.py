"""A copy of a model that was trained under autocast is a model of its own."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from accelerate import Accelerator

import unsloth_trl
from tests.numerics import make_trainer
from tests.trainers.grpo_runs import make_grpo


IDS = torch.tensor([[5, 9, 11, 4, 7]])
SFT = {"packing": True, "bf16": True, "max_steps": 2}


def trained(task: str, lora: bool, folder):
    if task == "sft":
        trainer = make_trainer(unsloth_trl, "llama", lora=lora, output_dir=str(folder), **SFT)
    else:
        trainer = make_grpo(unsloth_trl, "llama", lora=lora, output_dir=str(folder), bf16=True, max_steps=1)
    trainer.train()
    return trainer


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def move(model) -> None:
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.add_(0.05 * noise)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_a_copy_computes_with_its_own_weights(task, lora, tmp_path):
    trainer = trained(task, lora, tmp_path)
    model = trainer.model.eval()
    before = logits(model)
    twin, rebuilt = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(twin), before)  # under autocast, as the original
    # an unpickled model has the class's own forward, as TRL's has: accelerate's wrapper has no place in a file
    assert torch.allclose(logits(rebuilt), before, rtol=0.1, atol=0.1) and not torch.equal(logits(rebuilt), before)
    for other in (twin, rebuilt):
        same = logits(other)
        move(other)
        assert (logits(other) - same).norm() > 0.01 * same.norm()
        assert torch.equal(logits(model), before)
    move(model)
    assert not torch.equal(logits(model), before) and torch.equal(logits(twin), logits(copy.deepcopy(twin)))


def test_the_copy_outlives_the_original(tmp_path):
    trainer = trained("sft", False, tmp_path)
    expected = logits(trainer.model.eval())
    twin, original = copy.deepcopy(trainer.model), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert original() is None
    assert torch.equal(logits(twin), expected)


@pytest.mark.parametrize("removed", [False, True], ids=["left", "removed"])
def test_trainers_one_after_the_other_and_a_copy_in_between(removed, tmp_path):
    """Each trains the model that it was given, whatever earlier ones have left on it."""
    first = trained("sft", False, tmp_path / "first")
    if removed:
        first.patch_report.remove()
    model, twin = first.model, copy.deepcopy(first.model)
    held = {name: value.clone() for name, value in twin.state_dict().items()}
    second = make_trainer(unsloth_trl, None, model=model, output_dir=str(tmp_path / "second"), **SFT)
    second.train()
    assert all(torch.equal(value, held[name]) for name, value in twin.state_dict().items())
    now = {name: value.clone() for name, value in model.state_dict().items()}
    third = make_trainer(unsloth_trl, None, model=twin, output_dir=str(tmp_path / "third"), **SFT)
    third.train()
    assert all(torch.equal(value, now[name]) for name, value in model.state_dict().items())
    # the same weights, rows and order
    assert [entry["loss"] for entry in third.state.log_history[:-1]] == [
        entry["loss"] for entry in second.state.log_history[:-1]
    ]
    assert all(torch.equal(value, now[name]) for name, value in twin.state_dict().items())
    assert any(not torch.equal(value, held[name]) for name, value in now.items())


def test_what_accelerate_takes_off(tmp_path):
    """`unwrap_model(keep_fp32_wrapper=False)` leaves a forward of the model, with its own signature."""
    trainer = trained("sft", False, tmp_path)
    model = trainer.model.eval()
    under_autocast = logits(model)
    expected = inspect.signature(type(model).forward).parameters.keys() - {"self"}
    assert inspect.signature(model.forward).parameters.keys() == expected
    assert Accelerator(cpu=True).unwrap_model(model, keep_fp32_wrapper=False) is model
    assert inspect.signature(model.forward).parameters.keys() == expected
    plain = make_trainer(unsloth_trl, "llama", output_dir=str(tmp_path), patches="none").model
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(plain.eval()))
    assert not torch.equal(logits(model), under_autocast)
    assert model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape[1] > IDS.shape[1]
