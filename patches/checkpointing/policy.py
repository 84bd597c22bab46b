"""What becomes of each decoder layer between forward and backward, decided from measured memory.

Three things can happen to a layer: its activations are kept, or they are computed again in the backward from its
input that stays on the device, or from its input that waits in host memory. Kept layers are the last ones: the
backward frees them first. None of the three changes a number.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from ..config import CheckpointPolicy
from .memory import Probe
from .offload import Offloader
from .settings import RESERVE, Action, Measured, Notch, choose, expected_peak, tile_of


logger = logging.getLogger(__name__)

Place = Literal["layer", "projection", "outside"]

LARGE = 0.3  # of the free memory: more than this for all layer inputs, and the first step offloads them
MOST_TIMES = 64  # layers whose forward is timed


class Plan:
    """
    The state of one model's checkpointing: its policy, the setting now, and its offloaded inputs.

    Args:
        policy (`str`): `"auto"`, `"keep"`, `"recompute"` or `"offload"`.
        num_layers (`int`): Decoder layers.
        max_pinned_gb (`float`, *optional*): See `Offloader`.
        staging_buffers (`int`): See `Offloader`.
        num_devices (`int`): See `Offloader`.
        probe (`Probe`, *optional*): Where memory is read, in tests.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        num_layers: int,
        *,
        max_pinned_gb: float | None = None,
        staging_buffers: int = 2,
        num_devices: int = 1,
        probe: Probe | None = None,
    ):
        self.policy = policy
        self.num_layers = num_layers
        self.staging_buffers = staging_buffers
        self.num_devices = num_devices
        self.max_pinned_gb = max_pinned_gb
        self.reserve = RESERVE
        self.measures = False  # whether somebody says where a step ends, which "auto" needs
        self._probe = probe
        self._start()

    def _start(self) -> None:
        self.offloader = Offloader(self.max_pinned_gb, self.staging_buffers, self.num_devices)
        self.restart()

    def restart(self) -> None:
        """A training run begins, perhaps with smaller batches than the one before: nothing is known of it."""
        self.notch = Notch.of_policy(self.policy, self.num_layers, self.staging_buffers)
        self.planned_tokens = 0  # of the longest micro-batch so far
        self.measured: Measured | None = None
        self.fixed = False  # by an out-of-memory error, or by hand: auto no longer chooses the setting
        self.tiles_now = False
        self._last_index = self.num_layers  # so that any layer is the first of a forward
        self._refused = False
        self.watch: _Watch | None = None  # the measurement under way
        self.changes: list[str] = []
        self.offloader.set_staging_buffers(self.staging_buffers)
        if not self.notch.offload:
            self.offloader.release()

    def follow(self, earlier: "Plan") -> None:
        """Go on from another plan of the same model, whose layers save something else from now on."""
        self.changes = list(earlier.changes)
        self._probe = earlier._probe
        if earlier.fixed:
            self.fixed, self.planned_tokens = True, earlier.planned_tokens
            self.notch, self._refused = earlier.notch, earlier._refused
            self.offloader.set_staging_buffers(self.notch.staging)

    # a copy of the model, or a pickled one, has the policy and starts anew
    def __getstate__(self) -> dict[str, Any]:
        names = ("policy", "num_layers", "staging_buffers", "num_devices", "max_pinned_gb")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reserve, self.measures, self._probe = RESERVE, False, None
        self._start()

    def __str__(self) -> str:
        what = self.notch.describe(self.num_layers) if self.changes else "no plan before the first micro-batch"
        return f"checkpoint_policy={self.policy!r}: {what}"

    @property
    def actions(self) -> list[Action]:
        """What happens to each layer now, in the order of the forward."""
        return self.notch.actions(self.num_layers)

    def layer(self, index: int, args: tuple) -> Action:
        """A layer's forward begins; what to do with it."""
        first = index <= self._last_index
        if first:
            self._begin(args)
        self._last_index = index
        if self.notch.offload:
            self.offloader.next_layer(first)
        return self.actions[index]

    def watched(self, function: Callable) -> Callable:
        """`function` of a checkpointed layer: in tiles if the plan says so, and measured if it does not know yet."""
        tiles, watch = bool(self.notch.tile), self.watch
        if watch is None and not tiles:
            return function
        return _Checkpointed(self, function, tiles, None if watch is None else watch.layer())

    def _begin(self, args: tuple) -> None:
        hidden = next((a for a in args if isinstance(a, torch.Tensor) and a.ndim > 1), None)
        if hidden is None:
            return
        tokens = hidden.shape[:-1].numel()
        if self._probe is None:
            self._probe = Probe(hidden.device)
        if tokens > self.planned_tokens:
            self._longer(tokens, hidden)
        if self.notch.offload:
            nbytes = hidden.numel() * hidden.element_size()
            self.offloader.reserve(hidden.device, nbytes, self.actions.count("offload"))
        if self.watch is not None:
            self.watch.begin(tokens)

    def _longer(self, tokens: int, hidden: torch.Tensor) -> None:
        """A micro-batch with more tokens than any before: plan for it before it runs."""
        self.planned_tokens = tokens
        tile = tile_of(tokens)
        if self.fixed:
            tile = self.notch.tile or tile
        notch, why = replace(self.notch, tile=tile), f"micro-batches of {tokens} tokens"
        if self.policy == "auto" and self.measures and not self.fixed:
            nbytes = hidden.numel() * hidden.element_size()
            if self.measured is None:
                large = nbytes * self.num_layers > LARGE * self._probe.free()
                notch = replace(notch, keep=0, offload=large and self._probe.is_cuda)
            else:
                notch, expected = self._choose(self.measured.at(tokens), tile)
                why += f", {expected}"
            if self._probe.is_cuda:
                # measured until the optimizer has stepped, which allocates its state in the first step
                self.watch = _Watch(self._probe, nbytes, notch)
        self._set(notch, why)

    def _choose(self, measured: Measured, tile: int) -> tuple[Notch, str]:
        """The setting for what was measured, and what it is expected to need."""
        usable, host = self._probe.usable(), self.offloader.limit()
        notch = choose(measured, self.num_layers, usable, self._probe.bandwidth(), tile, self.reserve, host)
        offloaded = int(host // max(1, measured.layer_input)) if notch.offload else 0
        peak = expected_peak(measured, self.num_layers, notch.keep, offloaded)
        expected = f"expected peak {peak / 2**30:.2f} of {usable / 2**30:.2f} GiB"
        return replace(notch, staging=self.staging_buffers), expected

    def before_optimizer_step(self) -> None:
        """The trainer's sign that all micro-batches of a step are over."""
        if self.watch is not None:
            self.watch.end()

    def after_optimizer_step(self) -> None:
        """The trainer's sign that a whole step has been seen: `"auto"` plans from what it needed."""
        watch, self.watch = self.watch, None
        if watch is None or (measured := watch.result(self.notch)) is None:
            return
        self.measured = measured
        if not self.fixed:
            notch, expected = self._choose(measured, self.notch.tile)
            self._set(notch, f"measured on {measured.tokens} tokens, {expected}")

    def step_down(self) -> bool:
        """
        Use less memory after an out-of-memory error.

        Returns:
            `bool`: Whether there was a lower setting.
        """
        self.watch = None
        lower = next(self.notch.lower(self.num_layers, self.planned_tokens, not self._refused), None)
        if lower is None:
            return False
        self.fixed = True
        self._set(lower, "out of memory", logger.warning)
        return True

    def tile_for(self, tokens: int, place: Place) -> int:
        """
        Tokens per tile for a part of the model that works token by token; 0 to run it whole.

        Args:
            tokens (`int`): Of its input.
            place (`str`): `"layer"`, `"projection"`, or `"outside"` of the layers, which checkpoint themselves.
        """
        if not torch.is_grad_enabled():
            tile = tile_of(tokens)
        elif place == "outside":
            tile = self.notch.tile
        else:
            tile = self.notch.tile if self.tiles_now and (place == "layer" or self.notch.projections) else 0
        return tile if tile < tokens else 0

    def use(self, notch: Notch) -> None:
        """Take this setting from the next forward on, and leave it there."""
        self.fixed, self.watch = True, None
        self._set(notch, "set by hand")

    def refused(self, error: Exception) -> None:
        """Host memory was refused: this input stays on the device, and so will those for which there is none."""
        if not self._refused:
            self._refused = True
            logger.warning(
                f"Not all layer inputs are offloaded, the rest stay on the device: {error}. Raise max_pinned_gb, free "
                "memory, or set checkpoint_policy='recompute'."
            )

    def _set(self, notch: Notch, why: str, say: Callable[[str], None] | None = None) -> None:
        first = not self.changes
        if notch == self.notch and not first:
            return
        self.notch = notch
        self.offloader.set_staging_buffers(notch.staging)
        if not notch.offload:
            self.offloader.release()
        line = f"Checkpoint plan{'' if first else ' changed'} ({why}): {notch.describe(self.num_layers)}."
        self.changes.append(line)
        (say or logger.info)(line)

    def reset(self) -> None:
        """Forget the forward or backward that an error ended."""
        self._last_index = self.num_layers
        self.tiles_now = False
        self.offloader.reset()


class _Checkpointed:
    """The forward of a checkpointed layer, which runs once in the forward and once more in the backward."""

    def __init__(self, plan: Plan, function: Callable, tiles: bool, watch: "_LayerWatch | None"):
        self.plan, self.function, self.tiles, self.watch = plan, function, tiles, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, self.plan.tiles_now = self.plan.tiles_now, self.tiles
        try:
            with contextlib.nullcontext() if self.watch is None else self.watch:
                return self.function(*args, **kwargs)
        finally:
            self.plan.tiles_now = before


class _Watch:
    """Measures checkpointed micro-batches until the optimizer has stepped."""

    def __init__(self, probe: Probe, layer_input: int, notch: Notch):
        self.probe, self.layer_input, self.notch = probe, layer_input, notch
        self.tokens = self.base = self.kept = self.in_tiles = self.num_runs = self.peak = self.ended_with = 0
        self.times: list[tuple[Any, Any]] = []

    def begin(self, tokens: int) -> None:
        if not self.tokens:
            self.base = self.probe.allocated()
            self.probe.reset_peak()
        self.tokens = max(self.tokens, tokens)

    def end(self) -> None:
        """The optimizer is about to step: what it needs for itself is none of the layers'."""
        self.peak, self.ended_with = self.probe.peak(), self.probe.allocated()

    def layer(self) -> "_LayerWatch":
        return _LayerWatch(self)

    def tile(self, nbytes: int) -> None:
        """What a tiled part of a layer would save in all, were it not cut into tiles."""
        self.in_tiles += nbytes

    def result(self, notch: Notch) -> Measured | None:
        if not self.kept or not self.peak or notch != self.notch:
            return None
        # the state that the optimizer has made in the first step is there in all later ones
        grown = max(0, self.probe.allocated() - self.ended_with)
        base, peak = self.base + grown, self.peak + grown
        self.kept += self.in_tiles // self.num_runs
        # what the kept layers added is taken out again: the peak of a step that keeps none
        peak -= notch.keep * (self.kept - (0 if notch.offload else self.layer_input))
        seconds = self.probe.seconds(*self.times[len(self.times) // 2]) if self.times else 0.0
        return Measured(self.tokens, base, peak, self.kept, self.layer_input, not notch.offload, seconds)


class _LayerWatch:
    """Around both runs of a layer: the first is timed, and the second shows what the layer saves."""

    def __init__(self, watch: _Watch):
        self.watch, self.runs = watch, 0

    def __enter__(self):
        if self.runs:
            self.before = self.watch.probe.allocated()
        else:
            self.start = self.watch.probe.mark()

    def __exit__(self, *error):
        if self.runs:
            self.watch.num_runs += 1
            self.watch.kept = max(self.watch.kept, self.watch.probe.allocated() - self.before)
        elif len(self.watch.times) < MOST_TIMES:
            self.watch.times.append((self.start, self.watch.probe.mark()))
        self.runs += 1
