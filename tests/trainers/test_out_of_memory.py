"""A micro-batch that runs out of memory is run again with a lower plan: same gradients, metrics counted once."""

import functools

import pytest
import torch
from transformers import TrainerCallback

import unsloth_trl
from tests.numerics import make_trainer, snapshot, updates_since
from tests.trainers.grpo_runs import Rollouts, make_grpo
from unsloth_trl.patches.checkpointing import checkpoint, offload
from unsloth_trl.trainers import planning


MICRO_BATCHES = 3


class Faults:
    """
    Raises an out-of-memory error in one layer, in the forward or while its backward recomputes it.

    Args:
        layer (`int`): Which layer.
        micro_batch (`int`): In which micro-batch of the run, from 0.
        where (`str`): `"forward"` or `"backward"`.
        times (`int`): How often, in a row.
    """

    def __init__(self, layer, micro_batch, where, times=1, error=torch.OutOfMemoryError):
        self.layer, self.micro_batch, self.where, self.left, self.error = layer, micro_batch, where, times, error
        self.seen = -1
        self.raised = 0

    def install(self, monkeypatch):
        faults = self
        original = checkpoint.LayerCheckpoint.__call__

        def call(self, function, *args, **kwargs):
            if not torch.is_grad_enabled():
                return original(self, function, *args, **kwargs)
            if self.index == 0 and faults.left == faults.total:
                faults.seen += 1
            runs = []

            def counted(*tensors, **named):
                runs.append(None)
                second = len(runs) == 2
                if self.index == faults.layer and faults.seen == faults.micro_batch and faults.left:
                    if second == (faults.where == "backward"):
                        faults.left -= 1
                        faults.raised += 1
                        raise faults.error("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return function(*tensors, **named)

            return original(self, counted, *args, **kwargs)

        self.total = self.left
        monkeypatch.setattr(checkpoint.LayerCheckpoint, "__call__", call)
        return self


class Gradients(TrainerCallback):
    """The gradients of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def run(task="sft", **fields):
    watch = Gradients()
    fields = {"gradient_checkpointing": True, "checkpoint_policy": "recompute"} | fields
    fields |= {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": 2, "lora": True}
    fields["lora_kwargs"] = {"lora_dropout": 0.2}
    if task == "sft":
        trainer = make_trainer(unsloth_trl, "llama", packing=True, trainer_kwargs={"callbacks": [watch]}, **fields)
    else:
        rollouts = Rollouts()
        trainer = make_grpo(
            unsloth_trl, "llama", init={"rollout_func": rollouts, "callbacks": [watch]}, beta=0.1, **fields
        )
        trainer.rollouts = rollouts
    before = snapshot(trainer.model)
    trainer.train()
    logs = [
        {k: v for k, v in log.items() if "time" not in k and "second" not in k} for log in trainer.state.log_history
    ]
    return trainer, watch.steps, updates_since(before, trainer.model), [log for log in logs if "loss" in log]


@functools.cache
def plain(task):
    return run(task)[1:]


def assert_same(actual, expected):
    for ours, theirs in zip(actual[0], expected[0], strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(actual[1][name], value) for name, value in expected[1].items())
    assert actual[2] == expected[2]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("micro_batch", [0, 1, 5])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_bit_equal_gradients_and_metrics_counted_once(task, micro_batch, layer, where, monkeypatch):
    expected = plain(task)
    faults = Faults(layer, micro_batch, where).install(monkeypatch)
    trainer, *actual = run(task)
    assert faults.raised == 1
    assert_same(actual, expected)
    assert trainer._plan.notch.offload and "out of memory" in trainer._plan.changes[-1]
    if task == "grpo":
        calls = trainer.rollouts.calls
        assert calls == 2, "the completions were sampled again"


def test_several_errors_in_a_row_go_down_notch_by_notch(monkeypatch):
    expected = plain("sft")
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    faults = Faults(1, 1, "forward", times=2).install(monkeypatch)
    trainer, *actual = run("sft", checkpoint_policy="keep")
    assert faults.raised == 2
    assert_same(actual, expected)
    assert trainer._plan.notch.keep == 0 and len(trainer._plan.changes) == 3


@pytest.mark.parametrize("error", [MemoryError, RuntimeError], ids=["host", "pinned"])
def test_other_kinds_of_error(error, monkeypatch):
    faults = Faults(0, 1, "backward", error=error).install(monkeypatch)
    _, *actual = run("sft")
    assert faults.raised == 1
    assert_same(actual, plain("sft"))


def test_an_error_without_text(monkeypatch):
    """As CPython's own."""

    class Silent(MemoryError):
        def __init__(self, message):
            super().__init__()

    Faults(0, 1, "backward", error=Silent).install(monkeypatch)
    _, *actual = run("sft")
    assert_same(actual, plain("sft"))


def test_a_plan_that_is_no_longer_on_the_model_does_nothing(monkeypatch):
    class Removes(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.patch_report.remove()

    faults = Faults(0, 0, "forward")
    trainer = make_trainer(
        unsloth_trl,
        "llama",
        gradient_checkpointing=True,
        trainer_kwargs={"callbacks": [Removes()]},
        max_steps=2,
        gradient_accumulation_steps=1,
    )
    plan = trainer._plan

    def fail(*args, **kwargs):
        if trainer.state.global_step == 1:
            raise faults.error("CUDA out of memory.")

    trainer.model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\.$"):
        trainer.train()
    assert len(plan.changes) == 1 and plan.offloader.nbytes == 0


def test_an_optimizer_that_steps_in_the_backward(monkeypatch):
    """Its weights cannot be put back."""
    original = planning.MicroBatchState.restore

    def restore(self, trainer):
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: None) for p in trainer.model.parameters() if p.requires_grad
        ]
        try:
            return original(self, trainer)
        finally:
            for handle in handles:
                handle.remove()

    monkeypatch.setattr(planning.MicroBatchState, "restore", restore)
    Faults(0, 0, "forward").install(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match="may have changed weights already") as caught:
        run("sft")
    assert any("in counted" in note for note in caught.value.__notes__), "the failing line is lost"


def test_what_is_no_memory_is_not_run_again():
    assert not planning.is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."))
    assert planning.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes"))
    assert planning.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not planning.is_out_of_memory(ValueError("out of memory"))


def test_memory_in_pieces_is_told_apart():
    error = (
        "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 24.00 GiB of which 0.36 GiB is free. "
        "Of the allocated memory 19.42 GiB is allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
    )
    found = planning.about_pieces(error.format("1.84 GiB", "2.82 GiB"))
    assert found.startswith(" 2.82 GiB are free") and "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in found
    assert planning.about_pieces(error.format("512.00 MiB", "0.75 GiB")).startswith(" 0.75 GiB")
    assert planning.about_pieces(error.format("1.84 GiB", "900.00 MiB")) == ""
    assert planning.about_pieces("CUDA error: out of memory") == ""


def test_other_errors_pass(monkeypatch):
    class Broken(RuntimeError):
        def __init__(self, message):
            super().__init__("shapes do not match")

    Faults(0, 1, "forward", error=Broken).install(monkeypatch)
    with pytest.raises(Broken, match="shapes do not match"):
        run("sft")


def test_at_the_bottom_it_says_what_to_change(monkeypatch):
    Faults(0, 0, "forward", times=100).install(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match="no lower setting; lower per_device_train_batch_size"):
        run("sft")


def test_several_processes_stop_with_advice(monkeypatch):
    Faults(0, 0, "forward").install(monkeypatch)
    monkeypatch.setattr(planning.MemoryPlanning, "_num_processes", property(lambda self: 2))
    with pytest.raises(torch.OutOfMemoryError, match="One of 2 processes ran out of memory"):
        run("sft")


def test_gradients_too_large_to_keep_twice(monkeypatch):
    """The second micro-batch's backward has begun to add to them: there is no way back."""
    monkeypatch.setattr(planning.MicroBatchState, "_can_copy", lambda self, parameters: False)
    Faults(0, 1, "backward").install(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match="too large to be kept twice"):
        run("sft")


def test_gradients_too_large_to_keep_twice_but_untouched(monkeypatch):
    expected = plain("sft")
    monkeypatch.setattr(planning.MicroBatchState, "_can_copy", lambda self, parameters: False)
    Faults(1, 1, "forward").install(monkeypatch)
    _, *actual = run("sft")
    assert_same(actual, expected)


def test_the_trainers_smaller_batch_still_works(monkeypatch):
    """`auto_find_batch_size` looks for the words of the error."""
    Faults(0, 0, "forward", times=6).install(monkeypatch)  # three for each of the sizes 4 and 3
    trainer = make_trainer(
        unsloth_trl,
        "llama",
        gradient_checkpointing=True,
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=2,
    )
    trainer.train()
    assert trainer._train_batch_size == 2 and trainer.state.global_step == 2
