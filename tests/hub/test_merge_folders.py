"""What saving does to folders: nothing is overwritten, mixed up, left half-written or larger than the disk."""

import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.hub.merge_runs import adapted, gap, logits, names_in, saved_tensors, stock_merge
from tests.tiny import tiny_model, tiny_tokenizer
from unsloth_trl.hub.checkpoints import check_one_kind
from unsloth_trl.hub.merge import save_pretrained_merged, write_merged


ROOT = Path(__file__).parents[2]
NEW = ["config.json", "generation_config.json", "model.safetensors"]
FP32 = 5e-6


@pytest.fixture
def base(tmp_path):
    """The folder of a base model in bf16."""
    folder = tmp_path / "base"
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def model(base):
    """A model with an adapter, from that folder."""
    return adapted("llama", AutoModelForCausalLM.from_pretrained(base))


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_merged(folder: Path, model: PeftModel) -> None:
    """The folder holds base plus delta, and loads."""
    truth = stock_merge(model).state_dict()
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in truth.items():
        torch.testing.assert_close(state[name].float(), value, rtol=2**-8, atol=1e-6)
    before = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    assert not torch.allclose(state["model.layers.0.mlp.up_proj.weight"], before, atol=0.05)


def test_b66_shards_as_large_as_the_base_s(base, model, tmp_path):
    size = (base / "model.safetensors").stat().st_size
    for folder in (tmp_path / "new", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        save_pretrained_merged(model, folder, max_shard_size=size)
        assert names_in(folder) == NEW
        assert_merged(folder, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "empty", "new"]


def test_b66_a_folder_with_old_shards(base, model, tmp_path):
    """Old weights and indexes go, in whatever format; everything else stays."""
    folder = tmp_path / "merged"
    save_pretrained_merged(adapted("llama", tiny_model("llama", seed=5)), folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").is_file()
    many = len(list(folder.glob("model-*.safetensors")))
    assert many > 4
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "adapter_config.json").write_text("{}")
    save_pretrained_merged(model, folder)
    assert names_in(folder) == sorted([*NEW, "notes.txt", "checkpoint-3", "checkpoint-3/adapter_config.json"])
    assert (folder / "notes.txt").read_text() == "mine"
    assert_merged(folder, model)
    # and the other way round: fewer files become more
    save_pretrained_merged(model, folder, max_shard_size="80KB")
    assert not (folder / "model.safetensors").exists() and 1 < len(list(folder.glob("model-*.safetensors"))) < many
    assert_merged(folder, model)


@pytest.mark.parametrize("spelled", ["as it is", "relative", "link"])
def test_b66_the_folder_of_the_base_is_refused(base, model, tmp_path, spelled):
    target, before = base, digests(base)
    if spelled == "relative":
        target = Path(os.path.relpath(base))
    elif spelled == "link":
        target = tmp_path / "link"
        target.symlink_to(base)
    for method in ("merged_16bit", "lora"):
        with pytest.raises(ValueError, match="is the folder of the base model, which would be lost: name another"):
            save_pretrained_merged(model, target, save_method=method)
    assert digests(base) == before
    # of a model that was trained whole, too
    with pytest.raises(ValueError, match="is the folder of the base model"):
        save_pretrained_merged(AutoModelForCausalLM.from_pretrained(base), target)
    assert digests(base) == before


def test_b62_one_folder_holds_one_kind(model, tmp_path):
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    save_pretrained_merged(model, adapter, save_method="lora")
    before = digests(adapter)
    with pytest.raises(ValueError, match="holds an adapter.* remove adapter_config.json, adapter_model.safetensors"):
        save_pretrained_merged(model, adapter)
    assert digests(adapter) == before
    save_pretrained_merged(model, merged)
    before = digests(merged)
    with pytest.raises(ValueError, match="holds a whole model.* remove model.safetensors first"):
        save_pretrained_merged(model, merged, save_method="lora")
    assert digests(merged) == before
    # an adapter over an adapter is what a second save is
    save_pretrained_merged(model, adapter, save_method="lora")
    check_one_kind(adapter)
    check_one_kind(merged)
    shutil.copy(adapter / "adapter_config.json", merged)
    with pytest.raises(
        ValueError, match=r"an adapter \(adapter_config.json\) and a whole model \(model.safetensors\)"
    ):
        check_one_kind(merged)


def test_b69_a_disk_that_is_too_small(model, tmp_path, monkeypatch):
    before = digests(tmp_path)
    size = sum(value.numel() * 2 for value in stock_merge(model).state_dict().values())
    spare = 64 * 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size + spare - 1))
    with pytest.raises(
        OSError, match=r"not enough disk .*0.06 GiB are needed, 0.06 GiB are free.* Nothing was written"
    ):
        save_pretrained_merged(model, tmp_path / "deep" / "merged")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**20))
    with pytest.raises(OSError, match="0.06 GiB are needed, 0.00 GiB are free"):
        save_pretrained_merged(model, tmp_path / "merged", save_method="lora")
    assert digests(tmp_path) == before and sorted(path.name for path in tmp_path.iterdir()) == ["base"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size + spare))
    save_pretrained_merged(model, tmp_path / "deep" / "merged")
    assert names_in(tmp_path / "deep" / "merged") == NEW


LARGE = """
import gc, json, os, signal, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from unsloth_trl.hub.merge import save_pretrained_merged, write_merged
torch.set_num_threads(1)
config = AutoConfig.for_model(
    "llama", vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=40, num_attention_heads=4
)
torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
model.to_empty(device="cpu")
torch.set_default_dtype(torch.float32)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.01)
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
for size in (10**7, 10**9):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
    before = peak()
    report = write_merged(model, sys.argv[1], max_shard_size=size, verify=False)
    print(json.dumps({"peak": peak() - before, "bytes": report.num_bytes, "files": len(report.files)}), flush=True)
class Kills:
    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)
save_pretrained_merged(model, sys.argv[2], Kills())
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A process that saves a model of 40 layers in many files and in one, and is killed in the third save."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of a process can be reset on Linux only")
    folder = tmp_path_factory.mktemp("large")
    save_pretrained_merged(tiny_model("llama"), folder / "good")
    before = digests(folder / "good")
    command = [sys.executable, "-c", LARGE, str(folder / "merged"), str(folder / "good")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    return folder, before, [json.loads(line) for line in done.stdout.splitlines()[-2:]]


def test_b69_one_file_is_in_memory(large):
    """15 files: the process grows by less than two of them, and some. In one file, by all of it."""
    _, _, (many, one) = large
    assert many["files"] == 15 and one["files"] == 1 and many["bytes"] == one["bytes"] > 130e6
    assert many["peak"] < 2 * 10**7 + 20e6, many
    assert one["peak"] > 0.9 * one["bytes"], one  # what is measured is what is meant


def test_b69_a_save_that_is_killed(large, monkeypatch):
    """Nothing runs after SIGKILL: the model that was there is whole, and the rest is named when room is short."""
    folder, before, _ = large
    assert digests(folder / "good") == before
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert len(left) == 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(OSError, match=f"safe to remove: {left[0]}"):
        save_pretrained_merged(tiny_model("llama"), folder / "good")


class Interrupts:
    """Stands in for a tokenizer, and for a user who presses Ctrl-C while its files are written."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{")
        raise KeyboardInterrupt


@pytest.mark.parametrize("there", ["nothing", "a model"])
def test_b69_a_save_that_fails_leaves_what_was_there(model, tmp_path, there):
    target = tmp_path / "out" / "merged"
    if there == "a model":
        save_pretrained_merged(model, target, tiny_tokenizer())
    before = digests(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained_merged(model, target, Interrupts())
    with pytest.raises(KeyboardInterrupt):
        save_pretrained_merged(model, target if there == "nothing" else tmp_path / "adapter", Interrupts(), "lora")
    # the last layer is broken: several files are complete by then
    with torch.no_grad():
        model.get_base_model().model.norm.weight[3] = float("nan")
    with pytest.raises(ValueError, match="model.norm.weight has values that are not finite.*earlier checkpoint"):
        save_pretrained_merged(model, target, max_shard_size="30KB")
    assert digests(tmp_path) == before
    assert (tmp_path / "out").exists() == (there == "a model")
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("offline", ["1", "0"])
def test_b67_no_connection_is_made(base, model, tmp_path, monkeypatch, offline):
    """A base in a local folder: merging, saving the adapter and loading both ask nobody."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline == "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("127.0.0.1", 9))
    tried.clear()
    tokenizer = tiny_tokenizer()
    save_pretrained_merged(model, tmp_path / "merged", tokenizer)
    save_pretrained_merged(model, tmp_path / "adapter", tokenizer, save_method="lora")
    assert_merged(tmp_path / "merged", model)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert gap(logits(again), logits(model)) == 0
    assert not tried


def test_a_model_that_is_not_what_was_saved_is_not_kept(model, tmp_path):
    """Something that is no weight changes what the live model computes: verification says so."""
    before = digests(tmp_path)
    layer = model.get_base_model().model.layers[1].mlp
    handle = layer.register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(RuntimeError, match=r"does not compute what the live one does: logits differ .* by 0\.\d+"):
        save_pretrained_merged(model, tmp_path / "merged")
    assert digests(tmp_path) == before and not (tmp_path / "merged").exists()
    report = write_merged(model, tmp_path / "merged", verify=False)
    assert report.verification is None and report.not_verified == "verify=False"
    handle.remove()
    assert_merged(tmp_path / "merged", model)


def test_a_delta_that_is_lost_is_found(model, tmp_path):
    """What the files of others get wrong most: the base without the adapter."""
    from unsloth_trl.hub.merge_layers import merged_weights
    from unsloth_trl.hub.verify import compare, load_saved

    save_pretrained_merged(model, tmp_path / "merged")
    live = model.get_base_model()
    right = compare(live, load_saved(live, tmp_path / "merged", torch.device("cpu")), merged_weights(live))
    wrong = compare(live, load_saved(live, tmp_path / "base", torch.device("cpu")), merged_weights(live))
    assert right.passed and not wrong.passed and wrong.gap > 20 * right.gap


def test_verification_that_does_not_fit_says_so(model, tmp_path, monkeypatch, caplog):
    memory = psutil.virtual_memory()._replace(available=2**20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with caplog.at_level(logging.WARNING, "unsloth_trl"):
        report = write_merged(model, tmp_path / "merged", tiny_tokenizer())
    assert report.verification is None
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["The saved model is not verified: " + report.not_verified + "."]
    assert report.not_verified == "reloading takes 0.3 GiB beside the live model, and 0.0 GiB are left"
    assert_merged(tmp_path / "merged", model)


def test_places_that_cannot_be_replaced(model, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"save_directory=.*: .*/file is a file: name another folder"):
        save_pretrained_merged(model, tmp_path / "file" / "merged")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file' is a file: name a folder"):
        save_pretrained_merged(model, tmp_path / "file")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="is the working directory or a mount point.*name a folder in it"):
        save_pretrained_merged(model, ".")
    save_pretrained_merged(model, "merged")
    assert_merged(folder / "merged", model)


def test_the_index_covers_all_files(model, tmp_path):
    report = write_merged(model, tmp_path / "merged", max_shard_size="50KB")
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    tensors = saved_tensors(tmp_path / "merged")
    assert index["weight_map"].keys() == tensors.keys() and set(index["weight_map"].values()) == set(report.files)
    assert index["metadata"]["total_size"] == report.num_bytes == sum(value.nbytes for value in tensors.values())
    assert all((tmp_path / "merged" / name).stat().st_size < 60_000 for name in report.files)
