"""Scores of a frozen head and their gradient from the forward: against TRL's kernel; and the Triton kernel."""

import pytest
import torch
import trl
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import ChunkedLogProbFunction

import unsloth_trl
from tests.numerics import assert_runs_close, run_sft
from tests.targets import TARGETS, Recorder, compile_for, in_interpreter
from tests.trainers.grpo_runs import run_oracle, run_ours
from unsloth_trl.patches.lm_head import frozen
from unsloth_trl.patches.lm_head.frozen import Scoring, State, chunks, fold_reference, frozen_head_scores, launch_fold


TOKENS, WIDTH, VOCAB = 21, 12, 53
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 2.0},
    "scale": {"logit_scale": 0.25},
    "all": {"temperature": 1.3, "softcap": 1.5, "logit_scale": 3.0},
}


def draw(bias=False, dtype=torch.float32, tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    bias = torch.randn(VOCAB, generator=generator).to(dtype) if bias else None
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    if tokens:
        targets[0], targets[1] = 0, VOCAB - 1
        logits = torch.nn.functional.linear(hidden.detach(), weight, bias)
        targets[2::2] = logits.argmax(-1)[2::2]
        weight[VOCAB - 1] = weight[targets[2]]  # a tie with an earlier token
        targets[4] = VOCAB - 1
    return hidden, weight, bias, targets


def trls(hidden, weight, bias, targets, temperature=1.0, softcap=None, logit_scale=1.0):
    outputs = ("entropy", "is_top1")
    log_probs, entropy, _, _, is_top1 = ChunkedLogProbFunction.apply(
        hidden, weight, bias, targets, temperature, 16, softcap, logit_scale, outputs
    )
    return log_probs, entropy, is_top1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_trls(case, bias, monkeypatch):
    for name, value in {"LOGITS_BYTES": 1, "_COLUMNS": 16, "MOST_TOKENS": 8}.items():  # three by four tiles
        monkeypatch.setattr(frozen, name, value)
    inputs = draw(bias)
    expected, actual = (run(*inputs, **CASES[case]) for run in (trls, frozen_head_scores))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert 0 < actual[2].sum() < TOKENS
    weights = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    (theirs,) = torch.autograd.grad((expected[0] * weights).sum(), inputs[0])
    (mine,) = torch.autograd.grad((actual[0] * weights).sum(), inputs[0])
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_no_token():
    hidden, *rest = draw(tokens=0)
    log_probs, entropy, is_top1 = frozen_head_scores(hidden, *rest)
    assert log_probs.shape == entropy.shape == is_top1.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad.shape == hidden.shape


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_two_products_and_none_of_them_in_the_backward():
    hidden, *rest = draw()
    with Products() as forward:
        log_probs = frozen_head_scores(hidden, *rest)[0]
    with Products() as backward:
        log_probs.sum().backward()
    with Products() as without, torch.no_grad():
        frozen_head_scores(hidden, *rest)
    assert (forward.number, backward.number, without.number) == (2, 0, 1)


@pytest.mark.parametrize(
    "num_tokens, vocab_size, expected",
    [
        (4096, 151936, (4096, 30720)),
        (5000, 151936, (2500, 51200)),
        (100, 1000, (100, 1000)),
        (9000, 10**8, (3000, 44032)),
        (0, 128, (1, 128)),
    ],
)
def test_chunks(num_tokens, vocab_size, expected):
    assert chunks(num_tokens, vocab_size, 2) == expected
    rows, columns = expected
    assert rows * columns * 2 <= frozen.LOGITS_BYTES


def test_what_is_refused():
    _, weight, bias, _ = draw(bias=True)
    assert frozen.refusal(weight, bias) is None
    assert frozen.refusal(weight.clone().requires_grad_(), bias) == "the head is trained"
    assert frozen.refusal(weight, bias.clone().requires_grad_()) == "the head is trained"
    assert "uint8" in frozen.refusal(weight.to(torch.uint8), None)

    class Packed(torch.Tensor):
        pass

    assert "Packed" in frozen.refusal(weight.as_subclass(Packed), None)


def test_an_fp32_head_under_autocast():
    inputs = draw()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (theirs, _, _), (mine, _, _) = (run(*inputs) for run in (trls, frozen_head_scores))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    theirs, mine = (torch.autograd.grad(scores.sum(), inputs[0])[0] for scores in (theirs, mine))
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert mine.dtype == torch.float32


def test_an_entropy_in_the_loss_is_not_lost():
    log_probs, entropy, _ = frozen_head_scores(*draw())
    with pytest.raises(RuntimeError, match="frozen_head=False"):
        (log_probs.sum() + 0.1 * entropy.sum()).backward()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "qwen3_moe"])
def test_training_is_the_same(model_type):
    runs = {
        name: run_sft(library, model_type, packing=True, lora=True, **config)
        for name, library, config in (
            ("on", unsloth_trl, {}),
            ("off", unsloth_trl, {"frozen_head": False}),
            ("trl", trl, {}),
        )
    }
    assert "its gradient in the forward" in runs["on"].trainer.patch_report["lm_head"].detail
    assert "TRL's kernel" in runs["off"].trainer.patch_report["lm_head"].detail
    assert_runs_close(runs["on"], runs["off"], 1e-4)
    assert_runs_close(runs["on"], runs["trl"], 1e-4)


GRPO = {
    "kl": {"beta": 0.1},
    "delta": {"delta": 1.5, "num_iterations": 2},
    "sequence": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "temperature": {"temperature": 0.6},
    "fp32": {"cast_lm_head_to_fp32": True},
    "quantile": {"top_entropy_quantile": 0.5},
}


@pytest.mark.parametrize("case", GRPO)
def test_grpo_is_the_same(case):
    runs = {
        name: run("llama", lora=True, **GRPO[case], **config)
        for name, run, config in (
            ("on", run_ours, {}),
            ("off", run_ours, {"frozen_head": False}),
            ("trl", run_oracle, {}),
        )
    }
    assert_runs_close(runs["on"], runs["off"], 1e-4)
    assert_runs_close(runs["on"], runs["trl"], 1e-4)


def test_an_entropy_in_the_loss_goes_to_trls(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "unsloth_trl.patches.lm_head.op.frozen_head_scores",
        lambda *a, **k: calls.append(1) or frozen_head_scores(*a, **k),
    )
    runs = [run("llama", lora=True, entropy_coef=0.05) for run in (run_ours, run_oracle)]
    assert_runs_close(*runs, 1e-4)
    assert not calls
    run_ours("llama", lora=True)
    assert calls


def test_a_head_that_is_trained_goes_to_trls(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the head is not frozen")

    monkeypatch.setattr("unsloth_trl.patches.lm_head.op.frozen_head_scores", fail)
    runs = [run_sft(library, "llama", packing=True) for library in (unsloth_trl, trl)]
    assert_runs_close(*runs, 1e-4)
    with pytest.raises(AssertionError, match="not frozen"):
        run_sft(unsloth_trl, "llama", packing=True, lora=True)


def folded(run, dtype, vocab, scoring, factor, gradient):
    """Two pieces of columns, one after the other: what is left of the logits, the state and the factors."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(7, vocab, generator=generator) * 3).to(dtype)
    targets = torch.randint(vocab, (7,), generator=generator)
    targets[:2] = torch.tensor([0, vocab - 1])
    logits[2] = -float("inf")
    logits[2, :2] = 1.0  # a tie, and no probability elsewhere
    targets[2] = 1
    state, cut, found = State.start(logits, 9).of(slice(1, 8)), vocab // 3, []
    for start, end in ((0, cut), (cut, vocab)):
        tile, rescale = logits[:, start:end].clone(), torch.full((7,), float("nan"))
        run(tile, targets, state, rescale, start, scoring, factor, gradient)
        found += [tile, rescale]
    return [*found, *state]


def interpreted() -> list:
    """Where the kernel differs from plain PyTorch; run with TRITON_INTERPRET."""
    from tests.targets import mend_interpreter

    mend_interpreter()
    torch.cuda.device_of = lambda tensor: torch.device("cpu")
    frozen._BLOCK = 64
    wrong = []
    for dtype in (torch.float32, torch.float16):
        for vocab in (50, 192, 400):
            for name, case in CASES.items():
                for gradient in (True, False):
                    settings = (dtype, vocab, Scoring(**case), 64.0, gradient)
                    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
                    pairs = zip(folded(launch_fold, *settings), folded(fold_reference, *settings), strict=True)
                    for i, (a, b) in enumerate(pairs):
                        small = tolerance * (16 if i in (0, 2) else 1)  # exponentials have the factor in them
                        if not torch.allclose(a.float(), b.float(), rtol=tolerance, atol=small):
                            wrong.append([str(dtype), vocab, name, gradient, i])
    return wrong


def test_kernel_interpreted():
    pytest.importorskip("triton")
    assert in_interpreter("tests.patches.test_frozen_head") == []


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("vocab", [151936, 32003])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_kernel_compiles(target, vocab, softcap, monkeypatch):
    pytest.importorskip("triton")
    from unsloth_trl.patches.lm_head import kernels

    recorder, kernel = Recorder(), kernels.fold_kernel
    monkeypatch.setattr(kernels, "fold_kernel", recorder)
    logits = torch.empty(4, vocab, dtype=target.dtype, device="meta")
    state, targets = State(*torch.empty(6, 4, device="meta")), torch.empty(4, dtype=torch.int64, device="meta")
    launch_fold(logits, targets, state, state.top, 2048, Scoring(1.0, softcap, 0.5), 1.0, True)
    ((_, args, kwargs),) = recorder.launches
    assert compile_for(target, kernel, *args, **kwargs).metadata.shared <= target.shared
