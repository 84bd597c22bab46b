"""Attention over segments with parents in one Triton kernel: windows, soft-capping, sinks, unequal head sizes.

The choice of blocks is a function of the card, the dtype and the head size; nothing is asked of the device.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch

from ..kernels import has_triton, least_block
from ..layout import PackedLayout
from .tables import build_tables


MAX_SIZE = 512
LARGEST_BEFORE_SM_80 = 256  # their 64 KiB of shared memory hold no more: Triton multiplies without tensor cores there
MANY_KEYS = 2048
Part = Literal["forward", "query", "key"]


class Blocks(NamedTuple):
    """Rows of queries and of keys that a program has at once, in one direction of the pass."""

    m: int
    n: int
    num_warps: int
    num_stages: int


def blocks_for(shared: int, dtype: torch.dtype, size: int, part: Part, long: bool = False) -> Blocks:
    """
    Args:
        shared (`int`): Bytes of shared memory that a program may take.
        dtype (`torch.dtype`): Of queries, keys and values.
        size (`int`): The larger head size.
        part (`str`): `"forward"`, or whose gradients: `"query"`, or `"key"` for keys and values, which hold the most.
        long (`bool`, *optional*): Whether a token sees `MANY_KEYS` on average.
    """
    width = least_block(size)
    if dtype == torch.float32:
        return Blocks(16, 16, 4, 1) if width > 128 else Blocks(32, 32, 4, 1)
    roomy, small = shared >= 160 * 1024, shared <= 64 * 1024
    if width > 256:
        return Blocks(16, 16, 4, 1)
    if width > 128:
        if part == "forward":
            return Blocks(64, 64, 8, 2) if roomy else Blocks(32, 32, 4, 1)
        return Blocks(16, 16, 4, 1) if small else Blocks(32, 32, 4, 1) if roomy else Blocks(16, 32, 4, 1)
    if part == "forward":
        if width <= 64:
            return Blocks(128, 64, 4, 3 if roomy else 2)
        return Blocks(128, 64, 8, 3) if roomy else Blocks(64, 32, 4, 2)
    if small:
        return Blocks(32, 32, 4, 1)
    if part == "key" and long and width == 128 and shared >= 200 * 1024:
        # 17.0 against 18.2 ms for a prompt of 1,024 with 8 completions of 4,096, on an H200
        return Blocks(64, 128, 8, 2)
    if part == "query":
        return Blocks(128 if width <= 64 else 64, 64, 4, 2) if roomy else Blocks(64, 32, 4, 1)
    return Blocks(64, 64, 4, 2) if roomy or width <= 64 else Blocks(32, 64, 4, 1)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take on `device`."""
    if device.type != "cuda":  # Triton's interpreter
        return 64 * 1024
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


@functools.cache
def tiles_for_balance(device: torch.device) -> int:
    """Tiles of keys in all, four for each multiprocessor, of which a longer one is divided."""
    if device.type != "cuda":  # Triton's interpreter
        return 8
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def fused_refusal(query: torch.Tensor, value: torch.Tensor, dropout: float) -> str | None:
    """Why the kernel cannot take this call, or `None` if it can. Head size is the last dimension."""
    if query.device.type != "cuda":
        return f"device {query.device}"
    return refusal_on_cuda(query.device, query.dtype, max(query.shape[-1], value.shape[-1]), dropout)


def refusal_on_cuda(device: torch.device, dtype: torch.dtype, size: int, dropout: float) -> str | None:
    """`fused_refusal` for a card, a dtype and the larger head size."""
    if not has_triton():
        return "a machine without triton (pip install triton)"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {dtype}"
    if dropout:
        return f"attention dropout ({dropout})"
    old = torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    largest = LARGEST_BEFORE_SM_80 if old else MAX_SIZE
    if size > largest:
        return f"head size {size} over {largest}" + (" on a card before sm_80" if old else "")
    return None


def _shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, int]:
    size, v_size = query.shape[-1], value.shape[-1]
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "SIZE": size,
        "V_SIZE": v_size,
        "BLOCK_D": least_block(size),
        "BLOCK_DV": least_block(v_size),
    }


def _launch(kernel, grid, *args, blocks: Blocks, **constants) -> None:
    kernel[grid](
        *args,
        **constants,
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def _on_its_card(launch: Callable) -> Callable:
    """Triton launches on the current card, which need not be that of the first tensor."""

    @functools.wraps(launch)
    def launch_there(x: torch.Tensor, *args):
        with torch.cuda.device_of(x):
            return launch(x, *args)

    return launch_there


@_on_its_card
def launch_forward(query, key, value, sinks, tiles, spans, scale, softcap, window, blocks):
    """Output and log-sum-exp; tensors as in `fused_attention`, tables as in `Tables`."""
    from . import fused_kernels

    num_tokens, heads, _ = query.shape
    out = query.new_empty(num_tokens, heads, value.shape[-1])
    lse = torch.empty(heads, num_tokens, dtype=torch.float32, device=query.device)
    _launch(
        fused_kernels.attention_forward_kernel,
        (tiles.shape[0], heads),
        query,
        key,
        value,
        sinks,
        out,
        lse,
        tiles,
        spans,
        scale,
        softcap or 0.0,
        window,
        num_tokens,
        *(stride for x in (query, key, value, out) for stride in x.stride()[:2]),
        blocks=blocks,
        **_shape_of(query, key, value),
        SOFTCAP=bool(softcap),
        WINDOW=bool(window),
    )
    return out, lse


@_on_its_card
def launch_backward(grad, query, key, value, out, lse, tables, scale, softcap, window, q_blocks, k_blocks):
    """Gradients of query, key and value, and `<grad, out>` `(heads, num_tokens)`."""
    from . import fused_kernels

    num_tokens, heads, _ = query.shape
    delta = torch.empty(heads, num_tokens, dtype=torch.float32, device=query.device)
    shape = _shape_of(query, key, value)
    rows = max(1, 8192 // shape["BLOCK_DV"])
    fused_kernels.attention_delta_kernel[(-(-num_tokens // rows), heads)](
        grad,
        out,
        delta,
        num_tokens,
        *grad.stride()[:2],
        *out.stride()[:2],
        V_SIZE=shape["V_SIZE"],
        BLOCK_DV=shape["BLOCK_DV"],
        BLOCK_M=rows,
        num_warps=4,
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    numbers = (scale, softcap or 0.0, window, num_tokens)
    strides = [stride for x in (query, key, value, grad) for stride in x.stride()[:2]]
    constants = {**shape, "SOFTCAP": bool(softcap), "WINDOW": bool(window)}
    given = (query, key, value, grad, lse, delta)
    _launch(
        fused_kernels.attention_backward_q_kernel,
        (tables.d_tiles.shape[0], heads),
        *given,
        dq,
        tables.d_tiles,
        tables.q_spans,
        *numbers,
        *strides,
        *dq.stride()[:2],
        blocks=q_blocks,
        **constants,
    )
    kv_heads, width = key.shape[1], shape["BLOCK_D"] + shape["BLOCK_DV"]
    parts = None
    if tables.num_slots:
        parts = torch.empty(tables.num_slots, kv_heads, k_blocks.n, width, dtype=torch.float32, device=query.device)
    _launch(
        fused_kernels.attention_backward_kv_kernel,
        (tables.k_tiles.shape[0], kv_heads),
        *given,
        dk,
        dv,
        parts,
        tables.k_tiles,
        tables.k_spans,
        *numbers,
        *strides,
        *dk.stride()[:2],
        *dv.stride()[:2],
        blocks=k_blocks,
        **constants,
    )
    if parts is not None:
        del shape["GROUP"]
        rows = min(k_blocks.n, 16)
        fused_kernels.attention_sum_kernel[(tables.k_sums.shape[0], kv_heads, k_blocks.n // rows)](
            parts,
            dk,
            dv,
            tables.k_sums,
            *dk.stride()[:2],
            *dv.stride()[:2],
            **shape,
            BLOCK_N=k_blocks.n,
            BLOCK_M=rows,
            num_warps=4,
        )
    return dq, dk, dv, delta


def _plan(query, key, value, layout: PackedLayout):
    """Blocks of the forward, of the gradients of queries and of those of keys, and the tables of a layout for them."""
    size = max(query.shape[-1], value.shape[-1])
    shared = shared_memory(query.device)
    long = layout.mean_context >= MANY_KEYS
    forward, for_queries, for_keys = (blocks_for(shared, query.dtype, size, part, long) for part in get_args(Part))
    rows = (forward.m, for_queries.m, for_keys.n)
    kv_heads = key.shape[1]
    group, programs = query.shape[1] // kv_heads, -(-tiles_for_balance(query.device) // kv_heads)
    tables = layout.derived(
        ("fused", *rows, group, programs),
        lambda found: build_tables(found, *rows, group=group, programs=programs),
    )
    return tables, forward, for_queries, for_keys


def _rowwise(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# The name keeps "flash_attn" in it: TRL's selective checkpointing saves ops whose name has it instead of recomputing.
@torch.library.custom_op("unsloth_trl::flash_attn_fused", mutates_args=())
def _flash_attn_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    q_tiles: torch.Tensor,
    q_spans: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    blocks: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_forward(query, key, value, sinks, q_tiles, q_spans, scale, softcap, window, Blocks(*blocks))


@_flash_attn_fused.register_fake
def _(query, key, value, sinks, q_tiles, q_spans, scale, softcap, window, blocks):
    num_tokens, heads, _ = query.shape
    return (
        query.new_empty(num_tokens, heads, value.shape[-1]),
        query.new_empty((heads, num_tokens), dtype=torch.float32),
    )


def fused_forward(query, key, value, sinks, layout, scale, window, softcap, launch=launch_forward):
    """Output and log-sum-exp `(num_heads, num_tokens)` in fp32; arguments as in `fused_attention`, 0 for no limit."""
    tables, blocks, *_ = _plan(query, key, value, layout)
    query, key, value = map(_rowwise, (query, key, value))
    sinks = None if sinks is None else sinks.contiguous()
    given = query, key, value, sinks, tables.q_tiles, tables.q_spans
    return launch(*given, scale, softcap, window, blocks)


def fused_backward(grad, query, key, value, sinks, out, lse, layout, scale, window, softcap):
    """Gradients of query, key, value and sinks (`None` without), from what `fused_forward` gave."""
    tables, _, *blocks = _plan(query, key, value, layout)
    grad, query, key, value = map(_rowwise, (grad, query, key, value))
    given = grad, query, key, value, out, lse, tables
    dq, dk, dv, delta = launch_backward(*given, scale, softcap, window, *blocks)
    d_sinks = None
    if sinks is not None:
        # a sink takes its share of the softmax and gives nothing for it
        d_sinks = -((sinks.float()[:, None] - lse).exp() * delta).sum(1).to(sinks.dtype)
    return dq, dk, dv, d_sinks


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, *settings):
        out, lse = fused_forward(query, key, value, sinks, *settings, launch=torch.ops.unsloth_trl.flash_attn_fused)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return *fused_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 4


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of each segment to itself, causally, and to all of its ancestors, in one pass over the keys.

    The online softmax is FlashAttention-2's (Dao 2023); blocks of keys that no query of a block sees are not visited.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`, fp32, fp16 or bf16): Queries.
        key (`torch.Tensor` of shape `(num_tokens, num_kv_heads, head_dim)`): Keys; `num_kv_heads` divides `num_heads`.
        value (`torch.Tensor` of shape `(num_tokens, num_kv_heads, v_head_dim)`): Values.
        layout (`PackedLayout`): Segments, with parents or without, on the same device.
        scale (`float`): Factor on the scores.
        window (`int`, *optional*): Keys a query sees, itself included, counted in positions.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.
        sinks (`torch.Tensor` of shape `(num_heads,)`, *optional*): A logit per head that takes part in the softmax and
            has no value.

    Returns:
        `torch.Tensor` of shape `(num_tokens, num_heads, v_head_dim)`, in the dtype of `query`.

    Raises:
        ValueError: If the layout does not have this many tokens.
    """
    layout.check(query.shape[0])
    return _Fused.apply(query, key, value, sinks, layout, scale, window or 0, softcap or 0.0)
