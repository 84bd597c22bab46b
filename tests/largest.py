"""The largest tensor that a piece of code makes."""

from collections.abc import Callable

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """
    Within this context, the largest tensor that any op returns, those inside this package's ops included.

    Args:
        counts (`Callable`, *optional*): Whether a tensor counts; by default each does.

    Attributes:
        numel (`int`), shape (`tuple[int, ...]`), op (`OpOverload`): Of the largest one.
        ops (`set[str]`): Names of all ops.
    """

    def __init__(self, counts: Callable[[torch.Tensor], bool] = lambda tensor: True):
        super().__init__()
        self.counts = counts
        self.numel, self.shape, self.op, self.ops = 0, None, None, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        own = OPDEFS.get(func._schema.name)
        if own is None or func._schema.is_mutable:  # what writes into a buffer that is given makes nothing
            out = func(*args, **(kwargs or {}))
        else:
            with self:
                out = own._init_fn(*args, **(kwargs or {}))
        self.ops.add(func.overloadpacket.__name__)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.numel and self.counts(tensor):
                self.numel, self.shape, self.op = tensor.numel(), tuple(tensor.shape), func
        return out
