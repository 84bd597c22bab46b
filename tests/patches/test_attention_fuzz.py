"""Random layouts: every kernel against one dense mask over all tokens."""

import functools

import pytest
import torch

from tests.patches.attention_fuzz_cases import DEPTH, KERNEL_SEEDS, SCALE, dense, draw_case, draw_tensors
from tests.targets import in_interpreter
from unsloth_trl import PackedLayout
from unsloth_trl.patches.attention.op import flash_attn_varlen
from unsloth_trl.patches.attention.segments import eager_attend, sdpa_attend, segment_attention
from unsloth_trl.patches.attention.shared import flash_attn_shared, level_refusal


SEEDS = range(400)
FLOOR = 4e-6


def paths(case, layout):
    """The paths that can take the case, by name: query, key, value, sinks to output."""
    settings = {"scale": SCALE, "window": case.window}

    def segments(attend):
        return lambda q, k, v, sinks: segment_attention(q, k, v, layout, attend(sinks))

    capped = settings | {"softcap": case.softcap}
    found = {"eager": segments(lambda sinks: functools.partial(eager_attend, **capped, sinks=sinks))}
    if case.softcap is None and not case.sinks:
        found["sdpa"] = segments(lambda _: functools.partial(sdpa_attend, **settings))
        if layout.parents is None:
            found["varlen"] = lambda q, k, v, _: flash_attn_varlen(q, k, v, layout, **settings)
        elif case.window is None and level_refusal(layout) is None:
            found["merged pair"] = lambda q, k, v, _: flash_attn_shared(q, k, v, layout, scale=SCALE)
    return found


def depth(case, i):
    return 0 if case.parents is None or case.parents[i] == -1 else depth(case, case.parents[i]) + 1


def test_paths_equal_a_dense_mask():
    """Output and all gradients in fp64."""
    ran = dict.fromkeys(("eager", "sdpa", "varlen", "merged pair"), 0)
    for seed in SEEDS:
        case = draw_case(seed)
        if case.heads[3] > case.heads[2]:
            case = case._replace(heads=(2, 2, 24, 16))  # of FlashAttention-2 values are no wider than keys
        layout = PackedLayout(case.seqlens, case.parents)
        tensors = draw_tensors(case, seed, torch.float64)
        expected = dense(case, tensors, torch.float64)
        for name, path in paths(case, layout).items():
            query, key, value, sinks = (None if x is None else x.detach().requires_grad_() for x in tensors[:4])
            out = path(query, key, value, sinks)
            leaves = [x for x in (query, key, value, sinks) if x is not None]
            found = [out.detach(), *torch.autograd.grad(out, leaves, tensors[4])]
            for what, a, e in zip(("out", "query", "key", "value", "sinks"), found, expected, strict=False):
                message = functools.partial("{} of {}, seed {}, {}: {}".format, what, name, seed, case)
                torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11, msg=message)
            ran[name] += 1
    assert min(ran.values()) >= 10, ran


def test_what_is_drawn():
    """Everything that the kernels have to get right is among the layouts, in those of the interpreter, too."""
    for seeds in (SEEDS, KERNEL_SEEDS):
        cases = [draw_case(seed) for seed in seeds]
        assert any(0 in case.seqlens for case in cases) and any(1 in case.seqlens for case in cases)
        assert {min(depth(case, i) for i in range(len(case.seqlens))) for case in cases} == {0}
        assert max(depth(case, i) for case in cases for i in range(len(case.seqlens))) == DEPTH
        assert {case.parents is None for case in cases} == {True, False}
        assert any(case.parents and max(map(case.parents.count, case.parents)) > 8 for case in cases)
        windows = [case.window for case in cases]
        assert None in windows and 1 in windows
        assert any(case.window and case.window > sum(case.seqlens) for case in cases)
        assert any(case.window and 1 < case.window < max(case.seqlens) for case in cases)
        assert {case.sinks for case in cases} == {True, False} and {case.softcap for case in cases} == {None, 3.0}


def test_the_fused_kernel_equals_a_dense_mask():
    pytest.importorskip("triton")
    results = in_interpreter("tests.patches.attention_fuzz_cases")
    assert len(results) == len(KERNEL_SEEDS)
    for case, found in results.items():
        assert len(found["ours"]) == len(found["eager"]) >= 4
        for ours, eager in zip(found["ours"], found["eager"], strict=True):
            assert ours <= max(1.5 * eager, FLOOR), (case, found)
