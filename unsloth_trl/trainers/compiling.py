"""Turns on what costs time before it saves any, compiled layers and CUDA graphs, once it is known to pay."""

import dataclasses
import time
import weakref
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, broadcast_object_list
from peft.tuners.lora.layer import ParamWrapper
from transformers import TrainerCallback

from ..data.collators import PackedDataCollator
from ..patches.attention.patch import text_decoder
from ..patches.compilation import patch as compilation
from ..patches.config import PatchConfig
from ..patches.quantization.experts import is_experts
from ..patches.registry import base_model, reapply
from ..patches.report import PatchReport


logger = get_logger(__name__)

# The first step compiles kernels and is what the checkpoint plan is measured on, the second is the first of the plan.
FIRST_MEASURED = 3
MEASURED = 3  # steps, of which the fastest counts: kernels may be compiled in any of them
SETTLED = 4  # the first one to measure after a change, behind its compilation and the plan's measurement and change
# Of training left. A compilation takes up to a minute, and saves a tenth of the time or more.
LEAST_TO_COMPILE = 600.0  # seconds
LEAST_TO_CAPTURE = 60.0  # seconds; a graph is captured in one or two
LAUNCH_BOUND = 0.1  # of a step: a device that is no further behind the host than this waits for launches

ENTRIES = {"compile_layers": "compilation", "cuda_graphs": "cuda_graphs"}  # of the patch report
# What has to be put on again for each: what sits on the same modules, or depends on whether layers are compiled.
_PATCHES = {"compile_layers": ("lora", "checkpointing", "compilation", "cuda_graphs"), "cuda_graphs": ("cuda_graphs",)}


@dataclasses.dataclass
class StepTime:
    """
    The forwards and backwards of one optimizer step.

    Args:
        seconds (`float`): Until the device was done with them.
        behind (`float`): Of these, seconds for which the host had nothing left to launch.
    """

    seconds: float = 0.0
    behind: float = 0.0

    @property
    def launch_bound(self) -> bool:
        """Whether the device is done when the host is: it waits for launches, not for its own work."""
        return self.behind < LAUNCH_BOUND * self.seconds

    def __str__(self) -> str:
        share = 1 - self.behind / self.seconds if self.seconds else 1.0
        return f"the host launches for {share:.0%} of a step's {self.seconds:.3g} seconds"


class AutoCompilation(TrainerCallback):
    """
    Decides what `"auto"` comes to, from a few steps that wait for the device.

    Args:
        trainer: The trainer, of which no reference is kept that would hold it in memory.
        config (`PatchConfig`): Its switches.
        refusals (`dict[str, str | None]`): The switches that are `"auto"`, and why each is `"off"` whatever a step
            takes, or `None`.

    Attributes:
        on (`set[str]`): The switches that were turned on.
        steps (`int`): Steps of this run so far.
    """

    def __init__(self, trainer: Any, config: PatchConfig, refusals: dict[str, str | None]):
        self.trainer = weakref.ref(trainer)
        self.config = config
        self.refusals = refusals
        self.on: set[str] = set()
        self.steps = 0
        self._next: int | None = None  # first step to measure
        self._times: list[StepTime] = []
        self._time: StepTime | None = None  # of the step that is measured now
        self._began = 0.0
        self._texts: dict[str, str] = {}  # what the patch report says of each switch
        for name, reason in refusals.items():
            self._tell(name, f"{name}='auto' is off: {reason}" if reason else f"{name}='auto': not decided yet")

    @property
    def undecided(self) -> list[str]:
        """Switches that may still be turned on."""
        return [name for name, reason in self.refusals.items() if reason is None and name not in self.on]

    def begin(self, device: torch.device) -> None:
        """A micro-batch's inputs are there."""
        if self._time is not None:
            _wait(device)
            self._began = time.perf_counter()

    def end(self, device: torch.device) -> None:
        """The host has launched the micro-batch's forward and backward."""
        if self._time is not None:
            launched = time.perf_counter()
            _wait(device)
            done = time.perf_counter()
            self._time.seconds += done - self._began
            self._time.behind += done - launched

    def on_train_begin(self, args, state, control, **kwargs):
        self.steps, self._time, self._times = 0, None, []
        self._next = FIRST_MEASURED if self.undecided else None

    def on_step_begin(self, args, state, control, **kwargs):
        if self._next is not None and self.steps + 1 >= self._next:
            self._time = StepTime()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        if self._time is not None:
            self._times.append(self._time)
            self._time = None
        trainer = self.trainer()
        if len(self._times) < MEASURED or trainer is None:
            return
        measured = min(self._times, key=lambda time: time.seconds)
        self._next, self._times = None, []
        if trainer.patch_report.removed:
            return
        left = measured.seconds * (state.max_steps - state.global_step)
        decided = [(self._worth(measured, left, _has_experts(trainer.model)), f"{_duration(left)} left, {measured}")]
        if trainer.accelerator.num_processes > 1:
            broadcast_object_list(decided)  # each has measured its own
        self._turn_on(trainer, *decided[0])

    def _worth(self, measured: StepTime, left: float, experts: bool) -> list[str]:
        """The undecided switches to turn on, for a step's time and the seconds of training left."""
        names = self.undecided
        least = {"compile_layers": LEAST_TO_COMPILE, "cuda_graphs": LEAST_TO_CAPTURE}
        names = [name for name in names if left >= least[name]]
        if not measured.launch_bound:
            return [name for name in names if name != "cuda_graphs"]
        captured = "cuda_graphs" in names or self.config.cuda_graphs == "on"
        # a layer with experts comes apart into several graphs, and entering them costs the host more than it saves
        return names if captured or not experts else []

    def _turn_on(self, trainer: Any, names: list[str], why: str) -> None:
        for name in self.undecided:
            if name not in names:
                self._tell(name, f"{name}='auto' is off at step {self.steps}: {why}")
        if not names:
            return
        if "compile_layers" in names:
            logger.warning(
                f"Decoder layers are compiled from the next step on ({why}), which takes up to a minute once. Set "
                "compile_layers='off' to leave it out."
            )
        self.on.update(names)
        self.config = dataclasses.replace(self.config, **dict.fromkeys(names, "on"))
        self._texts.update({name: f"{name}='auto' is on since step {self.steps}: {why}" for name in names})
        trainer._patch_again(self.config, names[0])
        if self.undecided:
            self._next = self.steps + SETTLED

    def tell_again(self) -> None:
        """After patches were put on again, whose entries in the report are their own."""
        for name, text in self._texts.items():
            self._tell(name, text)

    def _tell(self, name: str, text: str) -> None:
        """Say it in the patch report, beside what the patch says of itself."""
        self._texts[name] = text
        entry = self.trainer().patch_report[ENTRIES[name]]
        live = entry.detail.live if isinstance(entry.detail, _Beside) else entry.detail
        entry.detail = _Beside(text, live) if entry.applied else text


@dataclasses.dataclass
class _Beside:
    text: str
    live: object

    def __str__(self) -> str:
        return f"{self.live}; {self.text}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _has_experts(model: torch.nn.Module) -> bool:
    return any(is_experts(module) for module in model.modules())


def _take_liger_off_experts(model: torch.nn.Module) -> int:
    """
    Give experts, and PEFT's wrappers around them, the forward of their class again; how many had one of Liger's.

    That one multiplies with the stacked weights as they are: without the LoRA of a wrapper that it is bound to.
    """
    found = 0
    for module in model.modules():
        experts = module.get_base_layer() if isinstance(module, ParamWrapper) else module
        forward = module.__dict__.get("forward")
        if is_experts(experts) and (getattr(forward, "__module__", None) or "").startswith("liger_kernel."):
            for name in ("forward", "_get_name"):  # the two that it binds
                module.__dict__.pop(name, None)
            found += 1
    return found


def _why_not_compiled(trainer: Any) -> str | None:
    """Why `compile_layers="auto"` is `"off"` for this trainer, or `None`."""
    args, kind = trainer.args, trainer.accelerator.distributed_type
    if args.torch_compile:
        return "torch_compile=True compiles the model"
    if args.use_liger_kernel:
        return "use_liger_kernel=True fuses the same parts of a layer"
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return f"no measured gain with {kind.value}"
    return compilation.why_no_compiler(args.device)


def _why_not_captured(trainer: Any, skip: dict[str, str]) -> str | None:
    """Why `cuda_graphs="auto"` is `"off"` for this trainer, or `None`."""
    if "cuda_graphs" in skip:
        return skip["cuda_graphs"]
    if trainer.args.torch_compile:
        return "torch_compile=True has a way of its own with graphs"
    if trainer.accelerator.num_processes > 1:
        return "no measured gain with several processes"
    return compilation.why_no_graphs(text_decoder(base_model(trainer.model)))


class Compiling:
    """
    A part of the trainers, before `MemoryPlanning` in the order of classes.

    The trainer calls `_start_compiling` when its model is patched.
    """

    _config: PatchConfig | None = None
    _auto: AutoCompilation | None = None
    _skip: dict[str, str] = {}
    _reference: tuple[PatchReport, dict[str, str]] | None = None  # of another model that has the same patches

    def _start_compiling(self, config: PatchConfig, skip: dict[str, str]) -> None:
        self._config, self._skip = config, skip
        refusals = {}
        if config.compile_layers == "auto":
            refusals["compile_layers"] = _why_not_compiled(self)
        if config.cuda_graphs == "auto":
            refusals["cuda_graphs"] = _why_not_captured(self, skip)
        if self.accelerator.num_processes > 1:
            told = [refusals]
            broadcast_object_list(told)  # machines may differ, and all processes have to decide at the same steps
            refusals = told[0]
        if refusals:
            self._auto = AutoCompilation(self, config, refusals)
            self.add_callback(self._auto)

    def _inner_training_loop(self, *args, **kwargs):
        if self.args.use_liger_kernel and self._config is not None and not self.patch_report.removed:
            # `train` has just bound Liger's forwards to modules, in the place of what the patches had put there
            if self.patch_report["moe"].applied and _take_liger_off_experts(self.model):
                logger.warning(
                    "use_liger_kernel=True: experts stay with this package's kernels, since Liger's leave out LoRA on "
                    "experts. liger_kernel_config={'swiglu': False} says so to Liger as well."
                )
                reapply(self.patch_report, self._config, ("moe",), self._skip)
            self._patch_again(self._config, "compile_layers")
        return super()._inner_training_loop(*args, **kwargs)

    def _patch_again(self, config: PatchConfig, switch: str) -> None:
        """Put the patches that depend on a switch on again, between two steps."""
        self._config = config
        reapply(self.patch_report, config, _PATCHES[switch], self._skip)
        if self._reference is not None:
            report, skip = self._reference
            reapply(report, config, _PATCHES[switch], skip)
        if self._auto is not None:
            self._auto.tell_again()
        if "checkpointing" in _PATCHES[switch]:
            self._take_plan()
        # it may have been exchanged for one of the user's
        packs = isinstance(self.data_collator, PackedDataCollator)
        if config.cuda_graphs == "on" and "cuda_graphs" not in self._skip and packs:
            self.data_collator.is_static.fill_(True)

    def _before_micro_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._before_micro_batch(inputs)
        if self._auto is not None:
            self._auto.begin(self.args.device)
        return inputs

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        if self._auto is not None:
            self._auto.end(self.args.device)
        return loss
