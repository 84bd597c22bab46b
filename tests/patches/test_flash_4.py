"""FlashAttention-4: when it is asked, and for what, with a package in its place that does the same on the CPU."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.patches.fused_attention_cases import draw_for, eager, errors
from unsloth_trl.patches.attention import compiled, dispatch, flash_4, op, patch
from unsloth_trl.patches.attention.flash_4 import flash_attn_4
from unsloth_trl.patches.config import PatchConfig
from unsloth_trl.patches.layout import PackedLayout


pytest.importorskip("triton")

ROW = PackedLayout([5, 3])
GROUP = PackedLayout([5, 3, 4], [-1, 0, 0])
STAND_IN = Path(__file__).with_name("flash_4_stand_in.py")
# in fp16 and bf16, where eager's own error says nothing: segments of one token are a copy
FLOOR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    flash_4.missing.cache_clear()
    op.device_supports_flash.cache_clear()


def install(folder: Path, source: str) -> None:
    package = folder / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (folder / "flash_attn" / "__init__.py").touch()
    (package / "__init__.py").write_text("from .interface import flash_attn_varlen_func\n")
    (package / "interface.py").write_text(source)
    about = folder / "flash_attn_4-4.0.0b36.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.4\nName: flash-attn-4\nVersion: 4.0.0b36\n")


@pytest.fixture
def uninstalled(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def calls(uninstalled):
    """The package is installed; what it was asked."""
    install(uninstalled, STAND_IN.read_text())
    return importlib.import_module("flash_attn.cute.interface").CALLS


@pytest.fixture
def card(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    return request.param


def on(*capabilities):
    return pytest.mark.parametrize("card", capabilities, indirect=True, ids=lambda c: f"sm_{c[0]}{c[1]}")


def choose(layout=ROW, dtype=torch.bfloat16, size=128, v_size=None, backend="auto", **settings):
    query, value = (
        SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 2, 8, n)) for n in (size, v_size or size)
    )
    settings = {"window": None, "softcap": None, "sinks": None, "dropout": 0.0} | settings
    return dispatch.choose(backend, query, value, layout, **settings)


@pytest.mark.parametrize("kind", ["plain", "window 1", "window 7", "window beyond"])
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        PackedLayout([5, 1, 0, 19, 40]),
        PackedLayout([1]),
        PackedLayout([12, 9], pad_to=32, cu_seqlens_size=9, max_seqlen_multiple=16),
    ],
    ids=["ragged", "one token", "static"],
)
def test_numbers(calls, layout, dtype, kind):
    tensors, layout, window, _ = draw_for(layout, (4, 2, 32, 32), kind, dtype)
    query, key, value, _, grad = tensors
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = flash_attn_4(*leaves, layout, scale=0.3, window=window)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    assert len(calls) == 1 and all(x.dtype == dtype for x in found)
    truth, plain = (eager(tensors, layout, window, None, d) for d in (torch.float64, dtype))
    assert truth[0].norm() > 1
    for ours, theirs in zip(errors(found, truth), errors(plain, truth), strict=True):
        assert ours <= max(1.5 * theirs, FLOOR[dtype])


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_it_is_asked(calls, deterministic):
    layout = PackedLayout([12, 9], pad_to=32, cu_seqlens_size=9, max_seqlen_multiple=16)
    query, key = torch.randn(32, 4, 64).half(), torch.randn(32, 2, 64).half()
    torch.use_deterministic_algorithms(deterministic)
    try:
        flash_attn_4(query, key, key, layout, scale=0.125)
        flash_attn_4(query, key, key, layout, scale=0.125, window=8)
    finally:
        torch.use_deterministic_algorithms(False)
    plain, windowed = calls
    assert plain["cu_seqlens_q"].data_ptr() == plain["cu_seqlens_k"].data_ptr() == layout.cu_seqlens.data_ptr()
    assert plain["shapes"] == [(32, 4, 64), (32, 2, 64), (32, 2, 64)]
    assert plain["max_seqlen_q"] == plain["max_seqlen_k"] == 16
    assert plain["softmax_scale"] == 0.125 and plain["causal"] is True and plain["deterministic"] is deterministic
    assert plain["window_size"] == (None, None) and windowed["window_size"] == (7, 0)
    with pytest.raises(ValueError, match="describes 32 tokens but the attention got 31"):
        flash_attn_4(query[:31], key[:31], key[:31], layout, scale=0.125)
    assert len(calls) == 2


class OnACard(torch.Tensor):
    """A tensor of the CPU that says it is on a card."""

    device = torch.device("cuda", 0)


@on((9, 0), (10, 0))
@pytest.mark.parametrize("window", [None, 3, 5])
def test_the_attention_of_a_layer(card, calls, window):
    """The function that transformers calls, and what comes back, beside sdpa's."""
    layout = PackedLayout([5, 3])
    layout._by_device[OnACard.device] = layout
    drawn = [torch.randn(1, heads, 8, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    grad, found = torch.randn(1, 8, 4, 64, dtype=torch.bfloat16), {}
    for backend, kind in (("flash_attention_4", OnACard), ("sdpa", torch.Tensor)):
        leaves = [x.clone().requires_grad_() for x in drawn]
        given = (x.as_subclass(kind) for x in leaves)
        settings = {"packed_layout": layout, "scaling": 0.2, "sliding_window": window, "backend": backend}
        out, _ = patch.attention_forward(None, *given, None, **settings)
        found[backend] = [x.as_subclass(torch.Tensor) for x in (out, *torch.autograd.grad(out, leaves, grad))]
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours.shape == theirs.shape and theirs.norm() > 1
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    (call,) = calls
    assert call["shapes"] == [(8, 4, 64), (8, 2, 64), (8, 2, 64)] and call["softmax_scale"] == 0.2
    # a window that holds all of a segment's tokens is none
    assert call["window_size"] == ((2, 0) if window == 3 else (None, None))
    assert layout.reached == {"attention"}


@on((10, 0))
def test_a_compiled_layer_has_another(card, calls):
    """What a graph holds is an op, and chooses among ops when it runs."""
    layout = PackedLayout([5, 3])
    layout._by_device[OnACard.device] = layout
    head = torch.empty(1, 4, 8, 64, dtype=torch.bfloat16).as_subclass(OnACard)
    assert dispatch.fits_graph("auto", head, head, None, None, 0.0)
    assert compiled._opened(head, head, compiled.hold(layout), 3, 0.0, None, "auto") == (
        layout,
        3,
        "flash_attention_2",
    )
    assert dispatch.choose("auto", head, head, layout, 3, None, None, 0.0) == "flash_attention_4"


@on((9, 0), (10, 0), (10, 3), (11, 0), (12, 0))
def test_auto(card, calls):
    """First on the cards that it is faster on, for rows that it can take, outside of graphs."""
    first, second = "flash_attention_4", "triton" if card == (9, 0) else "flash_attention_2"
    assert choose(size=128) == choose(size=128, window=3) == choose(size=128, dtype=torch.float16) == first
    assert choose(size=64) == (second if card == (9, 0) else first)
    assert choose(GROUP) == choose(ROW.of_any_lengths()) == choose(in_graph=True) == second
    assert choose(size=80) == choose(size=128, v_size=64) == second
    assert choose(size=256) == ("flash_attention_4" if card[0] in (10, 11) else "flash_attention_2")
    assert choose(size=256, window=3) == choose(size=192) == choose(size=192, v_size=128) == "flash_attention_2"
    assert choose(softcap=30.0) == choose(sinks=torch.zeros(2)) == choose(GROUP, window=3) == "triton"
    assert choose(size=512) == "triton"
    assert choose(dropout=0.1) == choose(dtype=torch.float32) == "sdpa"
    assert not calls


@on((8, 0), (10, 0), (12, 0))
def test_auto_without_the_package(card, uninstalled):
    assert choose() == choose(size=256) == "flash_attention_2"


@on((9, 0), (10, 0), (12, 0))
def test_by_name(card, calls):
    named = {"backend": "flash_attention_4"}
    assert choose(**named) == choose(**named, window=3) == choose(**named, in_graph=True) == "flash_attention_4"
    refused = [
        (GROUP, {}, "segments with parents"),
        (ROW, {"softcap": 30.0}, r"soft-capping \(30.0\)"),
        (ROW, {"sinks": torch.zeros(2)}, "attention sinks"),
        (ROW, {"dropout": 0.1}, r"attention dropout \(0.1\)"),
        (ROW, {"dtype": torch.float32}, "dtype torch.float32"),
        (ROW, {"size": 128, "v_size": 64}, "head sizes 128 and 64, which differ"),
        (ROW, {"size": 80}, "head size 80, no multiple of 32"),
        (ROW, {"size": 288}, "head size 288 over"),
    ]
    for layout, settings, obstacle in refused:
        message = f"attention_backend='flash_attention_4' cannot do {obstacle}.*; set attention_backend='auto'"
        with pytest.raises(ValueError, match=message):
            choose(layout, **named, **settings)
    with pytest.raises(RuntimeError, match="rules out attention_backend='flash_attention_4'"):
        choose(ROW.of_any_lengths(), **named)
    head = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 2, 8, 64))
    assert not dispatch.fits_graph("flash_attention_4", head, head, None, None, 0.0)


def test_by_card_and_size(calls, monkeypatch):
    """The sizes that the package has forward and backward kernels for, and windows and determinism with them."""

    def refusal(major, size, window=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        head = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 2, 8, size))
        return flash_4.flash_4_refusal(head, head, ROW, window, None, None, 0.0)

    assert [refusal(9, size) for size in (32, 96, 192, 256)] == [None] * 4 and refusal(9, 256, 3) is None
    assert [refusal(10, size) for size in (32, 96, 128, 256)] == [None] * 4 and refusal(10, 128, 3) is None
    assert refusal(10, 256, 3) == "a window (3) at head size 256 on sm_10x"
    assert refusal(11, 192) == "head size 192 over 128 on sm_11x"
    assert refusal(12, 128, 3) is None and refusal(12, 256) == "head size 256 over 128 on sm_12x"
    for major in (7, 8, 13):
        assert refusal(major, 64) == "device cuda (needs CUDA sm_90 to sm_12x)"
    torch.use_deterministic_algorithms(True)
    try:
        assert refusal(12, 64) == "deterministic algorithms on sm_12x"
        assert refusal(9, 64) is refusal(10, 64) is None
    finally:
        torch.use_deterministic_algorithms(False)


@on((9, 0))
def test_without_the_package_by_name(card, uninstalled):
    message = r"cannot do a machine without flash-attn-4 \(pip install flash-attn-4\); set attention_backend='auto'"
    with pytest.raises(ValueError, match=message):
        choose(backend="flash_attention_4")


@on((10, 0))
def test_a_folder_of_another_package(card, uninstalled):
    """FlashAttention-2's package brings a folder of that name, which does not run on its own."""
    install(uninstalled, STAND_IN.read_text())
    about = uninstalled / "flash_attn_4-4.0.0b36.dist-info"
    about.rename(uninstalled / "flash_attn-2.8.3.dist-info")
    (uninstalled / "flash_attn-2.8.3.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.8.3\n")
    assert choose() == "flash_attention_2"


@on((10, 0))
def test_a_package_that_does_not_run_is_said_once(card, uninstalled, recwarn):
    install(uninstalled, "raise ImportError('no module named cutlass')")
    for _ in range(2):
        assert choose() == "flash_attention_2"
    (warning,) = recwarn
    assert "FlashAttention-4 is left out: flash-attn-4 4.0.0b36, which cannot be imported" in str(warning.message)
    with pytest.raises(ValueError, match=r"\(ImportError: no module named cutlass\); set attention_backend='auto'"):
        choose(backend="flash_attention_4")


@on((9, 0), (10, 0), (12, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_report_says_what_runs(card, dtype, calls):

    def report(backend="auto", **module):
        parameters = [SimpleNamespace(device=torch.device("cuda"), dtype=dtype)]
        modules = [SimpleNamespace(**module)]
        decoder = SimpleNamespace(parameters=lambda: iter(parameters), modules=lambda: modules)
        text = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
        model = SimpleNamespace(config=text, get_decoder=lambda: decoder)
        return patch._expected_backend(model, PatchConfig(attention_backend=backend))

    fp32 = " under autocast, else sdpa over segments (fp32 weights)" * (dtype == torch.float32)
    hopper = card == (9, 0)
    other = "triton" if hopper else "flash_attention_2"
    fourth = f"flash_attention_4 (shared prompts, compiled layers and CUDA graphs: {other})" + fp32
    second = "flash_attention_2" + fp32
    fastest = "triton (as measured to be the fastest on this card)" + fp32
    assert report(head_dim=128) == fourth
    assert report() == report(head_dim=64) == (fastest if hopper else fourth)
    assert report(head_dim=256) == (fourth if card == (10, 0) else second)
    # of MLA: queries of 128, values of 64
    mla = {"qk_head_dim": 128, "head_dim": 32, "v_head_dim": 64}
    assert report(**mla) == (fastest if hopper else second)
    assert report("flash_attention_4", head_dim=128) == "flash_attention_4"
