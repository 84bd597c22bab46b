"""Runs in processes of their own for `test_caches.py`: with folders that cannot be written, and several at once."""

import ctypes
import hashlib
import json
import os
import sys
import time
from pathlib import Path


PROCESSES, REPEATS = 4, 20
WHEEL = b"the wheel"


def drop_capabilities() -> None:
    """Let permissions hold for root too; for other users they do."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if libc.capset(header, data) != 0:
            raise OSError(ctypes.get_errno(), "capset")


def watch_executed_code(folders: list[str]) -> list[str]:
    """The files in these folders whose code is executed from now on."""
    found = []

    def audit(event, args):
        if event == "exec":
            name = getattr(args[0], "co_filename", None) or ""
            if os.path.isabs(name) and any(name.startswith(folder + os.sep) for folder in folders):
                found.append(name)

    sys.addaudithook(audit)
    return found


def stand_in_for_the_wheel(log: Path, wheel: bytes = WHEEL) -> None:
    """SmolLM2 without the network and without half a minute: `pip` and the conversion leave a line in `log` each."""
    from unsloth_trl.models import smollm2

    def note(what: str) -> None:
        with open(log, "a") as file:  # short lines are appended whole
            file.write(f"{what}\n")

    def download(folder: Path) -> None:
        note("download")
        (folder / smollm2.WHEEL_NAME).write_bytes(wheel)

    def convert(source: Path, target: Path) -> None:
        note("convert")
        time.sleep(0.02)
        target.mkdir()
        for name in smollm2._REQUIRED:
            (target / name).write_bytes(source.read_bytes())
        record = {"wheel": smollm2.WHEEL_SHA256, "model": smollm2._sha256(target / "model.safetensors")}
        (target / smollm2._RECORD).write_text(json.dumps(record))

    smollm2.WHEEL_SHA256 = hashlib.sha256(wheel).hexdigest()
    smollm2._pip_download, smollm2._convert = download, convert


def train_without_a_place_to_write(output: str, log: str, *read_only: str) -> None:
    """One step and SmolLM2, where neither the working directory nor a cache can be written."""
    drop_capabilities()
    assert not any(os.access(folder, os.W_OK) for folder in (*read_only, "."))
    executed = watch_executed_code([os.getcwd(), *read_only])
    from tests.packaging.one_step import one_step_loss

    loss = one_step_loss(output)
    from unsloth_trl.models import smollm2

    stand_in_for_the_wheel(Path(log))
    sources = [smollm2.resolve_smollm2() for _ in range(2)]
    print(json.dumps({"loss": loss, "executed": executed, "paths": [source.path for source in sources]}))


def _trainer(library, root: str):
    from datasets import Dataset

    from tests.tiny import lora_config, tiny_model, tiny_rows, tiny_tokenizer

    return library.SFTTrainer(
        tiny_model("llama"),
        library.SFTConfig(f"{root}/out", packing=True, max_length=32, report_to=[], use_cpu=True, bf16=False),
        train_dataset=Dataset.from_list(tiny_rows(4, seed=0)),
        processing_class=tiny_tokenizer(),
        peft_config=lora_config("llama"),
    )


def _build(cache: str, log: str, barrier, wheel: bytes, trl_version: str | None) -> None:
    assert not [name for name in sys.modules if name.split(".")[0] == "unsloth_trl"]
    os.environ["HF_HOME"] = cache
    barrier.wait(60)
    if trl_version is not None:
        import trl

        trl.__version__ = trl_version
    import unsloth_trl

    trainer = _trainer(unsloth_trl, cache)
    assert trainer.patch_report["attention"].applied
    stand_in_for_the_wheel(Path(log), wheel)
    from unsloth_trl.models.smollm2 import resolve_smollm2

    source = resolve_smollm2(cache)
    assert (Path(source.path) / "model.safetensors").read_bytes() == wheel


def at_once(root: str) -> None:
    """
    Four processes import this package and build a trainer at the same moment, twenty times, each time with an empty
    cache; then once more in the last cache with another version of TRL, and once with another wheel.
    """
    import gc
    import multiprocessing

    import trl

    _trainer(trl, root)  # other libraries are loaded once: what is left is this package and its caches
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    found = []
    for repeat in range(REPEATS + 2):
        cache, log = Path(root) / f"cache-{min(repeat, REPEATS - 1)}", Path(root) / f"log-{repeat}"
        cache.mkdir(exist_ok=True)
        barrier = context.Barrier(PROCESSES)
        version, wheel = ("99.0.0" if repeat == REPEATS else None), (b"another" if repeat > REPEATS else WHEEL)
        processes = [
            context.Process(target=_build, args=(str(cache), str(log), barrier, wheel, version))
            for _ in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        entries = sorted(path.name for path in cache.iterdir() if path.name != "out")
        made = log.read_text().split() if log.is_file() else []
        codes = [process.exitcode for process in processes]
        found.append({"exit": codes, "entries": entries, "made": made})
        code = [str(path) for path in cache.rglob("*.py*")]
        assert not code, code
    print(json.dumps(found))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
