"""Merged FlashAttention-2 calls over segments with parents, against fp64, beside eager attention in the same dtype."""

import pytest
import torch

from unsloth_trl.patches.attention.segments import eager_attend, sdpa_attend, segment_attention
from unsloth_trl.patches.attention.shared import flash_attn_shared
from unsloth_trl.patches.layout import PackedLayout


pytestmark = pytest.mark.gpu

TREES = {
    "group": ([300, 64, 1, 130, 77], [-1, 0, 0, 0, 0]),
    "groups": ([150, 0, 1, 33, 40, 77, 5, 20, 3, 9, 128], [-1, -1, -1, -1, 0, 0, 1, 1, 2, 3, 3]),
    "lone-prompt": ([200, 90, 64, 64], [-1, -1, 0, 0]),
    "depth-4": ([70, 30, 40, 20, 65, 130, 17, 5, 9], [-1, 0, 0, 1, 1, 2, 4, 5, 6]),
    "many": ([20] * 40 + [9] * 80, [-1] * 40 + [i // 2 for i in range(80)]),
}


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# each head size and dtype loads kernels of its own, which takes seconds the first time
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, v_head_dim, dtype",
    [(8, 2, 128, 128, torch.bfloat16), (4, 4, 192, 128, torch.bfloat16), (7, 1, 40, 40, torch.float16)],
    ids=["gqa-128-bf16", "mla-192-128-bf16", "mqa-40-fp16"],
)
def test_error_against_fp64(name, heads, kv_heads, head_dim, v_head_dim, dtype):
    torch.manual_seed(0)
    layout = PackedLayout(*TREES[name], pad_to=sum(TREES[name][0]) + 7).to("cuda")
    total, scale = layout.num_tokens, head_dim**-0.5
    shapes = [(total, heads, head_dim), (total, kv_heads, head_dim), (total, kv_heads, v_head_dim)]
    inputs = [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]
    grad = torch.randn(total, heads, v_head_dim, device="cuda", dtype=dtype)

    def run(attend, dtype):
        xs = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        out = attend(*xs)
        out.backward(grad.to(dtype))
        return [out.detach(), *(x.grad for x in xs)]

    def segments(attend):
        return lambda q, k, v: segment_attention(q, k, v, layout, lambda *x: attend(*x, scale=scale))

    truth = run(segments(eager_attend), torch.float64)
    flash = run(lambda q, k, v: flash_attn_shared(q, k, v, layout, scale=scale), dtype)
    sdpa, eager = run(segments(sdpa_attend), dtype), run(segments(eager_attend), dtype)
    cap = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for what, t, f, s, e in zip(("out", "dq", "dk", "dv"), truth, flash, sdpa, eager, strict=True):
        assert torch.isfinite(f).all() and torch.isfinite(s).all()
        limit = min(max(1.5 * relative(e, t), 1e-4), cap)
        assert relative(f, t) <= limit, f"flash {what}"
        assert relative(s, t) <= limit, f"sdpa {what}"


def test_no_host_synchronisation():
    layout = PackedLayout(*TREES["groups"]).pin_memory().to("cuda", non_blocking=True)
    q, k, v = (
        torch.randn(layout.num_tokens, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (4, 2, 2)
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = flash_attn_shared(q, k, v, layout, scale=0.125)
        out.backward(torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert q.grad.isfinite().all() and k.grad.norm() > 0
