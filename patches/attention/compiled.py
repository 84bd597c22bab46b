"""Packed attention inside a compiled layer, whose graph knows a batch's layout as a number on the host.

What a layout says about a batch would be compiled in, and every batch compiled again. A graph gets a handle instead, a
tensor on the CPU that no compiler looks into; the op behind it finds the layout when it runs.
"""

import itertools
from collections import OrderedDict

import torch

from ..layout import PackedLayout
from .dispatch import GRAPHS, choose
from .fused import fused_backward, fused_forward
from .op import pad_columns, pad_heads
from .shared import batch_arguments


# layouts of the latest batches: of those whose backward is still to come
HELD = 64
_LAYOUTS: OrderedDict[int, PackedLayout] = OrderedDict()
_NUMBERS = itertools.count(1)


def hold(layout: PackedLayout) -> torch.Tensor:
    """The handle of a layout, int64 on the CPU; valid until `HELD` others have been asked for since."""
    handle = layout.derived("handle", lambda _: torch.tensor(next(_NUMBERS)))
    number = int(handle)
    _LAYOUTS[number] = layout
    _LAYOUTS.move_to_end(number)
    while len(_LAYOUTS) > HELD:
        _LAYOUTS.popitem(last=False)
    return handle


def layout_of(handle: torch.Tensor) -> PackedLayout:
    """
    The layout behind a handle.

    Raises:
        RuntimeError: If there have been too many others since.
    """
    layout = _LAYOUTS.get(int(handle))
    if layout is None:
        raise RuntimeError(
            f"more than {HELD} batches have gone forward through compiled layers since this one, whose backward comes "
            "now; call backward() earlier, or set compile_layers='off'"
        )
    return layout


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _opened(query, value, handle, window, softcap, sinks, backend):
    """The layout of a call on its device, the window or 0, and what attends: `"triton"` or `"flash_attention_2"`."""
    batch, _, seq_len, _ = query.shape
    layout = layout_of(handle)
    layout.reached.add("attention")
    layout.check(batch * seq_len)
    layout = layout.to(query.device)
    window = 0 if window >= layout.max_context else window
    name = choose(backend, query, value, layout, window or None, softcap or None, sinks, 0.0, in_graph=True)
    if name not in GRAPHS:
        raise ValueError(f"{name} is no op of a compiled layer; set compile_layers='off'")
    return layout, window, name


def _flash_arguments(layout, window):
    """FlashAttention-2's op, what it takes behind queries, keys and values, and behind the scale."""
    if layout.parents is None:
        return "flash_attn_varlen", (layout.cu_seqlens, layout.max_seqlen), (window,)
    return "flash_attn_shared", batch_arguments(layout), ()


# The name keeps "flash_attn" in it: TRL's selective checkpointing saves ops whose name has it instead of recomputing.
@torch.library.custom_op("unsloth_trl::flash_attn_by_layout", mutates_args=())
def _flash_attn_by_layout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    handle: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = query.shape[0], query.shape[2]
    layout, window, name = _opened(query, value, handle, window, softcap, sinks, backend)
    rows = tuple(map(_rows, (query, key, value)))
    if name == "triton":
        out, lse = fused_forward(*rows, sinks, layout, scale, window, softcap)
        return out.unflatten(0, shape), lse
    name, batch_info, rest = _flash_arguments(layout, window)
    out, lse = getattr(torch.ops.unsloth_trl, name)(*pad_heads(*rows), *batch_info, scale, *rest)
    # a kernel's output and gradients have the strides of its queries, and a graph has to know them before
    return out[..., : value.shape[-1]].contiguous().unflatten(0, shape), lse


@_flash_attn_by_layout.register_fake
def _(query, key, value, sinks, handle, scale, window, softcap, backend):
    batch, heads, seq_len, _ = query.shape
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty(batch, seq_len, heads, value.shape[-1]),
        query.new_empty((heads, batch * seq_len), dtype=lse_dtype),
    )


@torch.library.custom_op("unsloth_trl::flash_attn_by_layout_backward", mutates_args=())
def _flash_attn_by_layout_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = query.shape[0], query.shape[2]
    layout, window, name = _opened(query, value, handle, window, softcap, sinks, backend)
    rows = tuple(map(_rows, (query, key, value)))
    grad_out, out = grad_out.flatten(0, 1), out.flatten(0, 1)
    grad_sinks = None
    if name == "triton":
        *grads, grad_sinks = fused_backward(grad_out, *rows, sinks, out, lse, layout, scale, window, softcap)
    else:
        name, batch_info, rest = _flash_arguments(layout, window)
        rows = pad_heads(*rows)
        grad_out, out = (pad_columns(x, rows[0].shape[-1]) for x in (grad_out, out))
        backward = getattr(torch.ops.unsloth_trl, f"{name}_backward")
        grads = backward(grad_out.contiguous(), *rows, out, lse, *batch_info, scale, *rest)
    grads = [
        grad[..., : x.shape[-1]].contiguous().unflatten(0, shape).transpose(1, 2)
        for grad, x in zip(grads, (query, key, value), strict=True)
    ]
    return *grads, query.new_empty(0) if grad_sinks is None else grad_sinks


@_flash_attn_by_layout_backward.register_fake
def _(grad_out, query, key, value, sinks, out, lse, handle, scale, window, softcap, backend):
    return *(
        x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (query, key, value)
    ), query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _setup_context(ctx, inputs, output):
    query, key, value, sinks, handle, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, handle)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    if grad_out is None:
        return (None,) * 9
    *grads, grad_sinks = torch.ops.unsloth_trl.flash_attn_by_layout_backward(
        grad_out, *ctx.saved_tensors, *ctx.settings
    )
    return *grads, grad_sinks if ctx.needs_input_grad[3] else None, *[None] * 5


_flash_attn_by_layout.register_autograd(_backward, setup_context=_setup_context)


def flash_attn_by_layout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    FlashAttention-2 or the fused kernel over the segments of a layout, those with parents too.

    Args:
        query (`torch.Tensor` of shape `(batch, num_heads, seq_len, head_dim)`, fp16 or bf16): Queries.
        key, value (`torch.Tensor` of shape `(batch, num_kv_heads, seq_len, ...)`): Keys and values.
        handle (`torch.Tensor`): Of `hold`.
        scale (`float`): Factor on the scores.
        window (`int`, *optional*): Keys a query sees, itself included.
        softcap, sinks (*optional*): As in `fused_attention`.
        backend (`str`, *optional*): Of the config's `attention_backend`.

    Returns:
        `torch.Tensor` of shape `(batch, seq_len, num_heads, v_head_dim)`.
    """
    rest = scale, window or 0, softcap or 0.0, backend
    return torch.ops.unsloth_trl.flash_attn_by_layout(query, key, value, sinks, handle, *rest)[0]
