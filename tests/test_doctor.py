import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch

from unsloth_trl import cli, doctor, versions
from unsloth_trl.doctor import PINNED_BYTES, Copies, Gpu, Probes, findings, run_doctor
from unsloth_trl.patches.checkpointing import memory
from unsloth_trl.patches.checkpointing.ram import HostMemory


GIB = 2**30
H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, True, ("sm_80", "sm_90", "compute_90"))
T4 = Gpu("Tesla T4", (7, 5), 15 * GIB, 14 * GIB, False, ("sm_75", "sm_80"))
ROOMY = HostMemory(available=100 * GIB, total=128 * GIB, swap_used=0, container=False)
NAMES = ["versions", "driver", "GPU", "VRAM", "bf16", "RAM", "swap", "pinned memory"]


def probes(**others) -> Probes:
    """A machine on which all is well, with `others` in place of some probes' results."""
    results = {
        "versions": "torch 2.13.0 (>=2.11)",
        "driver": "580.65.06",
        "build": "torch 2.13.0 for CUDA 13.0",
        "gpus": [H200],
        "memory": ROOMY,
    } | others
    pin = results.pop("pin", lambda nbytes: Copies(55e9, 50e9))
    return Probes(**{name: lambda result=result: result for name, result in results.items()}, pin=pin)


def finding(subject: str, machine: Probes) -> tuple[str, str]:
    """Level and text of the one finding about `subject`."""
    (found,) = [f for f in findings(machine) if f.subject == subject]
    return found.level, found.text


def refuse(error: Exception):
    def pin(nbytes):
        raise error

    return pin


def test_a_good_machine(capsys):
    found = findings(probes())
    assert [f.subject for f in found] == NAMES
    assert {f.level for f in found} == {"ok"}
    assert run_doctor(probes()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "OK      versions: torch 2.13.0 (>=2.11)",
        "OK      driver: version 580.65.06, torch 2.13.0 for CUDA 13.0",
        "OK      GPU: NVIDIA H200, compute capability 9.0",
        "OK      VRAM: 139.0 of 140.0 GiB free",
        "OK      bf16: supported",
        "OK      RAM: 100.0 of 128.0 GiB available",
        "OK      swap: 0.0 GiB in use",
        "OK      pinned memory: 256 MiB page-locked, 55.0 GB/s to the host and 50.0 back",
    ]


def test_versions_that_are_too_old_block(capsys):
    def too_old():
        raise ImportError("unsloth_trl needs trl>=1.16, found 1.2: pip install -U 'trl>=1.16'")

    machine = Probes(versions=too_old, gpus=refuse(AssertionError("nothing else is looked at")))
    assert run_doctor(machine) == 1
    assert capsys.readouterr().out == (
        "BLOCKS  versions: unsloth_trl needs trl>=1.16, found 1.2: pip install -U 'trl>=1.16'\n"
    )


def test_the_versions_are_those_of_the_package(monkeypatch):
    assert findings()[0].level == "ok" and f"torch {torch.__version__} (>=2.11)" in findings()[0].text
    monkeypatch.setitem(versions.MINIMUM, "peft", "99.0")
    (found,) = findings()
    assert found.level == "blocks" and "unsloth_trl needs peft>=99.0, found" in found.text


def test_no_gpu_is_advice():
    machine = probes(gpus=[], driver=None, pin=lambda nbytes: None, build="torch 2.13.0+cpu without CUDA")
    assert [f.subject for f in findings(machine)] == ["versions", "driver", "GPU", "RAM", "swap", "pinned memory"]
    level, text = finding("GPU", machine)
    assert level == "advice" and "training runs on the CPU" in text and "use a CUDA card" in text
    assert finding("driver", machine)[0] == "advice"
    assert finding("pinned memory", machine) == (
        "ok",
        "256 MiB of host memory allocated; only a GPU needs it page-locked",
    )
    assert run_doctor(machine) == 0


def test_a_driver_without_a_torch_for_it():
    level, text = finding("driver", probes(gpus=[], build="torch 2.13.0+cpu without CUDA"))
    assert level == "advice"
    assert text == (
        "version 580.65.06 sees a GPU and torch 2.13.0+cpu without CUDA does not: install a build of torch for CUDA, "
        "or a newer driver"
    )


def test_t4_has_no_bf16():
    machine = probes(gpus=[T4])
    level, text = finding("bf16", machine)
    assert level == "advice" and "not on sm_75" in text and "leave bf16 unset" in text
    assert finding("GPU", machine) == ("ok", "Tesla T4, compute capability 7.5")
    assert run_doctor(machine) == 0


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((9, 0), ("sm_80", "sm_90"), True),
        ((8, 9), ("sm_80",), True),  # binaries of the same generation
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_80", "sm_90"), False),
        ((12, 0), ("sm_90", "compute_90"), True),  # compiled by the driver
        ((9, 0), ("compute_100",), False),
        ((10, 0), ("sm_90a",), False),
        ((7, 0), ("sm_75", "sm_80"), False),
    ],
    ids=str,
)
def test_kernels_for_the_card(capability, kernels, runs):
    gpu = Gpu("card", capability, 10 * GIB, 10 * GIB, True, kernels)
    assert gpu.has_kernels is runs
    machine = probes(gpus=[gpu])
    level, text = finding("GPU", machine)
    assert level == ("ok" if runs else "blocks")
    assert run_doctor(machine) == int(not runs)
    if not runs:
        assert text.endswith(f"torch 2.13.0 for CUDA 13.0 has no kernels for {gpu.architecture}; install one that has")


def test_memory_that_others_use():
    busy = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 90 * GIB, True, ())
    assert finding("VRAM", probes(gpus=[busy])) == (
        "advice",
        "90.0 of 140.0 GiB free: end the other processes that nvidia-smi lists",
    )


def test_each_gpu_has_its_lines():
    found = [f.text for f in findings(probes(gpus=[H200, T4])) if f.subject == "GPU"]
    assert found == ["NVIDIA H200, compute capability 9.0", "Tesla T4, compute capability 7.5"]


def test_limit_of_a_container():
    roomy = HostMemory(available=30 * GIB, total=32 * GIB, swap_used=0, container=True)
    assert finding("RAM", probes(memory=roomy)) == ("ok", "30.0 of 32.0 GiB available, the limit of this container")
    level, text = finding("RAM", probes(memory=roomy._replace(available=3 * GIB)))
    assert level == "advice" and "give the container more memory" in text
    level, text = finding("RAM", probes(memory=ROOMY._replace(available=3 * GIB)))
    assert level == "advice" and "close other programs" in text and "container" not in text


def test_swap_in_use():
    level, text = finding("swap", probes(memory=ROOMY._replace(swap_used=5 * GIB)))
    assert level == "advice" and text.startswith("5.0 GiB are swapped out") and "Close other programs" in text
    assert finding("swap", probes(memory=ROOMY._replace(swap_used=GIB // 2))) == ("ok", "0.5 GiB in use")


@pytest.mark.parametrize("error", [RuntimeError("CUDA error 2\nat line 7"), MemoryError()], ids=repr)
def test_pinning_that_fails_is_advice(error):
    machine = probes(pin=refuse(error))
    level, text = finding("pinned memory", machine)
    reason = "CUDA error 2" if str(error) else "MemoryError"
    assert level == "advice"
    assert text == f"256 MiB refused ({reason}): free host memory, or set checkpoint_policy='recompute'"
    assert run_doctor(machine) == 0


def test_slow_copies_are_advice():
    level, text = finding("pinned memory", probes(pin=lambda nbytes: Copies(3e9, 12e9)))
    assert level == "advice" and "3.0 GB/s to the host and 12.0 back; that is slow" in text
    assert finding("pinned memory", probes(pin=lambda nbytes: Copies(7e9, 12e9)))[0] == "ok"


def test_host_memory_is_really_allocated(monkeypatch):
    sizes = []
    empty = torch.empty

    def counted(*shape, **kwargs):
        sizes.append(shape[0])
        return empty(*shape, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "empty", counted)
    assert doctor.page_lock_and_copy(2**20) is None
    assert sizes == [2**20]
    with pytest.raises(RuntimeError):
        doctor.page_lock_and_copy(2**60)
    asked = []
    findings(probes(pin=asked.append))
    assert asked == [PINNED_BYTES] == [256 * 2**20]


def test_a_locked_buffer_is_unlocked_again(monkeypatch):
    """With a GPU that fails after the lock: the buffer is given back all the same."""
    lock, unlock = (create_autospec(f) for f in (memory.page_lock, memory.page_unlock))  # called as they can be
    empty = torch.empty

    def none_on_a_device(*shape, device=None, **kwargs):
        return empty(*shape, **kwargs) if device is None else refuse_anything()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(memory, "page_lock", lock)
    monkeypatch.setattr(memory, "page_unlock", unlock)
    monkeypatch.setattr(torch, "empty", none_on_a_device)
    with pytest.raises(RuntimeError, match="no device"):
        doctor.page_lock_and_copy(2**20)
    assert [call.args[0].numel() for call in (*lock.mock_calls, *unlock.mock_calls)] == [2**20, 2**20]
    assert unlock.mock_calls[0].args[1] == torch.device("cuda", 0)


def refuse_anything(*args, **kwargs):
    raise RuntimeError("no device")


@pytest.mark.parametrize(
    ("output", "returncode", "version"),
    [("580.65.06\n580.65.06\n", 0, "580.65.06"), ("", 0, None), ("no devices", 9, None)],
    ids=["two cards", "silent", "failed"],
)
def test_driver_version(output, returncode, version, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    done = SimpleNamespace(stdout=output, returncode=returncode)
    monkeypatch.setattr(doctor.subprocess, "run", lambda command, **kwargs: done)
    assert doctor.driver_version() == version


def test_driver_version_without_an_answer(monkeypatch):
    def hangs(command, **kwargs):
        raise subprocess.TimeoutExpired(command, kwargs["timeout"])

    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor.subprocess, "run", hangs)
    assert doctor.driver_version() is None
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.driver_version() is None


def test_gpus_as_torch_has_them(monkeypatch):
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert doctor.visible_gpus() == []
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "device", lambda index: __import__("contextlib").nullcontext())
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (14 * GIB, 15 * GIB))
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    assert doctor.visible_gpus() == [T4]


def test_this_machine(capsys):
    status = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert status == int(any(line.startswith("BLOCKS") for line in lines))
    subjects = [line[8:].partition(":")[0] for line in lines]
    assert subjects[:3] == NAMES[:3] and subjects[-3:] == NAMES[-3:]
    assert all(line.split()[0] in ("OK", "ADVICE", "BLOCKS") for line in lines)


def test_importing_it_is_light():
    code = "import sys, unsloth_trl.doctor\nassert not {'torch', 'psutil', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
