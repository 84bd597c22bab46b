"""Two gloo processes on the CPU train as one process on the data of both."""

import pytest
import torch

import unsloth_trl
from tests.numerics import assert_logs_close, assert_updates_close, masked_rows, run_sft
from tests.trainers.ranks import run_on_two_ranks


def row(length, num_labels, first):
    ids = list(range(first, first + length))
    return {"input_ids": ids, "labels": [-100] * (length - num_labels) + ids[length - num_labels :]}


UNEQUAL = [row(8, 2, 10), row(9, 6, 40)]
ADAPTER = {"lora": True, "lora_kwargs": {"init_lora_weights": False}}
# one step: each rank gets one of the two rows
ONE_STEP = {"rows": UNEQUAL, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
EPOCH = {"packing": True, "rows": masked_rows(25), "gradient_accumulation_steps": 2, "max_length": 16}
EPOCH |= {"per_device_train_batch_size": 2, "eval_rows": masked_rows(7, seed=5), "eval_strategy": "epoch"}

CASES = {
    "unequal-full": {"model_type": "llama", **ONE_STEP},
    "unequal-lora": {"model_type": "llama", **ONE_STEP, **ADAPTER},
    "unequal-flat": {"model_type": "llama", **ONE_STEP, "padding_free": True, "max_length": None},
    "unequal-local": {"model_type": "llama", **ONE_STEP, "average_tokens_across_devices": False},
    "epoch-packed": {"model_type": "qwen3_moe", **EPOCH},
    "epoch-unpacked": {"model_type": "llama", **EPOCH, **ADAPTER, "packing": False},
}
# each rank one group a micro-batch; groups that straddle ranks and micro-batches; experts with their auxiliary loss
GRPO_CASES = {
    "grpo-lora": {"model_type": "llama", "lora": True, "beta": 0.1, "mask_truncated_completions": True},
    "grpo-straddling": {"model_type": "llama", "per_device_train_batch_size": 6, "loss_type": "grpo"},
    "grpo-experts": {"model_type": "qwen3_moe", "num_iterations": 2},
}
# ours alone: the same bits whatever becomes of the layers' activations, with tied weights and experts too
CHECKPOINTED = {
    "lora": {"model_type": "llama", **EPOCH, **ADAPTER, "lora_kwargs": {"lora_dropout": 0.2}},
    "tied": {"model_type": "gemma3_text", **EPOCH},
    "experts": {"model_type": "qwen3_moe", **EPOCH},
    "grpo": {"model_type": "llama", "lora": True, "task": "grpo", "gradient_accumulation_steps": 2},
}
POLICIES = {
    "plain": {"gradient_checkpointing": False},
    **{
        policy: {"gradient_checkpointing": True, "checkpoint_policy": policy, "ddp_find_unused_parameters": False}
        for policy in ("recompute", "offload")
    },
}
for case in GRPO_CASES.values():
    case.update({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "task": "grpo"} | case)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Logs and updates of every case under both libraries, by rank: `ranks[rank][library-case]`."""
    folder = tmp_path_factory.mktemp("ddp")
    cases = {
        f"{library}-{name}": {"library": library, **case}
        for name, case in (CASES | GRPO_CASES).items()
        for library in ("trl", "unsloth_trl")
    } | {
        f"{policy}-{name}": {"library": "unsloth_trl", **case, **fields}
        for name, case in CHECKPOINTED.items()
        for policy, fields in POLICIES.items()
    }
    torch.save(cases, folder / "cases.pt")
    return run_on_two_ranks("ddp_worker.py", folder, str(folder / "cases.pt"), str(folder))


@pytest.mark.parametrize("case", CASES | GRPO_CASES)
def test_ranks_end_with_the_same_weights(ranks, case):
    first, second = (ranks[rank][f"unsloth_trl-{case}"][1] for rank in range(2))
    assert first.keys() == second.keys() and len(first) > 0
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", ["unequal-full", "unequal-lora", "unequal-flat"])
def test_update_is_that_of_one_process(ranks, case):
    """Ranks with 2 and with 6 label tokens: each token counts the same, not each rank."""
    config = {**CASES[case], "per_device_train_batch_size": 2}
    expected = run_sft(unsloth_trl, **config)
    logs, updates = ranks[0][f"unsloth_trl-{case}"]
    assert_updates_close(updates, expected.updates, 1e-4)
    for key in ("loss", "grad_norm", "num_tokens"):
        assert logs[0][key] == pytest.approx(expected.logs[0][key], rel=1e-5), key


def test_local_average_is_another_number(ranks):
    """Without the average over ranks each rank counts the same: the check above can fail."""
    token_mean, rank_mean = (ranks[0][f"unsloth_trl-unequal-{name}"][0][0]["grad_norm"] for name in ("full", "local"))
    assert abs(token_mean / rank_mean - 1) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_logs_and_updates_equal_trl(ranks, case):
    (logs, updates), (expected_logs, expected_updates) = (
        ranks[0][f"{library}-{case}"] for library in ("unsloth_trl", "trl")
    )
    assert len(logs) == {"epoch-packed": 2, "epoch-unpacked": 4}.get(case, 1)
    assert {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"} <= logs[0].keys()
    assert ("aux_loss" in logs[0]) == (CASES[case]["model_type"] == "qwen3_moe")
    assert_logs_close(logs, expected_logs, 1e-4)
    assert_updates_close(updates, expected_updates, 1e-4)


@pytest.mark.parametrize("case", GRPO_CASES)
def test_grpo_equals_trl(ranks, case):
    """Rewards are normalised over the ranks' groups, rows are regrouped on each rank by itself."""
    (logs, updates), (expected_logs, expected_updates) = (
        ranks[0][f"{library}-{case}"] for library in ("unsloth_trl", "trl")
    )
    assert len(logs) == 3 and {"loss", "grad_norm", "entropy", "reward"} <= logs[0].keys()
    assert ("aux_loss" in logs[0]) == (case == "grpo-experts")
    assert_logs_close(logs, expected_logs, 1e-4)
    assert_updates_close(updates, expected_updates, 1e-4)


@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("case", CHECKPOINTED)
def test_b51_checkpointing_under_ddp(ranks, case, policy):
    """Non-reentrant: each gradient is ready once, also that of a tied weight."""
    for rank in range(2):
        logs, updates = ranks[rank][f"{policy}-{case}"]
        expected_logs, expected = ranks[rank][f"plain-{case}"]
        assert logs == expected_logs and len(logs) > 1
        assert updates.keys() == expected.keys() and any(update.any() for update in expected.values())
        assert all(torch.equal(updates[name], expected[name]) for name in expected)
