"""What the launchers of all Triton kernels ask. Imports no Triton: it may not be there."""

import importlib.util

import torch


_HAS_TRITON = importlib.util.find_spec("triton") is not None  # once, and not where a compiler looks on


def has_triton() -> bool:
    """Whether the kernels can be imported."""
    return _HAS_TRITON


def use_kernels(x: torch.Tensor) -> bool:
    """Whether kernels can take this tensor; plain PyTorch does what they do elsewhere."""
    return x.is_cuda and x.dtype != torch.float64 and has_triton()


def least_block(width: int) -> int:
    """The least power of two from 16 that holds `width`: the smallest block that tensor cores multiply."""
    return max(16, 1 << (width - 1).bit_length())
