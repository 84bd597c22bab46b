"""Packed attention inside a compiled layer, whose graph knows a batch's layout as a number on the host.

What a layout says about a batch would be compiled in, and every batch compiled again. A graph gets a handle instead, a
tensor on the CPU that no compiler looks into; the op behind it finds the layout when it runs.
"""

import itertools
from collections import OrderedDict

import torch

from ..layout import PackedLayout
from .op import pad_columns, pad_heads, refusal_of_any_layout
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


def can_flash(query: torch.Tensor, value: torch.Tensor, softcap, sinks, dropout: float) -> bool:
    """Whether FlashAttention-2 can take such a call, whatever its layout; what a compiler may decide once."""
    return refusal_of_any_layout(query, value, softcap, sinks, dropout) is None


def _arguments(handle: torch.Tensor, tokens: int, device: torch.device, window: int):
    """Which op the layout takes, and what the op takes behind queries, keys and values, and behind the window."""
    layout = layout_of(handle)
    layout.reached.add("attention")
    layout.check(tokens)
    layout = layout.to(device)
    if layout.parents is None:
        window = 0 if window >= layout.max_context else window
        return "flash_attn_varlen", (layout.cu_seqlens, layout.max_seqlen), (window,)
    if window and window < layout.max_context:
        raise ValueError(f"a window ({window}) that reaches into parent segments has no kernel in compiled layers yet")
    return "flash_attn_shared", batch_arguments(layout), ()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1)


@torch.library.custom_op("unsloth_trl::flash_attn_by_layout", mutates_args=())
def _flash_attn_by_layout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, _, seq_len, _ = query.shape
    name, batch_info, rest = _arguments(handle, batch * seq_len, query.device, window)
    rows = pad_heads(*map(_rows, (query, key, value)))
    out, lse = getattr(torch.ops.unsloth_trl, name)(*rows, *batch_info, scale, *rest)
    # a kernel's output and gradients have the strides of its queries, and a graph has to know them before
    return out[..., : value.shape[-1]].contiguous().unflatten(0, (batch, seq_len)), lse


@_flash_attn_by_layout.register_fake
def _(query, key, value, handle, scale, window):
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
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, _, seq_len, _ = query.shape
    name, batch_info, rest = _arguments(handle, batch * seq_len, query.device, window)
    rows = pad_heads(*map(_rows, (query, key, value)))
    size = rows[0].shape[-1]
    grad_out, out = (pad_columns(x.flatten(0, 1), size) for x in (grad_out, out))
    backward = getattr(torch.ops.unsloth_trl, f"{name}_backward")
    grads = backward(grad_out.contiguous(), *rows, out, lse, *batch_info, scale, *rest)
    return tuple(
        grad[..., : x.shape[-1]].contiguous().unflatten(0, (batch, seq_len)).transpose(1, 2)
        for grad, x in zip(grads, (query, key, value), strict=True)
    )


@_flash_attn_by_layout_backward.register_fake
def _(grad_out, query, key, value, out, lse, handle, scale, window):
    return tuple(
        x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (query, key, value)
    )


def _setup_context(ctx, inputs, output):
    query, key, value, handle, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, handle)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    if grad_out is None:
        return (None,) * 6
    grads = torch.ops.unsloth_trl.flash_attn_by_layout_backward(grad_out, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *grads, None, None, None


_flash_attn_by_layout.register_autograd(_backward, setup_context=_setup_context)


def flash_attn_by_layout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """
    FlashAttention-2 over the segments of a layout, those with parents too.

    Args:
        query (`torch.Tensor` of shape `(batch, num_heads, seq_len, head_dim)`, fp16 or bf16): Queries.
        key, value (`torch.Tensor` of shape `(batch, num_kv_heads, seq_len, ...)`): Keys and values.
        handle (`torch.Tensor`): Of `hold`.
        scale (`float`): Factor on the scores.
        window (`int`, *optional*): Keys a query sees, itself included.

    Returns:
        `torch.Tensor` of shape `(batch, seq_len, num_heads, v_head_dim)`.
    """
    return torch.ops.unsloth_trl.flash_attn_by_layout(query, key, value, handle, scale, window or 0)[0]
