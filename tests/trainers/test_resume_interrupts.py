"""`save_on_interrupt`: the first Ctrl-C finishes the step and saves, the second stops at once. Signals are real."""

import json
import os
import signal
import threading

import pytest
from transformers import TrainerCallback

import unsloth_trl
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.resume_runs import assert_same, make, resume, train_whole
from unsloth_trl import cli


CASE = {
    "task": "sft",
    "model_type": "llama",
    "packing": True,
    "lora": True,
    "optim": "adamw_torch",
    "save_strategy": "no",
    "save_on_interrupt": True,
}


class Press(TrainerCallback):
    """Ctrl-C, `times` times, between the micro-batches of the step after `step`."""

    def __init__(self, step: int, times: int = 1):
        self.step, self.times = step, times

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def python_s_own_handler():
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def checkpoints(folder) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != "README.md")


def interrupted(folder, step: int, times: int = 1, **fields):
    trainer = make(folder=folder, **(CASE | fields))
    trainer.add_callback(Press(step, times))
    return trainer


def test_the_first_one_finishes_the_step_and_saves(tmp_path, capfd):
    whole = train_whole(folder=tmp_path / "whole", **CASE)
    handler = signal.getsignal(signal.SIGINT)
    trainer = interrupted(tmp_path / "parts", 1)
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.train()
    saved = tmp_path / "parts" / "checkpoint-2"
    assert str(stopped.value) == f"interrupted and saved in {saved}; resume_from_checkpoint=True goes on from there"
    assert "Interrupted: finishing this step, then saving. Ctrl-C again stops at once." in capfd.readouterr().err
    assert checkpoints(tmp_path / "parts") == ["checkpoint-2"] and trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGINT) is handler
    assert_same(resume(folder=tmp_path / "parts", **CASE), whole)
    # the same trainer, as in a notebook
    trainer.remove_callback(Press)
    trainer.train(resume_from_checkpoint=True)
    assert_same(trainer, whole)


def test_the_second_one_stops_at_once(tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    trainer = interrupted(tmp_path, 1, times=2)
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.train()
    assert "saved" not in str(stopped.value)
    assert checkpoints(tmp_path) == [] and trainer.state.global_step == 1
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_second_one_while_saving_leaves_nothing_half_written(tmp_path):
    trainer = interrupted(tmp_path, 1, save_strategy="steps")
    real = trainer._save_scaler

    def save(folder):
        real(folder)
        if trainer.state.global_step == 2:
            signal.raise_signal(signal.SIGINT)

    trainer._save_scaler = save
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-1"]


def test_grpo(tmp_path):
    case = {"task": "grpo", "model": "llama", "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    case |= {"save_strategy": "no", "save_on_interrupt": True}
    trainer = make(folder=tmp_path, **case)
    trainer.add_callback(Press(0))
    with pytest.raises(KeyboardInterrupt, match="saved in .*checkpoint-1; resume"):
        trainer.train()
    assert resume(folder=tmp_path, **case).state.global_step == 3


def test_off_by_default(tmp_path):
    trainer = interrupted(tmp_path, 1, save_on_interrupt=False)
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.train()
    assert str(stopped.value) == "" and checkpoints(tmp_path) == [] and trainer.state.global_step == 1


def test_a_handler_of_the_user_gets_the_second_one(tmp_path):
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        trainer = interrupted(tmp_path, 1, times=2)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_in_another_thread_it_says_so(tmp_path, caplog):
    trainer = make(folder=tmp_path, **(CASE | {"max_steps": 1}))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1
    assert "save_on_interrupt=True has no effect here" in caplog.text


def test_without_an_optimizer_there_is_nothing_to_go_on_with():
    with pytest.raises(ValueError, match="save_on_interrupt=True with save_only_model=True"):
        unsloth_trl.SFTConfig("out", use_cpu=True, bf16=False, save_on_interrupt=True, save_only_model=True)


def test_the_command_line_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    for made in (tiny_model("llama"), tiny_tokenizer()):
        made.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"w{i + 20}", "completion": f"w{i + 30} w{i + 31}"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    real = unsloth_trl.SFTTrainer.training_step

    def step(self, *args, **kwargs):
        if self.state.global_step == 1 and "--save_on_interrupt" in command:
            signal.raise_signal(signal.SIGINT)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(unsloth_trl.SFTTrainer, "training_step", step)
    options = f"--model_name_or_path {tmp_path}/model --dataset_name {tmp_path}/rows.jsonl --output_dir {tmp_path}/out"
    common = ["sft", *options.split(), "--use_cpu", "--bf16", "False", "--max_steps", "3", "--report_to", "none"]
    command = [*common, "--save_on_interrupt"]
    assert cli.main(command) == 130
    line = capsys.readouterr().err.splitlines()[-1]
    saved = tmp_path / "out" / "checkpoint-2"
    assert line == f"unsloth-trl sft: interrupted and saved in {saved}; resume_from_checkpoint=True goes on from there"
    assert not (tmp_path / "out" / "model.safetensors").exists()  # what comes after a run that is over
    command = [*common, "--resume_from_checkpoint", "True"]
    assert cli.main(command) == 0
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["global_step"] == 3
