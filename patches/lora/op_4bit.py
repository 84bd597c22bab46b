"""`lora_linear` over a weight of bitsandbytes' 4-bit format.

On a GPU the weight comes back by our own kernel, into memory that the allocator hands from one layer to the next, and
cuBLAS multiplies. Elsewhere, and for as few rows as an answer that is being generated has, bitsandbytes does both.
"""

import functools

import torch
import torch.nn.functional as F

from ..kernels import use_kernels
from ..quantization.op import BLOCKSIZES, DTYPES, dequantize_nf4_triton
from .op import adapter_gradients, add_product, gradients_like


NESTED_BLOCKSIZE = 256  # of the scales' scales: the only one that bitsandbytes' product takes
FEW_ROWS = 512  # up to some number of them bitsandbytes multiplies without a dense weight, whatever the card


@functools.cache
def _code(quant_type: str, device: torch.device) -> torch.Tensor:
    """The value of each digit, on the device."""
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device=device)


def _is_ours(x: torch.Tensor, blocksize: int, dtype: torch.dtype) -> bool:
    return use_kernels(x) and blocksize in BLOCKSIZES and dtype in DTYPES


def _product(x, packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset, bias):
    quantized = packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset
    if _is_ours(x, blocksize, x.dtype) and x.numel() > FEW_ROWS * x.shape[-1]:
        return F.linear(x, _weight(*quantized, dtype=x.dtype), bias)
    return torch.ops.bitsandbytes.gemm_4bit.default(
        x,
        packed,
        shape,
        absmax,
        blocksize,
        quant_type,
        bias=bias,
        absmax_8bit=absmax_8bit,
        absmax_code=absmax_code,
        absmax_offset=absmax_offset,
    )


def _weight(packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset, dtype):
    if _is_ours(packed, blocksize, dtype):
        out = torch.empty(shape, dtype=dtype, device=packed.device)
        nested = absmax_8bit is not None
        dequantize_nf4_triton(
            packed,
            absmax_8bit if nested else absmax,
            _code(quant_type, packed.device),
            absmax if nested else None,
            absmax_code,
            absmax_offset,
            blocksize,
            NESTED_BLOCKSIZE,
            0,
            out,
        )
        return out
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        absmax = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, NESTED_BLOCKSIZE, torch.float32)
        absmax = absmax + absmax_offset
    return ops.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, dtype)


@torch.library.custom_op("unsloth_trl::lora_linear_4bit", mutates_args=())
def lora_linear_4bit(
    x: torch.Tensor,
    packed: torch.Tensor,
    shape: list[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    absmax_8bit: torch.Tensor | None,
    absmax_code: torch.Tensor | None,
    absmax_offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    x_A: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """
    `lora_linear` with a weight in 4 bits.

    Args:
        x (`torch.Tensor` of shape `(..., in_features)`): Input.
        packed (`torch.Tensor` of shape `(out_features * in_features / 2, 1)`, uint8): The weight.
        shape (`list[int]`): `[out_features, in_features]`.
        absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset:
            As `torch.ops.bitsandbytes.gemm_4bit` takes them.
        bias, lora_A, lora_B, x_A, scaling: As in `lora_linear`, in the dtype of `x`.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`.
    """
    quantized = packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset
    return add_product(_product(x, *quantized, bias), x_A, lora_B, scaling)


@lora_linear_4bit.register_fake
def _(x, packed, shape, *rest):
    return x.new_empty(*x.shape[:-1], shape[0])


@torch.library.custom_op("unsloth_trl::lora_linear_4bit_backward", mutates_args=())
def lora_linear_4bit_backward(
    grad: torch.Tensor,
    packed: torch.Tensor,
    shape: list[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    absmax_8bit: torch.Tensor | None,
    absmax_code: torch.Tensor | None,
    absmax_offset: torch.Tensor | None,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    x_A: torch.Tensor,
    scaling: float,
    needs_x: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `x` (empty unless `needs_x`), `x_A` and `lora_B`."""
    weight = None
    if needs_x:
        quantized = packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset
        weight = _weight(*quantized, dtype=grad.dtype)
    return adapter_gradients(grad, weight, lora_A, lora_B, x_A, scaling)


@lora_linear_4bit_backward.register_fake
def _(grad, *rest):
    lora_A, lora_B, x_A, _, needs_x = rest[-5:]
    return gradients_like(grad, lora_A, lora_B, x_A, needs_x)


def _setup(ctx, inputs, output):
    kept = inputs[1:9] + inputs[10:]  # all but x and bias
    ctx.save_for_backward(*[value for value in kept if isinstance(value, torch.Tensor)])
    ctx.inputs = [None if isinstance(value, torch.Tensor) else (value,) for value in kept]


def _backward(ctx, grad):
    saved, needs_x = iter(ctx.saved_tensors), ctx.needs_input_grad[0]
    inputs = [next(saved) if other is None else other[0] for other in ctx.inputs]
    grads = torch.ops.unsloth_trl.lora_linear_4bit_backward(grad, *inputs, needs_x)
    return (grads[0] if needs_x else None, *[None] * 10, grads[2], grads[1], None)


lora_linear_4bit.register_autograd(_backward, setup_context=_setup)
