"""Moves layer inputs to host memory during the forward and back during the backward, beside the computation.

The method is offloaded activation checkpointing with double buffering, as published by Unsloth and by torchtune: what
a checkpointed layer saves is its input, and the copy of it runs on a stream of its own. No copy is joined to the
compute stream right after the layer; memory is given up for reuse only when the copy out of it is known, or ordered,
to be done, without `record_stream`.
"""

import sys
import weakref
from collections import deque
from collections.abc import Iterator

import torch

from .ram import pinned_limit
from .slab import HostSlab, Slot, page_lock


MIN_BYTES = 2**16  # a smaller input is not worth two copies
IN_FLIGHT = 2  # inputs that may wait on the device for their copy to be done


class _Layer:
    """What one layer saved, and the layer before it in the forward, which the backward comes to next."""

    def __init__(self, before: "_Layer | None"):
        self.before = before
        self.saved: list[weakref.ref[Saved]] = []

    def waiting(self) -> Iterator["Saved"]:
        """What has neither been asked for nor is on its way."""
        for ref in self.saved:
            saved = ref()
            if saved is not None and saved.slot is not None and not saved.loaded and saved.staged is None:
                yield saved


class Saved:
    """
    One tensor that autograd saved: where its bytes are, and how to get them back.

    Its slot is given back when autograd drops it, also after a forward without a backward.

    Args:
        mover (`DeviceMover`): Of the tensor's device.
        tensor (`torch.Tensor`): What is saved.
        slot (`Slot`, *optional*): Where its bytes go; without one it stays on the device.
        layer (`_Layer`): Whose input it is.
    """

    def __init__(self, mover: "DeviceMover", tensor: torch.Tensor, slot: Slot | None, layer: _Layer):
        self.mover = mover
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.slot = slot
        self.held = tensor if slot is None else None
        self.layer = layer
        self.loaded = False
        self.staged: tuple[torch.Tensor, torch.cuda.Event] | None = None
        layer.saved.append(weakref.ref(self))

    @property
    def host(self) -> torch.Tensor:
        return self.slot.buffer.view(self.dtype).view(self.shape)

    def __del__(self):
        if self.staged is not None and self.mover.is_cuda:
            # nobody asked for it: its memory must not be used again before the copy into it is over
            torch.cuda.current_stream(self.device).wait_event(self.staged[1])
        if self.slot is not None:
            self.mover.slab.give(self.slot)


class DeviceMover:
    """
    The streams and the host memory of one device.

    Args:
        device (`torch.device`): The device that inputs leave. A CPU is moved within its memory, synchronously: for
            tests of everything but the overlap.
        limit (`int`): Bytes of host memory it may hold.
        staging_buffers (`int`): Layers whose inputs the backward has on the device at once: 1 copies them when they
            are asked for, 2 copies the next layer's while one is used.
    """

    def __init__(self, device: torch.device, limit: int, staging_buffers: int = 2):
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.slab = HostSlab(limit, page_lock, device) if self.is_cuda else HostSlab(limit)
        self.staging_buffers = staging_buffers
        self._out = torch.cuda.Stream(device) if self.is_cuda else None
        self._in = torch.cuda.Stream(device) if self.is_cuda else None
        self._last_in: torch.cuda.Event | None = None
        self._leaving: deque[tuple[torch.Tensor, int, torch.cuda.Event]] = deque()
        self._layer = _Layer(None)

    def __del__(self):
        if getattr(self, "_leaving", None) and not sys.is_finalizing():
            torch.cuda.synchronize(self.device)  # before the memory of copies under way is used again

    def next_layer(self, first: bool) -> None:
        """What is saved from here on is another layer's; the `first` one follows nothing."""
        self._layer = _Layer(None if first else self._layer)

    def save(self, tensor: torch.Tensor) -> Saved:
        """
        Start the copy of a tensor to the host.

        Raises:
            HostMemoryError: If there is no host memory for it; nothing has changed then.
            RuntimeError: If one of the inputs saved before was changed in place while it was being copied.
        """
        slot = self.slab.take(tensor.numel() * tensor.element_size())
        saved = Saved(self, tensor, slot, self._layer)
        if not self.is_cuda:
            saved.host.copy_(tensor.detach())
            return saved
        with torch.cuda.device(self.device):
            self.let_go(IN_FLIGHT - 1)
            ready = torch.cuda.current_stream().record_event()
            self._out.wait_event(ready)
            if self._last_in is not None:
                self._out.wait_event(self._last_in)  # a copy back may still read the slot's old bytes
            with torch.cuda.stream(self._out):
                saved.host.copy_(tensor.detach(), non_blocking=True)
                done = self._out.record_event()
        self._leaving.append((tensor, tensor._version, done))
        return saved

    def hold(self, tensor: torch.Tensor) -> Saved:
        """Leave a tensor on the device, in the order of those that leave: loading it fetches the layer before it."""
        return Saved(self, tensor, None, self._layer)

    def load(self, saved: Saved) -> torch.Tensor:
        """The saved tensor on its device, with the copies of those that come next under way."""
        if not self.is_cuda:
            return saved.host.clone() if saved.held is None else saved.held
        with torch.cuda.device(self.device):
            self.let_go(0)
            if saved.staged is None and saved.held is None:
                self._stage(saved)
            layer = saved.layer
            for _ in range(self.staging_buffers):
                for following in layer.waiting():
                    self._stage(following)
                if (layer := layer.before) is None:
                    break
            saved.loaded = True
            if saved.held is not None:
                return saved.held
            tensor, arrived = saved.staged
            saved.staged = None
            torch.cuda.current_stream().wait_event(arrived)
        return tensor

    def _stage(self, saved: Saved) -> None:
        # from the caching allocator of the compute stream: the copy waits until what used this memory before is done
        tensor = torch.empty(saved.shape, dtype=saved.dtype, device=self.device)
        free = torch.cuda.current_stream().record_event()
        self._in.wait_event(free)
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            tensor.copy_(saved.host, non_blocking=True)
            self._last_in = self._in.record_event()
        saved.staged = (tensor, self._last_in)

    def let_go(self, keep: int = 0) -> None:
        """Drop inputs whose copy is done, and wait on the compute stream for all but the last `keep` others."""
        while self._leaving:
            tensor, version, done = self._leaving[0]
            if not done.query():
                if len(self._leaving) <= keep:
                    return
                torch.cuda.current_stream(self.device).wait_event(done)
            self._leaving.popleft()
            if tensor._version != version:
                raise RuntimeError(
                    "a layer changed its input in place after it was saved for the backward; set "
                    "checkpoint_policy='recompute' or gradient_checkpointing=False for this model"
                )

    def reset(self) -> None:
        """Forget a forward or backward that an error ended; copies under way are waited for."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        self._leaving.clear()
        self._layer = _Layer(None)


class Offloader:
    """
    The movers of one model, one per device it lives on. Freed with the model, and shared with no other.

    Args:
        max_pinned_gb (`float`, *optional*): GiB of host memory that this process may page-lock; by default its share
            of half of what is available when the first input is saved.
        staging_buffers (`int`): See `DeviceMover`.
        num_devices (`int`): Devices that the model lives on; each gets the same part of the limit.
    """

    def __init__(self, max_pinned_gb: float | None = None, staging_buffers: int = 2, num_devices: int = 1):
        self.max_pinned_gb = max_pinned_gb
        self.staging_buffers = staging_buffers
        self.num_devices = num_devices
        self._movers: dict[torch.device, DeviceMover] = {}

    def mover(self, device: torch.device) -> DeviceMover:
        if device not in self._movers:
            limit = pinned_limit(self.max_pinned_gb) // self.num_devices
            self._movers[device] = DeviceMover(device, limit, self.staging_buffers)
        return self._movers[device]

    def limit(self) -> int:
        """Bytes of host memory that may be held in all."""
        if self._movers:
            return sum(mover.slab.limit for mover in self._movers.values())
        return pinned_limit(self.max_pinned_gb)

    def reserve(self, device: torch.device, nbytes: int, count: int) -> None:
        """Have host memory for `count` inputs of `nbytes` each, spread over the model's devices."""
        self.mover(device).slab.reserve(nbytes, -(-count // self.num_devices))

    def next_layer(self, first: bool) -> None:
        """As `DeviceMover.next_layer`, on all devices."""
        for mover in self._movers.values():
            mover.next_layer(first)

    def save(self, tensor: torch.Tensor) -> Saved:
        """As `DeviceMover.save`, on the tensor's own device."""
        return self.mover(tensor.device).save(tensor)

    def hold(self, tensor: torch.Tensor) -> Saved:
        """As `DeviceMover.hold`."""
        return self.mover(tensor.device).hold(tensor)

    def reset(self) -> None:
        for mover in self._movers.values():
            mover.reset()

    def let_go(self) -> None:
        """As `DeviceMover.let_go`, on all devices."""
        for mover in self._movers.values():
            mover.let_go()

    def release(self) -> None:
        """Give all host memory back, once nothing is saved in it any more."""
        self.reset()
        self._movers.clear()

    def set_staging_buffers(self, number: int) -> None:
        self.staging_buffers = number
        for mover in self._movers.values():
            mover.staging_buffers = number

    @property
    def nbytes(self) -> int:
        """Host memory held, in bytes."""
        return sum(mover.slab.nbytes for mover in self._movers.values())


def can_leave(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a layer input worth moving: no parameter, dense, and not small."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_floating_point()
    return plain and tensor.numel() * tensor.element_size() >= MIN_BYTES
