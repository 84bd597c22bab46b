"""Checkpoint policies on a GPU: the same bits in every gradient, whatever the copies' timing, in constant memory."""

import gc
import os
import random

import pytest
import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import lora_config
from unsloth_trl import PatchConfig, apply_patches
from unsloth_trl.patches.checkpointing import offload, settings, slab
from unsloth_trl.patches.checkpointing.patch import current_plan
from unsloth_trl.patches.checkpointing.settings import Notch
from unsloth_trl.patches.layout import PackedLayout
from unsloth_trl.patches.registry import base_model


pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
LENGTHS = [900, 1, 300, 77, 770]
HIDDEN, LAYERS = 512, 6


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def build(policy_name: str, dropout: float = 0.0, intermediate: int = 1024, **config):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=HIDDEN,
            intermediate_size=intermediate,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    ).to("cuda", torch.bfloat16)
    model = get_peft_model(model, lora_config("llama", lora_dropout=dropout, r=8)).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)  # PEFT starts with zeros, and the gradient of lora_A would be zero
    base = base_model(model)
    apply_patches(model, PatchConfig(checkpoint_policy=policy_name, **config))
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    return model, current_plan(base)


def step(model, seed: int, lengths=LENGTHS):
    """Loss and the gradient of every trained weight for one packed row."""
    torch.manual_seed(seed)
    layout = PackedLayout(lengths).to("cuda")
    ids = torch.randint(512, (1, sum(lengths)), device="cuda")
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(input_ids=ids, position_ids=layout.position_ids, packed_layout=layout).logits
        loss = torch.nn.functional.cross_entropy(logits[0].float(), ids[0].roll(-1))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(actual, expected):
    assert torch.equal(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys() and len(actual[1]) == 2 * 7 * LAYERS
    for name, gradient in expected[1].items():
        assert torch.equal(actual[1][name], gradient), name


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("staging", [1, 2, 3])
def test_same_bits(dropout, staging):
    results = {}
    for name in ("keep", "recompute", "offload"):
        model, plan = build(name, dropout, staging_buffers=staging)
        results[name] = [step(model, seed) for seed in range(3)]
    assert plan.actions == ["offload"] * (LAYERS - 2) + ["recompute"] * 2
    assert plan.offloader.nbytes >= (LAYERS - 2) * sum(LENGTHS) * HIDDEN * 2
    for name in ("recompute", "offload"):
        for actual, expected in zip(results[name], results["keep"], strict=True):
            assert_same_bits(actual, expected)


def test_delayed_copies_change_nothing(monkeypatch):
    rng = random.Random(0)
    lengths = [[rng.randint(1, 600) for _ in range(rng.randint(1, 5))] for _ in range(10)]
    model, plan = build("recompute")
    expected = [step(model, i, lengths[i]) for i in range(10)]
    plan.use(Notch(offload=True))

    original = torch.Tensor.copy_

    def delayed(self, source, *args, **kwargs):
        if self.device.type != source.device.type:
            torch.cuda._sleep(rng.randrange(0, 2_000_000))  # up to a millisecond, on the stream of the copy
        return original(self, source, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", delayed)
    in_use = []
    for i in range(200):
        plan.use(Notch(offload=True, staging=rng.choice([1, 2, 3])))
        actual = step(model, i % 10, lengths[i % 10])
        assert_same_bits(actual, expected[i % 10])
        del actual
        if i in (9, 199):  # after the same row
            gc.collect()
            torch.cuda.synchronize()
            in_use.append((torch.cuda.memory_allocated(), plan.offloader.nbytes))
    assert in_use[0] == in_use[1]


@pytest.mark.parametrize("failing", [1, 5])
def test_pinning_that_fails(monkeypatch, failing):
    model, plan = build("recompute")
    expected = step(model, 0)
    monkeypatch.setattr(slab, "PIECE", 1)  # a request for each input
    monkeypatch.setattr(settings, "ON_DEVICE", 0)
    monkeypatch.setattr(offload, "page_lock", _fails_at(failing))
    plan.use(Notch(offload=True))
    assert_same_bits(step(model, 0), expected)
    assert_same_bits(step(model, 0), expected)
    mover = plan.offloader.mover(torch.device("cuda", 0))
    assert mover.slab.is_pageable


def _fails_at(failing):
    calls = []

    def lock(buffer):
        calls.append(buffer)
        if len(calls) == failing:
            raise RuntimeError("CUDA error: out of memory")

    return lock


def test_a_page_lock_that_is_refused_leaves_no_error_behind():
    """CUDA keeps the last error, and the launch of the next kernel would raise it."""
    buffer = torch.empty(2**20, dtype=torch.uint8)
    slab.page_lock(buffer)
    with pytest.raises(RuntimeError, match="CUDA error 712"):  # it is locked already
        slab.page_lock(buffer)
    assert (torch.ones(4, device="cuda") + 1).sum().item() == 8
    slab.page_unlock(buffer, torch.device("cuda", 0))


def test_tiles_are_as_exact(monkeypatch):
    monkeypatch.setattr(settings, "TILE", 256)
    monkeypatch.setattr(settings, "TILE_FROM", 512)
    model, _ = build("keep")
    expected = step(model, 0)
    model, plan = build("offload")
    actual = step(model, 0)
    assert plan.notch.tile == 256
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=2e-3)
    for name, gradient in expected[1].items():
        error = (actual[1][name].double() - gradient.double()).norm() / gradient.double().norm()
        assert error < 2e-2, name


def test_tiles_need_less_memory(monkeypatch):
    lengths = [4000] * 8
    peaks = {}
    for tile in (0, 1024):
        model, plan = build("recompute", intermediate=4096)
        step(model, 0, [8])
        plan.use(Notch(tile=tile))
        monkeypatch.setattr(settings, "TILE_FROM", 10**9)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        layout = PackedLayout(lengths).to("cuda")
        ids = torch.randint(512, (1, sum(lengths)), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            base_model(model).model(
                input_ids=ids, position_ids=layout.position_ids, packed_layout=layout
            ).last_hidden_state.sum().backward()
        peaks[tile] = torch.cuda.max_memory_allocated() - before
    assert peaks[1024] < 0.6 * peaks[0], peaks
