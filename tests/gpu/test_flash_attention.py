"""The FlashAttention-2 op against fp64, beside eager attention in the same dtype."""

import pytest
import torch

from unsloth_trl.patches.attention.op import flash_attn_varlen
from unsloth_trl.patches.attention.segments import eager_attend, sdpa_attend, segment_attention
from unsloth_trl.patches.layout import PackedLayout


pytestmark = pytest.mark.gpu

LAYOUTS = {
    "ragged": [1, 130, 0, 77, 1, 300, 16],
    "one": [513],
    "ones": [1] * 40,
    "padded": [200, 55],
}


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, v_head_dim",
    [(8, 2, 128, 128), (4, 4, 64, 64), (7, 1, 40, 40), (4, 4, 192, 128), (4, 2, 256, 256), (4, 4, 24, 16)],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_error_against_fp64(name, heads, kv_heads, head_dim, v_head_dim, window, dtype):
    if name in ("one", "ones") and (dtype == torch.float16 or window == 33):
        pytest.skip("covered by the ragged layout")
    torch.manual_seed(0)
    static = {"pad_to": 384, "cu_seqlens_size": 12, "max_seqlen_multiple": 128} if name == "padded" else {}
    layout = PackedLayout(LAYOUTS[name], **static).to("cuda")
    total = layout.num_tokens
    shapes = [(total, heads, head_dim), (total, kv_heads, head_dim), (total, kv_heads, v_head_dim)]
    inputs = [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]
    grad = torch.randn(total, heads, v_head_dim, device="cuda", dtype=dtype)
    scale = head_dim**-0.5

    def run(attend, dtype):
        xs = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        out = attend(*xs)
        out.backward(grad.to(dtype))
        return [out.detach(), *(x.grad for x in xs)]

    def segments(attend):
        return lambda q, k, v: segment_attention(q, k, v, layout, lambda *x: attend(*x, scale=scale, window=window))

    truth = run(segments(eager_attend), torch.float64)
    assert all(t.norm() > 0 for t in (truth[0], truth[3]))
    flash = run(lambda q, k, v: flash_attn_varlen(q, k, v, layout, scale=scale, window=window), dtype)
    sdpa = run(segments(sdpa_attend), dtype)
    eager = run(segments(eager_attend), dtype)
    cap = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for what, t, f, s, e in zip(("out", "dq", "dk", "dv"), truth, flash, sdpa, eager, strict=True):
        assert torch.isfinite(f).all() and torch.isfinite(s).all()
        if t.norm() < 1e-9:  # one-token segments and windows of one leave queries and keys without gradient
            assert f.double().norm() < 1e-2 * grad.double().norm()
            continue
        limit = max(1.5 * relative(e, t), 1e-4)
        assert relative(f, t) <= min(limit, cap), f"flash {what}"
        assert relative(s, t) <= min(limit, cap), f"sdpa {what}"


def test_op_compiles_whole():
    layout = PackedLayout([100, 28]).to("cuda")
    q, k, v = (torch.randn(128, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))

    def f(q, k, v):
        return torch.ops.unsloth_trl.flash_attn_varlen(q, k, v, layout.cu_seqlens, layout.max_seqlen, 0.125, 0)[0]

    expected = f(q, k, v)
    got = torch.compile(f, fullgraph=True)(q, k, v)
    torch.testing.assert_close(got, expected)
