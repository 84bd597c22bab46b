"""Dequantises the weight that is going to be asked for next while the device computes with others.

Layers ask for their weights in the same order in every step: forwards, then backwards, there perhaps twice in a row,
since a layer is recomputed first. What followed two weights the last time, after as many times in a row, follows them
again.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from .experts import packed_weight
from .op import NF4Weight
from .scratch import Scratch


@dataclass
class _Track:
    """Of one purpose: the last weight that was asked for, the one before it, and what was learnt, all by number."""

    before: int | None = None
    last: int | None = None
    in_a_row: int = 0
    followers: dict[tuple[int | None, int | None], tuple[int, int]] = field(default_factory=dict)

    def ask(self, who: int) -> None:
        if who == self.last:
            self.in_a_row += 1
            return
        self.followers[self.before, self.last] = self.in_a_row, who
        self.before, self.last, self.in_a_row = self.last, who, 1

    def next(self) -> int | None:
        """Who is going to follow, or `None` if the last one is expected again, or nothing is known."""
        times, who = self.followers.get((self.before, self.last), (0, None))
        return who if self.in_a_row >= times else None


class Foresight:
    """
    A `Scratch` that is filled ahead. It keeps no module and no weight alive but those in the buffers.

    Args:
        scratch (`Scratch`): Its buffers.
    """

    def __init__(self, scratch: Scratch):
        self.scratch = scratch
        self._tracks: dict[str, _Track] = {}
        self._numbers: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
        self._places: dict[int, tuple[weakref.ref, str]] = {}

    def know(self, module: nn.Module, name: str) -> int:
        """The number of the weight `name` of a module of experts, the same whenever it is asked for."""
        numbers = self._numbers.setdefault(module, {})
        if name not in numbers:
            numbers[name] = max(self._places, default=0) + 1
            self._places[numbers[name]] = weakref.ref(module), name
        return numbers[name]

    @contextmanager
    def use(self, weight: NF4Weight, dtype: torch.dtype, purpose: str, who: int) -> Iterator[torch.Tensor]:
        """`Scratch.use` of the weight with number `who`; behind it the next one of this purpose takes the buffer."""
        self._tracks.setdefault(purpose, _Track()).ask(who)
        with self.scratch.use(weight, dtype, purpose) as dense:
            yield dense
        if weight.device.type == "cuda" and (following := self.expected(purpose)) is not None:
            self.scratch.prefetch(following, dtype, purpose)

    def expected(self, purpose: str) -> NF4Weight | None:
        """The weight that takes the buffer now, or `None`."""
        track = self._tracks.get(purpose)
        module, name = self._places.get(track.next() if track else None, (lambda: None, ""))
        return None if module() is None else packed_weight(module(), name)
