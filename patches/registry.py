"""`apply_patches`: the one place that knows which patches there are and in which order they go on."""

import weakref
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from .config import PatchConfig
from .report import PatchEntry, PatchReport


__all__ = ["PatchEntry", "PatchReport", "apply_patches", "base_model", "current_report"]

_REPORTS: "weakref.WeakKeyDictionary[nn.Module, PatchReport]" = weakref.WeakKeyDictionary()


def base_model(model: nn.Module) -> PreTrainedModel:
    """
    The transformers model inside a PEFT wrapper, or `model` itself.

    Raises:
        TypeError: If there is no transformers model, for instance when the model is already wrapped by DDP.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"expected a transformers PreTrainedModel or a PeftModel around one, got {type(model).__name__}; "
            "apply the patches before accelerator.prepare() wraps the model"
        )
    return base


def current_report(model: nn.Module) -> PatchReport | None:
    """The report of the patches that are on this model object now."""
    report = _REPORTS.get(base_model(model))
    return None if report is None or report.removed else report


_Apply = Callable[[PreTrainedModel, PatchConfig], PatchEntry]


def _put_on(name: str, apply: _Apply, model: PreTrainedModel, config: PatchConfig, skip: dict[str, str]) -> PatchEntry:
    return PatchEntry(name, (), skip[name]) if name in skip else apply(model, config)


def _patches() -> tuple[tuple[str, _Apply], ...]:
    # they import transformers models' interfaces: at call time, so that this module stays light
    from .attention import patch as attention
    from .checkpointing import patch as checkpointing
    from .compilation import patch as compilation
    from .lm_head import patch as lm_head
    from .lora import patch as lora
    from .moe import patch as moe

    return (
        ("attention", attention.apply),
        ("lm_head", lm_head.apply),
        ("lora", lora.apply),
        ("moe", moe.apply),
        ("checkpointing", checkpointing.apply),
        ("compilation", compilation.apply),
        ("cuda_graphs", compilation.apply_graphs),
    )


def apply_patches(
    model: nn.Module, config: PatchConfig | None = None, *, skip: dict[str, str] | None = None
) -> PatchReport:
    """
    Put the patches into a model, in place. Works without our trainers, in a bare accelerate loop, before `prepare()`.

    A model that has patches from an earlier call loses those first.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model; its class stays what it is.
        config (`PatchConfig`, *optional*): The switches.
        skip (`dict[str, str]`, *optional*): Patches to leave out, and why: name to reason.

    Returns:
        `PatchReport`: What was applied, and `remove()`.
    """
    config = PatchConfig() if config is None else config
    skip = {} if skip is None else skip
    base = base_model(model)
    earlier = current_report(base)
    if earlier is not None:
        earlier.remove()
    entries = []
    for name, apply in _patches():
        try:
            entries.append(_put_on(name, apply, base, config, skip))
        except Exception:
            PatchReport(base, entries).remove()  # a refusal leaves the model as it was
            raise
    report = PatchReport(base, entries)
    _REPORTS[base] = report
    return report


def reapply(report: PatchReport, config: PatchConfig, names: tuple[str, ...], skip: dict[str, str]) -> None:
    """
    Put some patches on again with other switches, in their places in the report; between two steps of training.

    Args:
        report (`PatchReport`): Of a model that has its patches still.
        config (`PatchConfig`): The switches.
        names (`tuple[str, ...]`): The patches. Those that sit on the same modules have to come together.
        skip (`dict[str, str]`): See `apply_patches`.

    Raises:
        RuntimeError: If the patches were taken out, or their model is gone.
    """
    model = report.model
    if report.removed or model is None:
        raise RuntimeError("the patches are not in the model any more")
    for entry in reversed(report.entries):
        if entry.name in names and entry.undo is not None:
            entry.undo(model)
            vars(entry).update(vars(PatchEntry(entry.name, (), "taken out")))
    for name, apply in _patches():
        if name in names:
            vars(report[name]).update(vars(_put_on(name, apply, model, config, skip)))
