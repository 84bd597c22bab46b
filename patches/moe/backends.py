"""Which code runs the grouped products: torch's, this package's Triton kernels, or a plain loop."""

import os
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from ..config import MoeBackend
from ..kernels import has_triton
from .reference import grouped_gram_reference, grouped_mm_reference
from .routing import Routing
from .rows import add_product_


Backend = Literal["grouped_mm", "triton", "native_torch"]

VARIABLE = "UNSLOTH_MOE_BACKEND"
ALIASES = {"unsloth_triton": "triton"}
ALIGNMENT = 16  # bytes: torch's grouped product wants rows that start at multiples of it


def requested_backend(field: str | None) -> tuple[str, str]:
    """
    The backend that was asked for, and by whom.

    Args:
        field (`str`, *optional*): The config's `moe_backend`; it wins over the environment variable.

    Returns:
        The backend or `"auto"`, and where that comes from, in words.

    Raises:
        ValueError: If the environment variable names an unknown one.
    """
    if field is not None:
        return field, f"moe_backend={field!r}"
    value = os.environ.get(VARIABLE)
    if not value:
        return "auto", "the default"
    name = ALIASES.get(value, value)
    if name not in get_args(MoeBackend):
        choices = ", ".join([*get_args(MoeBackend), *ALIASES])
        raise ValueError(
            f"the environment variable {VARIABLE}={value!r} is unknown; choose from {choices}, or unset it"
        )
    return name, f"the environment variable {VARIABLE}={value}"


def refusal(backend: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> str | None:
    """
    Why `backend` cannot run products of these widths, or `None` if it can.

    Args:
        backend (`str`): One of `Backend`.
        device (`torch.device`): Where the tensors are.
        dtype (`torch.dtype`): Of the weights.
        widths (`tuple[int, ...]`): In and out features of the products.
    """
    if backend == "native_torch":
        return None
    if backend == "triton":
        if device.type != "cuda":
            return f"a device of type {device.type!r}"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {dtype}"
        return None if has_triton() else "a machine without triton (pip install triton)"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {dtype}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} (needs sm_80 or newer)"
    odd = next((width for width in widths if width * dtype.itemsize % ALIGNMENT), None)
    return None if odd is None else f"a width of {odd}, which is no multiple of {ALIGNMENT // dtype.itemsize}"


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> Backend:
    """
    The backend for products of these widths.

    Args:
        requested (`str`): One of `MoeBackend`; with `"auto"` this package's kernels on cards from sm_80 on and on
            AMD (on an H200 they were 1.05 to 1.3 times as fast as torch's), torch's on sm_100 in bf16, where ours
            were not measured, and a loop on the CPU and on older cards, for whose tensor cores Triton has no code.
        device, dtype, widths: See `refusal`.

    Raises:
        ValueError: If the backend that was asked for by name cannot run them.
    """
    if requested != "auto":
        if (reason := refusal(requested, device, dtype, widths)) is not None:
            raise ValueError(f"moe_backend={requested!r} cannot do {reason}; set moe_backend='auto'")
        return requested
    order = ["native_torch"]
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        if torch.version.hip is None and major == 10 and dtype == torch.bfloat16:
            order = ["grouped_mm", "triton", "native_torch"]
        elif torch.version.hip is not None or major >= 8:
            order = ["triton", "grouped_mm", "native_torch"]
    return next(backend for backend in order if refusal(backend, device, dtype, widths) is None)


def grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    backend: Backend,
    xa: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Each row times the weight of its expert, and the second half of an adapter added.

    Args:
        x (`torch.Tensor` of shape `(num_rows, in_features)`): Rows, sorted by expert; or others with `rows`.
        weight (`torch.Tensor` of shape `(num_experts, in_features, out_features)`, any strides): Weights.
        routing (`Routing`): The rows.
        backend (`str`): What computes it.
        xa, b (`torch.Tensor` of shapes `(num_rows, rank)` and `(num_experts, rank, out_features)`, *optional*): Thin
            product and its factors.
        rows (`torch.Tensor` of shape `(num_rows,)`, integer, *optional*): The row of `x` of each sorted row; for a
            backend that gathers.

    Returns:
        `torch.Tensor` of shape `(num_rows, out_features)`, in the dtype of `x`.
    """
    if not routing.num_rows:
        return x.new_empty(0, weight.shape[2])
    if backend == "triton":
        from .gemm import triton_grouped_mm

        return triton_grouped_mm(x, weight, routing.offsets, tiles=routing.tiles, rows=rows, xa=xa, b=b)
    x = x if rows is None else x[rows]
    if backend == "grouped_mm":
        out = F.grouped_mm(x, weight, offs=routing.offsets)
    else:
        out = grouped_mm_reference(x, weight, routing.offsets)
    return out if xa is None else add_product_(out, xa, b, routing)


def gathers(backend: Backend) -> bool:
    """Whether products of this backend read rows from where they are; the others want them side by side."""
    return backend == "triton"


def grouped_gram(
    x: torch.Tensor,
    y: torch.Tensor,
    routing: Routing,
    backend: Backend,
    y_rows: torch.Tensor | None = None,
    x_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    For each expert its rows of `x`, transposed, times its rows of `y`: the gradient of a weight.

    Args:
        x (`torch.Tensor` of shape `(num_rows, in_features)`): Rows, sorted by expert, or others with `x_rows`.
        y (`torch.Tensor` of shape `(num_rows, out_features)`): Rows in the same order, or others with `y_rows`.
        routing (`Routing`): The rows.
        backend (`str`): What computes it.
        y_rows, x_rows (`torch.Tensor` of shape `(num_rows,)`, integer, *optional*): The row of each sorted row.

    Returns:
        `torch.Tensor` of shape `(num_experts, in_features, out_features)`: Zeros for experts without rows.
    """
    if not routing.num_rows:
        return x.new_zeros(routing.num_experts, x.shape[1], y.shape[1])
    if backend == "triton":
        from .gemm import triton_grouped_gram

        return triton_grouped_gram(x, y, routing.offsets, x_rows=x_rows, y_rows=y_rows)
    x, y = x if x_rows is None else x[x_rows], y if y_rows is None else y[y_rows]
    if backend == "grouped_mm":
        return F.grouped_mm(x.t(), y, offs=routing.offsets)
    return grouped_gram_reference(x, y, routing.offsets)


def row_tile(x: torch.Tensor, num_rows: int, num_experts: int, backend: Backend) -> int:
    """Rows of the tiles that products of this dtype and device go through; 0 if they need none."""
    if backend != "triton" or not num_rows:
        return 0
    from .gemm import capability_of, row_block

    return row_block(capability_of(x.device), x.dtype, num_rows / num_experts)


def thin_backend(x: torch.Tensor) -> Backend:
    """What computes products with the thin factors of an adapter, whose widths torch's grouped product cannot take."""
    return "triton" if refusal("triton", x.device, x.dtype, ()) is None else "native_torch"
