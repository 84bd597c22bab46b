"""FlashAttention-4 over plain packed rows, where its package is installed: kernels and autograd are the package's.

The package, `flash-attn-4` (imported as `flash_attn.cute`), compiles its kernels at first use. It is no op of torch's,
so compilers and selective checkpointing do not see it; compiled layers and captured rows are left to other kernels.
"""

import functools
import importlib
import importlib.metadata
import warnings

import torch

from ..layout import PackedLayout
from .op import HALF, plain_refusal


PACKAGE = "flash-attn-4"


@functools.cache
def missing() -> str | None:
    """Why this machine has no FlashAttention-4, or `None` if it has; imports the package."""
    try:
        version = importlib.metadata.version(PACKAGE)  # the package of FlashAttention-2 has a folder of that name, too
    except importlib.metadata.PackageNotFoundError:
        return f"a machine without {PACKAGE} (pip install {PACKAGE})"
    try:
        importlib.import_module("flash_attn.cute")
    except Exception as error:  # whatever the compiler that it brings raises
        problem = f"{PACKAGE} {version}, which cannot be imported ({type(error).__name__}: {error})"
        warnings.warn(f"FlashAttention-4 is left out: {problem}")
        return problem
    return None


def _refused_size(major: int, size: int, window: int | None) -> str | None:
    """Head sizes that the kernels of a card have no code for, forward or backward, or wrong code."""
    if size % 32:  # 4.0.0b36 pads such sizes, and leaves a part of the gradient of queries unwritten
        return f"head size {size}, no multiple of 32"
    if major == 9:
        return f"head size {size} over 256" if size > 256 else None
    if major in (10, 11) and size == 256:
        return None if window is None else f"a window ({window}) at head size 256 on sm_{major}x"
    return f"head size {size} over 128 on sm_{major}x" if size > 128 else None


def flash_4_refusal(
    query: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> str | None:
    """Why FlashAttention-4 cannot take this call, or `None` if it can. Head size is the last dimension."""
    if layout.parents is not None:
        return "segments with parents (shared prompts)"
    if (refused := plain_refusal(softcap, sinks, dropout)) is not None:
        return refused
    if query.dtype not in HALF:
        return f"dtype {query.dtype}"
    device, size = query.device, query.shape[-1]
    if size != value.shape[-1]:
        return f"head sizes {size} and {value.shape[-1]}, which differ"
    major = 0
    if device.type == "cuda" and torch.version.hip is None:
        major = torch.cuda.get_device_capability(device)[0]
    if not 9 <= major <= 12:
        return f"device {device} (needs CUDA sm_90 to sm_12x)"
    if (refused := _refused_size(major, size, window)) is not None:
        return refused
    if major == 12 and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms on sm_12x"
    return missing()


def flash_attn_4(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """
    Causal attention within the segments of a packed row by FlashAttention-4, the package `flash-attn-4`.

    Deterministic where `torch.use_deterministic_algorithms` says so.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`, fp16 or bf16): Queries.
        key, value (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Keys and values; `num_kv_heads`
            divides `num_heads`.
        layout (`PackedLayout`): Segments without parents, on the same device.
        scale (`float`): Factor on the scores.
        window (`int`, *optional*): Keys a query sees, itself included.

    Returns:
        `torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`, in the dtype of `query`.

    Raises:
        ValueError: If the layout does not have this many tokens.
        ImportError: If the package is not installed.
    """
    from flash_attn.cute import flash_attn_varlen_func

    layout.check(query.shape[0])
    with torch.cuda.device_of(query):  # the package launches on the current card
        out, _ = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_k=layout.max_seqlen,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return out
