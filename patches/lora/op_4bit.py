"""Products with a weight in bitsandbytes' 4-bit format, without and with an adapter, as ops of a compiled graph.

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


@torch.library.custom_op("unsloth_trl::linear_4bit", mutates_args=())
def linear_4bit(
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
) -> torch.Tensor:
    """
    `x @ weight.T + bias`, in the dtype of `x`; gradients are those of `x` and `bias`.

    Args:
        x (`torch.Tensor` of shape `(..., in_features)`): Input.
        packed (`torch.Tensor` of shape `(out_features * in_features / 2, 1)`, uint8): The weight.
        shape (`list[int]`): `[out_features, in_features]`.
        absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset:
            As `torch.ops.bitsandbytes.gemm_4bit` takes them.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): Bias, in the dtype of `x`.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`.
    """
    return _product(x, packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset, bias)


@torch.library.custom_op("unsloth_trl::linear_4bit_backward", mutates_args=())
def linear_4bit_backward(
    grad: torch.Tensor,
    packed: torch.Tensor,
    shape: list[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    absmax_8bit: torch.Tensor | None,
    absmax_code: torch.Tensor | None,
    absmax_offset: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of `x`, from that of the output."""
    quantized = packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset
    return torch.matmul(grad, _weight(*quantized, dtype=grad.dtype))


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
        x, packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset: As in `linear_4bit`.
        bias, lora_A, lora_B, x_A, scaling: As in `lora_linear`, in the dtype of `x`.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`.
    """
    quantized = packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset
    return add_product(_product(x, *quantized, bias), x_A, lora_B, scaling)


@linear_4bit.register_fake
@lora_linear_4bit.register_fake
def _(x, packed, shape, *rest):
    return x.new_empty(*x.shape[:-1], shape[0])


@linear_4bit_backward.register_fake
def _(grad, packed, shape, *rest):
    return grad.new_empty(*grad.shape[:-1], shape[1])


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


def _inputs(ctx):
    saved = iter(ctx.saved_tensors)
    return [next(saved) if other is None else other[0] for other in ctx.inputs]


def _product_backward(ctx, grad):
    needs_x = ctx.needs_input_grad[0]
    grad_x = torch.ops.unsloth_trl.linear_4bit_backward(grad, *_inputs(ctx)) if needs_x else None
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[9] else None
    return (grad_x, *[None] * 8, grad_bias)


def _backward(ctx, grad):
    needs_x, inputs = ctx.needs_input_grad[0], _inputs(ctx)
    grads = torch.ops.unsloth_trl.lora_linear_4bit_backward(grad, *inputs, needs_x)
    return (grads[0] if needs_x else None, *[None] * 10, grads[2], grads[1], None)


linear_4bit.register_autograd(_product_backward, setup_context=_setup)
lora_linear_4bit.register_autograd(_backward, setup_context=_setup)
