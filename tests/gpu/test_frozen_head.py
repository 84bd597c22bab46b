"""The frozen head on a GPU: errors against fp64 beside those of TRL's kernel, and no synchronisation."""

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from unsloth_trl.patches.lm_head import frozen
from unsloth_trl.patches.lm_head.frozen import frozen_head_scores


pytestmark = pytest.mark.gpu

TOKENS, WIDTH = 900, 512
CASES = [{}, {"softcap": 20.0}, {"temperature": 0.7, "logit_scale": 0.5}]


def draw(dtype, vocab):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocab, WIDTH, generator=generator, device="cuda") * 3 / WIDTH**0.5).to(dtype)
    targets = torch.randint(vocab, (TOKENS,), generator=generator, device="cuda")
    targets[::3] = (hidden.detach().double() @ weight.double().t()).argmax(-1)[::3]
    grad = torch.rand(TOKENS, generator=generator, device="cuda")
    return hidden, weight, targets, grad


def exact(hidden, weight, targets, grad, temperature=1.0, softcap=None, logit_scale=1.0):
    hidden = hidden.detach().double().requires_grad_()
    z = hidden @ weight.double().t() * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = (z / temperature).log_softmax(-1)
    log_probs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    (log_probs * grad).sum().backward()
    others = z.detach().scatter(-1, targets[:, None], -torch.inf).amax(-1)
    margin = (z.detach().gather(-1, targets[:, None]).squeeze(-1) - others) / others.abs()
    return (log_probs.detach(), -(log_p.exp() * log_p).sum(-1).detach(), hidden.grad), margin


def trls(hidden, weight, targets, temperature=1.0, softcap=None, logit_scale=1.0):
    outputs = ("entropy", "is_top1")
    found = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, temperature, 32768, softcap, logit_scale, outputs
    )
    return found[0], found[1], found[4]


def error(found, expected) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("vocab", [32000, 50257])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_as_exact_as_trls(dtype, case, vocab, monkeypatch):
    monkeypatch.setattr(frozen, "LOGITS_BYTES", 256 * vocab * dtype.itemsize)  # four chunks
    hidden, weight, targets, grad = draw(dtype, vocab)
    expected, margin = exact(hidden, weight, targets, grad, **case)
    clear = margin.abs() > 1.5 * torch.finfo(dtype).eps  # no tie of rounded logits
    assert (clear & (margin > 0)).float().mean() > 0.2
    errors = {}
    for name, run in (("trl", trls), ("ours", lambda h, w, t, **c: frozen_head_scores(h, w, None, t, **c))):
        hidden.grad = None
        log_probs, entropy, is_top1 = run(hidden, weight, targets, **case)
        (log_probs * grad).sum().backward()
        errors[name] = [error(*pair) for pair in zip((log_probs, entropy, hidden.grad), expected, strict=True)]
        assert torch.equal(is_top1[clear], margin[clear] > 0)
    for own, other in zip(errors["ours"], errors["trl"], strict=True):
        assert own <= 1.5 * other + 1e-7, errors


def test_no_synchronisation():
    hidden, weight, targets, grad = draw(torch.bfloat16, 32000)
    (frozen_head_scores(hidden, weight, None, targets)[0] * grad).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (frozen_head_scores(hidden, weight, None, targets)[0] * grad).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
