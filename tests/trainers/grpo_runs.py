"""Short GRPO runs of our trainer and of TRL's with the same rollouts, on the CPU in fp32."""

import copy
import functools
import random
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import PreTrainedModel

import unsloth_trl
from tests.numerics import ADAMW, CPU, SGD, SGD_LORA, Run, snapshot, updates_since
from tests.tiny import EOS, VOCAB, lora_config, tiny_model, tiny_tokenizer
from unsloth_trl.data.shared_prompts import describe_rows, find_groups, order_rows


LOGGED = ("loss", "grad_norm", "entropy", "kl", "aux_loss", "policy_loss", "entropy_coef", "reward", "num_tokens")
LOGGED_PREFIXES = ("clip_ratio", "cispo", "vespo", "completions", "sampling", "rewards")


class Rollouts:
    """
    Random prompts and completions, the same for the same seed: `G` completions for each prompt, of 1 to `longest`
    tokens, every third one cut off before its end of sequence.
    """

    def __init__(self, longest: int = 9, prompts: tuple[int, int] = (2, 12), extra=None, seed: int = 0):
        self.longest, self.prompts, self.extra, self.calls = longest, prompts, extra or {}, 0
        self.seed = seed

    def __call__(self, prompts, trainer) -> dict[str, Any]:
        self.calls += 1
        output = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        rng = random.Random(f"{self.seed} {self.calls} {trainer.accelerator.process_index}")
        for prompt in prompts:
            own = random.Random(str(prompt))
            output["prompt_ids"].append(ids(own, own.randint(*self.prompts)))
            completion = ids(rng, rng.randint(0, self.longest - 1))
            output["completion_ids"].append([*completion, EOS if rng.random() < 0.66 else rng.randrange(8, VOCAB)])
        for name, make in self.extra.items():
            output[name] = [make(rng, completion) for completion in output["completion_ids"]]
        return output


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(8, VOCAB) for _ in range(n)]


def reward(completions, completion_ids, **_):
    """Differs within almost every group."""
    return [sum(tokens) % 17 / 17 + 0.1 * len(tokens) for tokens in completion_ids]


def settings(**fields) -> dict[str, Any]:
    base = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 9,
        "max_steps": 3,
        "seed": 0,
        **CPU,
        **SGD,
    }
    merged = base | fields
    if merged.get("optim") == "adamw_torch":
        merged = ADAMW | merged
    merged.setdefault("output_dir", tempfile.mkdtemp(prefix="unsloth_trl_test_"))
    return merged


def make_grpo(
    library: Any,
    model: str | PreTrainedModel,
    *,
    lora: bool = False,
    lora_kwargs: dict | None = None,
    init: dict | None = None,
    rollouts: Callable[[], Rollouts] = Rollouts,
    trainer_class: type | None = None,
    **fields: Any,
):
    """
    A `GRPOTrainer`; the same model, prompts, rollouts and order for the same arguments.

    Args:
        library: `trl` or `unsloth_trl`.
        model: One of `tests.tiny.ARCHITECTURES`, or a model.
        lora, lora_kwargs: Train an adapter, else all weights.
        init: Arguments of the trainer itself; `rollout_func=None` samples from the model.
        rollouts: Makes the rollout function.
        trainer_class: Instead of the library's.
        fields: For its config.
    """
    init = {"rollout_func": rollouts(), "reward_funcs": reward} | copy.copy(init or {})
    if init["rollout_func"] is None:
        del init["rollout_func"]
    init.setdefault("train_dataset", Dataset.from_dict({"prompt": [f"w{i + 9} w{i + 10}" for i in range(16)]}))
    init.setdefault("processing_class", tiny_tokenizer())
    if lora:
        init["peft_config"] = lora_config(model, **(lora_kwargs or {}))
        fields = SGD_LORA | fields
    if isinstance(model, str):
        model = loaded_from(model) if fields.get("beta") and not lora else tiny_model(model)
    torch.manual_seed(0)
    return (trainer_class or library.GRPOTrainer)(
        model,
        args=library.GRPOConfig(**settings(**fields)),
        **init,
    )


@functools.cache
def _saved(model_type: str) -> str:
    folder = tempfile.mkdtemp(prefix="unsloth_trl_test_")
    tiny_model(model_type).save_pretrained(folder)
    return folder


def loaded_from(model_type: str) -> PreTrainedModel:
    """A tiny model that knows its folder: TRL loads the reference model from there."""
    model = tiny_model(model_type)
    model.config._name_or_path = _saved(model_type)
    return model


def logs_of(trainer) -> list[dict[str, float]]:
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [
        {
            key: float("nan") if value is None else float(value)
            for key, value in entry.items()
            if key in LOGGED or key.startswith(LOGGED_PREFIXES)
        }
        for entry in history
    ]


def run_grpo(library: Any, model: str | PreTrainedModel, **kwargs: Any) -> Run:
    """Train; arguments as in `make_grpo`."""
    trainer = make_grpo(library, model, **kwargs)
    before = snapshot(trainer.model)
    trainer.train()
    return Run(trainer, logs_of(trainer), updates_since(before, trainer.model))


class Regrouped(trl.GRPOTrainer):
    """TRL's trainer with the micro-batches that ours would make, and nothing else of ours."""

    balances = True

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or not self.model.training:
            return inputs
        batches = self._buffered_inputs
        whole = {
            key: torch.cat([b[key] for b in batches]) if batches[0][key].ndim else batches[0][key]
            for key in batches[0]
        }
        width = whole["completion_ids"].shape[1]
        rows = describe_rows(
            torch.cat([whole["prompt_ids"], whole["completion_ids"]], 1),
            torch.cat([whole["prompt_mask"], whole["completion_mask"]], 1),
            width,
        )
        spg, ga = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        window = max(w for w in range(1, spg + 1) if spg % w == 0 and ga % w == 0)
        order = torch.tensor(order_rows(rows, find_groups(rows), len(rows) // spg, window, balance=self.balances))
        whole = {key: value[order] if value.ndim else value for key, value in whole.items()}
        n = len(order) // spg
        self._buffered_inputs = [
            {key: value[i * n : (i + 1) * n] if value.ndim else value for key, value in whole.items()}
            for i in range(spg)
        ]
        return self._buffered_inputs[self._step % spg]


class RegroupedUnbalanced(Regrouped):
    balances = False


def run_oracle(model: str | PreTrainedModel, **kwargs: Any) -> Run:
    """TRL on our micro-batches; arguments as in `make_grpo`, those of our config included."""
    balance, _ = kwargs.pop("balance_tokens", True), kwargs.pop("max_tokens_per_pass", None)
    return run_grpo(trl, model, trainer_class=Regrouped if balance else RegroupedUnbalanced, **kwargs)


def run_ours(model: str | PreTrainedModel, **kwargs: Any) -> Run:
    return run_grpo(unsloth_trl, model, **kwargs)
