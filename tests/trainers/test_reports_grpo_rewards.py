"""What users reported about GRPO's rewards and ratios (B25 to B29), through our trainer."""

import asyncio
import logging
import math

import numpy as np
import pytest
import torch

from tests.numerics import assert_updates_close, snapshot
from tests.tiny import tiny_model
from tests.trainers.grpo_spy import (
    ADAPTER,
    Spy,
    TRLSpy,
    advantages,
    given_trainer,
    log_of,
    log_probs_alone,
    tokens,
    trained,
)


ADVANTAGES = {
    "group": [0.8659, -0.8659, -0.8659, 0.8659, 0, 0, 0, 0],
    "batch": [0.2053, -0.2053, -0.2053, 0.2053, 0, 0, 0, 0],
    "none": [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0],
}


@pytest.mark.parametrize("scale", ADVANTAGES)
def test_b25_advantages_and_whose_they_are(scale):
    """The values, and each still at its own completion after micro-batches were made."""
    completions = tokens(*range(1, 9))
    trainer = given_trainer(
        "llama",
        completions,
        [1, 0, 0, 1, 5, 5, 5, 5],
        prompts=tokens(5, 3),
        scale_rewards=scale,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert trainer.generated[0]["advantages"].tolist() == pytest.approx(ADVANTAGES[scale], abs=1e-4)
    seen = {}
    for batch in trainer.batches:
        for ids, mask, value in zip(
            batch["completion_ids"], batch["completion_mask"], batch["advantages"], strict=True
        ):
            seen[tuple(ids[mask.bool()].tolist())] = value.item()
    assert [seen[tuple(c)] for c in completions] == pytest.approx(ADVANTAGES[scale], abs=1e-4)
    assert log_of(trainer)["frac_reward_zero_std"] == (0.0 if scale == "batch" else 0.5)


def one_for_all(completions, **_):
    return [1.0]


async def one_for_all_later(completions, **_):
    await asyncio.sleep(0)
    return [1.0]


@pytest.mark.parametrize("reward", [one_for_all, one_for_all_later])
def test_b26_a_wrong_number_of_rewards(reward):
    trainer = given_trainer("llama", tokens(3, 1, 4, 2), init={"reward_funcs": reward})
    with pytest.raises(ValueError, match=rf"'{reward.__name__}' returned 1 rewards, but 4 were expected"):
        trainer.train()


def test_b26_none_is_left_out():
    """Of two functions, one has nothing to say about two rows, and neither about the last one."""
    init = {"reward_funcs": [lambda **_: [1.0, None, 3.0, None], lambda **_: [0.0, 5.0, None, None]]}
    trainer = given_trainer("llama", tokens(3, 1, 4, 2), init=init, **ADAPTER)
    updates = trained(trainer)
    assert trainer.generated[0]["advantages"].tolist() == [-2.0, 2.0, 0.0, 0.0]  # of 1, 5 and 3
    assert log_of(trainer)["reward"] == 3.0 and math.isfinite(log_of(trainer)["loss"])
    theirs = given_trainer("llama", tokens(3, 1, 4, 2), init=init, spy=TRLSpy, **ADAPTER)
    assert_updates_close(updates, trained(theirs), 1e-5)


@pytest.mark.parametrize(
    "values",
    [
        [np.float32(1), np.float64(3), np.int64(0), True],
        np.array([1.0, 3.0, 0.0, 1.0]),
        [torch.tensor(v) for v in (1.0, 3.0, 0.0, 1.0)],
        torch.tensor([1.0, 3.0, 0.0, 1.0]),
    ],
    ids=["numpy scalars", "array", "torch scalars", "tensor"],
)
def test_b26_numbers_of_numpy_and_torch(values):
    trainer = given_trainer("llama", tokens(3, 1, 4, 2), init={"reward_funcs": lambda **_: values})
    trainer.train()
    assert trainer.generated[0]["advantages"].tolist() == [-0.25, 1.75, -1.25, -0.25]


def test_b26_an_async_reward():
    async def later(completion_ids, **_):
        await asyncio.sleep(0.001)
        return [float(len(ids)) for ids in completion_ids]

    # an empty completion is empty there too
    completions = [*tokens(3, 1, 4), []]
    asynchronous = given_trainer("llama", completions, init={"reward_funcs": later}, **ADAPTER)
    synchronous = given_trainer("llama", completions, [3, 1, 4, 0], **ADAPTER)
    assert_updates_close(trained(asynchronous), trained(synchronous), 1e-5)
    assert asynchronous.generated[0]["advantages"].tolist() == [1.0, -1.0, 2.0, -2.0]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_b26_after_a_reward_that_raised(fails_at):
    """In the first or second generation; then `train()` again is a run like any other from the same weights."""
    calls = []

    def reward(completion_ids, **_):
        calls.append(len(completion_ids))
        if len(calls) == fails_at + 1:
            raise RuntimeError("the judge is down")
        return [float(len(ids)) for ids in completion_ids]

    fields = {"max_steps": 3, "gradient_accumulation_steps": 2, "prompts": tokens(5, 3)}
    fields |= {"per_device_train_batch_size": 4, "num_generations": 4, **ADAPTER}
    completions = tokens(*range(1, 9))
    trainer = given_trainer("llama", completions, init={"reward_funcs": reward}, **fields)
    with pytest.raises(RuntimeError, match="the judge is down"):
        trainer.train()
    weights = snapshot(trainer.model)
    updates = trained(trainer)
    assert trainer.state.global_step == 3 and len(calls) == fails_at + 1 + 3
    fresh = given_trainer("llama", completions, [len(c) for c in completions], **fields)
    with torch.no_grad():
        for name, weight in weights.items():
            fresh.model.get_parameter(name).copy_(weight)
    assert_updates_close(updates, trained(fresh), 1e-4)


def ratios(*logs, of):
    """
    A `change`: these are the logarithms of the ratios of completions `of`, whose policy is `tiny_model("llama")`, and
    all advantages are 1.
    """

    def change(batch):
        old = torch.zeros(batch["completion_ids"].shape)
        for i, (completion, log) in enumerate(zip(of, logs, strict=True)):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
            now = log_probs_alone(tiny_model("llama").eval(), prompt, completion)
            old[i, : len(completion)] = now - torch.tensor(log)
        batch["old_per_token_logps"] = old
        advantages(*[1] * len(logs))(batch)

    return change


@pytest.mark.parametrize("loss_type, expected, warns", [("grpo", -1.0, False), ("dapo", -0.96667, True)])
def test_b27_sequence_ratios_with_a_loss_over_tokens(loss_type, expected, warns, caplog):
    """ln 1.1 over 2 tokens, ln 0.9 over 4: the mean of the sequences, or, with a warning, weighted by length."""
    completions = tokens(2, 4)
    with caplog.at_level(logging.WARNING):
        trainer = given_trainer(
            "llama",
            completions,
            change=ratios([math.log(1.1)] * 2, [math.log(0.9)] * 4, of=completions),
            importance_sampling_level="sequence",
            loss_type=loss_type,
        )
    trainer.train()
    assert trainer.losses == [pytest.approx(expected, abs=1e-4)]
    assert ("effectively weights each sequence by its completion length" in caplog.text) == warns


def test_b28_the_ratio_of_a_sequence():
    """exp of the mean, 1.2214 for both; a sum would be 1.4918 and 2.2255, a mean of exps 1.2275 for the first."""
    completions = tokens(2, 4)
    trainer = given_trainer(
        "llama",
        completions,
        change=ratios([0.1, 0.3], [0.2] * 4, of=completions),
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=0.9,
    )
    trainer.train()
    assert trainer.losses == [pytest.approx(-1.2214, abs=1e-4)]


def sampled_trainer(shifts, mode, temperature=1.0, spy=Spy):
    """TRL's correction for vLLM, with a rollout whose sampler's log-probs are below the model's by these."""
    completions, prompt = tokens(*map(len, shifts)), [20, 21, 22]
    model = tiny_model("llama").eval()
    log_probs = [
        (log_probs_alone(model, prompt, c, temperature) - torch.tensor(shift)).tolist()
        for c, shift in zip(completions, shifts, strict=True)
    ]
    trainer = given_trainer(
        "llama",
        completions,
        prompts=[prompt],
        extra={"logprobs": log_probs},
        change=advantages(*[1] * len(shifts)),
        spy=spy,
        temperature=temperature,
        vllm_importance_sampling_mode=mode,
    )
    trainer.use_vllm, trainer._last_loaded_step = True, 0  # no engine: the weights count as synchronised
    trainer.train()
    log = log_of(trainer)
    return trainer.losses[0], [log[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]


def test_b28_the_ratio_of_a_sequence_to_its_sampler():
    """exp of the sum: 1.4918 and 2.2255, each for its own sequence's tokens."""
    first, second = math.exp(0.4), math.exp(0.8)
    loss, seen = sampled_trainer([[0.1, 0.3], [0.2] * 4], "sequence_truncate")
    assert seen == pytest.approx([first, (first + second) / 2, second], rel=1e-4)
    assert loss == pytest.approx(-(2 * first + 4 * second) / 6, rel=1e-4)


@pytest.mark.parametrize("spy", [Spy, TRLSpy])
def test_b29_the_ratio_to_the_sampler_is_trl_s(spy):
    """
    1 for an unchanged policy at any temperature. A sampler that renormalises over the kept 0.8 (top_p, top_k, min_p)
    makes it 0.8: TRL has no correction for that, and ours has none of its own.
    """
    for temperature in (1.0, 0.6):
        loss, seen = sampled_trainer([[0.0] * 3, [0.0] * 5], "token_truncate", temperature, spy)
        assert seen == pytest.approx([1.0] * 3, abs=1e-5) and loss == pytest.approx(-1.0, abs=1e-5)
    kept = -math.log(0.8)
    loss, seen = sampled_trainer([[-kept] * 3, [-kept] * 5], "token_truncate", spy=spy)
    assert seen == pytest.approx([0.8] * 3, abs=1e-5) and loss == pytest.approx(-0.8, abs=1e-5)
