"""How much host memory there is to page-lock: the machine's, the container's, and what is swapped out already."""

import os
from pathlib import Path
from typing import NamedTuple

import psutil


CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
SHARE = 0.5  # of the available memory; Windows and WSL page-lock no more than half of it either
SWAP_IN_USE = 2**30  # bytes; less than this is what an idle desktop has swapped out


class HostMemory(NamedTuple):
    """
    Args:
        available (`int`): Bytes a process can still take without swapping, seen from inside its container.
        total (`int`): Bytes of the machine, or of the container if that is less.
        swap_used (`int`): Bytes that are swapped out now.
        container (`bool`): Whether a limit of the container, not the machine, is what counts.
    """

    available: int
    total: int
    swap_used: int
    container: bool


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None


def _reclaimable(path: Path) -> int:
    """File pages that the kernel drops before it refuses memory: they count as used in a cgroup."""
    try:
        stat = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))


def _own_groups() -> dict[str, str]:
    """The path of this process in each hierarchy of cgroups: "" is that of version 2, "memory" one of version 1."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path.strip("/")
    return found


def cgroup_memory(root: Path | None = None) -> tuple[int, int] | None:
    """
    Limit and use in bytes of the tightest container around this process (cgroup v2 or v1), or `None` without a limit.
    """
    root = CGROUP if root is None else root
    own = _own_groups()
    found = []
    for top, limit_name, used_name, path in (
        (root, "memory.max", "memory.current", own.get("", "")),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", own.get("memory", "")),
    ):
        # a limit holds for all groups below; inside a container the own path may not be there, and the root is it
        folder = top / path
        for group in (folder, *folder.parents):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                found.append((limit, max(0, used - _reclaimable(group / "memory.stat"))))
            if group == top:
                break
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def host_memory() -> HostMemory:
    """What this process can still take."""
    machine = psutil.virtual_memory()
    available, total, container = machine.available, machine.total, False
    if (limited := cgroup_memory()) is not None and limited[0] < total:
        limit, used = limited
        total, container = limit, True
        available = min(available, max(0, limit - used))
    return HostMemory(available, total, psutil.swap_memory().used, container)


def pinned_limit(max_pinned_gb: float | None) -> int:
    """
    Bytes that may be page-locked.

    Args:
        max_pinned_gb (`float`, *optional*): The user's limit in GiB for this process; by default its part of
            `SHARE` of what is available.
    """
    if max_pinned_gb is not None:
        return int(max_pinned_gb * 2**30)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this run, on this machine
    return int(host_memory().available * SHARE) // processes
