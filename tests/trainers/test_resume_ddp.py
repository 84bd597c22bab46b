"""Two processes: a resumed run is the uninterrupted one, and they agree on where to stop when one is interrupted."""

import os

import pytest
import torch

from tests.trainers.ranks import run_on_two_ranks


CASES = {
    # an epoch is 4 steps: the second part begins in the middle of the second epoch
    "sft": {
        "task": "sft",
        "model_type": "llama",
        "packing": True,
        "lora": True,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 1,
        "save_total_limit": None,
        "until": 6,
    },
    # a cycle is 2 steps, an epoch of 16 prompts 8: the second part begins in the first cycle of the second epoch
    "grpo": {
        "task": "grpo",
        "model": "llama",
        "init": {"rollout_func": None},
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "lora": True,
        "max_steps": 11,
        "save_total_limit": None,
        "until": 9,
    },
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    torch.save(CASES, folder / "cases.pt")
    return folder, run_on_two_ranks("resume_ddp_worker.py", folder, str(folder / "cases.pt"), str(folder))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("part", ["resumed", "after"])
def test_resumed(ranks, name, part):
    _, (first, second) = ranks
    logs, weights = first[name, "whole"]
    found, resumed = first[name, part]
    assert len(logs) > CASES[name]["until"] and found == logs
    for key, value in weights.items():
        assert torch.equal(resumed[key], value), key
        assert torch.equal(second[name, part][1][key], value), key


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_has_the_files_of_all_processes(ranks, name):
    folder, _ = ranks
    until = CASES[name]["until"]
    found = set(os.listdir(folder / name / "parts" / f"checkpoint-{until}"))
    assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", "optimizer.pt"} <= found
    assert not [entry for entry in os.listdir(folder / name / "parts") if entry.startswith("_")]
    if name == "grpo":
        assert {"completions_0.pt", "completions_1.pt"} <= found


@pytest.mark.parametrize("name", CASES)
def test_one_interrupted_process_stops_both(ranks, name):
    folder, results = ranks
    for result in results:
        message, step = result[name, "stopped"]
        assert step == 2 and f"saved in {folder / name / 'interrupted' / 'checkpoint-2'}" in message
