"""Which kernel attends in a packed row: a rule that was measured, and what each of them cannot do, in words."""

import functools

import torch

from ..kernels import has_triton
from ..layout import PackedLayout
from .flash_4 import flash_4_refusal, missing
from .fused import fused_refusal
from .op import HALF, refusal_of_any_layout
from .shared import level_refusal


GRAPHS = ("triton", "flash_attention_2")  # what reads a row's boundaries on the device alone


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a card of NVIDIA's on a machine with Triton, else `None`."""
    if device.type != "cuda" or torch.version.hip is not None or not has_triton():
        return None
    return torch.cuda.get_device_capability(device)


def takes_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `"auto"` may take the fused kernel: cards for whose tensor cores Triton has code."""
    capability = _capability(device)
    return capability is not None and capability >= (8, 0) and dtype in HALF


def prefers_fused(device: torch.device, dtype: torch.dtype, size: int = 128) -> bool:
    """
    Whether `"auto"` takes the fused kernel where FlashAttention-2 could do as well: where it was measured to be faster
    (`tests/benchmarks/attention.py`).
    """
    return takes_fused(device, dtype) and _capability(device)[0] == 9 and size <= 128


def prefers_flash_4(device: torch.device, dtype: torch.dtype, size: int = 128) -> bool:
    """
    Whether `"auto"` tries FlashAttention-4 first: where it was measured to be faster (`tests/benchmarks/attention.py
    --plain`), and on later cards, which it is made for.
    """
    capability = _capability(device)
    if capability is None or capability < (9, 0) or dtype not in HALF:
        return False
    return (size == 128 if capability[0] == 9 else size <= 256) and missing() is None


def flash_refusal(
    query: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> str | None:
    """Why FlashAttention-2 cannot take this call, or `None` if it can. Head size is the last dimension."""
    if layout.parents is not None:
        if window is not None:
            return f"a window ({window}) that reaches into parent segments"
        if (order := layout.derived("level_refusal", level_refusal)) is not None:
            return order
    return refusal_of_any_layout(query, value, softcap, sinks, dropout)


def sdpa_refusal(softcap: float | None, sinks: torch.Tensor | None) -> str | None:
    """Why `scaled_dot_product_attention` cannot take this call, or `None` if it can."""
    if softcap is not None:
        return f"soft-capping ({softcap})"
    return "attention sinks" if sinks is not None else None


def _order(backend: str, query: torch.Tensor, value: torch.Tensor, in_graph: bool) -> list[str]:
    """What is tried, one after the other."""
    if backend != "auto":
        return [backend]
    device, dtype, size = query.device, query.dtype, max(query.shape[-1], value.shape[-1])
    kernels = ["flash_attention_2", "triton"] if takes_fused(device, dtype) else ["flash_attention_2"]
    if prefers_fused(device, dtype, size):
        kernels.reverse()
    if not in_graph and prefers_flash_4(device, dtype, size):
        kernels.insert(0, "flash_attention_4")
    return [*kernels, "sdpa", "eager"]


def choose(
    backend: str,
    query: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
    in_graph: bool = False,
) -> str:
    """
    What attends in this call.

    Args:
        backend (`str`): Of the config's `attention_backend`.
        query, value (`torch.Tensor`): Their device, dtype and last dimension count.
        layout, window, softcap, sinks, dropout: As in `attention_forward`.
        in_graph (`bool`, *optional*, defaults to `False`): Whether a compiled layer asks, which `"auto"` gives an op.

    Raises:
        ValueError: If the backend that was asked for by name cannot do it.
        RuntimeError: If the row is of any lengths, for a CUDA graph, and nothing that can read it can do it.
    """
    call = query, value, layout, window, softcap, sinks, dropout
    refusals = {
        "flash_attention_2": functools.partial(flash_refusal, *call),
        "flash_attention_4": functools.partial(flash_4_refusal, *call),
        "triton": functools.partial(fused_refusal, query, value, dropout),
        "sdpa": functools.partial(sdpa_refusal, softcap, sinks),
        "eager": lambda: None,
    }
    order = _order(backend, query, value, in_graph)
    if layout.any_lengths:
        for name in order:
            if name in GRAPHS and refusals[name]() is None:
                return name
        reason = refusals["flash_attention_2"]() or f"attention_backend={backend!r}"
        raise RuntimeError(f"a captured row needs FlashAttention-2 or the fused kernel, which rules out {reason}")
    for name in order:
        refused = refusals[name]()
        if refused is None:
            return name
    raise ValueError(f"attention_backend={backend!r} cannot do {refused}; set attention_backend='auto'")


def fits_graph(
    backend: str,
    query: torch.Tensor,
    value: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> bool:
    """Whether what can be an op of a graph takes such a call, whatever its layout: a compiler decides once."""
    for name in _order(backend, query, value, in_graph=True):
        if name == "triton" and fused_refusal(query, value, dropout) is None:
            return True
        if name == "flash_attention_2" and refusal_of_any_layout(query, value, softcap, sinks, dropout) is None:
            return True
    return False
