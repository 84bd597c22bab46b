"""Launchers of the grouped products in Triton, and their configurations for each family of GPU.

Both are pure functions that query nothing from the device: block sizes follow from the card, the dtype and the mean
rows of an expert, which are numbers of the host.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..kernels import least_block
from .routing import _tiles, max_tiles


NARROW = 64  # up to this width, as adapters have, a product is limited by memory
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Configuration:
    """
    How a grouped product is cut into programs.

    Args:
        block_m, block_n, block_k (`int`): Block of the result, and of what is summed; powers of two from 16.
        num_warps, num_stages (`int`): As Triton understands them.
        group (`int`, *optional*, defaults to 8): Row blocks that neighbours in time go through before the next column.
        descriptors (`bool`, *optional*, defaults to `False`): Load through the tensor memory accelerator.
        flatten (`bool`, *optional*, defaults to `False`): Load for the next block while one is stored.
        per_sm (`int`, *optional*, defaults to 1): Persistent programs for each multiprocessor.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    descriptors: bool = False
    flatten: bool = False
    per_sm: int = 1


def _fitted(config: Configuration, *, block_n: int, block_k: int) -> Configuration:
    return replace(config, block_n=min(config.block_n, block_n), block_k=min(config.block_k, block_k))


def _has_descriptors(capability: tuple[int, int] | None) -> bool:
    return capability is not None and capability[0] in (9, 10)


def _no_tensor_cores(capability: tuple[int, int] | None, dtype: torch.dtype) -> bool:
    """Whether Triton multiplies without them: fp32 stays fp32, and it knows none before sm_80."""
    return dtype == torch.float32 or (capability is not None and capability < (8, 0))


def row_block(capability: tuple[int, int] | None, dtype: torch.dtype, mean_rows: float) -> int:
    """Rows of a block in each product of a layer, so that one table of tiles serves them all."""
    return 64 if _no_tensor_cores(capability, dtype) or mean_rows <= 96 else 128


def configuration(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    mean_rows: float,
    in_features: int,
    out_features: int,
    adapter: bool = False,
) -> Configuration:
    """
    How `triton_grouped_mm` runs.

    Args:
        capability (`tuple[int, int]`, *optional*): Compute capability; `None` on AMD.
        dtype (`torch.dtype`): Of rows and weights.
        mean_rows (`float`): Rows of an expert.
        in_features, out_features (`int`): Widths of the weights.
        adapter (`bool`, *optional*): Whether a second product comes behind the loop, which it must not be part of.

    Returns:
        `Configuration`: With `block_m` of `row_block`.
    """
    block_m = row_block(capability, dtype, mean_rows)
    narrow = out_features <= NARROW
    if _no_tensor_cores(capability, dtype):
        config = Configuration(block_m, 64, 16, num_warps=4, num_stages=2, per_sm=2)
    elif in_features % 8 or out_features % 8:  # rows that are read in small pieces, each with its address
        config = Configuration(block_m, 64, 32, num_warps=4, num_stages=2, per_sm=2)
    elif _has_descriptors(capability):
        if narrow:
            config = Configuration(block_m, 64, 64, num_warps=4, num_stages=4, descriptors=True, per_sm=2)
        elif block_m == 64:
            config = Configuration(block_m, 128, 64, num_warps=4, num_stages=4, descriptors=True, per_sm=2)
        else:
            # flattened where nothing follows the loop: with gathered rows 0.41 against 0.46 ms on an H200, and with an
            # adapter 0.52 against 0.44; on sm_100 that one does not fit into tensor memory in Triton 3.6
            flatten = capability[0] == 9 and not adapter
            stages = 3 if flatten or capability[0] != 9 else 4
            config = Configuration(block_m, 256, 64, num_warps=8, num_stages=stages, descriptors=True, flatten=flatten)
    elif capability is None:  # 64 KiB, no asynchronous copies
        config = Configuration(block_m, 128, 32, num_warps=4 if block_m == 64 else 8, num_stages=2, per_sm=2)
    else:
        stages = 4 if capability in ((8, 0), (8, 7)) else 3
        config = Configuration(block_m, 128, 32, num_warps=4, num_stages=stages, per_sm=2)
    return _fitted(config, block_n=least_block(out_features), block_k=least_block(in_features))


def gram_configuration(
    capability: tuple[int, int] | None, dtype: torch.dtype, mean_rows: float, wide: int, other: int
) -> Configuration:
    """
    How `triton_grouped_gram` runs. `block_k` counts rows here.

    Args:
        capability, dtype, mean_rows: As in `configuration`.
        wide (`int`): Width that `block_m` divides.
        other (`int`): Width that `block_n` divides, at most `wide` if it is narrow: then one block has it all, and
            the wide operand is read once.

    Returns:
        `Configuration`: `flatten` and `per_sm` have no meaning for it.
    """
    narrow = other <= NARROW
    if _no_tensor_cores(capability, dtype):
        config = Configuration(64, 64, 16, num_warps=4, num_stages=2)
    elif _has_descriptors(capability):
        if narrow:
            config = Configuration(128, 64, 128, num_warps=4, num_stages=3)
        elif mean_rows <= 96:
            config = Configuration(128, 128, 32, num_warps=4, num_stages=3)
        elif mean_rows <= 512:
            config = Configuration(128, 128, 64, num_warps=4, num_stages=3, descriptors=True)
        else:
            config = Configuration(128, 256, 64, num_warps=8, num_stages=3, descriptors=True)
    elif capability is None:
        config = Configuration(128, 64 if narrow else 128, 32, num_warps=8, num_stages=2)
    else:
        stages = 4 if capability in ((8, 0), (8, 7)) else 3
        config = Configuration(128, 64 if narrow else 128, 32, num_warps=4, num_stages=stages)
    return replace(
        config, block_m=min(config.block_m, least_block(wide)), block_n=min(config.block_n, least_block(other))
    )


@functools.cache
def _device(device: torch.device) -> tuple[tuple[int, int] | None, int]:
    """Compute capability, `None` on AMD, and number of multiprocessors."""
    if device.type != "cuda":  # Triton's interpreter
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(device)
    capability = None if torch.version.hip else (properties.major, properties.minor)
    return capability, properties.multi_processor_count


@functools.cache
def _descriptor_class() -> type | None:
    """Triton's tensor descriptor on the host; `None`, said once, where this Triton has none."""
    try:
        import triton
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:
        TensorDescriptor = None
    if TensorDescriptor is None or not hasattr(tl, "make_tensor_descriptor"):
        warnings.warn(
            f"Triton {triton.__version__} has no tensor descriptors: grouped products of experts use plain loads, "
            "slower on this GPU. Install Triton 3.4 or newer, the one that your PyTorch was built with."
        )
        return None
    return TensorDescriptor


def _descriptor(tensor: torch.Tensor, block: list[int]):
    """`tensor` for the tensor memory accelerator, or `None` if it cannot read it so."""
    aligned = 16 // tensor.element_size()
    strides = tensor.stride()
    if strides[-1] != 1 or any(s <= 0 or s % aligned for s in strides[:-1]) or tensor.data_ptr() % 16:
        return None
    if not tensor.numel():
        return None
    descriptor = _descriptor_class()
    return descriptor and descriptor(tensor, list(tensor.shape), list(strides), block)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, `None` on AMD."""
    return _device(device)[0]


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _rowwise(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(what: str, *tensors: torch.Tensor) -> None:
    dtype = tensors[0].dtype
    if dtype not in DTYPES or any(t.dtype != dtype for t in tensors):
        names = ", ".join(str(t.dtype).removeprefix("torch.") for t in tensors)
        raise ValueError(f"{what} takes tensors of one dtype, float32, float16 or bfloat16, not {names}")
    capability = _device(tensors[0].device)[0]
    if dtype == torch.bfloat16 and capability is not None and capability < (8, 0):
        raise ValueError(f"{what} needs float16 on this GPU: it has no bfloat16 instructions")


def _table(tiles, offsets: torch.Tensor, num_rows: int, block: int) -> torch.Tensor:
    if tiles is None:
        return _tiles(offsets, num_rows, block)
    table = tiles(block) if callable(tiles) else tiles
    expected = (max_tiles(num_rows, offsets.shape[0], block), 3)
    if table.dtype != torch.int32 or tuple(table.shape) != expected or not table.is_contiguous():
        raise ValueError(f"tiles must be int32 of shape {expected}, made for blocks of {block} rows (`row_block`)")
    return table


def triton_grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    tiles: torch.Tensor | Callable[[int], torch.Tensor] | None = None,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    xa: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    config: Configuration | None = None,
) -> torch.Tensor:
    """
    Each row times the weight of its expert; optionally gathered, with a bias, with the second half of a LoRA.

    Args:
        x (`torch.Tensor` of shape `(num_x, in_features)`, fp32, fp16 or bf16): Rows; sorted by expert without `rows`.
        weight (`torch.Tensor` of shape `(num_experts, in_features, out_features)`, any strides): Weights, fastest
            where the stride of one of the last two dimensions is 1. Transposed it is the gradient of `x`.
        offsets (`torch.Tensor` of shape `(num_experts,)`, int32): Where the rows of each expert end.
        tiles (*optional*): `Routing.tiles`, or its table for blocks of `row_block` rows (of `config.block_m`), so
            that the products of a layer share one; made from `offsets` otherwise.
        rows (`torch.Tensor` of shape `(num_rows,)`, integer, *optional*): The row of `x` of each sorted row.
        bias (`torch.Tensor` of shape `(num_experts, out_features)`, *optional*): Added to each row of its expert.
        xa (`torch.Tensor` of shape `(num_rows, rank)`, *optional*): Rows times `A`, in the order of the sorted rows.
        b (`torch.Tensor` of shape `(num_experts, rank, out_features)`, any strides, *optional*): With `xa` only.
        scale (`float`, *optional*, defaults to 1.0): Factor on `xa @ b`.
        out (`torch.Tensor` of shape `(num_rows, out_features)`, *optional*): Written and returned.
        config (`Configuration`, *optional*): In place of the one of `configuration`.

    Returns:
        `torch.Tensor` of shape `(num_rows, out_features)`: In the dtype of `x`; zeros for rows beyond the last offset.

    Raises:
        ValueError: If dtypes differ, `in_features` is 0, one of `xa` and `b` is missing, or `tiles` are made for
            other blocks.
    """
    if (xa is None) != (b is None):
        raise ValueError("xa and b are the two halves of one product: pass both or none")
    _check("triton_grouped_mm", x, weight, *(() if xa is None else (xa, b)))
    num_experts, in_features, out_features = weight.shape
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    if not in_features:
        raise ValueError("weight has no in_features: there is nothing to multiply")
    if out is None:
        out = x.new_empty(num_rows, out_features)
    if not out.numel():
        return out
    if scale == 0:  # which the kernel divides by
        xa = b = None
    capability, num_sms = _device(x.device)
    if config is None:
        widths = in_features, out_features
        config = configuration(capability, x.dtype, num_rows / num_experts, *widths, adapter=xa is not None)
    table = _table(tiles, offsets, num_rows, config.block_m)
    x, bias, xa = (t if t is None else _rowwise(t) for t in (x, bias, xa))

    x_desc = weight_desc = None
    transposed = weight.stride(2) != 1
    if config.descriptors:
        if rows is None:
            x_desc = _descriptor(x, [config.block_m, config.block_k])
        if transposed:
            weight_desc = _descriptor(weight.transpose(1, 2), [1, config.block_n, config.block_k])
        else:
            weight_desc = _descriptor(weight, [1, config.block_k, config.block_n])
    rank = 0 if xa is None else xa.shape[1]
    # where a row of xa is read one number at a time, larger blocks do not fit into registers
    block_r = min(16 if rank % 16 or _no_tensor_cores(capability, x.dtype) else 64, least_block(rank))

    from . import kernels

    blocks = table.shape[0] * -(-out_features // config.block_n)
    with _on(x.device):
        kernels.grouped_mm_kernel[(min(blocks, num_sms * config.per_sm),)](
            x,
            x_desc,
            weight,
            weight_desc,
            out,
            table,
            offsets,
            rows,
            bias,
            xa,
            b,
            float(scale),
            num_rows,
            in_features,
            out_features,
            num_experts,
            rank,
            x.stride(0),
            *weight.stride(),
            out.stride(0),
            0 if bias is None else bias.stride(0),
            0 if xa is None else xa.stride(0),
            *((0, 0, 0) if b is None else b.stride()),
            EXPERTS=1 << (num_experts - 1).bit_length(),
            RANK=-(-rank // block_r) * block_r,
            BLOCK_R=block_r,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP=config.group,
            EVEN_N=out_features % config.block_n == 0,
            EVEN_K=in_features % config.block_k == 0,
            TRANSPOSED=transposed,
            FLATTEN=config.flatten and rank <= block_r,  # one loop within it at most
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def triton_grouped_gram(
    x: torch.Tensor,
    y: torch.Tensor,
    offsets: torch.Tensor,
    *,
    x_rows: torch.Tensor | None = None,
    y_rows: torch.Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    config: Configuration | None = None,
) -> torch.Tensor:
    """
    For each expert the product of its rows of `x`, transposed, and its rows of `y`: the gradient of a weight.

    Args:
        x (`torch.Tensor` of shape `(num_x, in_features)`, fp32, fp16 or bf16): Rows; sorted by expert without
            `x_rows`.
        y (`torch.Tensor` of shape `(num_y, out_features)`): Rows; sorted by expert without `y_rows`.
        offsets (`torch.Tensor` of shape `(num_experts,)`, int32): Where the rows of each expert end.
        x_rows, y_rows (`torch.Tensor` of shape `(num_rows,)`, integer, *optional*): The row of each sorted row.
        scale (`float`, *optional*, defaults to 1.0): Factor on the result.
        dtype (`torch.dtype`, *optional*): Of the result; that of `x` otherwise.
        config (`Configuration`, *optional*): In place of the one of `gram_configuration`.

    Returns:
        `torch.Tensor` of shape `(num_experts, in_features, out_features)`: Zeros for experts without rows.

    Raises:
        ValueError: If the dtypes of `x` and `y` differ.
    """
    _check("triton_grouped_gram", x, y)
    num_experts = offsets.shape[0]
    out = torch.empty(num_experts, x.shape[1], y.shape[1], dtype=dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    num_rows = x.shape[0] if x_rows is None else x_rows.shape[0]
    strides = out.stride()
    if x.shape[1] < y.shape[1] and x.shape[1] <= NARROW:
        # the wide operand comes first: tensor cores have large blocks on that side, small ones on the other
        x, y, x_rows, y_rows, strides = y, x, y_rows, x_rows, (strides[0], strides[2], strides[1])
    x, y = _rowwise(x), _rowwise(y)
    if config is None:
        config = gram_configuration(_device(x.device)[0], x.dtype, num_rows / num_experts, x.shape[1], y.shape[1])
    x_desc = y_desc = None
    if config.descriptors and x_rows is None and y_rows is None:
        x_desc = _descriptor(x, [config.block_k, config.block_m])
        y_desc = x_desc and _descriptor(y, [config.block_k, config.block_n])
        x_desc = y_desc and x_desc

    from . import kernels

    blocks = num_experts * -(-x.shape[1] // config.block_m) * -(-y.shape[1] // config.block_n)
    with _on(x.device):
        kernels.grouped_gram_kernel[(blocks,)](
            x,
            x_desc,
            y,
            y_desc,
            out,
            offsets,
            x_rows,
            y_rows,
            float(scale),
            x.shape[1],
            y.shape[1],
            x.stride(0),
            y.stride(0),
            *strides,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP=config.group,
            EVEN_M=x.shape[1] % config.block_m == 0,
            EVEN_N=y.shape[1] % config.block_n == 0,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out
