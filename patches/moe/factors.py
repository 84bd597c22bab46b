"""LoRA factors of stacked experts: from the layout that PEFT stores to the one that the experts op reads, and back.

PEFT has the experts outermost in the rows of `lora_A`, and innermost in the columns of `lora_B`, both in fp32 as a
rule. The op wants a matrix for each expert and factor, in the dtype of the weights, with the scaling in it. Each
factor is one pass over memory in either direction.
"""

import torch
from torch.autograd.function import once_differentiable

from ..kernels import use_kernels


def _by_expert(b: torch.Tensor, num_experts: int, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """`lora_B` `(out, rank * num_experts)`, scaled, as `(num_experts, rank, out)`."""
    if _use_kernel(b):
        return _launch(b, num_experts, scaling, dtype, inverse=False)
    wide = b.to(torch.promote_types(b.dtype, torch.float32)) if scaling != 1 else b
    scaled = wide.view(b.shape[0], -1, num_experts).permute(2, 1, 0) * scaling
    return scaled.to(dtype).contiguous()


def _by_column(grad: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of `lora_B` from that of what `_by_expert` made of it."""
    if _use_kernel(grad):
        return _launch(grad, grad.shape[0], scaling, dtype, inverse=True)
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32)) if scaling != 1 else grad
    return (wide * scaling).to(dtype).permute(2, 1, 0).reshape(grad.shape[2], -1)


def _use_kernel(x: torch.Tensor) -> bool:
    return use_kernels(x) and not torch.compiler.is_compiling()


def _launch(x: torch.Tensor, num_experts: int, scaling: float, dtype: torch.dtype, *, inverse: bool) -> torch.Tensor:
    from .factor_kernels import move_factor_kernel

    x = x.contiguous()
    if inverse:
        width, columns = x.shape[2], x.shape[1] * num_experts
        out = torch.empty(width, columns, dtype=dtype, device=x.device)
    else:
        width, columns = x.shape
        out = torch.empty(num_experts, columns // num_experts, width, dtype=dtype, device=x.device)
    if out.numel():
        grid = (-(-columns // 64), -(-width // 64))
        with torch.cuda.device_of(x):
            move_factor_kernel[grid](
                x, out, width, columns, num_experts, float(scaling), INVERSE=inverse, BLOCK=64, num_warps=4
            )
    return out


class _Factors(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, num_experts, scaling, dtype):
        ctx.shapes, ctx.dtypes, ctx.scaling = a.shape, (a.dtype, b.dtype), scaling
        ctx.set_materialize_grads(False)
        return a.view(num_experts, -1, a.shape[1]).to(dtype), _by_expert(b, num_experts, scaling, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_a, grad_b):
        if grad_a is not None:
            grad_a = grad_a.to(ctx.dtypes[0]).reshape(ctx.shapes)
        if grad_b is not None:
            grad_b = _by_column(grad_b, ctx.scaling, ctx.dtypes[1])
        return grad_a, grad_b, None, None, None


def factors_by_expert(
    a: torch.Tensor, b: torch.Tensor, num_experts: int, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The LoRA factors of PEFT's layout, one matrix of rank `r` for each expert and factor.

    Args:
        a (`torch.Tensor` of shape `(num_experts * r, in)`): Weight of `lora_A`, experts outermost.
        b (`torch.Tensor` of shape `(out, r * num_experts)`): Weight of `lora_B`, experts innermost.
        num_experts (`int`): Experts.
        scaling (`float`): Factor on the product; goes into the second factor, in fp32 before it is rounded.
        dtype (`torch.dtype`): Of the result.

    Returns:
        `a` of shape `(num_experts, r, in)` and `b` of shape `(num_experts, r, out)`, contiguous.
    """
    return _Factors.apply(a, b, num_experts, scaling, dtype)
