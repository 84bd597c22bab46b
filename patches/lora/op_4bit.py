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


# what the ops take alike
QUANTIZED = (
    "Tensor packed, SymInt[] shape, Tensor absmax, SymInt blocksize, str quant_type, Tensor? absmax_8bit, "
    "Tensor? absmax_code, Tensor? absmax_offset"
)
ADAPTER = "Tensor lora_A, Tensor lora_B, Tensor x_A, float scaling"


@functools.cache
def _code(quant_type: str, device: torch.device) -> torch.Tensor:
    """The value of each digit, on the device."""
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device=device)


def _is_ours(x: torch.Tensor, blocksize: int, dtype: torch.dtype) -> bool:
    return use_kernels(x) and blocksize in BLOCKSIZES and dtype in DTYPES


def _product(x, quantized, bias):
    packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset = quantized
    if _is_ours(x, blocksize, x.dtype) and x.numel() > FEW_ROWS * x.shape[-1]:
        return F.linear(x, _weight(quantized, x.dtype), bias)
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


def _weight(quantized, dtype):
    packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset = quantized
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


def _op(name: str, schema: str):
    return torch.library.custom_op(f"unsloth_trl::{name}", mutates_args=(), schema=schema)


@_op("linear_4bit", f"(Tensor x, {QUANTIZED}, Tensor? bias) -> Tensor")
def linear_4bit(x, *rest):
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
    *quantized, bias = rest
    return _product(x, quantized, bias)


@_op("linear_4bit_backward", f"(Tensor grad, {QUANTIZED}) -> Tensor")
def linear_4bit_backward(grad, *quantized):
    """The gradient of `x`, from that of the output."""
    return torch.matmul(grad, _weight(quantized, grad.dtype))


@_op("lora_linear_4bit", f"(Tensor x, {QUANTIZED}, Tensor? bias, {ADAPTER}) -> Tensor")
def lora_linear_4bit(x, *rest):
    """
    `lora_linear` with a weight in 4 bits.

    Args:
        x, packed, shape, absmax, blocksize, quant_type, absmax_8bit, absmax_code, absmax_offset: As in `linear_4bit`.
        bias, lora_A, lora_B, x_A, scaling: As in `lora_linear`, in the dtype of `x`.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`.
    """
    *quantized, bias, _, lora_B, x_A, scaling = rest
    return add_product(_product(x, quantized, bias), x_A, lora_B, scaling)


@_op(
    "lora_linear_4bit_backward",
    f"(Tensor grad, {QUANTIZED}, {ADAPTER}, bool needs_x) -> (Tensor, Tensor, Tensor)",
)
def lora_linear_4bit_backward(grad, *rest):
    """Gradients of `x` (empty unless `needs_x`), `x_A` and `lora_B`."""
    *quantized, lora_A, lora_B, x_A, scaling, needs_x = rest
    weight = _weight(quantized, grad.dtype) if needs_x else None
    return adapter_gradients(grad, weight, lora_A, lora_B, x_A, scaling)


@linear_4bit.register_fake
@lora_linear_4bit.register_fake
def _(x, packed, shape, *rest):
    return x.new_empty(*x.shape[:-1], shape[0])


@linear_4bit_backward.register_fake
def _(grad, packed, shape, *rest):
    return grad.new_empty(*grad.shape[:-1], shape[1])


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
