"""The settings of a plan, and the one that makes the most of a card's memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal


Action = Literal["keep", "recompute", "offload"]

RESERVE = 0.05  # of the usable memory is never planned with
RESERVE_OF_RANKS = 0.15  # where an out-of-memory error on one rank ends the run of all
LEAST_RESERVE = 512 * 2**20  # bytes
ON_DEVICE = 2  # the last layers' inputs are the first that the backward needs: they stay
TILE = 8192  # tokens; products of this many rows are as fast as longer ones
TILE_FROM = 4 * TILE  # tokens of a row from which on it is cut into tiles
SMALLEST_TILE = 1024


def tile_of(tokens: int) -> int:
    """Tokens per tile of a row of `tokens`, 0 for none."""
    return TILE if tokens >= TILE_FROM else 0


@dataclass(frozen=True)
class Notch:
    """
    One setting of the plan.

    Args:
        keep (`int`): Last layers that keep their activations.
        offload (`bool`): Whether the inputs of the others wait in host memory.
        staging (`int`): Offloaded inputs on the device at once in the backward.
        tile (`int`): Tokens per tile inside checkpointed layers, 0 for none.
        projections (`bool`): Whether the attention's projections are tiled too, which computes them once more.
    """

    keep: int = 0
    offload: bool = False
    staging: int = 2
    tile: int = 0
    projections: bool = False

    @classmethod
    def of_policy(cls, policy: str, num_layers: int, staging: int, tile: int = 0) -> "Notch":
        """Where a policy starts; `"auto"` as `"recompute"`, before anything is known."""
        return cls(num_layers if policy == "keep" else 0, policy == "offload", staging, tile)

    def actions(self, num_layers: int) -> list[Action]:
        """What happens to each layer, in the order of the forward."""
        checkpointed = num_layers - self.keep
        # in long rows an input is large and the head takes long enough for its copies
        stay = 0 if self.keep or self.tile else ON_DEVICE
        offloaded = max(0, checkpointed - stay) if self.offload else 0
        return ["offload"] * offloaded + ["recompute"] * (checkpointed - offloaded) + ["keep"] * self.keep

    def lower(self, num_layers: int, tokens: int, can_offload: bool) -> "Iterator[Notch]":
        """Settings that need less memory for rows of `tokens`, the one that costs the least time first."""
        if self.keep:
            yield replace(self, keep=max(0, self.keep - max(1, num_layers // 8)))
        if not self.offload and can_offload:
            yield replace(self, offload=True)
        tile = self.tile // 2 if self.tile else min(TILE, tokens // 2)
        can_tile = SMALLEST_TILE <= tile < tokens
        if can_tile and (not self.tile or self.tile >= TILE):
            yield replace(self, tile=tile)
        if self.offload and self.staging > 1:
            yield replace(self, staging=1)
        if self.tile and not self.projections:
            yield replace(self, projections=True)
        if can_tile:
            yield replace(self, tile=tile)

    def describe(self, num_layers: int) -> str:
        rest = num_layers - self.keep
        parts = []
        if self.keep:
            parts.append(f"{self.keep} of {num_layers} layers keep their activations")
        if rest and self.offload:
            parts.append(f"{rest} recompute from inputs in host memory ({self.staging} staging buffers)")
        elif rest:
            parts.append(f"{rest} recompute from inputs on the device")
        if rest and self.tile:
            also = ", projections too" if self.projections else ""
            parts.append(f"in tiles of {self.tile} tokens{also}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Measured:
    """
    What one fully checkpointed step needed, in bytes.

    Args:
        tokens (`int`): Of its longest micro-batch.
        base (`int`): Allocated before its forward.
        peak (`int`): The most allocated at once.
        kept (`int`): What the largest layer saves when it keeps its activations.
        layer_input (`int`): The input of a layer.
        inputs_on_device (`bool`): Whether `peak` has the inputs of all layers in it.
        layer_seconds (`float`): Forward time of a layer, 0 if unknown.
    """

    tokens: int
    base: int
    peak: int
    kept: int
    layer_input: int
    inputs_on_device: bool
    layer_seconds: float = 0.0

    def at(self, tokens: int) -> "Measured":
        """The same for another number of tokens, all but `base` in proportion."""
        r = tokens / self.tokens
        return replace(
            self,
            tokens=tokens,
            peak=self.base + round((self.peak - self.base) * r),
            kept=round(self.kept * r),
            layer_input=round(self.layer_input * r),
            layer_seconds=self.layer_seconds * r,
        )


def expected_peak(measured: Measured, num_layers: int, keep: int, offloaded: int) -> int:
    """Bytes allocated at most when `keep` layers keep their activations and `offloaded` others have none on it."""
    held = measured.layer_input * num_layers if measured.inputs_on_device else 0
    on_device = max(0, num_layers - keep - offloaded)
    return measured.peak - held + keep * max(1, measured.kept) + on_device * measured.layer_input


def choose(
    measured: Measured,
    num_layers: int,
    usable: int,
    bandwidth: float,
    tile: int,
    reserve: float = RESERVE,
    host: float = float("inf"),
) -> Notch:
    """
    The setting of `"auto"`.

    Args:
        measured (`Measured`): Of a checkpointed step, at the tokens to plan for.
        num_layers (`int`): Decoder layers.
        usable (`int`): Bytes of device memory that may be used, of which a reserve is left alone.
        bandwidth (`float`): Bytes per second of a copy to the host.
        tile (`int`): Tokens per tile of the layers that are checkpointed.
        reserve (`float`): Share of `usable` that is left alone.
        host (`float`): Bytes of host memory that may be page-locked.
    """
    usable -= max(LEAST_RESERVE, round(usable * reserve))
    layer_input = measured.layer_input

    def fits(keep: int, offloaded: int) -> bool:
        return expected_peak(measured, num_layers, keep, offloaded) <= usable

    def most(offloaded: int) -> int:
        """Most layers that can keep their activations when so many others offload their inputs."""
        return next((keep for keep in range(num_layers, 0, -1) if fits(keep, offloaded)), 0)

    on_device = most(0)
    if on_device == num_layers:
        return Notch(keep=num_layers)
    copy_seconds = layer_input / bandwidth if bandwidth else float("inf")
    in_host = int(min(num_layers, host // max(1, layer_input)))
    if in_host and (copy_seconds <= measured.layer_seconds or not fits(0, 0)):
        return Notch(keep=most(in_host), offload=True, tile=tile)
    return Notch(keep=on_device, tile=tile)
