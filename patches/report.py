"""What was applied to a model, what was not and why, and the way back."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn


@dataclass
class PatchEntry:
    """
    One patch and what became of it.

    Args:
        name (`str`): The patch.
        modules (`tuple[str, ...]`): Where it sits in the model; empty if it was not applied.
        detail (`str`): What it does there, or why it was not applied; or an object whose text changes over a run.
        undo (`Callable`, *optional*): Takes the model and removes the patch; `None` if it was not applied.
    """

    name: str
    modules: tuple[str, ...]
    detail: str | object
    undo: Callable[[nn.Module], None] | None = field(default=None, repr=False)

    @property
    def applied(self) -> bool:
        return self.undo is not None


class LiveText:
    """What an object says of itself when it is asked; keeps it not alive."""

    def __init__(self, of: object):
        self._of = weakref.ref(of)

    def __str__(self) -> str:
        of = self._of()
        return "its model is gone" if of is None else str(of)


class PatchReport:
    """
    The result of `apply_patches`: `print(report)` lists every patch; `remove()` restores the model exactly.

    The report does not keep the model alive, and a copy of a patched model has no report.
    """

    def __init__(self, model: nn.Module, entries: list[PatchEntry]):
        self._model = weakref.ref(model)
        self.entries = list(entries)
        self.removed = False

    @property
    def model(self) -> nn.Module | None:
        """The model that the patches are in, or `None` if it is gone."""
        return self._model()

    def __getitem__(self, name: str) -> PatchEntry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"no patch named {name!r}; there are {', '.join(e.name for e in self.entries)}")

    def add(self, entry: PatchEntry) -> None:
        """List what the trainer itself did beside the patches."""
        self.entries.append(entry)

    def remove(self) -> None:
        """Take every applied patch out again, the last one first. Does nothing the second time."""
        model = self.model
        if not self.removed and model is not None:
            for entry in reversed(self.entries):
                if entry.undo is not None:
                    entry.undo(model)
        self.removed = True

    def __str__(self) -> str:
        state = " (removed)" if self.removed else ""
        lines = [f"unsloth_trl patches{state}:"]
        for entry in self.entries:
            where = f" on {', '.join(entry.modules)}" if entry.modules else ""
            lines.append(f"  {'applied    ' if entry.applied else 'not applied'} {entry.name}{where}: {entry.detail}")
        return "\n".join(lines)

    def __reduce__(self):
        raise TypeError("a PatchReport belongs to one live model and cannot be pickled; print it instead")
