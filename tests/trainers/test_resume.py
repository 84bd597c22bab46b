"""A run that is killed and resumed comes to the losses, norms and weights of one that is not, to the bit."""

import os

import pytest
import torch

from tests.trainers.resume_runs import Killer, assert_same, draw_moment, make, resume, train_until, train_whole


DROPOUT = {"lora": True, "lora_kwargs": {"lora_dropout": 0.1}}  # shows whether random states are restored
CASES = {
    "lora-packed-auto": {
        "task": "sft",
        "model_type": "llama",
        "packing": True,
        "gradient_checkpointing": True,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 2,
        **DROPOUT,
    },
    "full-packed-recompute": {
        "task": "sft",
        "model_type": "qwen3",
        "packing": True,
        "gradient_checkpointing": True,
        "checkpoint_policy": "recompute",
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "num_train_epochs": 2,
    },
    "lora-shuffled": {
        "task": "sft",
        "model_type": "llama",
        "shuffle_dataset": True,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        **DROPOUT,
    },
    # one cycle is 4 micro-batches, 2 steps; an epoch of 16 prompts is 4 cycles
    "grpo-lora": {
        "task": "grpo",
        "model": "llama",
        "init": {"rollout_func": None},
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "beta": 0.1,
        "max_steps": 11,
        "temperature": 0.5,
        **DROPOUT,
    },
    # each generation is used twice: old log-probabilities count
    "grpo-full-iterations": {
        "task": "grpo",
        "model": "qwen3",
        "init": {"rollout_func": None},
        "num_iterations": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.01,
        "max_steps": 7,
    },
}
STEPS = {"lora-packed-auto": 8, "full-packed-recompute": 8, "lora-shuffled": 6, "grpo-lora": 11}
STEPS["grpo-full-iterations"] = 7


@pytest.fixture(scope="module")
def killer():
    return Killer()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run of each case, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = train_whole(folder=tmp_path_factory.mktemp("whole"), **CASES[name])
            assert len(made[name][0]) == STEPS[name]
        return made[name]

    return get


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_killed_and_resumed(killer, whole, tmp_path, name, seed):
    case = CASES[name].copy()
    step, moment = draw_moment(f"{name} {seed}", STEPS[name])
    reached = killer.run(train_until, step, moment, case.pop("task"), str(tmp_path), case)
    # a callback of the end of a step comes before its checkpoint
    assert sorted(os.listdir(tmp_path))[-1].startswith("checkpoint-")
    resumed = resume(folder=tmp_path, **CASES[name])
    assert 0 < int(resumed._resumed_from.rpartition("-")[2]) <= reached
    assert_same(resumed, whole(name))


@pytest.mark.parametrize("step", [1, 2, 7, 8, 9])
def test_grpo_from_each_step(whole, tmp_path, step):
    """In the middle of a generation cycle, at its end, and in the second epoch."""
    case = CASES["grpo-lora"]
    first = make(folder=tmp_path, **(case | {"max_steps": step}))
    first.train()
    assert ("completions_0.pt" in os.listdir(tmp_path / f"checkpoint-{step}")) == (step % 2 == 1)
    assert_same(resume(folder=tmp_path, **case), whole("grpo-lora"))


def test_in_the_same_trainer(whole, tmp_path):
    """As in a notebook: the trainer that was interrupted goes on itself."""
    case = CASES["grpo-lora"]
    trainer = make(folder=tmp_path, **case)
    real = trainer.training_step

    def interrupted(*args, **kwargs):
        if trainer.state.global_step == 5:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    trainer.training_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    del trainer.training_step
    trainer.train(resume_from_checkpoint=True)
    assert_same(trainer, whole("grpo-lora"))


def test_without_the_completions_the_cycle_goes_on_and_says_so(whole, tmp_path, caplog):
    """A checkpoint of TRL's: the same prompts again for the rest of the cycle, the next cycle where it would be."""
    case = CASES["grpo-lora"]
    make(folder=tmp_path, **(case | {"max_steps": 3})).train()
    (tmp_path / "checkpoint-3" / "completions_0.pt").unlink()
    trainer = make(folder=tmp_path, **case)
    seen = []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (
        seen.append((trainer._step, [row["prompt"] for row in inputs])),
        generate(inputs),
    )[1]
    trainer.train(resume_from_checkpoint=True)
    assert [step for step, _ in seen] == [6, 8, 12, 16, 20]
    other = make(folder=tmp_path / "whole", **case)
    expected = []
    generate_other = other._generate_and_score_completions
    other._generate_and_score_completions = lambda inputs: (
        expected.append((other._step, [row["prompt"] for row in inputs])),
        generate_other(inputs),
    )[1]
    other.train()
    assert [step for step, _ in expected] == [0, 4, 8, 12, 16, 20]
    assert [prompts for _, prompts in seen] == [prompts for _, prompts in expected][1:]
    assert "checkpoint-3 is in the middle of a generation cycle, 2 of 4 micro-batches after its start" in caplog.text
    assert "has no completions_0.pt" in caplog.text and "multiple of 2" in caplog.text


def test_other_settings_do_not_take_the_completions(tmp_path, caplog):
    case = CASES["grpo-lora"]
    make(folder=tmp_path, **(case | {"max_steps": 3})).train()
    changed = case | {"gradient_accumulation_steps": 1, "max_steps": 5}
    trainer = resume(folder=tmp_path, **changed)
    assert trainer.state.global_step == 5 and trainer._step == 5
    assert "was saved with gradient_accumulation_steps=2, which is 1 now" in caplog.text


def test_a_synchronised_reference_is_named(tmp_path, caplog):
    case = {"task": "grpo", "model": "llama", "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    make(folder=tmp_path, max_steps=1, **case).train()
    assert "sync_ref_model" not in caplog.text
    resume(folder=tmp_path, max_steps=2, **case)
    assert "sync_ref_model=True: checkpoints do not have the reference model" in caplog.text


def test_tokens_are_counted_on(whole):
    """TRL begins at zero again."""
    logs, _ = whole("lora-packed-auto")
    counts = [entry["num_tokens"] for entry in logs]
    assert counts == sorted(counts) and counts[-1] > counts[0]


def test_buffer_is_data_only(whole, tmp_path):
    make(folder=tmp_path, **(CASES["grpo-lora"] | {"max_steps": 1})).train()
    saved = torch.load(tmp_path / "checkpoint-1" / "completions_0.pt", weights_only=True)
    assert saved["micro_batches"] == 2 and len(saved["inputs"]) == 4
    assert saved["inputs"][0]["completion_ids"].dtype == torch.int64
