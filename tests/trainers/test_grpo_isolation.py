"""What else happens to the model, the batches or the class around GRPOTrainer never makes a number wrong."""

import time

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig

import unsloth_trl
from tests.numerics import assert_logs_close, assert_runs_close
from tests.tiny import tiny_model, tiny_rows, tiny_tokenizer
from tests.trainers.grpo_runs import Regrouped, logs_of, make_grpo, run_grpo, run_oracle, run_ours
from unsloth_trl import GRPOTrainer
from unsloth_trl.data.shared_prompts import Row, find_groups, order_rows


@pytest.fixture(scope="module")
def expected():
    """The logs of TRL."""
    return run_oracle("llama").logs


def train(trainer):
    trainer.train()
    return logs_of(trainer)


def test_a_removed_report(expected):
    trainer = make_grpo(unsloth_trl, "llama")
    trainer.patch_report.remove()
    assert_logs_close(train(trainer), expected, 1e-4)
    assert trainer.token_counts.shared == 0


def test_another_trainer_that_fails_to_be_built(expected):
    model = tiny_model("llama")
    first = make_grpo(unsloth_trl, model)
    with pytest.raises(ValueError, match="sync_ref_model"):
        make_grpo(unsloth_trl, model, sync_ref_model=True)
    assert_logs_close(train(first), expected, 1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_an_sft_trainer_on_the_same_model(expected, packing, tmp_path):
    model = tiny_model("llama")
    trainer = make_grpo(unsloth_trl, model)
    args = unsloth_trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, packing=packing, report_to="none")
    unsloth_trl.SFTTrainer(
        model, args, train_dataset=Dataset.from_list(tiny_rows(8, 0)), processing_class=tiny_tokenizer()
    )
    assert_logs_close(train(trainer), expected, 1e-4)


def test_removal_takes_the_patches_off_the_reference_too():
    trainer = make_grpo(unsloth_trl, "llama", beta=0.1)
    trainer.patch_report.remove()
    assert trainer.ref_model.config._attn_implementation == "sdpa"


def test_adapters_that_look_at_a_row():
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}

    def run(library, trainer_class=None):
        torch.manual_seed(1)
        peft_config = LoraConfig(**config, alora_invocation_tokens=[11])
        return run_grpo(
            library, "llama", init={"peft_config": peft_config}, trainer_class=trainer_class, learning_rate=0.01
        )

    ours = run(unsloth_trl)
    assert "alora_invocation_tokens" in ours.trainer.patch_report["shared prompts"].detail
    assert_runs_close(ours, run(trl), 1e-5)


def test_packing_refuses_adapters_that_look_at_a_row(tmp_path):
    args = unsloth_trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, packing=True, report_to="none")
    peft_config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[11])
    with pytest.raises(ValueError, match="packing with LORA with alora_invocation_tokens looks for them once per row"):
        unsloth_trl.SFTTrainer(
            tiny_model("llama"),
            args,
            train_dataset=Dataset.from_list(tiny_rows(8, 0)),
            processing_class=tiny_tokenizer(),
            peft_config=peft_config,
        )


class Longer:
    """Puts three tokens behind each prompt before the loss."""

    def _compute_loss(self, model, inputs):
        inputs = dict(inputs)
        more = torch.tensor([[40, 41, 42]]).repeat(len(inputs["prompt_ids"]), 1)
        inputs["prompt_ids"] = torch.cat([inputs["prompt_ids"], more], 1)
        inputs["prompt_mask"] = torch.cat([inputs["prompt_mask"], torch.ones_like(more)], 1)
        return super()._compute_loss(model, inputs)


class Reversed:
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, {key: v.flip(0) if v.ndim else v for key, v in inputs.items()})


class Contrasted:
    """Scores other prompts before the loss, through the same method."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"].flip(0), inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"].flip(0), inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        log_probs, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width)
        return super()._compute_loss(model, inputs) + 0.1 * log_probs.mean()


def above(change):
    """A subclass that changes the inputs before ours."""
    return type(change.__name__, (change, GRPOTrainer), {})


def below(change):
    """A class between ours and TRL's, which changes the inputs that ours has seen."""
    return type(change.__name__, (GRPOTrainer, type("Between", (change, trl.GRPOTrainer), {})), {})


@pytest.mark.parametrize("place", [above, below])
@pytest.mark.parametrize("change", [Longer, Reversed, Contrasted])
def test_subclasses_may_change_the_inputs(change, place):
    ours = run_grpo(unsloth_trl, "llama", trainer_class=place(change))
    theirs = run_grpo(trl, "llama", trainer_class=type(change.__name__, (change, Regrouped), {}))
    assert_runs_close(ours, theirs, 1e-4)
    assert ours.trainer.token_counts.shared < ours.trainer.token_counts.unshared


def test_scores_are_those_of_the_batch_that_is_given():
    """The same ids with another mask, another width, other values in place."""
    ours, theirs = (make_grpo(library, "llama") for library in (unsloth_trl, trl))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, 120, (8, 14), generator=generator)
    whole, cut = torch.ones_like(ids), torch.ones_like(ids)
    cut[:, :3] = 0

    @torch.no_grad()
    def assert_equal(mask, width):
        a, b = (
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, batch_size=4)[0]
            for trainer in (ours, theirs)
        )
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    assert_equal(whole, 6)
    assert_equal(cut, 6)
    assert_equal(cut, 4)
    ids[0, 3] = 77
    assert_equal(cut, 4)
    cut[1, 3] = 0
    assert_equal(cut, 4)


CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    # else a mask for half of the machine's memory is filled in each step
    "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
}


@pytest.mark.parametrize("fields", [{"cache_implementation": "static"}, CONTINUOUS], ids=["static", "continuous"])
def test_rollouts_of_other_caches_are_those_of_trl(fields):
    """One prompt in the generation batch: nothing is padded, no mask is needed, and none may be missing."""
    data = Dataset.from_dict({"prompt": ["w9 w10 w11 w12 w13"]})
    kwargs = {"init": {"rollout_func": None, "train_dataset": data}, "lora": True, "num_generations": 8, **fields}
    kwargs |= {"temperature": 0.2, "max_steps": 2}
    ours, theirs = run_ours("llama", **kwargs), run_oracle("llama", **kwargs)
    assert list(ours.trainer._logs["completion"]) == list(theirs.trainer._logs["completion"])
    assert_runs_close(ours, theirs, 1e-4)
    assert ours.trainer.token_counts.shared > 0


def test_a_compiled_model_without_patches(expected):
    trainer = make_grpo(unsloth_trl, torch.compile(tiny_model("llama"), backend="eager"), patches="none", max_steps=1)
    assert_logs_close(train(trainer), run_grpo(trl, "llama", max_steps=1).logs, 1e-4)


def test_two_thousand_rows_are_ordered_in_no_time():
    rows = [Row(str(i).encode(), 4096, 1 + i * 7919 % 512) for i in range(2048)]
    started = time.perf_counter()
    order = order_rows(rows, find_groups(rows, share=False), 16, 128)
    assert time.perf_counter() - started < 1.5
    assert sorted(order) == list(range(2048))
