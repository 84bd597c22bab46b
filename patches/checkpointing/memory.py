"""Reads what the planner needs to know of a device: memory in use, the most in use, and the speed of a copy."""

import torch

from .slab import page_lock, page_unlock


class Probe:
    """
    Memory and time on one device; all zeros for a CPU, for which nothing is planned.

    Args:
        device (`torch.device`): The device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_cuda = device.type == "cuda"

    def allocated(self) -> int:
        """Bytes of tensors now."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else 0

    def peak(self) -> int:
        """Most bytes of tensors since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def free(self) -> int:
        """Bytes that tensors could still take: free on the device or cached by torch, within this process's limit."""
        return max(0, self.usable() - self.allocated())

    def usable(self) -> int:
        """Bytes that this process's tensors could take in all."""
        if not self.is_cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        limit = total * torch.cuda.get_per_process_memory_fraction(self.device)
        return int(min(free + reserved, limit))

    def mark(self) -> "torch.cuda.Event | None":
        """A point in time of the compute stream."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: "torch.cuda.Event | None", end: "torch.cuda.Event | None") -> float:
        """Time between two marks; waits for the second."""
        if start is None or end is None:
            return 0.0
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def bandwidth(self) -> float:
        """Bytes per second of a copy to page-locked memory, measured once; 0 if there is none."""
        if not self.is_cuda:
            return 0.0
        if self.device not in _BANDWIDTHS:
            try:
                _BANDWIDTHS[self.device], _ = copy_speeds(self.device, 64 * 2**20)
            except RuntimeError:  # refused, or no memory left: then nothing is offloaded by choice
                return 0.0
        return _BANDWIDTHS[self.device]


_BANDWIDTHS: dict[torch.device, float] = {}  # of devices, which stay; not of failures, which may pass


def copy_speeds(device: torch.device, nbytes: int) -> tuple[float, float]:
    """
    Page-lock host memory and time a copy in each direction.

    Args:
        device (`torch.device`): A CUDA device.
        nbytes (`int`): To lock, and to copy.

    Returns:
        `tuple[float, float]`: Bytes per second to the host, and to the device.

    Raises:
        RuntimeError: If the memory cannot be had or the driver refuses to lock it.
    """
    host = torch.empty(nbytes, dtype=torch.uint8)
    page_lock(host)
    try:
        on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)

        def speed(target: torch.Tensor, source: torch.Tensor) -> float:
            target.copy_(source, non_blocking=True)  # the first copy sets up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(device)
            start.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
            end.synchronize()
            return nbytes / (start.elapsed_time(end) / 1e3)

        return speed(host, on_device), speed(on_device, host)
    finally:
        page_unlock(host, device)
