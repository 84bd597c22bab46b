"""Inputs of the fused attention kernels, the truth in fp64, and the kernels themselves in Triton's interpreter."""

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unsloth_trl.patches.attention import compiled, dispatch, fused
from unsloth_trl.patches.attention.segments import eager_attend, segment_attention
from unsloth_trl.patches.attention.tables import build_tables
from unsloth_trl.patches.layout import PackedLayout


LAYOUTS = {
    "one token": ([1], None),
    "ragged": ([5, 1, 0, 19, 40], None),
    "group": ([21, 9, 1, 17, 0, 6], [-1, 0, 0, 0, 0, 0]),
    "two groups": ([7, 18, 5, 6, 3], [-1, -1, 0, 0, 1]),
    "tree": ([6, 4, 17, 3, 5, 9, 2, 1], [-1, 0, 0, 1, 1, 2, 3, 6]),
    "empty prompt": ([0, 8, 5], [-1, 0, 0]),
    "long": ([100, 20, 51], [-1, 0, 0]),
}
# heads, kv heads, head size, value size
HEADS = {
    "mha": (2, 2, 16, 16),
    "gqa": (4, 2, 32, 32),
    "pair": (2, 1, 32, 32),
    "seven": (7, 1, 16, 16),
    "odd": (2, 1, 24, 40),
    "mla": (2, 2, 96, 64),
}
# window, softcap, sinks
KINDS = {
    "plain": (None, None, False),
    "window 1": (1, None, False),
    "window 7": (7, None, False),
    "window 60": (60, None, False),
    "window beyond": (999, None, False),
    "softcap": (None, 3.0, False),
    "sinks": (None, None, True),
    "all": (11, 2.0, True),
}
CASES = [
    *((layout, "gqa", "all") for layout in LAYOUTS),
    # the tree's longest chain has 35 tokens
    *(("tree", "pair", kind) for kind in KINDS if kind not in ("all", "window beyond")),
    *(("ragged", heads, "all") for heads in HEADS if heads not in ("gqa", "pair")),
    *(("long", "odd", kind) for kind in ("plain", "window 60", "all")),
]
# of forward, gradients of queries, and those of keys: all unlike, and small, so that there are blocks seen whole
BLOCKS = (fused.Blocks(32, 16, 4, 1), fused.Blocks(16, 32, 4, 1), fused.Blocks(16, 64, 4, 1))


def draw(layout, heads, kind, dtype, device="cpu"):
    """Query, key, value, sinks and the gradient of the output in `dtype`; the layout; window and softcap."""
    return draw_for(PackedLayout(*LAYOUTS[layout]).to(device), HEADS[heads], kind, dtype)


def draw_for(layout, heads, kind, dtype):
    """`draw` for a layout itself, and `(heads, kv heads, head size, value size)`."""
    num_heads, kv_heads, size, v_size = heads
    window, softcap, with_sinks = KINDS[kind]
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(layout.device, dtype)

    tokens = layout.num_tokens
    tensors = [
        randn(tokens, num_heads, size),
        randn(tokens, kv_heads, size),
        randn(tokens, kv_heads, v_size),
        randn(num_heads) if with_sinks else None,
        randn(tokens, num_heads, v_size),
    ]
    return tensors, layout, window, softcap


def eager(tensors, layout, window, softcap, dtype):
    """Output and gradients by the eager path in `dtype`."""
    query, key, value, sinks, grad = (None if t is None else t.detach().to(dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in (query, key, value, sinks) if t is not None]
    attend = functools.partial(eager_attend, scale=0.3, window=window, softcap=softcap, sinks=sinks, dropout=0.0)
    out = segment_attention(query, key, value, layout, attend)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def errors(found, expected):
    """Relative; gradients that cancel are measured against a tenth of what is multiplied with them."""
    pairs = zip(found, expected, strict=True)
    return [((a.double() - e).norm() / e.norm().clamp(min=0.1 * e.numel() ** 0.5)).item() for a, e in pairs]


def kernels(tensors, layout, window, softcap, blocks=BLOCKS, programs=6, least_work=8):
    """Output and gradients by the kernels, whatever the device, with blocks of keys divided unless `programs` is 1."""
    query, key, value, sinks, grad = tensors
    forward, for_queries, for_keys = blocks
    group = query.shape[1] // key.shape[1]
    rows = (forward.m, for_queries.m, for_keys.n)
    # by default so little work that blocks of keys with descendants, or with several query heads, are divided
    tables = build_tables(layout, *rows, group=group, programs=programs, least_work=least_work)
    settings = (0.3, softcap, window or 0)
    out, lse = fused.launch_forward(query, key, value, sinks, tables.q_tiles, tables.q_spans, *settings, forward)
    given = (grad, query, key, value, out, lse, tables)
    dq, dk, dv, delta = fused.launch_backward(*given, *settings, for_queries, for_keys)
    found = [out, dq, dk, dv]
    if sinks is not None:
        found.append(-((sinks.float()[:, None] - lse).exp() * delta).sum(1))
    return found


def interpreted() -> dict[str, dict]:
    """Errors of each case, and how often the kernel ran under a checkpoint."""
    from tests.targets import mend_interpreter

    mend_interpreter()
    results = {}
    for case in CASES:
        for dtype in (torch.float32, torch.float16)[: 1 + (case[0] == "ragged" and case[1] in ("gqa", "mla"))]:
            inputs = draw(*case, dtype)
            truth = eager(*inputs, torch.float64)
            results[f"{' / '.join(case)} {dtype}"] = {
                "ours": errors(kernels(*inputs), truth),
                "eager": errors(eager(*inputs, dtype), truth),
            }
    whole = {"through autograd": through_autograd(), "in a graph": in_a_graph(), "in a layer": in_a_layer()}
    return {"numbers": results | whole, "launches": launches()}


def in_a_graph() -> dict[str, list[float]]:
    """A captured row: tables from the device, larger than this layout needs, in memory that was another layout's."""
    tensors, layout, window, softcap = draw("ragged", "pair", "all", torch.float32)
    sizes = {"cu_seqlens_size": 9, "max_seqlen_multiple": 64}
    captured = PackedLayout([30, 2, 33], **sizes).of_any_lengths()
    attended(tensors, captured, window, softcap)
    captured._buffer.copy_(PackedLayout(layout.seqlens, **sizes)._buffer)  # as a replay does
    captured.forget_derived()
    return beside_eager(attended(tensors, captured, window, softcap), tensors, layout, window, softcap)


def in_a_layer() -> dict[str, list[float]]:
    """The op of compiled layers, whose fake has the shapes, dtypes and strides that the kernels give."""
    tensors, layout, window, softcap = draw("empty prompt", "pair", "all", torch.float32)
    query, key, value, sinks, grad = tensors
    dispatch.fused_refusal = lambda query, value, dropout: None  # of anything but a GPU
    handle = compiled.hold(layout)
    leaves = [x.transpose(0, 1)[None].requires_grad_() for x in (query, key, value)]
    leaves.append(sinks.to(torch.float16).requires_grad_())
    arguments = (*leaves, handle, 0.3, window, softcap, "triton")
    torch.library.opcheck(torch.ops.unsloth_trl.flash_attn_by_layout, arguments)
    out = torch.ops.unsloth_trl.flash_attn_by_layout(*arguments)[0]
    *grads, d_sinks = torch.autograd.grad(out, leaves, grad[None])
    assert d_sinks.dtype == torch.float16
    found = [out.detach()[0], *(x[0].transpose(0, 1) for x in grads)]
    given = ([query, key, value, leaves[3], grad], layout, window, softcap)
    return beside_eager(found, *given)


def through_autograd() -> dict[str, list[float]]:
    """`fused_attention` with sinks that do not lie next to each other in memory."""
    tensors, *rest = draw("tree", "pair", "all", torch.float32)
    tensors[3] = torch.stack([tensors[3], torch.full_like(tensors[3], float("nan"))], dim=1)[:, 0]
    return beside_eager(attended(tensors, *rest), tensors, *rest)


def attended(tensors, layout, window, softcap):
    """Output and gradients by `fused_attention`, with the blocks that it chooses."""
    leaves = [t.detach().requires_grad_() for t in tensors[:4]]
    query, key, value, sinks = leaves
    out = fused.fused_attention(query, key, value, layout, scale=0.3, window=window, softcap=softcap, sinks=sinks)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[4])]


def beside_eager(found, *given) -> dict[str, list[float]]:
    truth, plain = (eager(*given, dtype)[: len(found)] for dtype in (torch.float64, torch.float32))
    return {"ours": errors(found, truth), "eager": errors(plain, truth)}


def launches() -> dict[str, int]:
    """Forwards of the kernel in a backward: of a checkpoint, and of one that saves what TRL's selective one does."""
    number, launch = [], fused.launch_forward

    def counted(*args):
        number.append(1)
        return launch(*args)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "flash_attn" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def count(**options) -> int:
        (query, key, value, _, grad), layout, *_ = draw("one token", "pair", "plain", torch.float32)
        attend = functools.partial(fused.fused_attention, layout=layout, scale=0.3)
        leaves = [t.requires_grad_() for t in (query, key, value)]
        out = checkpoint(lambda *given: attend(*given) * 2, *leaves, use_reentrant=False, **options)
        expected = torch.autograd.grad(attend(*leaves) * 2, leaves, grad)
        number.clear()
        found = torch.autograd.grad(out, leaves, grad)
        assert all(map(torch.equal, found, expected))
        return len(number)

    fused.launch_forward = counted
    selective = functools.partial(create_selective_checkpoint_contexts, policy)
    try:
        return {"checkpoint": count(), "selective": count(context_fn=selective)}
    finally:
        fused.launch_forward = launch
