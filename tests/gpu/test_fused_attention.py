"""The fused attention kernel on a GPU, with the blocks that it chooses: errors against fp64 beside eager's."""

import pytest
import torch

from tests.patches.fused_attention_cases import KINDS, LAYOUTS, draw_for, eager, errors
from unsloth_trl.patches.attention.fused import fused_attention
from unsloth_trl.patches.layout import PackedLayout


pytestmark = pytest.mark.gpu

PAIRS = {"lengths": [], "parents": []}
for group in range(100):
    PAIRS["lengths"] += [20 + group, 9, 14]
    PAIRS["parents"] += [-1, 3 * group, 3 * group]
LARGE = {
    "segments": ([700, 1, 0, 129, 300, 64], None),
    "one group of 64": ([300, *[17 + i for i in range(64)]], [-1, *[0] * 64]),
    "100 groups of 2": (PAIRS["lengths"], PAIRS["parents"]),
    "tree": ([200, 100, 130, 5, 90, 77], [-1, 0, 0, 1, 1, 3]),
}
SIZES = {
    "64": (8, 2, 64, 64),
    "80": (4, 4, 80, 80),
    "128": (4, 1, 128, 128),
    "mla": (4, 4, 192, 128),
    "256": (4, 2, 256, 256),
    "512": (2, 1, 512, 512),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "layout, size, kind",
    [(layout, "128", kind) for layout in LARGE for kind in ("plain", "all")]
    + [("tree", size, "all") for size in SIZES]
    + [("segments", "64", kind) for kind in KINDS]
    + [(layout, "64", "plain") for layout in LAYOUTS],
)
def test_error_against_fp64(layout, size, kind, dtype):
    layout = PackedLayout(*(LARGE | LAYOUTS)[layout]).to("cuda")
    tensors, layout, window, softcap = draw_for(layout, SIZES[size], kind, dtype)
    truth = eager(tensors, layout, window, softcap, torch.float64)
    plain = errors(eager(tensors, layout, window, softcap, dtype), truth)

    def run():
        leaves = [t.detach().requires_grad_() for t in tensors[:4] if t is not None]
        out = fused_attention(
            *leaves[:3],
            layout,
            scale=0.3,
            window=window,
            softcap=softcap,
            sinks=leaves[3] if len(leaves) > 3 else None,
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[4])]

    found = run()
    # where a query sees one key, 64 products of about 1 cancel those of another order, which eager does not have:
    # 64 * 2^-24 of rounding, times the scale, against a tenth
    floor = {torch.float32: 1.2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    ours = errors(found, truth)
    assert all(own <= max(1.5 * other, floor) for own, other in zip(ours, plain, strict=True)), (ours, plain)
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True)), "two runs differ"


def test_asks_the_device_for_nothing():
    layout = PackedLayout(*LARGE["tree"]).to("cuda")
    query, key = (torch.randn(layout.num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    query.requires_grad_()
    fused_attention(query, key, key, layout, scale=0.1).sum().backward()
    fresh = PackedLayout(*LARGE["tree"]).to("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_attention(query, key, key, fresh, scale=0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_beyond_31_bits():
    """A row whose queries have more than 2^31 numbers."""
    tokens = 2**31 // (64 * 64) + 200
    layout = PackedLayout([tokens - 130, 130]).to("cuda")
    query = torch.zeros(tokens, 64, 64, device="cuda", dtype=torch.bfloat16)
    query[-130:] = torch.randn(130, 64, 64, device="cuda")
    key = query[:, :1].contiguous()
    found = fused_attention(query, key, key, layout, scale=0.1, window=64)[-130:]
    short = PackedLayout([130]).to("cuda")
    expected = fused_attention(query[-130:], key[-130:], key[-130:], short, scale=0.1, window=64)
    torch.testing.assert_close(found, expected)
