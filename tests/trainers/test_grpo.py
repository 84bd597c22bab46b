"""GRPOTrainer: where it shares and where it does not, what it counts, and what it leaves as TRL has it."""

import logging
import re

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl.trainer import grpo_trainer

import unsloth_trl
from tests.numerics import Run, assert_runs_close, snapshot, updates_since
from tests.tiny import EOS, EXPERT_PARAMETERS, lora_config, tiny_model, tiny_vlm
from tests.trainers.grpo_runs import (
    Regrouped,
    Rollouts,
    logs_of,
    make_grpo,
    reward,
    run_grpo,
    run_oracle,
    run_ours,
    settings,
)
from unsloth_trl import GRPOConfig, GRPOTrainer, UnsupportedArchitectureWarning


class Tokens:
    """How often each token goes through the model: a hook on the embedding."""

    def __init__(self, model):
        self.passes: list[list[int]] = []
        model.get_input_embeddings().register_forward_hook(self)

    def __call__(self, module, args, output):
        self.passes.append(args[0].flatten().tolist())


def test_the_prompt_goes_through_once_per_group_and_pass():
    """Three passes a step (policy, old, reference), two groups of four: the prompts' tokens are there once each."""
    trainer = make_grpo(
        unsloth_trl, "llama", lora=True, beta=0.1, max_steps=1, gradient_accumulation_steps=1, num_iterations=2
    )
    tokens = Tokens(trainer.model)
    seen = []
    rollouts = trainer.rollout_func.rollout_func
    trainer.rollout_func.rollout_func = lambda *args: seen.append(rollouts(*args)) or seen[-1]
    trainer.train()
    (output,) = seen
    prompts = {tuple(ids) for ids in output["prompt_ids"]}
    assert len(prompts) == 2 and len(output["completion_ids"]) == 8
    completions = sum(len(ids) for ids in output["completion_ids"])
    expected = sum(len(ids) - 1 for ids in prompts) + completions
    assert [len(ids) for ids in tokens.passes] == [expected] * 3
    # all prompts at the front, each without its last token, which comes again with each completion
    prefix = [token for ids in output["prompt_ids"] for token in ids[:-1]]
    for ids in tokens.passes:
        for prompt in prompts:
            starts = [i for i in range(len(ids)) if tuple(ids[i : i + len(prompt) - 1]) == prompt[:-1]]
            assert len(starts) == 1, prefix
    counts = trainer.token_counts
    assert counts.shared == 3 * expected
    assert counts.unshared == 3 * (sum(len(ids) - 1 for ids in output["prompt_ids"]) + completions)
    longest = max(map(len, output["prompt_ids"])) + max(map(len, output["completion_ids"]))
    assert counts.padded == 3 * 8 * longest


def test_real_rollouts_are_those_of_trl():
    """Sampling from the model, three steps with updates in between: the same completions and numbers."""
    runs = [
        run("llama", init={"rollout_func": None}, lora=True, gradient_accumulation_steps=2)
        for run in (run_ours, run_oracle)
    ]
    assert_runs_close(*runs, 1e-4)
    ours, theirs = (list(run.trainer._logs["completion"]) for run in runs)
    assert ours == theirs and len(set(ours)) > 4


def test_the_report_says_what_is_shared():
    trainer = make_grpo(unsloth_trl, "llama", lora=True, beta=0.1)
    report = trainer.patch_report
    assert report["attention"].applied and report["shared prompts"].applied and report["micro-batches"].applied
    assert report["lora"].applied
    assert report["lm_head"].applied and "its gradient in the forward" in report["lm_head"].detail
    report.remove()
    assert trainer.model.get_base_model().config._attn_implementation == "sdpa"


def test_the_reference_model_is_patched_too():
    trainer = make_grpo(unsloth_trl, "llama", beta=0.1)
    assert trainer.ref_model.config._attn_implementation == "unsloth_trl"
    tokens = Tokens(trainer.ref_model)
    trainer.train()
    assert [len(ids) for ids in tokens.passes] and sum(map(len, tokens.passes)) * 2 == trainer.token_counts.shared


def test_an_adapter_of_before_is_the_reference():
    """A PeftModel with a trained adapter: TRL copies it to `ref`, and the KL is to that copy."""

    def run(make, **kwargs):
        model = tiny_model("llama")
        torch.manual_seed(3)
        model = get_peft_model(model, lora_config("llama", init_lora_weights=False))
        return make(model, beta=0.5, optim="sgd", learning_rate=0.2, **kwargs)

    ours, theirs = run(run_ours), run(run_oracle)
    assert_runs_close(ours, theirs, 1e-4)
    assert ours.logs[0]["kl"] == pytest.approx(0.0, abs=1e-6) and ours.logs[2]["kl"] > 1e-4


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma4_text"])
def test_lora_on_experts(model_type):
    kwargs = {
        "lora": True,
        "lora_kwargs": {"target_parameters": EXPERT_PARAMETERS},
        "beta": 0.1,
    }
    ours, theirs = run_ours(model_type, **kwargs), run_oracle(model_type, **kwargs)
    assert_runs_close(ours, theirs, 1e-4)
    assert any("experts" in name for name in ours.updates)
    assert "as two thin products" in ours.trainer.patch_report["moe"].detail


def test_qlora(tmp_path):
    """NF4 base weights on the CPU; the adapter, which TRL makes bf16, in fp32 to compare updates."""
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    tiny_model("llama").save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def run(library, trainer_class=None):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=nf4, device_map={"": "cpu"})
        trainer = make_grpo(
            library,
            model,
            init={"peft_config": lora_config("llama")},
            trainer_class=trainer_class,
            beta=0.1,
            learning_rate=0.2,
        )
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        before = snapshot(trainer.model)
        trainer.train()
        return Run(trainer, logs_of(trainer), updates_since(before, trainer.model))

    ours = run(unsloth_trl)
    assert_runs_close(ours, run(trl, Regrouped), 1e-4)
    linear = ours.trainer.model.get_base_model().model.layers[0].mlp.gate_proj.base_layer
    assert type(linear).__name__ == "Linear4bit"
    assert ours.trainer.patch_report["shared prompts"].applied


def assert_falls_back(ours, reason):
    report = ours.trainer.patch_report
    assert not report["shared prompts"].applied and re.search(reason, report["shared prompts"].detail)
    assert not report["attention"].applied and not report["micro-batches"].applied
    assert ours.trainer.token_counts.shared == 0


def test_attention_dropout_falls_back(caplog):
    def run(run):
        model = tiny_model("llama", attention_dropout=0.3)
        return run(model, lora=False)

    with caplog.at_level(logging.WARNING):
        ours = run(run_ours)
    assert caplog.text.count("Prompts are not shared: attention_dropout=0.3") == 1
    assert_falls_back(ours, "attention_dropout=0.3")
    assert_runs_close(ours, run(lambda *args, **kwargs: run_grpo(trl, *args, **kwargs)), 1e-6)


def test_prefix_tuning_falls_back():
    def run(library):
        peft_config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        return run_grpo(library, "llama", init={"peft_config": peft_config})

    ours = run(unsloth_trl)
    assert_falls_back(ours, "PREFIX_TUNING puts virtual tokens")
    assert_runs_close(ours, run(trl), 1e-6)


def test_state_between_tokens_falls_back():
    with pytest.warns(
        UnsupportedArchitectureWarning, match="keep state between tokens. It trains on TRL's padded rows"
    ):
        ours = run_ours("kimi_linear", max_steps=2)
    assert_falls_back(ours, "kimi_linear.* keep state between tokens")
    assert_runs_close(ours, run_grpo(trl, "kimi_linear", max_steps=2), 1e-4)
    with pytest.raises(ValueError, match="keep state between tokens, and strict=True"):
        make_grpo(unsloth_trl, "kimi_linear", strict=True)


def test_an_unverified_architecture_falls_back_unless_allowed():
    def config_of(**overrides):
        return tiny_model("llama", **overrides)

    model = config_of()
    model.config.model_type = "llama_next"
    with pytest.warns(UnsupportedArchitectureWarning, match="llama_next.* is not among the verified"):
        trainer = make_grpo(unsloth_trl, model)
    assert not trainer.patch_report["shared prompts"].applied
    model = config_of()
    model.config.model_type = "llama_next"
    with pytest.warns(UnsupportedArchitectureWarning, match="allow_unverified=True shares prompts anyway"):
        trainer = make_grpo(unsloth_trl, model, allow_unverified=True)
    assert trainer.patch_report["shared prompts"].applied


@pytest.mark.filterwarnings("ignore::unsloth_trl.UnsupportedArchitectureWarning")
def test_images_fall_back():
    """A tiny LLaVA sampling from images: TRL's path, TRL's numbers."""
    runs = []
    for library in (unsloth_trl, trl):
        model, processor, rows = tiny_vlm()
        data = Dataset.from_list([{"prompt": row["prompt"], "images": row["images"]} for row in rows])

        def length(completions, completion_ids, **_):
            return [float(sum(ids) % 13) for ids in completion_ids]

        init = {
            "train_dataset": data,
            "processing_class": processor,
            "rollout_func": None,
            "reward_funcs": length,
            "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        }
        runs.append(run_grpo(library, model, init=init, max_steps=2, learning_rate=0.2, gradient_accumulation_steps=2))
    assert_falls_back(runs[0], "the dataset has images")
    assert_runs_close(*runs, 1e-5)


def test_groups_that_are_cut_are_announced(caplog):
    with caplog.at_level(logging.WARNING):
        make_grpo(unsloth_trl, "llama", per_device_train_batch_size=6, gradient_accumulation_steps=2)
    assert "per_device_train_batch_size=6 is not a multiple of num_generations=4" in caplog.text
    assert "per_device_train_batch_size=8 shares more" in caplog.text


def test_too_few_prompts_are_announced(caplog):
    with pytest.raises(ValueError, match="the train dataset is empty"):
        make_grpo(unsloth_trl, "llama", init={"train_dataset": Dataset.from_dict({"prompt": []})})
    with caplog.at_level(logging.WARNING):
        trainer = make_grpo(unsloth_trl, "llama", init={"train_dataset": Dataset.from_dict({"prompt": ["w9"]})})
    assert "has 1 prompts and a generation batch takes 2: train() makes no step" in caplog.text
    trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share_prompts": "yes"}, "share_prompts='yes' is not a bool"),
        ({"balance_tokens": 1}, "balance_tokens=1 is not a bool"),
        ({"max_tokens_per_pass": 0}, "max_tokens_per_pass=0 is less than 1"),
        ({"packed_metadata": False}, "packed_metadata=False is an ablation of SFTTrainer"),
        ({"attention_backend": "flash"}, "attention_backend='flash' is unknown"),
        ({"num_generations": 3, "per_device_train_batch_size": 8}, "divisible by"),
    ],
)
def test_config_errors_name_field_and_value(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings(output_dir=str(tmp_path), **fields))


def test_trls_own_config_is_taken(tmp_path):
    trainer = GRPOTrainer(
        tiny_model("llama"),
        reward,
        trl.GRPOConfig(**settings(output_dir=str(tmp_path))),
        rollout_func=Rollouts(),
        train_dataset=Dataset.from_dict({"prompt": ["w9", "w10"]}),
        processing_class=make_grpo(unsloth_trl, "llama").processing_class,
    )
    trainer.train()
    assert trainer.patch_report["shared prompts"].applied and trainer.token_counts.shared > 0


class StubVLLM:
    """What the trainer asks of TRL's vLLM client: completions with sampled log-probs, and where weights are synced."""

    def __init__(self, **kwargs):
        self.mode, self.synced = kwargs["mode"], 0
        self.rollouts = Rollouts()
        self.accelerator = kwargs["accelerator"]
        self.vllm_client = self

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images=None, num_generations=1, **_):
        output = self.rollouts([tuple(ids) for ids in prompts], self)
        # one list per token, the sampled one first, as vLLM returns them
        logprobs = [[[-0.1 * (i % 7) - 5.0] for i, _ in enumerate(ids)] for ids in output["completion_ids"]]
        ids = output["completion_ids"]
        return prompts, ids, logprobs, [[[i] for i in row] for row in ids]


@pytest.mark.parametrize("mode", ["server", "colocate"])
@pytest.mark.parametrize("correction", ["token_truncate", "sequence_truncate"])
def test_only_the_rollout_of_vllm_differs(mode, correction, monkeypatch):
    """A stand-in for TRL's vLLM client: old log-probs and the importance ratio come from shared rows."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", StubVLLM)
    fields = {"use_vllm": True, "vllm_mode": mode, "vllm_importance_sampling_mode": correction, "lora": True}
    runs = [run("llama", init={"rollout_func": None}, beta=0.1, **fields) for run in (run_ours, run_oracle)]
    # the ratio of a sequence is a power of its tokens' rounding: 3.1e-4 on a CPU with AVX-512
    assert_runs_close(*runs, 1e-3 if correction == "sequence_truncate" else 1e-4)
    assert runs[0].trainer.vllm_generation.synced == 3
    assert any(0 < entry["sampling/importance_sampling_ratio/mean"] != 1 for entry in runs[0].logs)
    counts = runs[0].trainer.token_counts
    assert counts.shared < counts.unshared < counts.padded


def test_a_second_trainer_takes_the_model_over():
    model = tiny_model("llama")
    first = make_grpo(unsloth_trl, model)
    first.train()
    second = make_grpo(unsloth_trl, model)
    assert first.patch_report.removed
    before = snapshot(model)
    second.train()
    assert logs_of(second)[0]["entropy"] > 0 and any(update.any() for update in updates_since(before, model).values())


def test_empty_completions_stay_empty_for_the_rewards():
    seen = []

    def rollout(prompts, trainer):
        completions = [[9, 10, EOS] if i % 2 else [] for i in range(len(prompts))]
        return {"prompt_ids": [[9, 11]] * len(prompts), "completion_ids": completions, "logprobs": None}

    def count(completions, completion_ids, **_):
        seen.append(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_grpo(unsloth_trl, "llama", init={"rollout_func": rollout, "reward_funcs": count}, max_steps=1)
    trainer.train()
    assert seen == [[[], [9, 10, EOS]] * 4]
    assert logs_of(trainer)[0]["completions/min_length"] == 0
    assert logs_of(trainer)[0]["grad_norm"] > 0
