"""A checkpoint of which something is cut off or missing is never trained from; the last good one before it is."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainers.resume_runs import assert_same, log_of, make, resume, train_whole
from unsloth_trl.trainers.checkpoint_files import find_damage, find_missing, find_missing_state


FIRST, LAST, STEPS = "checkpoint-2", "checkpoint-3", 4
SAVED = {"optim": "adamw_torch", "save_total_limit": None, "max_steps": STEPS}
CASES = {
    "sft-lora": {"task": "sft", "model_type": "llama", "packing": True, "lora": True, **SAVED},
    "sft-full": {"task": "sft", "model_type": "llama", "packing": True, **SAVED},
    "grpo": {
        "task": "grpo",
        "model": "llama",
        "lora": True,
        "init": {"rollout_func": None},
        "temperature": 0.5,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,  # two optimizer steps of one generation: the third one is in the middle
        **SAVED,
    },
}
ADAPTER, MODEL, PROGRESS = "adapter_model.safetensors", "model.safetensors", "unsloth_trl_progress.json"
CUT = {
    "sft-lora": (ADAPTER, "optimizer.pt", "scheduler.pt", "rng_state.pth", PROGRESS, "trainer_state.json"),
    "sft-full": (MODEL, "optimizer.pt"),
    "grpo": (ADAPTER, "completions_0.pt", "optimizer.pt"),
}
GONE = {
    "sft-lora": (ADAPTER, "optimizer.pt", "scheduler.pt", "rng_state.pth"),
    "sft-full": (MODEL, "optimizer.pt"),
    "grpo": (ADAPTER, "rng_state.pth"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of each case, a folder with the checkpoints of steps 2 and 3, and what all four steps come to."""
    made = {}
    for name, case in CASES.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = (folder, train_whole(folder=folder, **case))
        for step in (1, STEPS):
            shutil.rmtree(folder / f"checkpoint-{step}")
    return made


@pytest.fixture
def copied(runs, tmp_path):
    def copy(name: str):
        folder, whole = runs[name]
        for checkpoint in (FIRST, LAST):
            shutil.copytree(folder / checkpoint, tmp_path / checkpoint)
        return tmp_path, whole

    return copy


def cut(path: Path) -> None:
    """As a kill or a full disk leaves it."""
    os.truncate(path, path.stat().st_size - 3)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def blank(path: Path) -> None:
    """As a power failure leaves what a file system has not written yet."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(("name", "file"), [(name, file) for name, files in CUT.items() for file in files])
def test_what_is_cut_off_is_put_aside(copied, name, file, caplog):
    folder, whole = copied(name)
    part = f"has no complete {file}" if file == "trainer_state.json" else f"has only a part of {file}"
    content = (folder / LAST / file).read_bytes()
    for damage in (cut_to_nothing, blank, cut):
        (folder / LAST / file).write_bytes(content)
        assert find_damage(folder / LAST) is None
        damage(folder / LAST / file)
        assert find_damage(folder / LAST) == part
    with pytest.raises(ValueError, match=f"{LAST}' {part}: its save was interrupted.*=True takes .*{FIRST}$"):
        make(folder=folder, **CASES[name]).train(resume_from_checkpoint=str(folder / LAST))
    trainer = resume(folder=folder, **CASES[name])
    assert trainer._resumed_from == str(folder / FIRST)
    assert_same(trainer, whole)
    assert f"A checkpoint in {folder} {part}: it is now _interrupted-{LAST}, and not used" in caplog.text
    found = sorted(path.name for path in folder.iterdir() if path.name != "README.md")
    assert found == [f"_interrupted-{LAST}", FIRST, LAST, f"checkpoint-{STEPS}"]
    assert find_damage(folder / LAST) is None and find_missing(folder / LAST) == []


@pytest.mark.parametrize(("name", "file"), [(name, file) for name, files in GONE.items() for file in files])
def test_what_is_missing_is_not_made_up(copied, name, file, caplog):
    folder, whole = copied(name)
    (folder / LAST / file).unlink()
    said = MODEL if file == ADAPTER else file
    with pytest.raises(
        ValueError, match=f"{LAST}' has no {said}, without which a run cannot go on as it was.*{FIRST}$"
    ):
        make(folder=folder, **CASES[name]).train(resume_from_checkpoint=str(folder / LAST))
    trainer = resume(folder=folder, **CASES[name])
    assert trainer._resumed_from == str(folder / FIRST)
    assert_same(trainer, whole)
    assert f"{folder / LAST} has no {said}, without which" in caplog.text
    assert f"It is left out: the run goes on from {folder / FIRST}" in caplog.text
    assert find_missing(folder / LAST) == []  # step 3 was saved again, whole


def test_none_is_good(copied):
    folder, _ = copied("sft-lora")
    cut(folder / FIRST / ADAPTER)
    (folder / LAST / "optimizer.pt").unlink()
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True needs a checkpoint") as error:
        resume(folder=folder, **CASES["sft-lora"])
    assert f"only incomplete ones ({LAST} has no optimizer.pt, without which" in str(error.value)
    assert f"{FIRST} has only a part of {ADAPTER}: its save was interrupted" in str(error.value)
    assert "pass the folder of a checkpoint, or None to begin anew" in str(error.value)
    assert sorted(folder.rglob("*")) == before, "nothing is renamed or begun"


def test_no_such_folder(copied):
    folder, _ = copied("sft-lora")
    with pytest.raises(ValueError, match=rf"checkpoint-7' is no folder; .*=True takes .*{LAST}"):
        make(folder=folder, **CASES["sft-lora"]).train(resume_from_checkpoint=str(folder / "checkpoint-7"))


def test_a_missing_shard(copied):
    folder, whole = copied("sft-full")
    model = AutoModelForCausalLM.from_pretrained(folder / LAST, dtype=torch.float32)
    (folder / LAST / MODEL).unlink()
    model.save_pretrained(folder / LAST, max_shard_size="100KB")
    shards = sorted(path.name for path in (folder / LAST).glob("model-*.safetensors"))
    assert len(shards) > 2 and find_missing(folder / LAST) == [] and find_damage(folder / LAST) is None
    assert_same(resume(folder=folder, **CASES["sft-full"]), whole)  # from the shards
    shutil.rmtree(folder / f"checkpoint-{STEPS}")
    (folder / LAST / shards[1]).unlink()
    assert find_missing(folder / LAST) == [shards[1]]
    trainer = resume(folder=folder, **CASES["sft-full"])
    assert trainer._resumed_from == str(folder / FIRST)
    assert_same(trainer, whole)


def test_weights_alone_go_on_where_that_is_asked_for(tmp_path, caplog):
    case = CASES["sft-lora"] | {"save_only_model": True}
    make(folder=tmp_path, **(case | {"max_steps": 2})).train()
    missing = ["optimizer.pt", "rng_state.pth", "scheduler.pt"]
    assert find_missing(tmp_path / FIRST) == find_missing_state(tmp_path / FIRST) == missing
    with pytest.raises(
        ValueError, match="has no optimizer.pt and no rng_state.pth.*was saved with save_only_model=True"
    ):
        resume(folder=tmp_path, **CASES["sft-lora"])
    assert "begins anew" not in caplog.text
    trainer = resume(folder=tmp_path, **case)
    assert trainer._resumed_from == str(tmp_path / FIRST) and len(log_of(trainer)) == STEPS
    assert f"{FIRST} has no optimizer.pt and no rng_state.pth and no scheduler.pt: what these would" in caplog.text


def files_of(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            path.write_text(json.dumps({"weight_map": {}}))
        elif path.suffix == ".safetensors":
            header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
            path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        else:
            torch.save({"a": torch.zeros(2)}, path)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp", "scheduler.pt", "rng_state_0.pth"),
        ("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"),
        ("global_step3/mp_rank_00_model_states.pt", "rng_state_0.pth"),
        ("default/adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
        ("pytorch_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
    ],
    ids=["fsdp2", "fsdp", "deepspeed", "named adapters", "bin"],
)
def test_checkpoints_of_other_forms_are_complete(names, tmp_path):
    files_of(tmp_path, *names, "trainer_state.json")
    assert find_damage(tmp_path) is None and find_missing(tmp_path) == []


def test_a_named_adapter_is_looked_at_too(tmp_path):
    file = "default/adapter_model.safetensors"
    files_of(tmp_path, file, "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
    cut(tmp_path / file)
    assert find_damage(tmp_path) == f"has only a part of {file}"
    (tmp_path / file).unlink()
    assert find_missing(tmp_path) == [MODEL]


def test_pickles_of_old_versions_of_torch_are_files_too(tmp_path):
    files_of(tmp_path, "trainer_state.json")
    torch.save({"a": torch.zeros(2)}, tmp_path / "optimizer.pt", _use_new_zipfile_serialization=False)
    assert find_damage(tmp_path) is None
