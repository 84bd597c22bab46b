"""Attention over segments with parents: every path against the formula, in fp64."""

import functools

import pytest
import torch

from tests.tiny import ARCHITECTURES, tiny_model
from unsloth_trl import PackedLayout, PatchConfig, apply_patches
from unsloth_trl.patches.attention import heads as by_heads
from unsloth_trl.patches.attention import shared
from unsloth_trl.patches.attention.segments import build_buckets, eager_attend, sdpa_attend, segment_attention
from unsloth_trl.patches.attention.shared import build_cross_calls, flash_attn_shared, level_refusal


torch.set_num_threads(1)

# lengths and parents, level by level
TREES = {
    "group": ([6, 3, 1, 5], [-1, 0, 0, 0]),
    "groups": ([4, 2, 7, 3, 1, 2, 2, 2], [-1, -1, -1, 0, 0, 1, 2, 2]),
    "no-prompt": ([0, 5, 3, 2, 4], [-1, -1, 0, 0, 1]),
    "leaf-root": ([4, 9, 2, 3], [-1, -1, 0, 0]),
    "empty-child": ([4, 0, 3, 0], [-1, 0, 0, 0]),
    "depth-4": (
        [3, 2, 4, 1, 2, 3, 5, 2, 1, 4, 2, 3],
        [-1, -1, 0, 0, 1, 2, 2, 4, 5, 6, 7, 8],
    ),
}
UNORDERED = ([3, 2, 4, 2, 1, 3], [-1, 0, -1, 0, 2, 1])
HEADS = {"mha": (2, 2, 16, 16), "gqa": (4, 2, 24, 24), "mqa": (4, 1, 8, 8), "mla": (2, 2, 16, 12)}


def draw(num_tokens, heads, seed=0):
    num_heads, num_kv_heads, dim, v_dim = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_heads, dim), (num_kv_heads, dim), (num_kv_heads, v_dim), (num_heads, v_dim)]
    return [torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def visible(seqlens, parents):
    """For each token the tokens that it sees, in order; itself the last one. Shares no line with the package."""
    spans, start = [], 0
    for n in seqlens:
        spans.append(list(range(start, start + n)))
        start += n
    seen = []
    for segment, own in enumerate(spans):
        before, parent = [], parents[segment]
        while parent != -1:
            before = spans[parent] + before
            parent = parents[parent]
        seen += [before + own[: i + 1] for i in range(len(own))]
    return seen


def by_hand(query, key, value, seqlens, parents, *, scale, window=None, softcap=None, sinks=None):
    groups = query.shape[1] // key.shape[1]
    key, value = (x[:, torch.arange(query.shape[1]) // groups] for x in (key, value))
    out = []
    for i, tokens in enumerate(visible(seqlens, parents)):
        if window is not None:
            tokens = tokens[-window:]
        scores = (query[i] * key[tokens]).sum(-1) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum(0) + (0 if sinks is None else sinks.exp())
        out.append((weights[..., None] * value[tokens]).sum(0) / total[:, None])
    return torch.stack(out)


def with_gradients(function, *tensors, grad_out):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def through_segments(attend):
    return lambda q, k, v, layout, **kwargs: segment_attention(q, k, v, layout, functools.partial(attend, **kwargs))


PATHS = {"sdpa": through_segments(sdpa_attend), "eager": through_segments(eager_attend), "flash": flash_attn_shared}


def assert_equals_formula(path, tree, heads, pad=0, **options):
    seqlens, parents = tree
    *tensors, grad_out = draw(sum(seqlens) + pad, heads)
    layout = PackedLayout(seqlens, parents, pad_to=sum(seqlens) + pad)
    if pad:
        seqlens, parents = [*seqlens, pad], [*parents, -1]
    expected = with_gradients(
        lambda q, k, v: by_hand(q, k, v, seqlens, parents, scale=0.3, **options), *tensors, grad_out=grad_out
    )
    actual = with_gradients(
        lambda q, k, v: PATHS[path](q, k, v, layout, scale=0.3, **options), *tensors, grad_out=grad_out
    )
    for what, a, e in zip(("out", "query", "key", "value"), actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12, msg=lambda m, w=what: f"{path} {w}: {m}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_paths_equal_the_formula(tree, heads, path):
    assert_equals_formula(path, tree, heads)


@pytest.mark.parametrize("queries", [1, 3, 7])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_long_rows_in_parts_equal_the_formula(tree, queries, monkeypatch):
    monkeypatch.setattr(shared, "MAX_QUERIES", queries)
    monkeypatch.setattr(by_heads, "BYTES", 1)
    assert_equals_formula("flash", tree, HEADS["gqa"])


def test_gradients_of_a_prompt_are_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(shared, "MAX_QUERIES", 1)
    layout = PackedLayout([1] * 601, [-1] + [0] * 600)
    query, key = torch.zeros(601, 1, 8, dtype=torch.bfloat16), torch.zeros(601, 1, 8, dtype=torch.bfloat16)
    value, grad_out = torch.zeros_like(key), torch.ones_like(key)
    *_, grad_value = with_gradients(
        lambda q, k, v: flash_attn_shared(q, k, v, layout, scale=0.3), query, key, value, grad_out=grad_out
    )
    # its own query sees the prompt alone, the others the prompt and themselves; in bf16 the sum would end at 128
    assert torch.equal(grad_value[0], torch.full((1, 8), 1 + 600 / 2, dtype=torch.bfloat16))
    assert torch.equal(grad_value[1:], torch.full((600, 1, 8), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["groups", "depth-4"])
def test_padding_is_a_segment_of_its_own(name, path):
    assert_equals_formula(path, TREES[name], HEADS["gqa"], pad=3)


@pytest.mark.parametrize("path", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [1, 3, 7, 100])
@pytest.mark.parametrize("name", TREES)
def test_windows_reach_into_the_parents(name, window, path):
    assert_equals_formula(path, TREES[name], HEADS["gqa"], window=window)


@pytest.mark.parametrize("path", ["sdpa", "eager"])
def test_segments_take_any_order(path):
    assert_equals_formula(path, UNORDERED, HEADS["gqa"])


@pytest.mark.parametrize("window", [None, 3])
def test_softcap_and_sinks_with_parents(window):
    seqlens, parents = TREES["groups"]
    *tensors, grad_out = draw(sum(seqlens), HEADS["gqa"])
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = {"scale": 0.3, "window": window, "softcap": 2.0}
    layout = PackedLayout(seqlens, parents)
    results = [
        with_gradients(function, *tensors, sinks, grad_out=grad_out)
        for function in (
            lambda q, k, v, s: by_hand(q, k, v, seqlens, parents, sinks=s, **options),
            lambda q, k, v, s: PATHS["eager"](q, k, v, layout, sinks=s, **options),
        )
    ]
    for e, a in zip(*results, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


def test_order_is_asked_for():
    for seqlens, parents in TREES.values():
        assert level_refusal(PackedLayout(seqlens, parents)) is None
    layout = PackedLayout(*UNORDERED)
    assert level_refusal(layout).startswith("segment 2 before the others of its level")
    *tensors, _ = draw(layout.num_tokens, HEADS["mha"])
    with pytest.raises(ValueError, match="packed_layout has segment 2 before the others of its level"):
        flash_attn_shared(*tensors, layout, scale=1.0)
    # children of one parent apart from each other
    assert level_refusal(PackedLayout([1, 1, 1, 1, 1], [-1, -1, 0, 1, 0])).startswith("segment 4")


def test_calls_between_levels():
    """Two levels are one call whatever the number of groups; four are six; spans are those of whole levels."""
    calls = build_cross_calls(PackedLayout(*TREES["groups"]))
    assert calls.table == [13, 23, 0, 13, 4, 7, 3]
    assert calls.cu_seqlens.tolist() == [0, 4, 6, 10, 0, 4, 6, 13]
    assert calls.cu_seqlens.dtype == torch.int32
    four = build_cross_calls(PackedLayout([1, 1, 1, 1], [-1, 0, 1, 2]))
    assert len(four.table) == 7 * 6
    # nothing to attend to, or nobody to do it
    assert build_cross_calls(PackedLayout([0, 5], [-1, 0])).table == []
    assert build_cross_calls(PackedLayout([5, 0], [-1, 0])).table == []


def test_buckets_read_the_prompt_once_per_response_only():
    """Roots have no copies of keys; children's keys are their ancestors' and their own."""
    seqlens, parents = [50, 4, 5, 4, 5, 4, 4, 5, 5], [-1] + [0] * 8
    buckets, restore = build_buckets(PackedLayout(seqlens, parents))
    assert [(b.rows, b.length, b.ancestors) for b in buckets] == [(1, 50, 0), (4, 5, 50), (4, 4, 50)]
    assert buckets[0].key_gather is None
    token = torch.cat([b.gather for b in buckets])
    assert torch.equal(token[restore], torch.arange(sum(seqlens)))


def test_op_declares_what_it_does():
    layout = PackedLayout(*TREES["groups"])
    calls = build_cross_calls(layout)
    q, k, v, _ = (t.float().requires_grad_() for t in draw(layout.num_tokens, HEADS["gqa"]))
    arguments = (q, k, v, layout.cu_seqlens, layout.max_seqlen, calls.cu_seqlens, calls.table, 0.3)
    torch.library.opcheck(torch.ops.unsloth_trl.flash_attn_shared, arguments)


# two groups; the second segment of each level belongs to the second group
PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22]]
RESPONSES = [[[30, 31, 32], [33, 34, 35, 36, 37], [38]], [[40, 41], [42, 43, 44, 45]]]


def shared_row():
    seqlens = [len(p) for p in PROMPTS] + [len(r) for responses in RESPONSES for r in responses]
    parents = [-1] * len(PROMPTS) + [i for i, responses in enumerate(RESPONSES) for _ in responses]
    ids = [t for p in PROMPTS for t in p] + [t for responses in RESPONSES for r in responses for t in r]
    return torch.tensor([ids]), PackedLayout(seqlens, parents)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_models_see_the_prompt_and_not_the_sisters(model_type):
    """Logits of each response equal those of its own unpacked row, windows shorter than the prompt included."""
    model = tiny_model(model_type)
    expected = []
    with torch.no_grad():
        for prompt, responses in zip(PROMPTS, RESPONSES, strict=True):
            for response in responses:
                logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits
                expected.append(logits[0, len(prompt) :])
        apply_patches(model)
        ids, layout = shared_row()
        logits = model(input_ids=ids, packed_layout=layout).logits[0, sum(len(p) for p in PROMPTS) :]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=2e-4)
    assert layout.reached == {"attention"}


def test_windows_are_refused_by_name_where_flash_is_asked_for():
    model = tiny_model("mistral")
    apply_patches(model, PatchConfig(attention_backend="flash_attention_2"))
    ids, layout = shared_row()
    message = r"attention_backend='flash_attention_2' cannot do a window \(4\) that reaches into parent segments"
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, packed_layout=layout)
