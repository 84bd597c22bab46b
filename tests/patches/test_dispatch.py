"""Which kernel attends in a packed row, by card, dtype and head size, without any of these cards."""

from types import SimpleNamespace

import pytest
import torch

from unsloth_trl.patches.attention import dispatch, op, patch
from unsloth_trl.patches.config import PatchConfig
from unsloth_trl.patches.layout import PackedLayout


pytest.importorskip("triton")

ROW = PackedLayout([5, 3])
GROUP = PackedLayout([5, 3, 4], [-1, 0, 0])
CAPTURED = ROW.of_any_lengths()
SINKS = torch.zeros(2)


@pytest.fixture(params=[(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def card(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    op.device_supports_flash.cache_clear()
    yield request.param
    op.device_supports_flash.cache_clear()


def choose(layout=ROW, dtype=torch.float16, size=128, window=None, softcap=None, sinks=None, backend="auto"):
    head = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 2, 8, size))
    return dispatch.choose(backend, head, head, layout, window, softcap, sinks, 0.0)


def test_by_card(card):
    """The fused kernel where it was measured to be faster, and wherever FlashAttention-2 cannot do it."""
    old, measured = card < (8, 0), card == (9, 0)
    plain = "sdpa" if old else "triton" if measured else "flash_attention_2"
    assert choose() == choose(GROUP) == choose(window=3) == plain
    assert choose(size=256) == ("sdpa" if old else "flash_attention_2")
    assert choose(size=512) == ("sdpa" if old else "triton")
    assert choose(size=520) == "sdpa"
    assert choose(softcap=30.0) == choose(sinks=SINKS) == ("eager" if old else "triton")
    assert choose(GROUP, window=3) == ("sdpa" if old else "triton")
    assert choose(dtype=torch.float32) == "sdpa"
    assert choose(dtype=torch.float32, sinks=SINKS) == "eager"


def test_by_name(card):
    assert choose(backend="triton") == choose(backend="triton", dtype=torch.float32) == "triton"
    if card >= (8, 0):
        assert choose(backend="flash_attention_2") == "flash_attention_2"
    with pytest.raises(ValueError, match="attention_backend='flash_attention_2' cannot do soft-capping"):
        choose(backend="flash_attention_2", softcap=30.0)
    with pytest.raises(ValueError, match=r"attention_backend='triton' cannot do head size 520"):
        choose(backend="triton", size=520)


def test_what_a_graph_can_hold(card):
    """A captured row has its boundaries on the device alone."""
    if card < (8, 0):
        with pytest.raises(RuntimeError, match="a captured row needs .* rules out device cuda"):
            choose(CAPTURED)
        return
    assert choose(CAPTURED) == ("triton" if card == (9, 0) else "flash_attention_2")
    assert choose(CAPTURED, sinks=SINKS) == choose(CAPTURED, softcap=9.0) == "triton"
    with pytest.raises(RuntimeError, match="rules out attention_backend='sdpa'"):
        choose(CAPTURED, backend="sdpa")
    with pytest.raises(RuntimeError, match="rules out dtype torch.float32"):
        choose(CAPTURED, dtype=torch.float32)


def test_what_can_be_an_op_of_a_graph(card):
    head = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 2, 8, 64))
    new = card >= (8, 0)
    assert dispatch.fits_graph("auto", head, head, None, None, 0.0) is new
    assert dispatch.fits_graph("auto", head, head, 30.0, SINKS, 0.0) is new
    assert dispatch.fits_graph("triton", head, head, 30.0, None, 0.0)
    assert not dispatch.fits_graph("auto", head, head, None, None, 0.1)
    assert not dispatch.fits_graph("sdpa", head, head, None, None, 0.0)
    assert not dispatch.fits_graph("flash_attention_2", head, head, 30.0, None, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_report_says_what_runs(card, dtype):
    """In the words of `print(trainer.patch_report)`: head sizes, soft-capping and sinks count as in a call."""

    def report(*modules, **config):
        parameters = [SimpleNamespace(device=torch.device("cuda"), dtype=dtype)]
        decoder = SimpleNamespace(parameters=lambda: iter(parameters), modules=lambda: modules)
        text = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config))
        return patch._expected_backend(SimpleNamespace(config=text, get_decoder=lambda: decoder), PatchConfig())

    def size(number, **others):
        return SimpleNamespace(head_dim=number, **others)

    new, measured, fp32 = card >= (8, 0), card == (9, 0), dtype == torch.float32
    sdpa, eager = "sdpa over segments", "eager over segments (soft-capping)"
    but = f" under autocast, else {sdpa} (fp32 weights)" * fp32
    flash = "flash_attention_2" + but if new else f"{sdpa} (device cuda)"
    fastest = "triton (as measured to be the fastest on this card)" + but
    assert report(size(128)) == report() == (fastest if measured else flash)
    assert report(size(256)) == report(SimpleNamespace(qk_head_dim=192, head_dim=64)) == flash
    largest = ("triton (for head size 512)" + but) if new else f"{sdpa} (device cuda)"
    assert report(size(512)) == largest
    several = f"{flash} at head size 256, {largest} at head size 512" if new else flash
    assert report(size(256), size(512), size(256)) == several
    capped = "triton (for soft-capping)" + f" under autocast, else {eager}" * fp32 if new else eager
    assert report(size(256), attn_logit_softcapping=50.0) == capped
    assert report(size(64, sinks=SINKS)) == capped.replace("soft-capping", "attention sinks")
    assert report(size(520, sinks=SINKS)) == "eager over segments (attention sinks)"


def test_a_compiler_can_ask(card):
    """The question is part of a layer's graph, and interrupts it nowhere."""

    def ask(x):
        head = torch.empty(1, 2, 8, 64, dtype=torch.float16)
        fits = (
            dispatch.takes_fused(torch.device("cuda"), head.dtype),
            dispatch.prefers_fused(torch.device("cuda"), head.dtype),
        )
        return x + 2 * fits[0] + fits[1]

    torch._dynamo.reset()
    found = torch.compile(ask, backend="eager", fullgraph=True)(torch.zeros(1))
    assert found.item() == (0 if card < (8, 0) else 3 if card == (9, 0) else 2)
