"""A save that is killed, fails or is done twice leaves the last good checkpoint, and nothing that looks like one."""

import errno
import json
import os
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
import trl
from safetensors.torch import load_file
from transformers import TrainerState
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import get_last_checkpoint

import unsloth_trl
from tests.numerics import make_trainer, masked_rows
from tests.trainers.resume_runs import Killer, assert_same, make, resume, train_whole, wait_for_the_end
from unsloth_trl.trainers.checkpoint_folders import ASIDE, clear_aside, is_complete, put_in_place


CASE = {"task": "sft", "model_type": "llama", "packing": True, "lora": True, "optim": "adamw_torch"}
WRITTEN = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def names(folder) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != "README.md")


@pytest.fixture(scope="module")
def killer():
    return Killer()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train_whole(folder=tmp_path_factory.mktemp("whole"), **CASE)


def train_until_written(connection, name: str, folder: str) -> None:
    """Stop in the save of step 3, with one of its files half written."""
    trainer = make(folder=folder, **CASE)

    def stop_in(path) -> None:
        if trainer.state.global_step == 3 and Path(path).name == name:
            os.truncate(path, os.path.getsize(path) // 2)
            wait_for_the_end(connection, names(Path(path).parent))

    save, write = torch.save, TrainerState.save_to_json
    torch.save = lambda value, path: (save(value, path), stop_in(path))
    TrainerState.save_to_json = lambda self, path: (write(self, path), stop_in(path))
    trainer.train()


@pytest.mark.parametrize("name", WRITTEN)
def test_killed_while_saving(killer, whole, tmp_path, name):
    written = killer.run(train_until_written, name, str(tmp_path))
    assert name in written and "adapter_model.safetensors" in written
    assert names(tmp_path) == [ASIDE, "checkpoint-1", "checkpoint-2"]
    # what transformers itself takes is complete too
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    trainer = resume(folder=tmp_path, **CASE)
    assert trainer._resumed_from == str(tmp_path / "checkpoint-2")
    assert_same(trainer, whole)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert all(is_complete(tmp_path / name) for name in names(tmp_path))


def replace_until(connection, renames: int, folder: str) -> None:
    rename, done = Path.rename, []

    def stopping(self, target):
        if len(done) == renames:
            wait_for_the_end(connection, len(done))
        done.append(target)
        return rename(self, target)

    Path.rename = stopping
    put_in_place(Path(folder) / ASIDE / "checkpoint-3", Path(folder))
    wait_for_the_end(connection, len(done))


@pytest.mark.parametrize("renames", range(3))
def test_killed_while_replacing(killer, tmp_path, renames):
    """A checkpoint of the same step is there before, or the new one is."""
    for folder, text in ((tmp_path / "checkpoint-3", "old"), (tmp_path / ASIDE / "checkpoint-3", "new")):
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"is": text}))
    assert killer.run(replace_until, renames, str(tmp_path)) == renames
    clear_aside(tmp_path)
    assert names(tmp_path) == ["checkpoint-3"]
    found = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert found == {"is": "new" if renames == 2 else "old"}


def test_a_disk_without_renames(tmp_path, monkeypatch):
    """Object stores that are mounted as a folder: copied, the file that makes a checkpoint complete at the end."""
    order, copy = [], shutil.copy2
    # copytree's default is bound to the function itself
    tree = shutil.copytree
    monkeypatch.setattr(shutil, "copytree", lambda *args, **kwargs: tree(*args, copy_function=copying, **kwargs))

    def refuse(self, target):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(Path, "rename", refuse)

    def copying(source, target, **kwargs):
        order.append(Path(source).name)
        return copy(source, target, **kwargs)

    monkeypatch.setattr(shutil, "copy2", copying)
    for _ in range(2):
        order.clear()
        make(folder=tmp_path, **(CASE | {"max_steps": 1})).train()
        assert order[-1] == "trainer_state.json" and names(tmp_path) == ["checkpoint-1"]
    assert is_complete(tmp_path / "checkpoint-1")


def test_a_missing_permission_stays_itself(tmp_path, monkeypatch):
    def refuse(self, target):
        raise PermissionError(errno.EACCES, "Permission denied", str(target))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: .*checkpoint-1"):
        make(folder=tmp_path, **(CASE | {"max_steps": 1})).train()
    assert names(tmp_path) == []


def train_on_small_disk(connection, largest: int, folder: str) -> None:
    """From step 3 on no file can be larger than that: the kernel refuses, as it does on a full disk."""
    trainer = make(folder=folder, **CASE)
    real = trainer._save_checkpoint

    def save(*args):
        if trainer.state.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
        return real(*args)

    trainer._save_checkpoint = save
    try:
        trainer.train()
    except Exception as error:
        wait_for_the_end(connection, (type(error).__name__, str(error), names(folder)))
    connection.send("nothing failed")
    time.sleep(600)


@pytest.mark.parametrize("fails", ["adapter_model.safetensors", "optimizer.pt"])
def test_a_full_disk(killer, whole, tmp_path, fails):
    first = make(folder=tmp_path / "first", **(CASE | {"max_steps": 1}))
    first.train()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "first" / "checkpoint-1").iterdir()}
    assert sizes["adapter_model.safetensors"] < sizes["optimizer.pt"]
    folder = tmp_path / "run"
    kind, message, left = killer.run(train_on_small_disk, sizes[fails] - 1000, str(folder))
    assert kind == "OSError"
    assert message.startswith(f"{folder / 'checkpoint-3'} could not be saved: ")
    assert f"GiB are free there now); {folder / 'checkpoint-2'} is the last good one. Make room and resume" in message
    assert left == ["checkpoint-1", "checkpoint-2"]
    assert_same(resume(folder=folder, **CASE), whole)


def test_an_error_that_is_not_of_the_disk_stays_itself(tmp_path):
    trainer = make(folder=tmp_path, **CASE)

    def broken(folder):
        raise KeyError("mine")

    trainer._save_rng_state = broken
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    assert names(tmp_path) == []


def test_rotation_keeps_the_last_and_the_best(tmp_path):
    """The folders and the state that TRL's own trainer has."""
    found = {}
    rows = masked_rows(4, seed=7)
    for library in (trl, unsloth_trl):
        folder = tmp_path / library.__name__
        trainer = make_trainer(
            library,
            "llama",
            output_dir=str(folder),
            eval_rows=rows,
            lora=True,
            num_train_epochs=2,
            greater_is_better=True,  # of the loss: an early one
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            load_best_model_at_end=True,
        )
        trainer.train()
        states = {name: json.loads((folder / name / "trainer_state.json").read_text()) for name in names(folder)}
        best = {name: Path(state["best_model_checkpoint"]).relative_to(folder) for name, state in states.items()}
        kept = load_file(folder / best[max(best)] / "adapter_model.safetensors")
        found[library] = (best, trainer.state.best_global_step, kept)
    ours, theirs = found[unsloth_trl], found[trl]
    assert ours[:2] == theirs[:2]
    assert len(ours[0]) == 2 and "checkpoint-8" in ours[0] and ours[1] < 7
    assert all(torch.allclose(ours[2][name], value, atol=1e-5) for name, value in theirs[2].items())


def test_half_a_checkpoint_of_another_program(whole, tmp_path, caplog):
    """TRL and transformers write in place: such a folder is neither resumed from nor counted by the rotation."""
    first = CASE | {"max_steps": 2, "save_total_limit": 1}
    make(folder=tmp_path, **first).train()
    assert names(tmp_path) == ["checkpoint-2"]
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-9")
    state = tmp_path / "checkpoint-9" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-8" / "checkpoint-is-incomplete.txt").write_text("by enable_jit_checkpoint")
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-9")
    with pytest.raises(ValueError, match=r"checkpoint-9' has no complete trainer_state.json.*takes .*checkpoint-2"):
        make(folder=tmp_path, **CASE).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    trainer = resume(folder=tmp_path, **(CASE | {"save_total_limit": 1}))
    assert trainer._resumed_from == str(tmp_path / "checkpoint-2")
    assert_same(trainer, whole)
    assert names(tmp_path) == ["_interrupted-checkpoint-8", "_interrupted-checkpoint-9", "checkpoint-4"]
    assert "no complete trainer_state.json: it is now _interrupted-checkpoint-9, and not used" in caplog.text


def test_nothing_to_resume_from(tmp_path):
    trainer = make(folder=tmp_path, **CASE)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True needs a checkpoint in output_dir=.* has none"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(ValueError, match=r"has only incomplete ones \(checkpoint-5 has no .*\); pass the folder"):
        trainer.train(resume_from_checkpoint=True)


def test_the_same_step_twice(whole, tmp_path):
    """A second run into the same folder replaces checkpoints as a whole."""
    for _ in range(2):
        trainer = make(folder=tmp_path, **(CASE | {"save_total_limit": None}))
        trainer.train()
        assert names(tmp_path) == [f"checkpoint-{step}" for step in range(1, 5)]
        (tmp_path / "checkpoint-3" / "of the first run").touch()
    assert_same(resume(folder=tmp_path, **CASE), whole)


def test_weights_only(tmp_path):
    make(folder=tmp_path, **(CASE | {"max_steps": 1, "save_only_model": True})).train()
    found = names(tmp_path / "checkpoint-1")
    assert "adapter_model.safetensors" in found and "trainer_state.json" in found
    assert not {"optimizer.pt", "rng_state.pth", "unsloth_trl_progress.json"} & set(found)


def test_jit_checkpoint(tmp_path):
    """transformers' own saving on SIGTERM marks the folder before it calls the trainer."""
    trainer = make(folder=tmp_path, **(CASE | {"enable_jit_checkpoint": True, "save_strategy": "no"}))
    callback = next(found for found in trainer.callback_handler.callbacks if isinstance(found, JITCheckpointCallback))
    real = trainer.training_step

    def step(*args, **kwargs):
        if trainer.state.global_step == 2:
            callback.jit_manager.is_checkpoint_requested = True
        return real(*args, **kwargs)

    trainer.training_step = step
    trainer.train()
    assert names(tmp_path) == ["checkpoint-2"] and is_complete(tmp_path / "checkpoint-2")
