"""Through both trainers: the policy changes no bit of a log or an update, whatever happens between micro-batches."""

import copy
import functools
import gc
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback

import unsloth_trl
from tests.numerics import EXPERTS, assert_logs_close, assert_updates_close, make_trainer, masked_rows, run_sft
from tests.tiny import tiny_model
from tests.trainers.grpo_runs import make_grpo, run_ours
from unsloth_trl import PatchConfig
from unsloth_trl.patches.checkpointing import offload, settings, slab
from unsloth_trl.patches.registry import base_model
from unsloth_trl.trainers.planning import settle_policy, why_not_checkpoint


POLICIES = ["recompute", "offload"]
# more layers than one, so that the order of the backward matters
LAYERS = {"num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    monkeypatch.setattr(settings, "ON_DEVICE", 0)
    monkeypatch.setattr(slab, "STEP", 1024)


SFT = {
    "llama-packed-lora": ("llama", {"lora": True, "packing": True}),
    "llama-packed-dropout": ("llama", {"lora": True, "packing": True, "lora_kwargs": {"lora_dropout": 0.3}}),
    "llama-padded-full": ("llama", {"packing": False}),
    "tied": ("llama", {"packing": True, "tied": True}),
    "experts": ("qwen3_moe", {"packing": True}),
    "experts-lora": ("qwen3_moe", {"lora": True, "packing": True}),
    "per-layer-embeddings": ("gemma4_text", {"packing": True, "lora": True}),
    "sinks": ("gpt_oss", {"packing": True, "attention_backend": "eager"}),
}


def sft(name, policy_name, **fields):
    model_type, kwargs = SFT[name]
    kwargs = dict(kwargs)
    if kwargs.pop("tied", False):
        kwargs["model"] = tiny_model(model_type, tie_word_embeddings=True, **LAYERS)
    checkpointing = {"gradient_checkpointing": policy_name is not None}
    if policy_name is not None:
        checkpointing["checkpoint_policy"] = policy_name
    return run_sft(unsloth_trl, model_type, **kwargs, **checkpointing, **fields)


def assert_same_bits(actual, expected):
    assert actual.logs == expected.logs and len(actual.logs) > 1
    assert actual.updates.keys() == expected.updates.keys()
    different = [name for name, update in expected.updates.items() if not torch.equal(actual.updates[name], update)]
    assert not different
    assert any(update.any() for update in expected.updates.values())


@pytest.mark.parametrize("policy_name", [*POLICIES, "keep", "auto"])
@pytest.mark.parametrize("name", SFT)
def test_sft_has_the_same_bits(name, policy_name):
    run = sft(name, policy_name)
    assert_same_bits(run, _plain(name))
    plan = run.trainer._plan
    wanted = "recompute" if policy_name == "auto" else policy_name
    assert plan.actions == [wanted] * plan.num_layers
    assert (plan.offloader.nbytes > 0) == (policy_name == "offload")
    assert all(mover.slab.used == 0 for mover in plan.offloader._movers.values())


@functools.cache
def _plain(name):
    return sft(name, None)


GRPO = {
    "lora": ("llama", {"lora": True, "beta": 0.1}),
    "dropout": ("llama", {"lora": True, "lora_kwargs": {"lora_dropout": 0.3}, "num_iterations": 2}),
    "experts": ("qwen3_moe", {"gradient_accumulation_steps": 2}),
    "from-the-model": ("llama", {"lora": True, "init": {"rollout_func": None}, "max_completion_length": 6}),
}


@pytest.mark.parametrize("name", GRPO)
def test_grpo_has_the_same_bits(name):
    model_type, kwargs = GRPO[name]
    expected = run_ours(model_type, gradient_checkpointing=False, **kwargs)
    for policy_name in POLICIES:
        run = run_ours(model_type, gradient_checkpointing=True, checkpoint_policy=policy_name, **kwargs)
        assert_same_bits(run, expected)
        assert (run.trainer._plan.offloader.nbytes > 0) == (policy_name == "offload")


@pytest.mark.parametrize("failing", [1, 5])
def test_b47_page_locking_that_fails(failing, monkeypatch, caplog):
    """As under WSL, where most of the memory cannot be page-locked: training goes on, and says so once."""
    requests = []

    def lock(buffer):
        requests.append(buffer.numel())
        if len(requests) == failing:
            raise RuntimeError("CUDA error: out of memory")

    original = slab.HostSlab
    monkeypatch.setattr(offload, "HostSlab", lambda limit, *_: original(limit, lock))
    monkeypatch.setattr(slab, "PIECE", 1)  # a request for each layer's input
    monkeypatch.setattr(settings, "TILE_FROM", 10**9)
    model = tiny_model("llama", num_hidden_layers=6)
    expected = run_sft(unsloth_trl, "llama", model=copy.deepcopy(model), packing=True, gradient_checkpointing=False)
    run = run_sft(
        unsloth_trl, "llama", model=model, packing=True, gradient_checkpointing=True, checkpoint_policy="offload"
    )
    assert_same_bits(run, expected)
    assert len(requests) == failing
    assert len([r for r in caplog.records if "pageable memory" in r.getMessage()]) == 1
    assert run.trainer._plan.offloader.mover(torch.device("cpu")).slab.is_pageable


def test_b47_less_host_memory_than_needed(monkeypatch, caplog):
    """Two of three inputs find room: the third stays on the device."""
    expected = _plain("llama-packed-lora")
    run = sft("llama-packed-lora", "offload", max_pinned_gb=8192 / 2**30)
    assert_same_bits(run, expected)
    slab_of = run.trainer._plan.offloader.mover(torch.device("cpu")).slab
    assert 0 < slab_of.nbytes <= 8192
    assert len([r for r in caplog.records if "stay on the device" in r.getMessage()]) == 1


class LayerForwards:
    """Counts the forwards of all layers under training."""

    def __init__(self, model):
        self.n = 0
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.n += module.training


@pytest.mark.parametrize(
    "fields, forwards",
    [
        ({"gradient_checkpointing": False}, 1),
        ({"gradient_checkpointing": True, "checkpoint_policy": "keep"}, 1),
        ({"gradient_checkpointing": True, "checkpoint_policy": "recompute"}, 2),
        ({"gradient_checkpointing": True, "checkpoint_policy": "offload"}, 2),
    ],
    ids=["off", "keep", "recompute", "offload"],
)
def test_b53_checkpointing_can_be_turned_off(fields, forwards):
    model = tiny_model("llama", **LAYERS)
    trainer = make_trainer(unsloth_trl, "llama", model=model, max_steps=1, gradient_accumulation_steps=1, **fields)
    count = LayerForwards(model)
    trainer.train()
    assert count.n == forwards * 3


class InBetween(TrainerCallback):
    """Evaluates and generates between the micro-batches of a step, and leaves the random state as it was."""

    def __init__(self):
        self.times = 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.times += 1
        with torch.random.fork_rng(devices=[]):
            self.trainer.evaluate()
            model = self.trainer.model
            model.eval()
            with torch.no_grad():
                model.generate(input_ids=torch.arange(3, 9)[None], max_new_tokens=3, do_sample=False)
            model.train()


@pytest.mark.parametrize("policy_name", POLICIES)
def test_evaluation_and_generation_between_micro_batches(policy_name):
    def run(interrupted):
        callback = InBetween()
        trainer = make_trainer(
            unsloth_trl,
            "llama",
            lora=True,
            packing=True,
            eval_rows=masked_rows(5, seed=9),
            gradient_checkpointing=True,
            checkpoint_policy=policy_name,
            gradient_accumulation_steps=3,
            max_steps=3,
            trainer_kwargs={"callbacks": [callback] if interrupted else []},
        )
        callback.trainer = trainer
        trainer.train()
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, callback.times

    (plain, _), (interrupted, times) = run(False), run(True)
    assert times >= 4
    assert all(torch.equal(interrupted[name], value) for name, value in plain.items())


def test_tiles_through_the_trainers(monkeypatch):
    monkeypatch.setattr(settings, "TILE", 8)
    monkeypatch.setattr(settings, "TILE_FROM", 16)
    for name in ("llama-packed-lora", "tied", "per-layer-embeddings"):
        run = sft(name, "offload")
        assert run.trainer._plan.notch.tile == 8
        assert_logs_close(run.logs, _plain(name).logs, 1e-5)
        assert_updates_close(run.updates, _plain(name).updates, 1e-4)
    ours = run_ours("llama", lora=True, beta=0.1, gradient_checkpointing=True, checkpoint_policy="offload")
    assert ours.trainer._plan.notch.tile == 8
    plain = run_ours("llama", lora=True, beta=0.1, gradient_checkpointing=False)
    assert_logs_close(ours.logs, plain.logs, 1e-5)
    assert_updates_close(ours.updates, plain.updates, 1e-4)


def test_tiles_over_forwards_of_liger(monkeypatch):
    """`train` binds them to the modules, over what the patches put there; here they are the model's own."""
    calls = []

    def apply_liger_kernel(model, config):
        for layer in base_model(model).model.layers:
            mlp = layer.mlp

            def forward(x, mlp=mlp):
                calls.append(x.shape[1])
                return type(mlp).forward(mlp, x)

            mlp.forward = forward

    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", apply_liger_kernel)
    monkeypatch.setattr(settings, "TILE", 8)
    monkeypatch.setattr(settings, "TILE_FROM", 16)
    run = sft("llama-packed-lora", "offload", use_liger_kernel=True, trainer_kwargs={"callbacks": []})
    assert_logs_close(run.logs, _plain("llama-packed-lora").logs, 1e-5)
    assert_updates_close(run.updates, _plain("llama-packed-lora").updates, 1e-4)
    assert calls and max(calls) <= 8
    assert "use_liger_kernel=True" in str(run.trainer.patch_report["compilation"].detail)
    del calls[:]
    run.trainer.train()  # which binds them again
    assert calls and max(calls) <= 8


def bind_to_experts(model, config):
    """What Liger does to a mixture, whose experts are inside of wrappers of PEFT's or are not."""

    def forward(self, *args):
        raise AssertionError("LoRA on the experts is left out")

    forward.__module__ = "liger_kernel.transformers.swiglu"
    for layer in base_model(model).model.layers:
        experts = layer.mlp.experts
        experts.__dict__["forward"] = forward.__get__(experts)
        experts.__dict__["_get_name"] = (lambda self: "LigerExperts").__get__(experts)


@pytest.mark.parametrize("experts", [EXPERTS, {"lora": True}], ids=["lora on experts", "frozen experts"])
def test_experts_are_not_liger_s(experts, monkeypatch, caplog):
    plain = run_sft(unsloth_trl, "qwen3_moe", packing=True, **experts)
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", bind_to_experts)
    run = run_sft(unsloth_trl, "qwen3_moe", packing=True, use_liger_kernel=True, **experts)
    assert_logs_close(run.logs, plain.logs, 1e-6)
    assert_updates_close(run.updates, plain.updates, 1e-6)
    assert "experts stay with this package's kernels" in caplog.text
    assert str(run.trainer.patch_report["moe"]) == str(plain.trainer.patch_report["moe"])
    run.trainer.train()  # which binds them again
    run.trainer.patch_report.remove()
    assert not [
        m for m in run.trainer.model.modules() if "forward" in m.__dict__ and m is not base_model(run.trainer.model)
    ]
    assert "LigerExperts" not in repr(run.trainer.model)


def test_liger_without_patches(monkeypatch):
    calls = []
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda *args: calls.append(args))
    run = run_sft(unsloth_trl, "llama", lora=True, packing=True, patches="none", use_liger_kernel=True)
    assert len(calls) == 1
    assert_logs_close(run.logs, _plain("llama-packed-lora").logs, 1e-5)
    assert_updates_close(run.updates, _plain("llama-packed-lora").updates, 1e-4)


def held_tensors():
    gc.collect()
    return sum(t.numel() * t.element_size() for t in gc.get_objects() if type(t) is torch.Tensor)


def test_b84_grpo_memory_does_not_climb():
    """60 steps with completions of all lengths: nothing grows between equal steps."""
    seen = []

    class Measure(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (12, 36, 60):
                slab_bytes = trainer._plan.offloader.nbytes
                seen.append((held_tensors(), slab_bytes, sum(len(v) for v in trainer._metrics["train"].values())))

    def rollout(prompts, trainer):
        step = trainer.state.global_step
        lengths = [4 + (step * 5 + i) % 12 * 5 for i in range(len(prompts))]
        return {
            "prompt_ids": [[9, 10, 11]] * len(prompts),
            "completion_ids": [[12 + (i + step) % 20] * n for i, n in enumerate(lengths)],
            "logprobs": None,
        }

    trainer = make_grpo(
        unsloth_trl,
        "llama",
        lora=True,
        init={"rollout_func": rollout, "callbacks": [Measure()]},
        max_steps=60,
        num_train_epochs=100,
        max_completion_length=64,
        gradient_checkpointing=True,
        checkpoint_policy="offload",
    )
    trainer.train()
    assert len(seen) == 3
    # the cycle of lengths is 12 steps; the history of logs grows by numbers, not by tensors
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"gradient_checkpointing": False}, "gradient_checkpointing=False"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "every_n_layers"),
    ],
)
def test_the_report_says_why_not(fields, reason):
    fields = {"gradient_checkpointing": True} | fields
    entry = make_trainer(unsloth_trl, "llama", **fields).patch_report["checkpointing"]
    assert not entry.applied and reason in str(entry.detail)


def test_why_not_elsewhere():
    args = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs=None, activation_offloading=True)
    accelerator = SimpleNamespace(distributed_type=DistributedType.NO)
    assert why_not_checkpoint(args, accelerator).startswith("activation_offloading=True")
    args.activation_offloading = False
    assert why_not_checkpoint(args, accelerator) is None
    accelerator.distributed_type = DistributedType.DEEPSPEED
    assert "DeepSpeed" in why_not_checkpoint(args, accelerator)


def test_auto_leaves_memory_that_is_not_the_trainers_alone():
    config = PatchConfig()
    one_card = [SimpleNamespace(device=torch.device("cuda", 0))] * 3
    model = SimpleNamespace(parameters=lambda: one_card)
    plain = SimpleNamespace(accelerator=SimpleNamespace(distributed_type=DistributedType.NO), model=model)
    assert settle_policy(config, plain) is config
    plain.use_vllm, plain.vllm_mode = True, "server"
    assert settle_policy(config, plain) is config
    plain.vllm_mode = "colocate"
    assert settle_policy(config, plain).checkpoint_policy == "recompute"
    assert settle_policy(PatchConfig(checkpoint_policy="keep"), plain).checkpoint_policy == "keep"
    sharded = SimpleNamespace(accelerator=SimpleNamespace(distributed_type=DistributedType.FSDP), model=model)
    assert settle_policy(config, sharded).checkpoint_policy == "recompute"
    two_cards = SimpleNamespace(parameters=lambda: [*one_card, SimpleNamespace(device=torch.device("cuda", 1))])
    split = SimpleNamespace(accelerator=plain.accelerator, model=two_cards)
    assert settle_policy(config, split).checkpoint_policy == "recompute"


def test_the_report_says_what_the_plan_is():
    run = sft("llama-packed-lora", "offload")
    text = str(run.trainer.patch_report)
    assert "checkpoint_policy='offload': " in text and "recompute from inputs in host memory" in text


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"checkpoint_policy": "offloaded"}, "checkpoint_policy='offloaded' is unknown"),
        ({"max_pinned_gb": 0.0}, "max_pinned_gb=0.0 is not above 0"),
        ({"staging_buffers": 4}, "staging_buffers=4 is not 1, 2 or 3"),
    ],
)
def test_wrong_values_name_field_and_value(fields, message, tmp_path):
    for config in (unsloth_trl.SFTConfig, unsloth_trl.GRPOConfig):
        with pytest.raises(ValueError, match=message):
            config(str(tmp_path), use_cpu=True, **fields)
