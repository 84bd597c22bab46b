"""Dequantises the weight that is going to be asked for next while the device computes with others.

Layers ask for their weights in the same order in every step: forwards, then backwards, there perhaps twice in a row,
since a layer is recomputed first. What followed two weights the last time, after as many times in a row, follows them
again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .op import NF4Weight
from .scratch import Scratch


@dataclass
class _Track:
    """Of one purpose: the last weight that was asked for, the one before it, what was learnt; keys are addresses."""

    before: int | None = None
    last: int | None = None
    in_a_row: int = 0
    followers: dict[tuple, tuple[int, NF4Weight]] = field(default_factory=dict)

    def ask(self, weight: NF4Weight) -> None:
        key = weight.packed.data_ptr()
        if key == self.last:
            self.in_a_row += 1
            return
        self.followers[self.before, self.last] = self.in_a_row, weight
        self.before, self.last, self.in_a_row = self.last, key, 1

    def next(self) -> NF4Weight | None:
        """The weight that is going to follow, or `None` if the last one is expected again, or nothing is known."""
        times, weight = self.followers.get((self.before, self.last), (0, None))
        return weight if self.in_a_row >= times else None


class Foresight:
    """
    A `Scratch` that is filled ahead.

    Args:
        scratch (`Scratch`): Its buffers.
    """

    def __init__(self, scratch: Scratch):
        self.scratch = scratch
        self._tracks: dict[str, _Track] = {}

    @contextmanager
    def use(self, weight: NF4Weight, dtype: torch.dtype, purpose: str) -> Iterator[torch.Tensor]:
        """`Scratch.use`; behind it the next weight of this purpose takes the buffer, on a side stream."""
        self._tracks.setdefault(purpose, _Track()).ask(weight)
        with self.scratch.use(weight, dtype, purpose) as dense:
            yield dense
        following = self.expected(purpose)
        if following is not None and weight.device.type == "cuda":
            self.scratch.prefetch(following, dtype, purpose)

    def expected(self, purpose: str) -> NF4Weight | None:
        """The weight that takes the buffer now, or `None`."""
        track = self._tracks.get(purpose)
        return None if track is None else track.next()
