"""Page-locked host memory for what leaves the device: one slab, grown in steps and reused over the run.

torch's own pinned allocator rounds every request up to a power of two and page-locks memory in the middle of training.
Here a few large pieces are locked, each of exactly the size asked for, and handed out as slots.
"""

import bisect
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch


logger = logging.getLogger(__name__)

ALIGNMENT = 256  # bytes; so that a slot can be viewed in any dtype
STEP = 256 * 2**20  # bytes; the least that the slab grows by for a slot that was not reserved
PIECE = 4 * 2**30  # bytes that are locked at once when slots are reserved, if a slot is not longer


class HostMemoryError(RuntimeError):
    """No host memory: the limit is reached, or the operating system refuses."""


PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices


def page_lock(buffer: torch.Tensor) -> None:
    """
    Page-lock a CPU tensor in place, for copies that run beside the computation.

    Raises:
        RuntimeError: If the driver refuses.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE))
    if code:
        _forget_error()
        raise RuntimeError(f"page-locking {buffer.numel() / 2**30:.2f} GiB failed: CUDA error {code}")


def page_unlock(buffer: torch.Tensor, device: torch.device) -> None:
    """Undo `page_lock`, once no copy of the device is under way."""
    torch.cuda.synchronize(device)
    if int(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())):
        _forget_error()


def _forget_error() -> None:
    """CUDA keeps the last error until somebody asks, and the next launch of a kernel would raise it."""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        pass


class Slot(NamedTuple):
    """A range of a slab: `buffer` is the `uint8` view of its bytes."""

    piece: "_Piece"
    start: int
    buffer: torch.Tensor


class _Piece:
    """One stretch of host memory and its free ranges: sorted, and no two of them touch."""

    def __init__(self, nbytes: int, lock: Callable[[torch.Tensor], None] | None, device: torch.device | None):
        self.device = device
        try:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise HostMemoryError(f"{nbytes / 2**30:.2f} GiB of host memory cannot be had: {error}") from error
        self.locked = False
        if lock is not None:
            lock(self.buffer)
            self.locked = device is not None
        self.free: list[tuple[int, int]] = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Offset of `nbytes` in the smallest free range that has them, or `None`."""
        fits = [(end - start, start, i) for i, (start, end) in enumerate(self.free) if end - start >= nbytes]
        if not fits:
            return None
        _, start, i = min(fits)
        end = self.free[i][1]
        self.free[i : i + 1] = [(start + nbytes, end)] if start + nbytes < end else []
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Return a range and join it with the free ones that it touches."""
        end = start + nbytes
        i = bisect.bisect(self.free, (start, end))
        if i < len(self.free) and self.free[i][0] == end:
            end = self.free.pop(i)[1]
        if i and self.free[i - 1][1] == start:
            i -= 1
            start = self.free.pop(i)[0]
        self.free.insert(i, (start, end))

    @property
    def is_free(self) -> bool:
        return self.free == [(0, self.buffer.numel())]

    def __del__(self):
        if getattr(self, "locked", False) and not sys.is_finalizing():
            page_unlock(self.buffer, self.device)


class HostSlab:
    """
    Slots of host memory.

    Args:
        limit (`int`): Bytes that the slab may grow to.
        lock (`Callable`, *optional*): Page-locks a new piece; `None` for memory that no device copies from. When it
            fails, the piece and all later ones stay pageable, with one warning: copies then are slow but right.
        device (`torch.device`, *optional*): The CUDA device that copies, waited for before memory is unlocked.
    """

    def __init__(
        self,
        limit: int,
        lock: Callable[[torch.Tensor], None] | None = None,
        device: torch.device | None = None,
    ):
        self.limit = limit
        self.device = device
        self._lock = lock
        # a slot can come back in the middle of a garbage collection, when the lists below are half changed
        self._returned: deque[Slot] = deque()
        self._pieces: list[_Piece] = []
        self._reserved = 0  # bytes of the longest slots that were

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return sum(piece.buffer.numel() for piece in self._pieces)

    @property
    def used(self) -> int:
        """Bytes handed out."""
        self._take_back()
        return self.nbytes - sum(end - start for piece in self._pieces for start, end in piece.free)

    @property
    def is_pageable(self) -> bool:
        return self._lock is None

    def reserve(self, nbytes: int, count: int) -> None:
        """
        Have `count` free slots of `nbytes` each, or as many as can be had.

        Rows that are longer than any before come again and again at first; each time a quarter more is reserved, and
        what is too short for them is given back.
        """
        self._take_back()
        size = _aligned(nbytes)
        if self._free_slots(size) >= count:
            return
        if self._reserved and (wide := _aligned(self._reserved * 5 // 4)) * count <= self.limit:
            size = max(size, wide)
        self._reserved = size
        self._pieces = [piece for piece in self._pieces if not piece.is_free]
        # whoever takes one that is missing in the end is told
        missing = min(count - self._free_slots(size), (self.limit - self.nbytes) // size)
        while missing > 0:
            slots = min(missing, max(1, PIECE // size))
            try:
                self._grow(slots * size)
            except HostMemoryError:
                return
            missing -= slots

    def _free_slots(self, size: int) -> int:
        return sum((end - start) // size for piece in self._pieces for start, end in piece.free)

    def take(self, nbytes: int) -> Slot:
        """
        A slot of at least `nbytes`.

        Raises:
            HostMemoryError: If the limit is reached or the operating system has no more memory.
        """
        self._take_back()
        size = _aligned(nbytes)
        for piece in self._pieces:
            if (start := piece.take(size)) is not None:
                return Slot(piece, start, piece.buffer[start : start + nbytes])
        if size > self.limit - self.nbytes:
            # pieces that are too short for longer rows than before make room
            self._pieces = [piece for piece in self._pieces if not piece.is_free]
        self._grow(max(size, min(STEP, self.limit - self.nbytes)))
        piece = self._pieces[-1]
        start = piece.take(size)
        return Slot(piece, start, piece.buffer[start : start + nbytes])

    def give(self, slot: Slot) -> None:
        """Take a slot back, from any thread and at any time, once nothing new will read from it."""
        self._returned.append(slot)

    def _take_back(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            slot.piece.give(slot.start, _aligned(slot.buffer.numel()))

    def _grow(self, nbytes: int) -> None:
        room = self.limit - self.nbytes
        if nbytes > room:
            raise HostMemoryError(
                f"{(self.nbytes + nbytes) / 2**30:.2f} GiB of host memory are needed for offloaded layer inputs and "
                f"{self.limit / 2**30:.2f} GiB are allowed"
            )
        try:
            self._pieces.append(_Piece(nbytes, self._lock, self.device))
        except HostMemoryError:
            raise
        except RuntimeError as error:
            self._lock = None
            logger.warning(
                f"Offloaded layer inputs go to pageable memory from here on: {error}. Training goes on, with slower "
                "copies; lower max_pinned_gb, or set checkpoint_policy='recompute'."
            )
            self._pieces.append(_Piece(nbytes, None, self.device))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
