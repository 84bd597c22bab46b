"""Importing this package changes nothing, needs no GPU, and may happen in any order."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unsloth_trl
from tests.packaging.one_step import one_step_loss
from tests.packaging.snapshot import changes, snapshot


ROOT = Path(__file__).parents[2]
HEAVY = ("accelerate", "datasets", "huggingface_hub", "numpy", "peft", "torch", "transformers", "triton", "trl")

NO_SIDE_EFFECTS = """
import logging, os, sys, warnings
written = []
def audit(event, args):
    if event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append(args[0])
    elif event in ("os.mkdir", "os.rename", "subprocess.Popen", "socket.connect"):
        written.append((event, args))
def state():
    return {
        "environment": dict(os.environ),
        "sys.path": list(sys.path),
        "sys.meta_path": list(sys.meta_path),
        "hooks": (sys.excepthook, sys.displayhook),
        "warning filters": list(warnings.filters),
        "root handlers": list(logging.getLogger().handlers),
        "builtins": dict(vars(__builtins__)),
    }
before = state()
sys.addaudithook(audit)
import unsloth_trl
dir(unsloth_trl), unsloth_trl.__version__
assert state() == before, [key for key, value in state().items() if value != before[key]]
assert not written, written
loaded = set(HEAVY) & set(sys.modules)
assert not loaded, loaded
ours = {name for name in sys.modules if name.split(".")[0] == "unsloth_trl"}
assert ours == {"unsloth_trl"}, ours
"""


def run_python(code: str, *arguments: str, cwd: Path, inherit: bool = True, **environment: str) -> str:
    """What `code` prints in a fresh interpreter; this repository's root is on its path."""
    inherited = os.environ if inherit else {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    env = inherited | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def loss_in_subprocess(preamble: str, tmp_path: Path, **environment: str) -> float:
    """The loss of `one_step_loss` in a fresh interpreter, after `preamble`; nothing may be written to its folder."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    code = f"{preamble}\nimport sys\nfrom tests.packaging.one_step import one_step_loss\n"
    code += "print('loss', repr(one_step_loss(sys.argv[1])))"
    printed = run_python(code, str(tmp_path / "out"), cwd=cwd, **environment)
    assert not list(cwd.iterdir())
    return float(printed.rsplit("loss ", 1)[1])


@pytest.fixture(scope="module")
def expected_loss(tmp_path_factory):
    return one_step_loss(str(tmp_path_factory.mktemp("out")))


def test_import_takes_no_time(tmp_path):
    code = "import time\nstart = time.perf_counter()\nimport unsloth_trl\nprint(time.perf_counter() - start)"
    assert min(float(run_python(code, cwd=tmp_path)) for _ in range(3)) < 0.3


def test_import_has_no_side_effect(tmp_path):
    # a variable that this process got from its own import must not be there already
    run_python(f"HEAVY = {HEAVY}\n{NO_SIDE_EFFECTS}", cwd=tmp_path, inherit=False)
    assert not list(tmp_path.iterdir())


def test_import_of_the_command_line_is_light(tmp_path):
    loaded = f"import sys, unsloth_trl.cli\nprint([name for name in {HEAVY} if name in sys.modules])"
    assert run_python(loaded, cwd=tmp_path) == "[]\n"


def test_unknown_attribute_lists_what_there_is():
    with pytest.raises(AttributeError, match="module 'unsloth_trl' has no attribute 'SFTTrainr'; it has .*SFTTrainer"):
        unsloth_trl.SFTTrainr  # noqa: B018


def test_public_names_resolve():
    assert {"SFTConfig", "SFTTrainer", "apply_patches"} <= set(unsloth_trl.__all__) <= set(dir(unsloth_trl))
    for name in unsloth_trl.__all__:
        assert inspect.getdoc(getattr(unsloth_trl, name)), name


def test_the_folder_does_not_import_under_its_own_name():
    code = "try:\n    import patches\nexcept ImportError as error:\n    print(error)"
    printed = run_python(code, cwd=ROOT)
    assert "import `unsloth_trl.patches`, not `patches`" in printed


REPLACES_NOTHING = """
import sys
from tests.packaging.snapshot import changes, snapshot
import torch, transformers, trl, peft
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

def mappings():
    return dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)

from tests.tiny import tiny_model
tiny_model("llama")  # transformers adds a method to torch.nn.Module when it initialises a model
assert not [name for name in sys.modules if name.split(".")[0] == "unsloth_trl"]
# loaded when they are first asked for
trl.SFTTrainer, trl.SFTConfig, trl.GRPOTrainer, transformers.Trainer, transformers.PreTrainedModel, peft.PeftModel
before, (attention, masks) = snapshot(), mappings()
assert len(before) > 3000, len(before)
for owner, name in [
    ("trl", "SFTTrainer"),
    ("transformers.trainer.Trainer", "training_step"),
    ("torch.nn.functional", "scaled_dot_product_attention"),
    ("transformers.models.llama.modeling_llama.LlamaForCausalLM", "forward"),
    ("peft.tuners.lora.layer.ParamWrapper", "forward"),
]:
    assert (owner, name) in before, (owner, name)

from unsloth_trl import *
import unsloth_trl.data, unsloth_trl.models.smollm2, unsloth_trl.models.support
import unsloth_trl.patches.attention.patch, unsloth_trl.patches.lm_head.patch
assert not changes(before), changes(before)
assert mappings() == (attention, masks)

from tests.packaging.one_step import one_step_loss
one_step_loss(sys.argv[1])
assert not changes(before), changes(before)
after_attention, after_masks = mappings()
assert attention.items() <= after_attention.items() and masks.items() <= after_masks.items()
added = set(after_attention) - set(attention)
assert added and all("unsloth_trl" in name for name in added), added
"""


def test_nothing_of_another_library_is_replaced(tmp_path):
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    run_python(REPLACES_NOTHING, str(tmp_path / "out"), cwd=cwd)


def test_snapshot_sees_a_replacement(monkeypatch):
    trl_module = importlib.import_module("trl.trainer.sft_trainer")
    before = snapshot()
    assert changes(before) == []
    monkeypatch.setattr(trl_module.SFTTrainer, "compute_loss", lambda self: None)
    assert "trl.trainer.sft_trainer.SFTTrainer.compute_loss changed" in changes(before)


@pytest.mark.parametrize("position", ["first", "last"])
def test_import_order_does_not_matter(position, expected_loss, tmp_path):
    imports = ["import torch", "import transformers", "import peft", "import trl"]
    imports.insert({"first": 0, "last": 4}[position], "from unsloth_trl import SFTConfig, SFTTrainer")
    assert loss_in_subprocess("\n".join(imports), tmp_path) == pytest.approx(expected_loss, rel=0, abs=1e-7)


def test_trains_without_gpu_triton_and_bitsandbytes(expected_loss, tmp_path):
    blocked = "import sys\nsys.modules['triton'] = sys.modules['bitsandbytes'] = None"
    loss = loss_in_subprocess(blocked, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert loss == pytest.approx(expected_loss, rel=0, abs=1e-7)


def test_trains_with_triton_but_without_gpu(expected_loss, tmp_path):
    pytest.importorskip("triton")
    loss = loss_in_subprocess("import triton", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert loss == pytest.approx(expected_loss, rel=0, abs=1e-7)
