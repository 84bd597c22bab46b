"""A kernel is compiled once for a model and not again for another batch, which on a slow host is seconds each time.

Triton compiles anew where the type of an argument, a constant, or whether 16 divides a number or an address is new.
Launches are recorded, with what Triton would look up before it compiles; none of that needs a GPU.
"""

import random

import pytest
import torch

from tests.patches.moe_rows_cases import draw, kernels
from unsloth_trl.patches.attention import fused
from unsloth_trl.patches.layout import PackedLayout
from unsloth_trl.patches.lm_head.frozen import Scoring, State, launch_fold
from unsloth_trl.patches.moe.counting_sort import launch_sort_rows
from unsloth_trl.patches.quantization.op import dequantize_nf4_triton


jit = pytest.importorskip("triton.runtime.jit")


@pytest.fixture
def compiled(monkeypatch):
    """By name of the kernel the set of what would be compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    found = {}
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders = {}

    def run(self, *args, grid, warmup, **kwargs):
        if self not in binders:
            binders[self] = jit.create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binders[self](*args, **kwargs)
        found.setdefault(self.__name__, set()).add(str((specialization, sorted(options.items()))))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return found


def layouts(shared, number=40):
    rng = random.Random(0)
    for _ in range(number):
        lengths = [rng.randrange(1, 300) for _ in range(rng.randrange(2, 9))]
        parents = [-1] + [0] * (len(lengths) - 1) if shared else None
        yield PackedLayout(lengths, parents)


@pytest.mark.parametrize("shared", [False, True])
def test_attention(compiled, shared):
    for layout in layouts(shared):
        q, k, v = (torch.randn(layout.num_tokens, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        tables, *blocks = fused._plan(q, k, v, layout)
        out, lse = fused.launch_forward(q, k, v, None, tables.q_tiles, tables.q_spans, 0.125, None, 0, blocks[0])
        fused.launch_backward(out, q, k, v, out, lse, tables, 0.125, None, 0, *blocks[1:])
    numbers = {name: len(kinds) for name, kinds in compiled.items()}
    # sums of divided blocks are written by a kernel that has them as an argument, where there are any
    expected = {"attention_forward_kernel": 1, "attention_delta_kernel": 1, "attention_backward_q_kernel": 1}
    assert numbers.pop("attention_backward_kv_kernel") in (1, 2)
    assert numbers.pop("attention_sum_kernel", 1) == 1
    assert numbers == expected


def test_head(compiled):
    for num_tokens in (16, 17, 33, 64, 1):
        hidden, state = torch.randn(num_tokens, 32), None
        state = State.start(hidden, num_tokens)
        logits, targets = torch.randn(num_tokens, 64), torch.randint(128, (num_tokens + 1,))[1:]
        for start in (0, 64):
            launch_fold(logits, targets, state, torch.empty(num_tokens), start, Scoring(), 1.0, True)
    assert {name: len(kinds) for name, kinds in compiled.items()} == {"fold_kernel": 1}


def test_experts(compiled):
    for seed, num_tokens in enumerate((64, 65, 97, 160, 33)):
        inputs = draw((num_tokens, 2, 4, 4, 64, 32, 16, 16, "silu"), torch.bfloat16, seed=seed)
        launch_sort_rows(inputs["index"], 4)
        kernels(inputs)
    numbers = {name: len(kinds) for name, kinds in compiled.items()}
    assert numbers.pop("combine_kernel") == 2  # with weights and without
    assert numbers.pop("gather_project_kernel") == 2  # with the rows and without
    assert set(numbers.values()) == {1}, numbers


def test_weights_in_4_bits(compiled):
    for rows, columns in ((64, 64), (64, 128), (192, 64)):
        blocks = rows * columns // 64
        packed, absmax = torch.zeros(rows * columns // 2, dtype=torch.uint8), torch.zeros(blocks, dtype=torch.uint8)
        code, nested = torch.zeros(16), torch.zeros(256)
        out = torch.empty(rows, columns, dtype=torch.bfloat16)
        scales = (code, torch.zeros(-(-blocks // 256)), nested, torch.zeros(()))
        dequantize_nf4_triton(packed, absmax, *scales, 64, 256, 0, out)
    assert {name: len(kinds) for name, kinds in compiled.items()} == {"dequantize_nf4_kernel": 1}
