"""What `"auto"` of `compile_layers` and `cuda_graphs` comes to; turning them on within a run changes no number."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader

import unsloth_trl
from tests.numerics import (
    assert_logs_close,
    assert_runs_close,
    assert_updates_close,
    make_trainer,
    masked_rows,
    run_sft,
)
from tests.tiny import tiny_model
from tests.trainers.graph_replay import graphed, replayed  # noqa: F401 (replayed: a fixture)
from tests.trainers.grpo_runs import run_ours
from tests.trainers.ranks import run_on_two_ranks
from unsloth_trl.data.collators import PackedDataCollator
from unsloth_trl.patches.checkpointing.checkpoint import LayerCheckpoint
from unsloth_trl.patches.checkpointing.policy import Plan
from unsloth_trl.patches.checkpointing.settings import Notch
from unsloth_trl.patches.compilation import layers
from unsloth_trl.patches.compilation import patch as compilation
from unsloth_trl.patches.config import PatchConfig
from unsloth_trl.patches.lora.patch import PlainLoraForward
from unsloth_trl.patches.registry import base_model
from unsloth_trl.trainers import compiling
from unsloth_trl.trainers.compiling import AutoCompilation, StepTime


PACKED = {
    "packing": True,
    "max_length": 24,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 6,
    "gradient_checkpointing": True,
    "checkpoint_policy": "recompute",
    "rows": masked_rows(16, seed=5),
}
DECIDED = compiling.FIRST_MEASURED + compiling.MEASURED - 1  # the step after which it is
BUSY, WAITING = StepTime(1.0, 0.05), StepTime(1.0, 0.4)  # the host


@pytest.fixture
def worthwhile(monkeypatch):
    """A CPU on which compiling is worth it, with graphs that run as they are."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "apply", functools.partial(compilation.apply, backend="aot_eager"))
    monkeypatch.setattr(compilation, "why_no_compiler", lambda device: None)
    monkeypatch.setattr(compiling, "LEAST_TO_COMPILE", 0.0)
    monkeypatch.setattr(compiling, "LEAST_TO_CAPTURE", 0.0)
    yield
    torch._dynamo.reset()


def compiled_layers(trainer) -> list[layers.CompiledForward]:
    forwards = (m.__dict__.get("forward") for m in base_model(trainer.model).modules())
    return [forward for forward in forwards if isinstance(forward, layers.CompiledForward)]


def told(trainer, entry: str) -> str:
    return str(trainer.patch_report[entry].detail)


@pytest.mark.parametrize(
    "measured, left, experts, graphs, expected",
    [
        (WAITING, 599, False, None, []),
        (WAITING, 601, False, None, ["compile_layers"]),
        (WAITING, 601, True, None, ["compile_layers"]),
        (BUSY, 59, False, None, []),
        (BUSY, 61, False, None, ["cuda_graphs"]),
        (BUSY, 601, False, None, ["compile_layers", "cuda_graphs"]),
        (BUSY, 601, True, None, ["compile_layers", "cuda_graphs"]),
        (BUSY, 601, False, "rows of any length", ["compile_layers"]),
        (BUSY, 601, True, "rows of any length", []),
    ],
)
def test_the_rule(measured, left, experts, graphs, expected):
    trainer = make_trainer(unsloth_trl, "llama", lora=True, **PACKED)
    auto = AutoCompilation(trainer, PatchConfig(), {"compile_layers": None, "cuda_graphs": graphs})
    assert auto._worth(measured, left, experts) == expected


def test_a_cpu_compiles_nothing_unless_asked():
    run = run_sft(unsloth_trl, "llama", lora=True, **PACKED)
    assert told(run.trainer, "compilation") == "compile_layers='auto' is off: no measured gain on cpu"
    assert told(run.trainer, "cuda_graphs") == "cuda_graphs='auto' is off: no CUDA device"
    assert not compiled_layers(run.trainer)


def test_a_machine_without_a_compiler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    device = torch.device("cuda")
    monkeypatch.setattr(compilation, "has_triton", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    assert compilation.why_no_compiler(device) == "no C compiler was found: install gcc or clang, or set CC"
    monkeypatch.setattr(compilation.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert compilation.why_no_compiler(device) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "sm_80" in compilation.why_no_compiler(device)
    monkeypatch.setattr(compilation, "has_triton", lambda: False)
    assert "pip install triton" in compilation.why_no_compiler(device)


def test_a_short_run_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(compilation, "why_no_compiler", lambda device: None)
    run = run_sft(unsloth_trl, "llama", lora=True, **PACKED)
    assert run.trainer.state.max_steps > DECIDED
    assert told(run.trainer, "compilation").startswith("compile_layers='auto' is off at step 5: ")
    assert " seconds left, the host launches for " in told(run.trainer, "compilation")
    assert not compiled_layers(run.trainer)


@pytest.mark.parametrize("model_type, lora, policy", [("qwen3_moe", True, "auto"), ("gemma2", False, "recompute")])
def test_compiling_within_a_run_changes_nothing(model_type, lora, policy, worthwhile, monkeypatch, caplog):
    monkeypatch.setattr(compiling, "LAUNCH_BOUND", -1.0)  # nothing is, so that experts are compiled as well
    fields = PACKED | {"checkpoint_policy": policy}
    auto = run_sft(unsloth_trl, model_type, lora=lora, **fields)
    off = run_sft(unsloth_trl, model_type, lora=lora, compile_layers="off", **fields)
    assert compiled_layers(auto.trainer)[0].compiler.num_graphs > 0 and not compiled_layers(off.trainer)
    assert "; compile_layers='auto' is on since step 5: " in told(auto.trainer, "compilation")
    assert "compile_layers='off'" in caplog.text
    # a forward of a LoRA layer's own would be other code in each layer
    assert not any(isinstance(m.__dict__.get("forward"), PlainLoraForward) for m in auto.trainer.model.modules())
    assert_runs_close(auto, off, 1e-4)
    # put on again beside the layers, and still says why it is not
    assert told(auto.trainer, "cuda_graphs") == "cuda_graphs='auto' is off: no CUDA device"
    auto.trainer.patch_report.remove()
    assert not compiled_layers(auto.trainer)


def test_options_of_the_checkpoint_outlive_the_change(worthwhile):
    options = {"use_reentrant": False, "determinism_check": "none"}
    auto = run_sft(unsloth_trl, "llama", lora=True, gradient_checkpointing_kwargs=options, **PACKED)
    assert compiled_layers(auto.trainer)[0].compiler.num_graphs > 0
    checkpoint = base_model(auto.trainer.model).model.layers[1]._gradient_checkpointing_func
    assert isinstance(checkpoint, LayerCheckpoint) and checkpoint.options == options


def test_grpo_compiles_within_a_run(worthwhile):
    fields = {"max_steps": 8, "gradient_checkpointing": True, "checkpoint_policy": "recompute"}
    auto = run_ours(tiny_model("llama"), **fields)
    off = run_ours(tiny_model("llama"), compile_layers="off", **fields)
    assert compiled_layers(auto.trainer)[0].compiler.num_graphs > 0
    assert "lengths" in told(auto.trainer, "cuda_graphs")
    assert_runs_close(auto, off, 1e-4)


def test_the_reference_model_follows(worthwhile):
    fields = {"max_steps": 7, "beta": 0.1}
    auto = run_ours("llama", **fields)
    off = run_ours("llama", compile_layers="off", **fields)
    forward = auto.trainer.ref_model.model.layers[0].__dict__["forward"]
    assert forward.compiler.num_graphs > 0 and forward.compiler is not compiled_layers(auto.trainer)[0].compiler
    assert_runs_close(auto, off, 1e-4)
    auto.trainer.patch_report.remove()
    assert "forward" not in auto.trainer.ref_model.model.layers[0].__dict__


def test_graphs_within_a_run_change_nothing(captures, worthwhile, monkeypatch):
    monkeypatch.setattr(compiling, "LAUNCH_BOUND", 2.0)  # everything is
    fields = PACKED | {"compile_layers": "off"}
    auto = run_sft(unsloth_trl, "llama", lora=True, **fields)
    off = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="off", **fields)
    decoder = graphed(auto.trainer.model)
    assert captures.number >= 1 and decoder.replays >= 3
    assert decoder.replays + decoder.others == auto.trainer.state.global_step - DECIDED
    assert "; cuda_graphs='auto' is on since step 5: " in told(auto.trainer, "cuda_graphs")
    assert_runs_close(auto, off, 2e-5)


def test_a_collator_of_the_users_own_is_left_alone(captures, worthwhile, monkeypatch):
    monkeypatch.setattr(compiling, "LAUNCH_BOUND", 2.0)
    trainer = make_trainer(unsloth_trl, "llama", lora=True, compile_layers="off", **PACKED)
    packed = trainer.data_collator
    trainer.data_collator = lambda examples: packed(examples)
    trainer.train()
    assert "is on since step 5: " in told(trainer, "cuda_graphs") and not packed.is_static


def test_two_processes_decide_at_the_same_step(tmp_path):
    """As the first one does, though the second one's machine differs."""
    case = PACKED | {"max_steps": DECIDED + 2, "rows": masked_rows(40, seed=5)}
    torch.save(case, tmp_path / "case.pt")
    for rank in run_on_two_ranks("compiling_worker.py", tmp_path, str(tmp_path / "case.pt"), str(tmp_path)):
        auto, off = rank["auto"], rank["off"]
        assert auto["num_graphs"] > 0 and off["num_graphs"] == 0
        assert "; compile_layers='auto' is on since step 5: " in auto["details"]["compilation"]
        assert auto["details"]["cuda_graphs"] == "cuda_graphs='auto' is off: no measured gain with several processes"
        assert_logs_close(auto["logs"], off["logs"], 1e-4)
        assert_updates_close(auto["updates"], off["updates"], 1e-4)


def test_a_device_that_waits_once_layers_are_compiled(captures, worthwhile, monkeypatch):
    """Graphs are decided on once more, by the time that a step takes then."""
    steps = iter([StepTime(2.0, 0.0), StepTime(1.0, 0.4), StepTime(3.0, 0.0)] + [StepTime(0.6, 0.0)] * 3)
    real = AutoCompilation.on_step_end

    def measured(self, *args, **kwargs):
        if self._time is not None:
            self._time = next(steps)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(AutoCompilation, "on_step_end", measured)
    monkeypatch.setattr(compilation.LayerCompiler, "_compile_graph", lambda self, graph, inputs: graph)
    auto = run_sft(unsloth_trl, "llama", lora=True, **PACKED)
    off = run_sft(unsloth_trl, "llama", lora=True, compile_layers="off", cuda_graphs="off", **PACKED)
    assert "is on since step 5: 31 seconds" in told(auto.trainer, "compilation")
    assert "is on since step 11: " in told(auto.trainer, "cuda_graphs")
    assert graphed(auto.trainer.model).replays >= 1
    assert_runs_close(auto, off, 2e-5)


def test_the_workers_of_a_data_loader_follow():
    trainer = make_trainer(unsloth_trl, "llama", lora=True, **(PACKED | {"max_length": 512}))
    collator = PackedDataCollator.from_trl(trainer.data_collator, static_length=512)
    collator.is_static.fill_(False)
    rows = [{"input_ids": [9] * 130, "seq_lengths": [130]}] * 8
    loader = DataLoader(rows, collate_fn=collator, num_workers=1, prefetch_factor=1, persistent_workers=True)
    batches = iter(loader)
    assert next(batches)["input_ids"].shape == (1, 130)
    collator.is_static.fill_(True)
    assert [batch["input_ids"].shape[1] for batch in batches][-1] == 256
    assert {batch["input_ids"].shape[1] for batch in loader} == {256}


def test_an_earlier_plan_that_ran_out_of_memory_is_followed():
    earlier = Plan("auto", 4)
    earlier.planned_tokens = 64
    earlier.step_down()
    plan = Plan("auto", 4)
    plan.follow(earlier)
    assert earlier.fixed and plan.fixed and plan.notch == earlier.notch and plan.changes == earlier.changes
    free = Plan("auto", 4)
    free.use(Notch())
    free.fixed = False
    other = Plan("auto", 4)
    other.follow(free)
    assert not other.fixed and other.planned_tokens == 0
