"""What a run says about host memory before its first step."""

import logging

import pytest

import unsloth_trl
from tests.numerics import make_trainer
from unsloth_trl.patches.checkpointing.ram import HostMemory
from unsloth_trl.trainers import ram
from unsloth_trl.trainers.ram import host_memory_findings


GIB = 2**30


@pytest.mark.parametrize(
    "memory, max_pinned_gb, found",
    [
        (HostMemory(64 * GIB, 128 * GIB, 0, False), None, []),
        (HostMemory(64 * GIB, 128 * GIB, GIB // 2, False), 32.0, []),
        (HostMemory(64 * GIB, 128 * GIB, 3 * GIB, False), None, ["3.0 GiB are swapped out"]),
        (
            HostMemory(8 * GIB, 16 * GIB, 0, True),
            7.5,
            ["max_pinned_gb=7.5 is more than nine tenths", "this container"],
        ),
        (HostMemory(8 * GIB, 16 * GIB, 0, False), 20.0, ["the machine has left: ", "Set at most 4.0"]),
    ],
)
def test_findings(memory, max_pinned_gb, found):
    lines = host_memory_findings(memory, max_pinned_gb)
    assert bool(lines) == bool(found)
    assert all(part in " ".join(lines) for part in found)


@pytest.mark.parametrize("policy, said", [("offload", 1), ("auto", 1), ("recompute", 0)])
def test_the_trainer_says_it_before_the_first_step(policy, said, monkeypatch, caplog):
    monkeypatch.setattr(ram, "host_memory", lambda: HostMemory(8 * GIB, 16 * GIB, 5 * GIB, False))
    trainer = make_trainer(unsloth_trl, "llama", gradient_checkpointing=True, checkpoint_policy=policy, max_steps=2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert len([r for r in caplog.records if "5.0 GiB are swapped out" in r.getMessage()]) == said
