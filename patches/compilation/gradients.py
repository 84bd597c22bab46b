"""Where CUDA graphs leave the gradients of weights: memory that all graphs share and that is lent, not copied."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary


class LentGradients:
    """
    The memory of a decoder's gradients, the same in all of its graphs.

    A weight without a gradient gets it as its own, until the next replay, before which what is still there moves
    elsewhere. Who holds on to it otherwise is noticed: every gradient that is given has a storage of its own, of which
    nobody but its holders knows.
    """

    def __init__(self):
        self._buffers = WeakIdKeyDictionary()
        self._lent: list[tuple[weakref.ref, StorageWeakRef]] = []
        self._lends = True

    @contextlib.contextmanager
    def capture(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """
        What is captured within leaves the gradients of these weights here; what they were in is free for the rest of
        the graph. Hooks on the weights are not captured: they run whenever a graph has.
        """
        theirs = [(p._backward_hooks, list(p._backward_hooks.items())) for p in parameters if p._backward_hooks]
        for hooks, _ in theirs:
            hooks.clear()
        for parameter in parameters:
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.empty_like(parameter, requires_grad=False)
        own = [p.register_hook(self._buffers[p].copy_) for p in parameters]
        try:
            yield
        finally:
            for hook in own:
                hook.remove()
            for hooks, items in theirs:
                hooks.update(items)

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the memory of all other weights."""
        kept = [(p, self._buffers[p]) for p in parameters if p in self._buffers]
        self._buffers = WeakIdKeyDictionary()
        for parameter, buffer in kept:
            self._buffers[parameter] = buffer

    def give(self, parameters: list[nn.Parameter], grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients for autograd to pass on, which a weight that has none keeps as they are."""
        if not parameters:
            return []
        if not self._lends:
            return torch._foreach_mul(grads, 1)
        given = [torch.from_dlpack(grad) for grad in grads]
        self._lent += [
            (weakref.ref(p), StorageWeakRef(grad.untyped_storage())) for p, grad in zip(parameters, given, strict=True)
        ]
        return given

    def take_back(self) -> bool:
        """
        Whether the memory can be written to, after gradients that are still needed have moved. Not if somebody else
        holds on to one; weights get copies from then on.
        """
        moved = []
        for reference, storage in self._lent:
            parameter = reference()
            if parameter is None or parameter.grad is None or storage.expired():
                continue
            if parameter.grad.untyped_storage()._cdata == storage.cdata:
                parameter.grad.data = parameter.grad.clone()
                moved.append((parameter, storage))
        self._lent = [lent for lent in self._lent if not lent[1].expired()]
        for parameter, storage in moved:
            if not storage.expired():  # a view of it is held, which has to stay one
                parameter.grad.data = torch.from_dlpack(self._buffers[parameter])
        self._lends &= not self._lent
        return not self._lent

    def clear(self) -> None:
        """Leave the memory to whom it is lent."""
        self._buffers.clear()
        self._lent.clear()

    def __reduce__(self):
        return LentGradients, ()
