"""`unsloth-trl doctor`: what of this machine helps or hinders training, one line each. Nothing heavy at import."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .versions import check_versions, found_and_supported


if TYPE_CHECKING:
    from .patches.checkpointing.ram import HostMemory

Level = Literal["ok", "advice", "blocks"]

GIB = 2**30
PINNED_BYTES = 256 * 2**20
SLOW_COPY = 6e9  # bytes per second; half of what 16 lanes of PCIe 3 give
LITTLE_RAM = 8 * GIB
MOSTLY_FREE = 0.9


@dataclass(frozen=True)
class Finding:
    """
    Args:
        subject (`str`): What was looked at.
        level (`str`): `"ok"`, `"advice"`, or `"blocks"` if no training is possible.
        text (`str`): What was found, and what to change unless it is `"ok"`.
    """

    subject: str
    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level.upper():<7} {self.subject}: {self.text}"


@dataclass(frozen=True)
class Gpu:
    """
    Args:
        name (`str`): As the driver has it.
        capability (`tuple[int, int]`): Compute capability.
        total, free (`int`): Bytes of its memory.
        bf16 (`bool`): Whether it has bf16 instructions.
        kernels (`tuple[str, ...]`): Architectures that torch was built for, as "sm_90" or "compute_90".
    """

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    bf16: bool
    kernels: tuple[str, ...]

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def has_kernels(self) -> bool:
        """Whether torch's binaries, or code it can compile for this card, are there."""
        major, minor = self.capability
        for kernel in self.kernels:
            kind, _, number = kernel.partition("_")
            if not number.isdigit():
                continue  # "sm_90a" runs on that one architecture only, beside a plain entry
            built = divmod(int(number), 10)
            if kind == "compute" and built <= self.capability:
                return True
            if kind == "sm" and built[0] == major and built[1] <= minor:
                return True
        return False


@dataclass(frozen=True)
class Copies:
    """Bytes per second of copies between page-locked host memory and the device."""

    to_host: float
    to_device: float


def supported_versions() -> str:
    """The versions of the libraries underneath; raises an `ImportError` if one is missing or too old."""
    check_versions()
    return found_and_supported()


def driver_version() -> str | None:
    """The version of NVIDIA's driver, from `nvidia-smi`."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def torch_build() -> str:
    """torch's version and what it was built for, in words."""
    import torch

    if torch.version.cuda:
        return f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    return f"torch {torch.__version__}" + (f" for ROCm {torch.version.hip}" if torch.version.hip else " without CUDA")


def visible_gpus() -> list[Gpu]:
    """The GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    kernels = () if torch.version.hip else tuple(torch.cuda.get_arch_list())
    found = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            free, total = torch.cuda.mem_get_info()
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        found.append(Gpu(name, capability, total, free, bf16, kernels))
    return found


def available_memory() -> "HostMemory":
    """What `host_memory` finds, container limits included."""
    from .patches.checkpointing.ram import host_memory

    return host_memory()


def page_lock_and_copy(nbytes: int) -> Copies | None:
    """
    Allocate and fill host memory; with a GPU page-lock it and time a copy in each direction.

    Returns:
        `Copies`, or `None` without a GPU.

    Raises:
        RuntimeError: If the memory cannot be had or the driver refuses to lock it.
    """
    import torch

    from .patches.checkpointing.memory import copy_speeds

    if torch.cuda.is_available():
        return Copies(*copy_speeds(torch.device("cuda", torch.cuda.current_device()), nbytes))
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)  # memory that is not written to is not there yet
    return None


@dataclass(frozen=True)
class Probes:
    """Where each fact comes from; tests put others in their place."""

    versions: Callable[[], str] = supported_versions
    driver: Callable[[], str | None] = driver_version
    build: Callable[[], str] = torch_build
    gpus: Callable[[], list[Gpu]] = visible_gpus
    memory: Callable[[], "HostMemory"] = available_memory
    pin: Callable[[int], Copies | None] = page_lock_and_copy


def findings(probes: Probes | None = None) -> list[Finding]:
    """
    Look at this machine.

    Args:
        probes (`Probes`, *optional*): Where to look.

    Returns:
        `list[Finding]`: Only the one about versions if these are not supported: nothing else can be looked at then.
    """
    probes = Probes() if probes is None else probes
    try:
        found = [Finding("versions", "ok", probes.versions())]
    except ImportError as error:
        return [Finding("versions", "blocks", str(error))]
    gpus, driver, build = probes.gpus(), probes.driver(), probes.build()
    found += _about_driver(gpus, driver, build)
    for gpu in gpus:
        found += _about_gpu(gpu, build)
    return [*found, *_about_memory(probes.memory()), _about_pinning(probes.pin)]


def _about_driver(gpus: list[Gpu], driver: str | None, build: str) -> list[Finding]:
    if gpus:
        version = f"version {driver}" if driver else "version unknown (there is no nvidia-smi)"
        return [Finding("driver", "ok", f"{version}, {build}")]
    if driver:
        text = (
            f"version {driver} sees a GPU and {build} does not: install a build of torch for CUDA, or a newer driver"
        )
        return [
            Finding("driver", "advice", text),
            Finding("GPU", "advice", "none that torch can use: training would run on the CPU; see driver"),
        ]
    return [
        Finding("driver", "advice", f"none found ({build}): install NVIDIA's if this machine has a GPU"),
        Finding("GPU", "advice", "none: training runs on the CPU, which is for tests and demos; use a CUDA card"),
    ]


def _about_gpu(gpu: Gpu, build: str) -> list[Finding]:
    free, total = gpu.free / GIB, gpu.total / GIB
    what = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.kernels and not gpu.has_kernels:
        return [
            Finding("GPU", "blocks", f"{what}: {build} has no kernels for {gpu.architecture}; install one that has")
        ]
    found = [Finding("GPU", "ok", what)]
    if gpu.free >= MOSTLY_FREE * gpu.total:
        found.append(Finding("VRAM", "ok", f"{free:.1f} of {total:.1f} GiB free"))
    else:
        text = f"{free:.1f} of {total:.1f} GiB free: end the other processes that nvidia-smi lists"
        found.append(Finding("VRAM", "advice", text))
    if gpu.bf16:
        found.append(Finding("bf16", "ok", "supported"))
    else:
        text = f"not on {gpu.architecture}: leave bf16 unset and the trainers take fp16; bf16 needs sm_80 or newer"
        found.append(Finding("bf16", "advice", text))
    return found


def _about_memory(memory: "HostMemory") -> list[Finding]:
    from .trainers.ram import host_memory_findings

    limit = ", the limit of this container" if memory.container else ""
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available{limit}"
    if memory.available < LITTLE_RAM:
        more = "give the container more memory" if memory.container else "close other programs"
        found = [Finding("RAM", "advice", f"{text}: {more}, or set checkpoint_policy='recompute', which uses none")]
    else:
        found = [Finding("RAM", "ok", text)]
    advice = host_memory_findings(memory, None)
    swap = Finding("swap", "ok", f"{memory.swap_used / GIB:.1f} GiB in use")
    return [*found, *([Finding("swap", "advice", line) for line in advice] or [swap])]


def _about_pinning(pin: Callable[[int], Copies | None]) -> Finding:
    size = f"{PINNED_BYTES // 2**20} MiB"
    try:
        copies = pin(PINNED_BYTES)
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = f"{size} refused ({reason}): free host memory, or set checkpoint_policy='recompute'"
        return Finding("pinned memory", "advice", text)
    if copies is None:
        return Finding("pinned memory", "ok", f"{size} of host memory allocated; only a GPU needs it page-locked")
    text = f"{size} page-locked, {copies.to_host / 1e9:.1f} GB/s to the host and {copies.to_device / 1e9:.1f} back"
    if min(copies.to_host, copies.to_device) < SLOW_COPY:
        advice = "that is slow: put the card into a slot with 16 lanes, or set checkpoint_policy='recompute'"
        return Finding("pinned memory", "advice", f"{text}; {advice}")
    return Finding("pinned memory", "ok", text)


def run_doctor(probes: Probes | None = None) -> int:
    """
    Print the findings.

    Returns:
        `int`: 1 if one of them blocks training, else 0.
    """
    found = findings(probes)
    print(*found, sep="\n")
    return int(any(finding.level == "blocks" for finding in found))
