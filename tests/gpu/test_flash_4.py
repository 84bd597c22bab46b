"""FlashAttention-4 (the package flash-attn-4) on a GPU: errors against fp64 beside those of eager attention."""

import pytest
import torch

from tests.patches.fused_attention_cases import draw_for, eager, errors
from unsloth_trl.patches.attention import flash_4
from unsloth_trl.patches.attention.flash_4 import flash_attn_4
from unsloth_trl.patches.layout import PackedLayout


pytestmark = pytest.mark.gpu

LAYOUTS = {
    "segments": ([700, 1, 0, 129, 300, 64], {}),
    "one token": ([1], {}),
    "ones": ([1] * 300, {}),
    "static": ([200, 55], {"pad_to": 384, "cu_seqlens_size": 12, "max_seqlen_multiple": 128}),
}
HEADS = {"64": (8, 2, 64, 64), "128": (8, 2, 128, 128), "mha": (4, 4, 96, 96), "seven": (7, 1, 128, 128)}
HEADS["256"] = (4, 2, 256, 256)


@pytest.fixture(autouse=True)
def installed():
    if (reason := flash_4.missing()) is not None:
        pytest.skip(reason)


def attended(tensors, layout, window):
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = flash_attn_4(*leaves, layout, scale=0.3, window=window)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[4])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "layout, heads, kind",
    [("segments", heads, "plain") for heads in HEADS]
    + [("segments", "128", kind) for kind in ("window 1", "window 7", "window 60")]
    + [("segments", "256", "window 60")]
    + [(layout, "128", "plain") for layout in LAYOUTS if layout != "segments"],
)
def test_error_against_fp64(layout, heads, kind, dtype):
    lengths, static = LAYOUTS[layout]
    layout = PackedLayout(lengths, **static).to("cuda")
    tensors, layout, window, _ = draw_for(layout, HEADS[heads], kind, dtype)
    refused = flash_4.flash_4_refusal(tensors[0], tensors[2], layout, window, None, None, 0.0)
    if refused is not None:
        pytest.skip(refused)
    truth, plain = (eager(tensors, layout, window, None, d) for d in (torch.float64, dtype))
    floor = {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    ours, theirs = errors(attended(tensors, layout, window), truth), errors(plain, truth)
    assert truth[0].norm() > 0
    assert all(own <= max(1.5 * other, floor) for own, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_two_runs_are_equal_where_determinism_is_asked_for():
    layout = PackedLayout([700, 1, 0, 129, 300, 64]).to("cuda")
    tensors, *_ = draw_for(layout, HEADS["128"], "plain", torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        refused = flash_4.flash_4_refusal(tensors[0], tensors[2], layout, None, None, None, 0.0)
        if refused is not None:
            pytest.skip(refused)
        assert all(map(torch.equal, attended(tensors, layout, None), attended(tensors, layout, None)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_asks_the_device_for_nothing():
    layout = PackedLayout([700, 1, 0, 129, 300, 64]).to("cuda")
    tensors, *_ = draw_for(layout, HEADS["128"], "plain", torch.bfloat16)
    expected = attended(tensors, layout, None)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = attended(tensors, layout, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found[0], expected[0])
