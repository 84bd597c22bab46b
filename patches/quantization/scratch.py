"""Buffers that 4-bit weights are dequantised into, used again and again, the next weight's on a side stream.

A buffer belongs to the forward or the backward that holds it and to nothing else: what autograd saves is the packed
weight, and the backward dequantises again. A buffer that autograd did save is written to by the next weight, which
counts its version up, so that the backward raises instead of using other numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .op import NF4Weight, dequantize_nf4


@dataclass
class _Slot:
    buffer: torch.Tensor
    holds: NF4Weight | None = None  # the weight whose numbers are in it
    version: int = -1  # of that weight's packed bytes
    users: int = 0
    ready: torch.cuda.Event | None = None  # after it was written
    free: torch.cuda.Event | None = None  # after the last user's work, or its allocation
    used: int = 0  # when, counted in calls

    def has(self, weight: NF4Weight) -> bool:
        held = self.holds
        # not `held is weight`: each look at a module makes a new NF4Weight around the same bytes; those cannot be
        # another weight's by now, since this one keeps them alive
        return (
            held is not None
            and held.packed.data_ptr() == weight.packed.data_ptr()
            and held.shape == weight.shape
            and self.version == weight.packed._version
        )


class Scratch:
    """
    One buffer for each device, dtype and purpose, or two if the next weight is prefetched into the other.

    Not for several threads at a time on one device, except that autograd's own thread may take over from the caller's.

    Args:
        slots (`int`, *optional*, defaults to 1): Buffers for each device, dtype and purpose; 2 for `prefetch`.
        poison (`bool`, *optional*, defaults to `False`): Fill a buffer with NaN when its last user releases it, for
            tests: who reads on shows. Otherwise its numbers stay and are found by the next `get` of that weight.
    """

    def __init__(self, slots: int = 1, poison: bool = False):
        if slots < 1:
            raise ValueError(f"slots={slots}: at least 1")
        self.slots = slots
        self.poison = poison
        self._slots: dict[tuple, list[_Slot]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._calls = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(slot.buffer.nbytes for slots in self._slots.values() for slot in slots)

    def clear(self) -> None:
        """Give up all buffers. Raises RuntimeError while one is in use."""
        if any(slot.users for slots in self._slots.values() for slot in slots):
            raise RuntimeError("a dequantised weight is still in use")
        for slots in self._slots.values():
            for slot in slots:
                _wait(slot.ready)  # the allocator may hand its memory to the current stream
        self._slots.clear()

    @contextmanager
    def use(self, weight: NF4Weight, dtype: torch.dtype | None = None, purpose: str = "") -> Iterator[torch.Tensor]:
        """`get` and `release` around a block."""
        dense = self.get(weight, dtype, purpose)
        try:
            yield dense
        finally:
            self.release(weight, dtype, purpose)

    def get(self, weight: NF4Weight, dtype: torch.dtype | None = None, purpose: str = "") -> torch.Tensor:
        """
        The weight in 16 or 32 bits, for work on the current stream until `release`.

        Args:
            weight (`NF4Weight`): The weight.
            dtype (`torch.dtype`, *optional*): bf16, fp16 or fp32; by default the one that the weight had.
            purpose (`str`, *optional*): Weights of different purposes never share a buffer, so that both projections
                of a layer can be held at once.

        Returns:
            `torch.Tensor` of the weight's shape, without gradient: a view of the buffer.

        Raises:
            RuntimeError: If all buffers of this purpose are in use by other weights.
        """
        slot = self._find(weight, dtype, purpose)
        if slot is None:
            slot = self._free(weight, dtype, purpose)
            if slot is None:
                raise RuntimeError(
                    f"all {self.slots} scratch buffers for {purpose or 'weights'!r} are in use: release one first"
                )
            self._write(slot, weight)
        _wait(slot.ready)
        slot.users += 1
        return _view(slot, weight)

    def release(self, weight: NF4Weight, dtype: torch.dtype | None = None, purpose: str = "") -> None:
        """The current stream has no more work for what `get` returned with these arguments."""
        slot = self._find(weight, dtype, purpose)
        if slot is None or not slot.users:
            raise RuntimeError("released a weight that is not in use")
        slot.users -= 1
        if not slot.users:
            if self.poison:
                slot.buffer.fill_(float("nan"))
                slot.holds = None
            slot.free = _event(weight.device)

    def prefetch(self, weight: NF4Weight, dtype: torch.dtype | None = None, purpose: str = "") -> bool:
        """
        Dequantise on a side stream what `get` will ask for next; a hint that can be ignored or wrong.

        Returns:
            `bool`: Whether a buffer has it or will; `False` if all are in use. With one slot, it waits for the work
            of the last user and overlaps with nothing that comes before that.
        """
        if self._find(weight, dtype, purpose) is not None:
            return True
        slot = self._free(weight, dtype, purpose)
        if slot is None:
            return False
        if weight.device.type != "cuda":
            self._write(slot, weight)
            return True
        side = self._streams.get(weight.device)
        if side is None:
            side = self._streams[weight.device] = torch.cuda.Stream(weight.device)
        with torch.cuda.stream(side):
            self._write(slot, weight)
        return True

    def _write(self, slot: _Slot, weight: NF4Weight) -> None:
        _wait(slot.ready)  # a prefetch that nobody asked for may still be writing
        _wait(slot.free)
        slot.holds = None
        with torch.no_grad():
            dequantize_nf4(weight, out=_view(slot, weight))
        slot.holds, slot.version = weight, weight.packed._version
        slot.ready = _event(weight.device)

    def _find(self, weight: NF4Weight, dtype: torch.dtype | None, purpose: str) -> _Slot | None:
        for slot in self._slots.get((weight.device, dtype or weight.dtype, purpose), ()):
            if slot.has(weight):
                self._touch(slot)
                return slot
        return None

    def _free(self, weight: NF4Weight, dtype: torch.dtype | None, purpose: str) -> _Slot | None:
        """A buffer that is big enough and not in use: an empty one, a new one, or the least recently used one."""
        key = (weight.device, dtype or weight.dtype, purpose)
        slots = self._slots.setdefault(key, [])
        # a buffer made in an evaluation under `inference_mode` could not be written to in training
        with torch.inference_mode(False):
            return self._make_room(weight, key, slots)

    def _make_room(self, weight: NF4Weight, key: tuple, slots: list[_Slot]) -> _Slot | None:
        idle = [slot for slot in slots if not slot.users]
        empty = [slot for slot in idle if slot.holds is None]
        if empty:
            slot = empty[0]
        elif len(slots) < self.slots:
            slot = _Slot(torch.empty(0, dtype=key[1], device=key[0]))
            slots.append(slot)
        elif idle:
            slot = min(idle, key=lambda slot: slot.used)
        else:
            return None
        if slot.buffer.numel() < weight.numel:
            _wait(slot.ready)
            slot.ready, slot.holds = None, None
            slot.buffer = torch.empty(0, dtype=key[1], device=key[0])  # the old one goes before the new one comes
            slot.buffer = torch.empty(weight.numel, dtype=key[1], device=key[0])
            slot.free = _event(weight.device)
        self._touch(slot)
        return slot

    def _touch(self, slot: _Slot) -> None:
        self._calls += 1
        slot.used = self._calls


def _view(slot: _Slot, weight: NF4Weight) -> torch.Tensor:
    return slot.buffer[: weight.numel].view(weight.shape)


def _event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.wait(torch.cuda.current_stream(event.device))
