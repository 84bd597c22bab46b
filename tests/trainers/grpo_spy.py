"""GRPO trainers that keep what goes through them, on rollouts and rewards that are given."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import trl

import unsloth_trl
from tests.numerics import snapshot, updates_since
from tests.tiny import VOCAB
from tests.trainers.grpo_runs import make_grpo


ADAPTER = {"lora": True, "lora_kwargs": {"init_lora_weights": False}}  # both halves get a gradient at once
PASSES = {"beta": 0.1, "num_iterations": 2}  # the old, the reference and the policy's pass


class Given:
    """A rollout function that returns these completions in turn, and these prompts, one for each group."""

    def __init__(self, completions: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], **extra: Sequence):
        self.completions, self.prompts, self.extra = completions, prompts, extra

    def __call__(self, prompts, trainer) -> dict[str, Any]:
        rows, group = range(len(prompts)), trainer.num_generations
        output = {
            "prompt_ids": [list(self.prompts[i // group % len(self.prompts)]) for i in rows],
            "completion_ids": [list(self.completions[i % len(self.completions)]) for i in rows],
            "logprobs": None,
        }
        for name, values in self.extra.items():
            output[name] = [values[i % len(values)] for i in rows]
        return output


class Scored(NamedTuple):
    """One call of `_get_per_token_logps_and_entropies`: its rows without padding, and their log-probabilities."""

    rows: list[tuple[list[int], list[int]]]
    log_probs: list[torch.Tensor]
    shape: tuple[int, int]


class _Keeps:
    """
    Attributes:
        generated: Each generation batch.
        batches, losses: What each loss was computed from, and its value.
        scored: Each pass, in order: old, reference, then the policy.
        forwards: The ids of each forward that the embedding saw.
    """

    def __init__(self, *args, change=None, **kwargs):
        self.generated, self.batches, self.losses, self.scored, self.forwards = [], [], [], [], []
        self.change = change
        super().__init__(*args, **kwargs)
        embedding = self.model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda _, inputs: self.forwards.append(inputs[0].detach().clone()))

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.change is not None:
            self.change(batch)
        self.generated.append(batch)
        return batch

    def _compute_loss(self, model, inputs):
        self.batches.append(inputs)
        loss = super()._compute_loss(model, inputs)
        self.losses.append(loss.item())
        return loss

    def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, *args, **kwargs):
        result = super()._get_per_token_logps_and_entropies(model, ids, mask, keep, *args, **kwargs)
        on = mask.bool()
        rows = [(r[:-keep][m[:-keep]].tolist(), r[-keep:][m[-keep:]].tolist()) for r, m in zip(ids, on, strict=True)]
        scores = [s[m[-keep:]].detach().clone() for s, m in zip(result[0], on, strict=True)]
        self.scored.append(Scored(rows, scores, tuple(result[0].shape)))
        return result


class Spy(_Keeps, unsloth_trl.GRPOTrainer):
    """Ours."""


class TRLSpy(_Keeps, trl.GRPOTrainer):
    """TRL's."""


def given_trainer(
    model,
    completions: Sequence[Sequence[int]],
    rewards: Sequence | None = None,
    *,
    prompts: Sequence[Sequence[int]] = ((20, 21, 22),),
    spy: type = Spy,
    change=None,
    extra: dict[str, Sequence] | None = None,
    init: dict | None = None,
    **fields: Any,
):
    """
    A trainer for one step on one generation batch that is written down.

    Args:
        model: As in `make_grpo`.
        completions: Those of all rows; by default one micro-batch holds them all.
        rewards: One for each row, in turn; by default 0, 1, 2, ...
        prompts: One for each group.
        spy: `Spy` or `TRLSpy`.
        change: Called with the generation batch before it is cut.
        extra: More fields of the rollout, a value for each row.
        init, fields: As in `make_grpo`, with `lora` and `lora_kwargs`.
    """
    rewards = list(range(len(completions))) if rewards is None else list(rewards)
    base = {
        "per_device_train_batch_size": len(completions),
        "num_generations": len(completions) // len(prompts),
        "max_steps": 1,
        "scale_rewards": "none",
    }
    start = {
        "rollout_func": Given(completions, prompts, **(extra or {})),
        "reward_funcs": lambda completions, **_: [float(rewards[i % len(rewards)]) for i in range(len(completions))],
        "change": change,
    }
    library = unsloth_trl if issubclass(spy, unsloth_trl.GRPOTrainer) else trl
    return make_grpo(library, model, trainer_class=spy, init=start | (init or {}), **(base | fields))


def first_batch(trainer) -> dict[str, Any]:
    """The first micro-batch of training."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def gradients(trainer, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a micro-batch and the gradient of everything that is trained."""
    loss = trainer.compute_loss(trainer.model, batch)
    named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    return loss.item(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@torch.no_grad()
def log_probs_alone(model, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of a completion in a row of its own, without padding."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
    log_probs = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, -1)
    return log_probs.gather(1, torch.tensor(list(completion), dtype=torch.int64)[:, None])[:, 0]


def tokens(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random rows of these lengths; ids from 40 on."""
    rng = random.Random(seed)
    return [[rng.randrange(40, VOCAB) for _ in range(n)] for n in lengths]


def trained(trainer) -> dict[str, torch.Tensor]:
    """The updates of `trainer.train()`."""
    before = snapshot(trainer.model)
    trainer.train()
    return updates_since(before, trainer.model)


def advantages(*values: float):
    """A `change` that replaces the advantages of the generation batch."""

    def change(batch):
        batch["advantages"] = torch.tensor(values, dtype=torch.float32)

    return change


def log_of(trainer) -> dict[str, float]:
    """What the first step logged."""
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


def assert_alone(trainer, reference, passes: int, tolerance: float = 1e-5) -> None:
    """Every row of every pass has the log-probabilities that it has in a row of its own."""
    assert len(trainer.scored) == passes
    for scored in trainer.scored:
        for (prompt, completion), log_probs in zip(scored.rows, scored.log_probs, strict=True):
            assert len(log_probs) == len(completion) > 0
            assert (log_probs - log_probs_alone(reference, prompt, completion)).abs().max() < tolerance
