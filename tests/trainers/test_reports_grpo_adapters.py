"""What users reported about GRPO with adapters (B30, B31, B33, B48) and about resuming (B35), through our trainer."""

import random
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

import unsloth_trl
from tests.numerics import assert_runs_close, assert_updates_close, snapshot
from tests.tiny import EOS, VOCAB, lora_config, tiny_model
from tests.trainers.grpo_runs import make_grpo, run_oracle, run_ours
from tests.trainers.grpo_spy import (
    ADAPTER,
    log_probs_alone,
)


EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize("model_type, adapter", [("qwen3_moe", EXPERTS), ("llama", {})], ids=["experts", "dense"])
@pytest.mark.parametrize("fresh", [False, True], ids=["trained", "fresh"])
def test_b30_the_reference_is_the_adapter_that_training_started_from(model_type, adapter, fresh):
    """KL 0 before the first step; the base model's would not be."""
    torch.manual_seed(3)
    config = lora_config(model_type, init_lora_weights=fresh, **adapter)
    model = get_peft_model(tiny_model(model_type), config)
    base = tiny_model(model_type).eval()
    ids = torch.tensor([[20, 21, 22, 23]])
    with torch.no_grad():
        distance = (model.eval()(ids).logits - base(ids).logits).abs().max()
    assert (distance == 0) if fresh else (distance > 0.1)
    run = run_ours(model.train(), beta=0.1, max_steps=2)
    assert 0 <= run.logs[0]["kl"] < 1e-6 < run.logs[1]["kl"]


def test_b31_an_adapter_on_the_head_is_refused():
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        make_grpo(unsloth_trl, "llama", lora=True, lora_kwargs={"target_modules": ["q_proj", "lm_head"]})


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_b31_a_head_that_is_trained_whole(name):
    """`modules_to_save` gets its gradient, and so does the adapter: TRL's."""
    adapter = {"target_modules": ["q_proj"], "modules_to_save": [name], "init_lora_weights": False}
    ours, theirs = (run("llama", lora=True, lora_kwargs=adapter, max_steps=2) for run in (run_ours, run_oracle))
    assert_runs_close(ours, theirs, 1e-4)
    (update,) = [update for key, update in ours.updates.items() if name in key]
    assert update.norm() > 1e-3


def test_b33_weights_for_the_generator():
    """TRL's synchronisation with vLLM, twice, from our patched LoRA layers: the merged weights, and nothing moves."""
    trainer = make_grpo(unsloth_trl, "llama", lora=True)
    assert trainer.patch_report["lora"].applied
    adapter = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for i, parameter in enumerate(adapter.values()):
            parameter.fill_(0.01 * (i + 1))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    received = []
    engine = SimpleNamespace(load_weights=lambda weights: received.extend((n, w.clone()) for n, w in weights))
    for name in ("model", "model_runner", "driver_worker", "model_executor", "llm_engine"):
        engine = SimpleNamespace(**{name: engine})
    engine.reset_prefix_cache = lambda: None
    generator = object.__new__(VLLMGeneration)
    vars(generator).update(
        mode="colocate",
        enable_sleep_mode=False,
        accelerator=trainer.accelerator,
        model=trainer.model,
        _dist=trainer._dist,
        llm=engine,
    )
    for _ in range(2):
        received.clear()
        generator.sync_weights()
        weights = dict(received)
        assert weights.keys() == tiny_model("llama").state_dict().keys()
        for layer in range(2):
            for slot in "self_attn.q self_attn.k self_attn.v self_attn.o mlp.gate mlp.up mlp.down".split():
                name = f"model.layers.{layer}.{slot}_proj"
                a, b, base = (
                    before[f"base_model.model.{name}.{part}.weight"]
                    for part in ("lora_A.default", "lora_B.default", "base_layer")
                )
                assert torch.allclose(weights[f"{name}.weight"], base + 2.0 * b @ a, atol=1e-6), name
        for name, parameter in trainer.model.named_parameters():
            if name in adapter:
                assert torch.equal(parameter, before[name]), name
            assert torch.allclose(parameter, before[name], atol=1e-6), name


class Deterministic:
    """Completions from the prompt, the step and the place in the group alone; keeps what the model says of one row."""

    def __init__(self):
        self.prompts, self.scores = [], {}

    def __call__(self, prompts, trainer):
        step = trainer.state.global_step
        self.prompts.append((step, sorted(set(prompts))))
        self.scores[step] = log_probs_alone(trainer.model, [20, 21, 22], [30, 31, 32])
        output = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        for i, prompt in enumerate(prompts):
            rng = random.Random(f"{prompt} {step} {i % trainer.num_generations}")
            output["prompt_ids"].append([int(word[1:]) for word in prompt.split()])
            output["completion_ids"].append([rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 9))] + [EOS])
        return output


class ScoreAtSave(TrainerCallback):
    def __init__(self):
        self.scores = {}

    def on_save(self, args, state, control, model=None, **kwargs):
        self.scores[state.global_step] = log_probs_alone(model, [20, 21, 22], [30, 31, 32])


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_b35_a_resumed_run_goes_on(tmp_path, lora):
    """4 steps, and 2 and 2: the same weights, logs and prompts; the rollouts come from the model that was saved."""

    def run(folder, steps, resume=None):
        rollouts, callback = Deterministic(), ScoreAtSave()
        trainer = make_grpo(
            unsloth_trl,
            "llama",
            **(ADAPTER if lora else {}),
            init={"rollout_func": rollouts, "callbacks": [callback]},
            output_dir=str(tmp_path / folder),
            save_strategy="steps",
            save_steps=2,
            max_steps=steps,
            gradient_accumulation_steps=2,
            optim="adamw_torch",
            beta=0.1 if lora else 0.0,
        )
        before = snapshot(trainer.model)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        after = snapshot(trainer.model)
        assert any((after[name] - before[name]).abs().max() > 1e-4 for name in after)
        logs = [{k: v for k, v in e.items() if k != "step_time"} for e in trainer.state.log_history if "loss" in e]
        return after, logs, rollouts, callback

    whole, logs, rollouts, saved = run("whole", 4)
    first, _, before, halfway = run("parts", 2)
    second, resumed_logs, after, _ = run("parts", 4, tmp_path / "parts" / "checkpoint-2")
    assert all((second[name] - whole[name]).abs().max() < 1e-6 for name in whole)
    assert any((second[name] - first[name]).abs().max() > 1e-4 for name in whole)
    assert [entry["step"] for entry in resumed_logs] == [1, 2, 3, 4]
    for mine, other in zip(resumed_logs, logs, strict=True):
        assert mine.keys() == other.keys()
        assert all(mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6) for key in mine)
    assert torch.allclose(halfway.scores[2], after.scores[2], atol=1e-6)
    assert torch.allclose(halfway.scores[2], saved.scores[2], atol=1e-6)
    assert before.prompts + after.prompts == rollouts.prompts and len(rollouts.prompts) == 4
    assert len({prompt for _, prompts in rollouts.prompts for prompt in prompts}) == 16


@pytest.mark.parametrize("called", [False, True], ids=["", "input-grads"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_b48_checkpointing_with_an_adapter(reentrant, called):
    """All four `lora_B` on q and v train, as without checkpointing, and the embedding stays frozen."""
    config = lora_config("llama", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = run_ours(tiny_model("llama"), init={"peft_config": config}, max_steps=1)
    for wrapped in (False, True):
        model = tiny_model("llama")
        if called:
            model.enable_input_require_grads()
        if wrapped:
            torch.manual_seed(0)
            model = get_peft_model(model, config)
        run = run_ours(
            model,
            init={} if wrapped else {"peft_config": config},
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
            max_steps=1,
        )
        assert len([name for name, update in run.updates.items() if "lora_B" in name and update.any()]) == 4
        assert not run.trainer.model.get_input_embeddings().weight.requires_grad
        assert_updates_close(run.updates, plain.updates, 1e-5)
