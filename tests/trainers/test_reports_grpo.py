"""What users reported about GRPO's passes and batches (B16, B18 to B24, B32, B34), through our trainer."""

import pytest
import torch
import trl
from transformers import AutoConfig, AutoModelForCausalLM

import unsloth_trl
from tests.numerics import assert_runs_close, assert_updates_close
from tests.tiny import EOS, VOCAB, tiny_model
from tests.trainers import runs
from tests.trainers.bigram import bigram_model
from tests.trainers.grpo_runs import make_grpo, run_oracle, run_ours
from tests.trainers.grpo_spy import (
    ADAPTER,
    PASSES,
    Spy,
    TRLSpy,
    advantages,
    assert_alone,
    first_batch,
    given_trainer,
    gradients,
    log_of,
    tokens,
    trained,
)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_b16_accumulation_over_uneven_completions(loss_type):
    """
    Groups of lengths [2, 8] and [5, 1] that TRL shuffles to micro-batches [2, 1] and [8, 5]: the step of its padded
    path, from its micro-batches where the loss depends on them, else from the groups.
    """
    updates, losses, lengths = [], [], []
    for spy in (Spy, TRLSpy):
        trainer = given_trainer(
            "llama",
            tokens(2, 8, 5, 1),
            prompts=tokens(3, 9),
            spy=spy,
            change=advantages(1, 2, 3, 4),  # with a mean, so that the loss has a value
            loss_type=loss_type,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            seed=1,
            **ADAPTER,
        )
        updates.append(trained(trainer))
        lengths.append([sorted(batch["completion_mask"].sum(1).tolist()) for batch in trainer.batches])
        losses.append(log_of(trainer)["loss"])
    assert sorted(lengths[0]) == ([[1, 2], [5, 8]] if loss_type == "bnpo" else [[1, 5], [2, 8]])
    assert sorted(lengths[1]) == [[1, 2], [5, 8]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[1] < -0.1
    assert_updates_close(*updates, tol=1e-4)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_b18_left_padding_is_not_seen(model_type, share):
    """Prompts of 3 and 9 tokens in one batch, completions of 4 and 6, in the old, reference and policy pass."""
    trainer = given_trainer(
        model_type, tokens(4, 6, 6, 4), prompts=tokens(3, 9), lora=True, share_prompts=share, **PASSES
    )
    trainer.train()
    assert_alone(trainer, tiny_model(model_type).eval(), passes=3)


def test_b18_later_generations_and_evaluation():
    """Other prompts and completions with other padding, of which nothing is left over in the next pass."""
    trainer = make_grpo(unsloth_trl, "llama", trainer_class=Spy, lora=True, learning_rate=0.0, max_steps=3, **PASSES)
    trainer.train()
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert_alone(trainer, tiny_model("llama").eval(), passes=4 + 3 + 3)
    rows = [sorted(scored.rows) for scored in trainer.scored]
    assert rows[0] == rows[3] and rows[4] == rows[6] and rows[7] == rows[9]
    assert rows[3] != rows[4] and rows[6] != rows[7]


def absolute_model():
    """A tiny GPT-2: its positions are embeddings, so a row that starts at the wrong one is another row."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = AutoConfig.for_model("gpt2", vocab_size=VOCAB, attn_pdrop=0.0, eos_token_id=EOS, bos_token_id=1, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0, 0.2)
    return model


@pytest.mark.filterwarnings("ignore:model_type 'gpt2'")
def test_b18_positions_come_from_the_mask():
    trainer = given_trainer(absolute_model(), tokens(4, 6, 6, 4), prompts=tokens(3, 9), allow_unverified=True)
    trainer.train()
    assert trainer.patch_report["shared prompts"].applied
    assert_alone(trainer, absolute_model().eval(), passes=1)
    for ids in trainer.forwards:
        assert ids.numel() == 2 + 10 + 8 + 10


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_b19_the_id_of_padding_does_not_matter(model_type, share):
    """No padding reaches a model, and another id in its place changes neither loss nor gradients, by not one bit."""
    completions, prompts = tokens(4, 6, 1, 3), tokens(3, 9)
    trainer = given_trainer(model_type, completions, prompts=prompts, share_prompts=share)
    batch = first_batch(trainer)
    batch = {key: value for key, value in batch.items() if key != "shared_prompt_rows"}  # described anew each time
    other = dict(batch)
    for part in ("prompt", "completion"):
        padding = batch[f"{part}_mask"] == 0
        assert padding.any()
        other[f"{part}_ids"] = batch[f"{part}_ids"].masked_fill(padding, 7)
    (loss, grads), (other_loss, other_grads) = gradients(trainer, batch), gradients(trainer, other)
    assert loss == other_loss and loss != 0
    assert all(torch.equal(grads[name], other_grads[name]) for name in grads)
    assert max(g.abs().max() for g in grads.values()) > 0
    assert trainer.aux_loss_enabled == (model_type == "mixtral")
    for ids in trainer.forwards:
        assert not (ids == 7).any() and not (ids == 0).any()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type, expected", [("dapo", 1.0), ("cispo", 0.2)])
def test_b20_truncated_completions_leave_the_denominator_too(loss_type, expected, accumulation):
    """
    4 tokens that end and 6 that are cut off, a loss of 1 per token: 4/4, where 0.4 is the fault. CISPO multiplies by
    its largest ratio, 0.2, and by the log-probability, -1.
    """
    losses = {t: (t + 1, 1.0) for t in (22, 40, 41)} | {22: (40, 1.0), 42: (EOS, 1.0)}
    trainer = given_trainer(
        bigram_model(losses),
        [[40, 41, 42, EOS], [50, 51, 52, 53, 54, 55]],
        [-1, 1],
        loss_type=loss_type,
        mask_truncated_completions=True,
        per_device_train_batch_size=2 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    expected = expected if loss_type == "dapo" else -expected
    assert sum(trainer.losses) == pytest.approx(expected, rel=1e-5)
    assert sorted(trainer.losses, key=abs)[:-1] == [0.0] * (accumulation - 1)
    log = log_of(trainer)
    assert log["loss"] == pytest.approx(expected, rel=1e-5)
    assert log["num_tokens"] == 2 * 3 + 10 and log["completions/mean_length"] == 5


GRID = [(b, g, a) for b in (2, 4, 8) for g in (2, 4) for a in (1, 2, 4)]


@pytest.mark.parametrize("batch_size, num_generations, accumulation", GRID)
def test_b21_every_batch_that_trl_accepts(batch_size, num_generations, accumulation):
    fields = {
        "per_device_train_batch_size": batch_size,
        "num_generations": num_generations,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 2,
    }
    if batch_size * accumulation % num_generations:
        with pytest.raises(
            ValueError, match=r"generation_batch_size \(2\) must be divisible by num_generations \(4\)"
        ):
            make_grpo(unsloth_trl, "llama", **fields)
        return
    ours = run_ours("llama", **ADAPTER, **fields)
    assert ours.trainer.state.global_step == 2
    assert any(log["grad_norm"] > 0 for log in ours.logs) and all(log["grad_norm"] < 1e3 for log in ours.logs)
    assert_runs_close(ours, run_oracle("llama", **ADAPTER, **fields), 1e-4)


def test_b22_completions_at_the_cap():
    """24 of 24 tokens without an end: all widths are 24, and each token has its advantage."""
    trainer = make_grpo(
        unsloth_trl,
        "llama",
        trainer_class=Spy,
        init={"rollout_func": None, "change": advantages(*[1] * 8)},
        lora=True,
        max_completion_length=24,
        generation_kwargs={"suppress_tokens": [EOS]},
        max_steps=1,
        **PASSES,
    )
    trainer.train()
    (batch,) = trainer.generated
    for key in ("completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps"):
        assert batch[key].shape == (8, 24), key
    assert batch["completion_mask"].all() and batch["num_items_in_batch"] == 8 * 24
    assert [scored.shape for scored in trainer.scored] == [(8, 24)] * 3
    assert_alone(trainer, tiny_model("llama").eval(), passes=3)
    assert trainer.losses == [pytest.approx(-1.0, abs=1e-6)]
    log = log_of(trainer)
    assert log["completions/mean_length"] == 24 and log["completions/clipped_ratio"] == 1


def test_b23_the_batch_size_is_kept():
    """One row per micro-batch, 8 generations: no pass has more tokens than TRL's with one row."""
    trainer = make_grpo(
        unsloth_trl,
        "llama",
        trainer_class=Spy,
        lora=True,
        per_device_train_batch_size=1,
        num_generations=8,
        gradient_accumulation_steps=8,
        max_steps=1,
        **PASSES,
    )
    trainer.train()
    assert trainer.args.per_device_train_batch_size == 1 and trainer.args.gradient_accumulation_steps == 8
    width = trainer.generated[0]["prompt_ids"].shape[1] + trainer.generated[0]["completion_ids"].shape[1]
    assert all(len(batch["advantages"]) == 1 for batch in trainer.batches) and len(trainer.batches) == 8
    assert max(ids.numel() for ids in trainer.forwards) <= width
    policy = [ids.numel() for ids in trainer.forwards[-8:]]
    assert policy == [len(p) + len(c) - 1 for scored in trainer.scored[-8:] for p, c in scored.rows]


def test_b23_groups_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"generation_batch_size \(8\) must be divisible by num_generations \(3\)"):
        make_grpo(unsloth_trl, "llama", per_device_train_batch_size=8, num_generations=3)


@pytest.mark.parametrize("mask_truncated", [False, True], ids=["", "mask-truncated"])
@pytest.mark.parametrize("loss_type, expected", [("dapo", -0.5), ("grpo", -0.25)])
def test_b24_one_empty_completion(loss_type, expected, mask_truncated):
    """It has no loss and no gradient, and the reward function sees that it is empty."""
    seen = []

    def reward(completions, completion_ids, **_):
        seen.append((completions, [list(ids) for ids in completion_ids]))
        return [0.0, 1.0]

    fields = {"loss_type": loss_type, "mask_truncated_completions": mask_truncated, "num_iterations": 2, **ADAPTER}
    init = {"reward_funcs": reward}
    trainer = given_trainer("llama", [[], [45, EOS]], init=init, **fields)
    updates = trained(trainer)
    assert seen == [(["", "w45"], [[], [45, EOS]])]
    assert trainer.losses == [pytest.approx(expected, abs=1e-6)]
    log = log_of(trainer)
    assert log["num_tokens"] == 2 * 3 + 2 and log["completions/mean_length"] == 1.0
    theirs = given_trainer(
        "llama", [[EOS], [45, EOS]], init=init, extra={"env_mask": [[0], [1, 1]]}, spy=TRLSpy, **fields
    )
    assert_updates_close(updates, trained(theirs), 1e-5)


@pytest.mark.parametrize("mask_truncated", [False, True], ids=["", "mask-truncated"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_b24_all_completions_are_empty(lora, mask_truncated):
    fields = ADAPTER | PASSES if lora else {"num_iterations": 2}
    trainer = given_trainer("llama", [[], []], mask_truncated_completions=mask_truncated, **fields)
    updates = trained(trainer)
    assert trainer.losses == [0.0] and log_of(trainer)["grad_norm"] == 0
    assert not any(update.any() for update in updates.values())
    assert log_of(trainer)["completions/max_length"] == 0


@pytest.mark.parametrize("mask_truncated", [False, True], ids=["", "mask-truncated"])
def test_b24_empty_completions_among_others(mask_truncated):
    """With masks and log-probs of the rollout's own, in two groups and two micro-batches."""
    completions = [[], *tokens(3, 0, 4), *tokens(2, 5, 1, 0)]
    completions[1].append(EOS)
    completions[5].append(EOS)
    mask = [[1] * len(c) for c in completions]
    mask[3] = [1, 0, 0, 1]
    log_probs = [[-1.0] * len(c) for c in completions]
    fields = {
        "prompts": tokens(5, 2),
        "mask_truncated_completions": mask_truncated,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        **ADAPTER,
        **PASSES,
    }
    ours = given_trainer("llama", completions, extra={"env_mask": mask, "logprobs": log_probs}, **fields)
    filled = [c or [EOS] for c in completions]
    theirs = given_trainer(
        "llama",
        filled,
        extra={"env_mask": [m or [0] for m in mask], "logprobs": [p or [0.0] for p in log_probs]},
        spy=TRLSpy,
        **fields,
    )
    assert_updates_close(trained(ours), trained(theirs), 1e-4)
    assert log_of(ours)["loss"] == pytest.approx(log_of(theirs)["loss"], rel=1e-5)
    assert ours.generated[0]["sampling_per_token_logps"].shape == ours.generated[0]["completion_ids"].shape


@pytest.mark.parametrize("batch_size, accumulation", [(8, 1), (16, 1), (8, 2), (4, 2)])
def test_b32_several_samples_and_micro_batches(batch_size, accumulation):
    """Gradients that are finite and not zero, and TRL's, with 8 generations."""
    fields = {
        "num_generations": 8,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 2,
        **ADAPTER,
    }
    ours = run_ours("llama", **fields)
    assert all(0 < log["grad_norm"] < 1e3 for log in ours.logs)
    assert_runs_close(ours, run_oracle("llama", **fields), 1e-4)


def test_b34_a_batch_size_that_could_shrink_is_refused():
    for library in (unsloth_trl, trl):
        with pytest.raises(ValueError, match="auto_find_batch_size is not supported by GRPO"):
            make_grpo(library, "llama", auto_find_batch_size=True)


def test_b34_packed_rows_stay_when_the_batch_shrinks(tmp_path):
    """SFT: out of memory with 4 rows; with fewer the rows are the same, and each window counts its own labels."""
    seen = []

    class Small(unsloth_trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            layout, labels = inputs["packed_layout"], inputs["label_positions"].numel()
            if layout.num_tokens > 32:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            seen.append((layout.num_tokens, labels, int(num_items_in_batch)))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = runs.trainer(
        tmp_path,
        Small,
        packing=True,
        max_length=16,
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
        max_steps=-1,
        num_train_epochs=1,
    )
    rows = [list(ids) for ids in trainer.train_dataset["input_ids"]]
    trainer.train()
    assert [list(ids) for ids in trainer.train_dataset["input_ids"]] == rows
    assert trainer._train_batch_size == 2 and sum(n for n, _, _ in seen) == sum(map(len, rows))
    for i in range(0, len(seen), 2):
        assert {items for _, _, items in seen[i : i + 2]} == {sum(labels for _, labels, _ in seen[i : i + 2])}
