"""Objects that stand in for a method of one module."""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import nn


M = TypeVar("M", bound=nn.Module)


class Owned(Generic[M]):
    """
    Base of what a module has as an attribute of its own and what refers back to it.

    The reference is weak, so that the module goes with the last reference to it and not with the next garbage
    collection. A copy of the module, or an unpickled one, has a copy of this that refers to the copy.

    Args:
        owner (`nn.Module`): The module.
    """

    def __init__(self, owner: M):
        self._owner = weakref.ref(owner)

    @property
    def owner(self) -> M:
        return self._owner()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_owner": self.owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_owner": weakref.ref(state["_owner"])})


class OwnForward(Owned[M]):
    """A `forward` that stands in for that of one module, and for what stood there before, if anything did."""

    def __init__(self, owner: M):
        super().__init__(owner)
        self.inner: Callable | None = owner.__dict__.get("forward")

    def before(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before this one."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.owner).forward(self.owner, *args, **kwargs)

    def take_off(self) -> None:
        """Put back what was there before."""
        if self.inner is None:
            del self.owner.forward
        else:
            self.owner.forward = self.inner
