"""Log-probabilities of a frozen head alone, forward and backward: ours beside TRL's kernel.

    python tests/benchmarks/head.py --tokens 8192 --vocab 151936 --width 4096

Both in turn, `--rounds` times. Prints one line `RESULT {json}` for each: median and fastest milliseconds, the peak
above what is there before, and how far log-probabilities and gradient are from those in fp32.
"""

import argparse
import functools
import json

import torch
from record import provenance, timed
from trl.kernels import ChunkedLogProbFunction

from unsloth_trl.patches.lm_head.frozen import frozen_head_scores
from unsloth_trl.patches.lm_head.op import VOCAB_CHUNK


ap = argparse.ArgumentParser()
ap.add_argument("--tokens", type=int, default=8192)
ap.add_argument("--vocab", type=int, default=151936)
ap.add_argument("--width", type=int, default=4096)
ap.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
ap.add_argument("--rounds", type=int, default=12)
a = ap.parse_args()
dtype = getattr(torch, a.dtype)
torch.manual_seed(0)
weight = (torch.randn(a.vocab, a.width, device="cuda") * 2 / a.width**0.5).to(dtype)
hidden = torch.randn(a.tokens, a.width, device="cuda").to(dtype).requires_grad_()
targets = torch.randint(a.vocab, (a.tokens,), device="cuda")
grad = torch.full((a.tokens,), -1 / a.tokens, device="cuda")


def trls():
    outputs = ("entropy", "is_top1")
    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, VOCAB_CHUNK, None, 1.0, outputs)[0]


def ours():
    return frozen_head_scores(hidden, weight, None, targets)[0]


def run(scores) -> torch.Tensor:
    """Log-probabilities, after a backward from them."""
    log_probs = scores()
    log_probs.backward(grad)
    return log_probs.detach()


def exact(rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and gradient of the first tokens in fp32."""
    some = hidden[:rows].detach().float().requires_grad_()
    log_probs = (some @ weight.float().t()).log_softmax(-1).gather(-1, targets[:rows, None]).squeeze(-1)
    log_probs.backward(grad[:rows])
    return log_probs.detach(), some.grad


torch.backends.cuda.matmul.allow_tf32 = False
expected = exact()
variants = {"trl": trls, "ours": ours}
times: dict[str, list[float]] = {name: [] for name in variants}
found = {}
for turn in range(a.rounds + 3):
    for name, scores in variants.items():
        hidden.grad = None
        took, peak, log_probs = timed(functools.partial(run, scores))
        pairs = zip((log_probs[: len(expected[0])], hidden.grad[: len(expected[0])]), expected, strict=True)
        found[name] = (peak, [((x - y).norm() / y.norm()).item() for x, y in pairs])
        if turn >= 3:
            times[name].append(took)
for name, took in times.items():
    took.sort()
    peak, errors = found[name]
    result = {
        "task": "head",
        "mode": name,
        "tokens": a.tokens,
        "vocab": a.vocab,
        "width": a.width,
        "dtype": a.dtype,
        "median_ms": round(took[len(took) // 2], 3),
        "min_ms": round(took[0], 3),
        "extra_gib": round(peak, 3),
        "error_log_probs": errors[0],
        "error_gradient": errors[1],
        **provenance(name, "head.py"),
    }
    print("RESULT", json.dumps(result), flush=True)
