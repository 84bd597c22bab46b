"""What users reported about attention kernels (B79, B80, B82), by the fused kernel in Triton's interpreter."""

import torch
import torch.nn.functional as F

from tests.patches.fused_attention_cases import draw_for, errors, kernels
from unsloth_trl.patches.attention.fused import Blocks, fused_attention, fused_forward
from unsloth_trl.patches.layout import PackedLayout


SIZES = (16, 24, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)
GROUPS = (1, 2, 4, 7)
LENGTHS = ((127,), (129, 1), (15, 16), (17,))  # each part goes with each of `GROUPS`
# sizes of queries and of values
UNEQUAL = ((24, 16), (16, 24), (192, 128))
BLOCKS = (Blocks(128, 64, 4, 1), Blocks(64, 64, 4, 1), Blocks(64, 64, 4, 1))


def sink() -> dict[str, list[float]]:
    """Scores of 0 and a sink of 0: the output of three tokens, and the gradient of the sink, summed over them."""
    query, key = torch.zeros(3, 1, 16), torch.randn(3, 1, 16)
    value = F.pad(torch.eye(3), (0, 13))[:, None]
    sinks = torch.zeros(1, requires_grad=True)
    out = fused_attention(query, key, value, PackedLayout([3]), scale=1.0, sinks=sinks)
    out.sum().backward()
    return {"out": out[:, 0, :3].tolist(), "gradient": sinks.grad.tolist()}


def cap() -> dict[str, list]:
    """
    The capped scores 100, -30 and 10, each the log-sum-exp of a segment of one token; and the kernel and eager
    attention with queries and keys that are 20 times too large, against fp64 with the cap and without.
    """
    query = torch.zeros(3, 1, 16)
    query[:, 0, 0] = torch.tensor([100.0, -30.0, 10.0])
    key = F.pad(torch.ones(3, 1, 1), (0, 15))
    _, lse = fused_forward(query, key, key, None, PackedLayout([1, 1, 1]), 1.0, 0, 50.0)
    (query, key, value, _, _), layout, *_ = draw_for(PackedLayout([9, 20]), (2, 1, 16, 16), "plain", torch.float32)
    query, key = query * 20, key * 20
    found = fused_attention(query, key, value, layout, scale=0.25, softcap=50.0)
    capped, uncapped = (_dense(query, key, value, layout.seqlens, 0.25, softcap) for softcap in (50.0, None))
    return {"lse": lse[0].tolist(), "error": _worst(found, capped), "effect": _worst(capped, uncapped)}


def _worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def _dense(query, key, value, seqlens, scale, softcap=None):
    """Causal attention of each segment in fp64, written out."""
    outs = []
    for q, k, v in zip(*(x.double().split(seqlens) for x in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outs.append(torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v[:, 0]))
    return torch.cat(outs)


def _by_sdpa(tensors, seqlens):
    """Output and gradients by fp32 SDPA, a segment at a time."""
    query, key, value, _, grad = (None if x is None else x.float() for x in tensors)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    outs = []
    for parts in zip(*(x.split(seqlens) for x in leaves), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def sizes() -> dict[str, list[float]]:
    """Errors in fp16 against fp32 SDPA: each pair of a head size, of query heads to a key head, and of a length."""
    cases = [
        (LENGTHS[(i + j) % len(LENGTHS)], (group, 1, size, size))
        for i, size in enumerate(SIZES)
        for j, group in enumerate(GROUPS)
    ]
    cases += [((15, 129), (2, 2, *unequal)) for unequal in UNEQUAL]
    found = {}
    for lengths, heads in cases:
        tensors, layout, window, softcap = draw_for(PackedLayout(lengths), heads, "plain", torch.float16)
        results = kernels(tensors, layout, window, softcap, blocks=BLOCKS, programs=1)
        expected = [x.double() for x in _by_sdpa(tensors, lengths)]
        found[f"{lengths} {heads}"] = errors(results, expected)
    return found


def interpreted() -> dict[str, dict]:
    from tests.targets import mend_interpreter

    mend_interpreter()
    return {"sink": sink(), "cap": cap(), "sizes": sizes()}
