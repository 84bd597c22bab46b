"""Random segments with and without parents, and their attention by one dense mask over all tokens."""

import random
from typing import Any, NamedTuple

import torch

from unsloth_trl.patches.attention.fused import Blocks
from unsloth_trl.patches.attention.reference import eager_attention
from unsloth_trl.patches.layout import PackedLayout


DEPTH = 4
# of few programs, which are what takes the interpreter's time
KERNEL_SEEDS = (5, 9, 14, 15, 19, 23, 26, 27, 33, 34, 36, 38, 56, 71, 130, 152)
SCALE = 0.3


class Case(NamedTuple):
    """A layout and what a layer asks for; `heads` of queries, of keys, and their sizes."""

    seqlens: list[int]
    parents: list[int] | None
    window: int | None
    softcap: float | None
    sinks: bool
    heads: tuple[int, int, int, int]


def draw_case(seed: int) -> Case:
    """Up to about 90 tokens: plain segments, groups of up to 16 responses, trees in any order or by level."""
    rng = random.Random(seed)

    def length(longest):
        return rng.choice([0, 1, 1, 2, rng.randint(3, longest)])

    kind = rng.choice(["plain", "groups", "tree", "levels"])
    parents = None
    if kind == "plain":
        seqlens = [length(40) for _ in range(rng.randint(1, 7))]
    elif kind == "groups":
        seqlens, parents = [], []
        for _ in range(rng.randint(1, 2)):
            prompt = len(seqlens)
            responses = rng.randint(1, 16)
            seqlens += [length(20), *(length(6) for _ in range(responses))]
            parents += [-1] + [prompt] * responses
    else:
        seqlens, parents, depths = [], [], []
        for i in range(rng.randint(2, 10)):
            parent = rng.choice([-1, *[j for j in range(i) if depths[j] < DEPTH]])
            if depths and rng.random() < 0.5 and depths[-1] < DEPTH:
                parent = i - 1  # chains
            parents.append(parent)
            depths.append(0 if parent == -1 else depths[parent] + 1)
            seqlens.append(length(16))
        if kind == "levels":
            seqlens, parents = _by_level(seqlens, parents, depths)
    if not any(seqlens):
        seqlens[-1] = 1
    window = rng.choice([None, 1, rng.randint(2, 12), sum(seqlens) + 5])
    heads = rng.choice([(1, 1, 24, 16), (2, 1, 16, 16), (2, 2, 16, 24)])
    return Case(seqlens, parents, window, rng.choice([None, None, 3.0]), rng.random() < 0.4, heads)


def _by_level(seqlens: list[int], parents: list[int], depths: list[int]) -> tuple[list[int], list[int]]:
    """All roots, then all of their children in the order of these, and so on."""
    order, place = [], {-1: -1}
    for level in range(max(depths) + 1):
        order += sorted((i for i, d in enumerate(depths) if d == level), key=lambda i: place[parents[i]])
        place |= {i: at for at, i in enumerate(order)}
    return [seqlens[i] for i in order], [place[parents[i]] for i in order]


def draw_blocks(seed: int) -> dict[str, Any]:
    """Blocks of the three kernels, and how far blocks of keys are divided."""
    rng = random.Random(seed)
    blocks = tuple(Blocks(rng.choice([16, 32, 64]), rng.choice([16, 32, 64]), 4, 1) for _ in range(3))
    return {"blocks": blocks, "programs": rng.choice([1, 4, 16]), "least_work": rng.choice([1, 8, 64])}


def draw_tensors(case: Case, seed: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Query, key, value, sinks or `None`, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    tokens, (heads, kv_heads, size, v_size) = sum(case.seqlens), case.heads
    shapes = [(tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, v_size), (heads,)]
    found = [torch.randn(shape, generator=generator, dtype=dtype) for shape in (*shapes, (tokens, heads, v_size))]
    return [*found[:3], found[3] if case.sinks else None, found[4]]


def dense_mask(case: Case) -> torch.Tensor:
    """Who sees whom, `(num_tokens, num_tokens)` bool, token by token from the definition."""
    segment, position = [], []
    starts: list[int] = []
    for i, n in enumerate(case.seqlens):
        parent = -1 if case.parents is None else case.parents[i]
        starts.append(0 if parent == -1 else starts[parent] + case.seqlens[parent])
        segment += [i] * n
        position += range(starts[i], starts[i] + n)
    chains = []
    for i in range(len(case.seqlens)):
        chain, at = set(), i
        while at != -1:
            chain.add(at)
            at = -1 if case.parents is None else case.parents[at]
        chains.append(chain)
    tokens = len(segment)
    return torch.tensor(
        [
            [
                segment[k] in chains[segment[q]] and 0 <= position[q] - position[k] < (case.window or tokens)
                for k in range(tokens)
            ]
            for q in range(tokens)
        ]
    )


def dense(case: Case, tensors: list[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients by `eager_attention` with that mask."""
    query, key, value, sinks, grad = (None if x is None else x.detach().to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in (query, key, value, sinks) if x is not None]
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = eager_attention(q, k, v, scale=SCALE, mask=dense_mask(case), softcap=case.softcap, sinks=sinks)
    out = out[0].transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def interpreted() -> dict[str, dict]:
    """Errors of the fused kernel and of dense eager attention in fp32 against fp64, for each of `KERNEL_SEEDS`."""
    from tests.patches.fused_attention_cases import errors, kernels
    from tests.targets import mend_interpreter

    mend_interpreter()
    found = {}
    for seed in KERNEL_SEEDS:
        case, blocks = draw_case(seed), draw_blocks(seed)
        tensors = draw_tensors(case, seed, torch.float32)
        truth = dense(case, tensors, torch.float64)
        layout = PackedLayout(case.seqlens, case.parents)
        ours = kernels(tensors, layout, case.window, case.softcap, **blocks)
        plain = dense(case, tensors, torch.float32)
        found[f"{seed}: {case} {blocks}"] = {"ours": errors(ours, truth), "eager": errors(plain, truth)}
    return found
