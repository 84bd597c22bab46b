"""The fused attention kernel through both trainers on a GPU, in fp32: packed is unpacked, shared prompts are not."""

import pytest
import torch

import unsloth_trl
from tests.numerics import assert_updates_close, masked_rows, run_sft
from tests.trainers.grpo_runs import run_ours


pytestmark = pytest.mark.gpu

# soft caps, sinks, windows, heads of unequal sizes, experts
MODELS = ["gpt_oss", "gemma2", "gemma3_text", "gemma4_text", "deepseek_v3"]
ON_GPU = {"use_cpu": False, "attention_backend": "triton"}
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def assert_same(run, expected, keys):
    assert len(run.logs) == len(expected.logs) > 0
    for own, other in zip(run.logs, expected.logs, strict=True):
        for key in keys:
            assert own[key] == pytest.approx(other[key], rel=TOLERANCE, abs=1e-6), key
    assert_updates_close(run.updates, expected.updates, TOLERANCE)
    assert "triton" in str(run.trainer.patch_report["attention"])


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_is_unpacked(model_type):
    settings = {
        "lora": True,
        "lora_kwargs": {"init_lora_weights": False},
        "rows": masked_rows(6, seed=3),
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 6,
        **ON_GPU,
    }
    packed = run_sft(unsloth_trl, model_type, packing=True, max_length=24, **settings)
    assert max(map(len, packed.trainer.train_dataset["seq_lengths"])) > 1
    unpacked = run_sft(unsloth_trl, model_type, **settings)
    assert_same(packed, unpacked, ("loss", "grad_norm", "entropy", "mean_token_accuracy"))


@pytest.mark.parametrize("model_type", MODELS)
def test_shared_is_not_shared(model_type):
    settings = {"lora": True, "lora_kwargs": {"init_lora_weights": False}, "beta": 0.04, **ON_GPU}
    shared = run_ours(model_type, **settings)
    assert shared.trainer.token_counts.shared < shared.trainer.token_counts.unshared
    assert_same(shared, run_ours(model_type, share_prompts=False, **settings), ("loss", "grad_norm", "entropy", "kl"))
