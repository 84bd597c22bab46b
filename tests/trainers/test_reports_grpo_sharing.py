"""What users reported about GRPO on shared prompts (B36), and batches in which something is extreme."""

import pytest
import torch
import trl

import unsloth_trl
from tests.numerics import assert_logs_close, assert_runs_close, assert_updates_close
from tests.tiny import EOS, VOCAB, tiny_model
from tests.trainers.grpo_runs import run_grpo, run_oracle, run_ours
from tests.trainers.grpo_spy import (
    ADAPTER,
    PASSES,
    Spy,
    TRLSpy,
    assert_alone,
    first_batch,
    given_trainer,
    gradients,
    log_of,
    tokens,
    trained,
)


PROMPT = list(range(20, 32))
LENGTHS = (1, 5, 5, 9)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_b36_sharing_changes_nothing(model_type):
    """Log-probabilities and all gradients, with sliding windows, a soft cap, sinks; the prompt goes in once."""
    results = []
    for share in (True, False):
        trainer = given_trainer(model_type, tokens(*LENGTHS), prompts=[PROMPT], share_prompts=share)
        loss, grads = gradients(trainer, first_batch(trainer))
        results.append((loss, grads))
        assert_alone(trainer, tiny_model(model_type).eval(), passes=1)
        (ids,) = trainer.forwards
        counts = torch.bincount(ids.flatten(), minlength=VOCAB)
        copies = 1 if share else 4
        aux = 4 if trainer.aux_loss_enabled else 0  # the load-balancing loss is over the last tokens too
        assert ids.shape == (1, 11 * copies + 4 + sum(LENGTHS) - 4 + aux)
        assert counts[20:31].tolist() == [copies] * 11 and counts[31] == 4
    (loss, grads), (other_loss, other_grads) = results
    assert loss == pytest.approx(other_loss, abs=1e-6)
    assert_updates_close(grads, other_grads, 1e-5)


def test_b36_two_groups_with_the_same_prompt():
    """The prompt goes in once for both, and each group keeps its own mean."""
    completions, rewards = tokens(*LENGTHS), [0, 1, 5, 9]
    fields = {"prompts": [PROMPT, PROMPT], "num_generations": 2, **ADAPTER}
    ours = given_trainer("llama", completions, rewards, **fields)
    theirs = given_trainer("llama", completions, rewards, spy=TRLSpy, **fields)
    assert_updates_close(trained(ours), trained(theirs), 1e-5)
    assert ours.generated[0]["advantages"].tolist() == [-0.5, 0.5, -2, 2]
    assert [ids.numel() for ids in ours.forwards] == [11 + sum(LENGTHS)]


def test_b36_shuffled_rows():
    """Rows of three groups in any order have the scores that they have in order."""
    trainer = given_trainer("llama", tokens(*range(1, 10)), prompts=tokens(12, 3, 7))
    first_batch(trainer)
    batch = trainer.generated[0]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        for seed in range(3):
            order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
            trainer._get_per_token_logps_and_entropies(trainer.model, ids[order], mask[order], 9)
    sizes = [ids.numel() for ids in trainer.forwards]
    assert sizes == [11 + 2 + 6 + 45] * 3
    assert_alone(trainer, tiny_model("llama").eval(), passes=3)


def test_b36_one_completion_for_a_prompt():
    """Micro-batches of one row, and evaluation with one generation: rows as they are."""
    fields = {"per_device_train_batch_size": 1, "num_generations": 2, "gradient_accumulation_steps": 2, **ADAPTER}
    ours = given_trainer("llama", tokens(3, 5), prompts=[PROMPT], **fields)
    theirs = given_trainer("llama", tokens(3, 5), prompts=[PROMPT], spy=TRLSpy, **fields)
    assert_updates_close(trained(ours), trained(theirs), 1e-5)
    assert sorted(ids.numel() for ids in ours.forwards) == [12 + 3 - 1, 12 + 5 - 1]
    for trainer in (ours, theirs):
        trainer.num_generations_eval = 1
        trainer.forwards.clear()
    data = ours.train_dataset.select(range(4))
    mine, other = (trainer.evaluate(data) for trainer in (ours, theirs))
    assert mine["eval_entropy"] == pytest.approx(other["eval_entropy"], rel=1e-5)
    assert mine["eval_loss"] == other["eval_loss"] == 0


def test_b36_prompts_of_one_token():
    """Nothing is left to share, and the first token of each completion is predicted from its own copy."""
    trainer = given_trainer("llama", tokens(*LENGTHS), prompts=[[20], [21]], lora=True, **PASSES)
    trainer.train()
    assert_alone(trainer, tiny_model("llama").eval(), passes=3)
    assert [ids.numel() for ids in trainer.forwards] == [sum(LENGTHS)] * 3


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "deepseek_v3"])
def test_b36_attention_dropout_falls_back(model_type):
    """To TRL's padded rows, bit for bit where there are no experts, and the report says why."""
    logs = []
    for library in (unsloth_trl, trl):
        run = run_grpo(library, tiny_model(model_type, attention_dropout=0.1), max_steps=1)
        logs.append(run.logs)
        if library is unsloth_trl:
            entry = run.trainer.patch_report["shared prompts"]
            assert not entry.applied and "attention_dropout=0.1" in entry.detail
            assert run.trainer.token_counts.padded == 0
    if model_type == "deepseek_v3":
        assert_logs_close(*logs, 1e-5)
    else:
        assert logs[0] == logs[1]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_teach_nothing(scale):
    """No advantage, no gradient and no NaN; the other group of the batch learns as before."""
    trainer = given_trainer("llama", tokens(3, 5, 1, 4), [2.5] * 4, scale_rewards=scale, num_iterations=2)
    updates = trained(trainer)
    assert trainer.generated[0]["advantages"].tolist() == [0.0] * 4
    assert trainer.losses == [0.0] and log_of(trainer)["grad_norm"] == 0
    assert not any(update.any() for update in updates.values())
    fields = {"prompts": tokens(5, 7), "scale_rewards": scale, **ADAPTER}
    runs = [given_trainer("llama", tokens(3, 5, 1, 4), [2, 2, 1, 4], spy=spy, **fields) for spy in (Spy, TRLSpy)]
    assert_updates_close(*map(trained, runs), tol=1e-5)
    assert runs[0].generated[0]["advantages"].tolist()[:2] == [0.0, 0.0]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
@pytest.mark.parametrize(
    "fields", [{}, ADAPTER | PASSES, {"gradient_checkpointing": True}], ids=["full", "lora", "gc"]
)
def test_all_rows_masked(fields, loss_type):
    """Every completion is cut off: zero loss, zero gradients, all of them finite."""
    trainer = given_trainer("llama", tokens(3, 5), mask_truncated_completions=True, loss_type=loss_type, **fields)
    updates = trained(trainer)
    assert trainer.losses == [0.0] and log_of(trainer)["loss"] == 0 and log_of(trainer)["grad_norm"] == 0
    assert updates and not any(update.any() for update in updates.values())
    assert [scored.shape for scored in trainer.scored] == [(2, 5)] * (3 if "beta" in fields else 1)
    assert not any(len(s) for scored in trainer.scored for s in scored.log_probs)


def test_all_rows_masked_leaves_the_balance_of_experts():
    """The load-balancing loss is over the prompts then, as in TRL."""
    runs = [
        given_trainer("mixtral", tokens(3, 5), mask_truncated_completions=True, spy=spy, router_aux_loss_coef=0.5)
        for spy in (Spy, TRLSpy)
    ]
    updates = list(map(trained, runs))
    assert runs[0].losses == [pytest.approx(runs[1].losses[0], rel=1e-6)] and runs[0].losses[0] > 0.5
    assert any(update.any() for update in updates[1].values())
    assert all(torch.allclose(updates[0][name], update, rtol=1e-4, atol=1e-6) for name, update in updates[1].items())


def test_one_micro_batch_of_two_is_masked():
    """The step is TRL's, whose other micro-batch has all the tokens."""
    completions = [[*c, EOS] for c in tokens(3, 5)] + tokens(4, 6)
    fields = {
        "prompts": tokens(5, 7),
        "mask_truncated_completions": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        **ADAPTER,
    }
    for loss_type in ("dapo", "grpo"):
        runs = [given_trainer("llama", completions, spy=spy, loss_type=loss_type, **fields) for spy in (Spy, TRLSpy)]
        assert_updates_close(*map(trained, runs), tol=1e-5)
        assert 0.0 in runs[0].losses and log_of(runs[0])["loss"] == pytest.approx(log_of(runs[1])["loss"], abs=1e-6)


def test_a_prompt_longer_than_a_pass():
    """It gets a pass for each of its completions, the others share one, and nothing changes."""
    completions, prompts = tokens(4, 6, 2, 3), tokens(30, 3)
    small, default = (
        given_trainer("llama", completions, prompts=prompts, max_tokens_per_pass=limit, **ADAPTER, **PASSES)
        for limit in (16, None)
    )
    assert_updates_close(trained(small), trained(default), 1e-5)
    assert [ids.numel() for ids in small.forwards[:3]] == [29 + 4, 29 + 6, 2 + 2 + 3]
    assert [ids.numel() for ids in small.forwards[3:6]] == [29 + 4, 29 + 6, 2 + 2 + 3]
    together = 29 + 4 + 6 + 2 + 2 + 3
    assert [ids.numel() for ids in small.forwards[6:]] == [together]
    assert [ids.numel() for ids in default.forwards] == [together] * 3
    for mine, other in zip(small.scored, default.scored, strict=True):
        scores = {tuple(c): s for (_, c), s in zip(mine.rows, mine.log_probs, strict=True)}
        assert len(scores) == 4
        for (_, completion), log_probs in zip(other.rows, other.log_probs, strict=True):
            assert torch.allclose(scores[tuple(completion)], log_probs, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_groups_across_micro_batches(loss_type):
    """6 rows a micro-batch, groups of 4: equal to TRL with our micro-batches, and to the step of TRL with its own."""
    fields = {
        "per_device_train_batch_size": 6,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "loss_type": loss_type,
        "max_steps": 2,
        **ADAPTER,
    }
    ours = run_ours("llama", **fields)
    assert_runs_close(ours, run_oracle("llama", **fields), 1e-4)
    plain = run_grpo(trl, "llama", **fields)
    assert_updates_close(ours.updates, plain.updates, 1e-4)
    for mine, other in zip(ours.logs, plain.logs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert ours.trainer.token_counts.shared < ours.trainer.token_counts.unshared
