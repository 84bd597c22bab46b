import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from tests.largest import LargestTensor
from tests.tiny import ARCHITECTURES, tiny_model
from unsloth_trl import PackedLayout, PatchConfig, apply_patches
from unsloth_trl.patches.attention import segments
from unsloth_trl.patches.attention.op import flash_attn_varlen
from unsloth_trl.patches.attention.reference import causal_mask, eager_attention
from unsloth_trl.patches.attention.segments import (
    MAX_BUCKETS,
    build_buckets,
    eager_attend,
    sdpa_attend,
    segment_attention,
)


torch.set_num_threads(1)

# ragged, with empty segments, with one-token ones, of one length, of one segment
LAYOUTS = {
    "ragged": [5, 1, 9, 2, 3],
    "empty": [0, 4, 0, 1, 1, 7, 0],
    "even": [4, 4, 4],
    "single": [11],
    "tokens": [1, 1, 1],
}
# query heads, KV heads, head size of queries and keys, of values
HEADS = {
    "mha-16": (2, 2, 16, 16),
    "gqa2-24": (4, 2, 24, 24),
    "gqa4-40": (4, 1, 40, 40),
    "gqa7-16": (7, 1, 16, 16),
    "mla-16-12": (4, 4, 16, 12),
}
WINDOWS = [None, 1, 3, 100]


def draw(seqlens, heads, seed=0, dtype=torch.float64):
    num_heads, num_kv_heads, dim, v_dim = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_heads, dim), (num_kv_heads, dim), (num_kv_heads, v_dim), (num_heads, v_dim)]
    return [torch.randn(sum(seqlens), *shape, generator=generator, dtype=dtype) for shape in shapes]


def by_hand(query, key, value, seqlens, *, scale, window=None, softcap=None, sinks=None):
    """The truth, written query by query: shares no line with the package."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x[:, torch.arange(query.shape[1]) // groups] for x in (key, value))
    out, start = [], 0
    for n in seqlens:
        for i in range(start, start + n):
            first = start if window is None else max(start, i - window + 1)
            scores = (query[i] * key[first : i + 1]).sum(-1) * scale  # (keys, heads)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum(0) + (0 if sinks is None else sinks.exp())
            out.append((weights[..., None] * value[first : i + 1]).sum(0) / total[:, None])
        start += n
    return torch.stack(out)


def with_gradients(function, *tensors, grad_out):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def run_sdpa(q, k, v, layout, **kwargs):
    return segment_attention(q, k, v, layout, functools.partial(sdpa_attend, **kwargs))


def run_eager(q, k, v, layout, **kwargs):
    return segment_attention(q, k, v, layout, functools.partial(eager_attend, **kwargs))


PATHS = {"sdpa": run_sdpa, "eager": run_eager, "op": flash_attn_varlen}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seqlens", LAYOUTS.values(), ids=LAYOUTS)
def test_paths_equal_the_formula(seqlens, window, heads):
    """Output and all gradients in fp64, of all three paths."""
    *tensors, grad_out = draw(seqlens, heads)
    expected = with_gradients(
        lambda q, k, v: by_hand(q, k, v, seqlens, scale=0.3, window=window), *tensors, grad_out=grad_out
    )
    for name, path in PATHS.items():
        layout = PackedLayout(seqlens)
        actual = with_gradients(
            lambda q, k, v, path=path, layout=layout: path(q, k, v, layout, scale=0.3, window=window),
            *tensors,
            grad_out=grad_out,
        )
        for what, a, e in zip(("out", "query", "key", "value"), actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12, msg=lambda m, n=name, w=what: f"{n} {w}: {m}")


@pytest.mark.parametrize("window", [None, 3])
def test_softcap_and_sinks_equal_the_formula(window):
    seqlens = LAYOUTS["ragged"]
    *tensors, grad_out = draw(seqlens, HEADS["gqa2-24"])
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for options in ({"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}):
        given = [*tensors, sinks] if options.get("sinks") else tensors
        rest = {"scale": 0.3, "window": window, "softcap": options.get("softcap")}

        def expected(q, k, v, s=None, rest=rest):
            return by_hand(q, k, v, seqlens, sinks=s, **rest)

        def actual(q, k, v, s=None, rest=rest):
            return run_eager(q, k, v, PackedLayout(seqlens), sinks=s, **rest)

        for a, e in zip(
            with_gradients(actual, *given, grad_out=grad_out),
            with_gradients(expected, *given, grad_out=grad_out),
            strict=True,
        ):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


def test_sinks_take_their_share():
    """Three scores of 0 and a sink of 0: a quarter each, and a quarter for nothing."""
    query, key = torch.zeros(1, 2, 1, 8), torch.randn(1, 2, 3, 8)
    value = torch.eye(3).expand(1, 2, 3, 3)
    out = eager_attention(query, key, value, scale=1.0, sinks=torch.zeros(2))
    torch.testing.assert_close(out, torch.full((1, 2, 1, 3), 0.25))
    out = eager_attention(query, key, value, scale=1.0)
    torch.testing.assert_close(out, torch.full((1, 2, 1, 3), 1 / 3))


def test_softcap_values():
    """50 * tanh(s / 50) of 100, -30 and 10, read back from the probabilities."""
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = torch.tensor([100.0, -30.0, 10.0], dtype=torch.float64).view(1, 1, 3, 1)
    value = torch.eye(3, dtype=torch.float64).expand(1, 1, 3, 3)
    logs = eager_attention(query, key, value, scale=1.0, softcap=50.0).log().flatten()
    expected = torch.tensor([48.2014, -26.8525, 9.8688], dtype=torch.float64)
    torch.testing.assert_close(logs - logs[0], expected - expected[0], rtol=0, atol=2e-4)


def test_causal_mask_values():
    assert causal_mask(2, 3, None, "cpu").int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert causal_mask(3, 3, 2, "cpu").int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert causal_mask(1, 4, 1, "cpu").int().tolist() == [[0, 0, 0, 1]]


def test_mask_forms_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(3))
    allowed = causal_mask(5, 5, 3, q.device)
    additive = torch.zeros(5, 5).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3)
    for mask in (allowed, additive):
        torch.testing.assert_close(eager_attention(q, k, v, scale=0.3, mask=mask), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("path", ["sdpa", "op"])
def test_fp32_error_is_that_of_eager(path, window):
    """At most 1.5 times the error of the eager path in the same dtype, and a cap."""
    seqlens = [64, 3, 31, 1, 40]
    *tensors, grad_out = draw(seqlens, HEADS["gqa2-24"])
    truth = with_gradients(
        lambda q, k, v: by_hand(q, k, v, seqlens, scale=0.5, window=window), *tensors, grad_out=grad_out
    )

    def errors(function):
        layout = PackedLayout(seqlens)
        results = with_gradients(
            lambda q, k, v: function(q, k, v, layout, scale=0.5, window=window),
            *(t.float() for t in tensors),
            grad_out=grad_out.float(),
        )
        return [((r.double() - t).norm() / t.norm()).item() for r, t in zip(results, truth, strict=True)]

    for error, reference in zip(errors(PATHS[path]), errors(run_eager), strict=True):
        assert error <= max(1.5 * reference, 5e-7)
        assert error <= 1e-6


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("poisoned", [0, 2, 4])
def test_nan_stays_in_its_segment(poisoned, path, window):
    """Rows are padded to a common length with tokens of their own, so NaN in one sample reaches no other one."""
    seqlens = LAYOUTS["ragged"]
    *tensors, grad_out = draw(seqlens, HEADS["gqa2-24"])
    layout = PackedLayout(seqlens)
    inside = torch.repeat_interleave(torch.arange(len(seqlens)), torch.tensor(seqlens)) == poisoned

    def run(q, k, v):
        return PATHS[path](q, k, v, layout, scale=0.3, window=window)

    clean = with_gradients(run, *tensors, grad_out=grad_out)
    for t in tensors:
        t[inside] = float("nan")
    for result, expected in zip(with_gradients(run, *tensors, grad_out=grad_out), clean, strict=True):
        assert torch.equal(result[~inside], expected[~inside])
        assert result[inside].isnan().all()


def test_many_lengths_are_few_calls(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    seqlens = torch.randint(1, 500, (200,), generator=generator).tolist()
    layout = PackedLayout(seqlens)
    buckets, restore = build_buckets(layout)
    assert 1 < len(buckets) <= MAX_BUCKETS == 8
    assert sum(b.rows for b in buckets) == len(seqlens)
    slots = sum(b.rows * b.length for b in buckets)
    ratio = (max(seqlens) / min(seqlens)) ** (1 / MAX_BUCKETS)
    assert layout.num_tokens <= slots <= ratio * layout.num_tokens
    token = torch.cat([b.gather for b in buckets])
    assert torch.equal(token[restore], torch.arange(layout.num_tokens))

    calls = []
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        segments.F,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or attention(*args, **kwargs),
    )
    q, k, v = (torch.randn(layout.num_tokens, 1, 8, generator=generator) for _ in range(3))
    for window in (None, 16):
        calls.clear()
        run_sdpa(q, k, v, layout, scale=1.0, window=window)
        assert len(calls) == len(buckets)
    calls.clear()
    run_sdpa(q[:12], k[:12], v[:12], PackedLayout([4, 4, 4]), scale=1.0)
    assert len(calls) == 1


@pytest.mark.parametrize(("model_type", "window"), [("llama", None), ("mistral", 128)])
def test_long_sequence_makes_no_square(model_type, window):
    """B12: one sequence of 2048 tokens: nothing as large as 2048 x 2048, neither forward nor backward."""
    length = 2048
    overrides = {"max_position_embeddings": length} | ({"sliding_window": window} if window else {})
    model = tiny_model(model_type, **overrides)
    ids = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(0))
    plain = model(input_ids=ids, use_cache=False).logits
    apply_patches(model)
    with LargestTensor() as largest:
        logits = model(input_ids=ids, packed_layout=PackedLayout([length])).logits
        logits.logsumexp(-1).sum().backward()
    assert "_scaled_dot_product_flash_attention_for_cpu" in largest.ops or window, "the mode must see the kernels"
    assert 0 < largest.numel < length * length, largest.shape
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)


def op_inputs(window, dtype=torch.float32, dim=16):
    seqlens = [5, 0, 1, 6]
    *tensors, _ = draw(seqlens, (4, 2, dim, dim), dtype=dtype)
    return (*(t.requires_grad_() for t in tensors), PackedLayout(seqlens).cu_seqlens, 6, 0.3, window)


@pytest.mark.parametrize("window", [0, 3])
def test_op_keeps_the_contract_of_torch_library(window):
    checks = torch.library.opcheck(torch.ops.unsloth_trl.flash_attn_varlen.default, op_inputs(window))
    assert set(checks.values()) == {"SUCCESS"} and len(checks) >= 4


def test_backward_op_keeps_the_contract_of_torch_library():
    query, key, value, cu_seqlens, max_seqlen, scale, window = op_inputs(3)
    out, lse = torch.ops.unsloth_trl.flash_attn_varlen(query, key, value, cu_seqlens, max_seqlen, scale, window)
    tensors = [t.detach() for t in (torch.ones_like(out), query, key, value, out, lse, cu_seqlens)]
    checks = torch.library.opcheck(
        torch.ops.unsloth_trl.flash_attn_varlen_backward.default,
        (*tensors, max_seqlen, scale, window),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(checks.values()) == {"SUCCESS"}


def test_op_gradcheck():
    query, key, value, *rest = op_inputs(3, dtype=torch.float64, dim=3)
    op = torch.ops.unsloth_trl.flash_attn_varlen
    assert torch.autograd.gradcheck(lambda q, k, v: op(q, k, v, *rest)[0], (query, key, value))


def test_op_compiles_without_a_break():
    # through the compiler's graph, fakes and autograd; code generation is tested on a GPU, where the op is used
    torch._dynamo.reset()
    seqlens = LAYOUTS["ragged"]
    *tensors, grad_out = draw(seqlens, HEADS["mla-16-12"], dtype=torch.float32)
    layout = PackedLayout(seqlens)

    def function(q, k, v):
        return flash_attn_varlen(q * 2, k, v, layout, scale=0.3, window=3) + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, e in zip(
        with_gradients(compiled, *tensors, grad_out=grad_out),
        with_gradients(function, *tensors, grad_out=grad_out),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


A, B = 7, 9
IDS = torch.randint(3, 128, (1, A + B), generator=torch.Generator().manual_seed(1))


@functools.cache
def separate_logits(model_type):
    model = tiny_model(model_type)
    with torch.no_grad():
        return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in IDS.split([A, B], 1)], 1)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_samples_are_isolated_however_the_model_is_called(model_type):
    """B02: without a mask, with a mask of ones, with the cache at its default, and in eval mode."""
    model = tiny_model(model_type)
    with torch.no_grad():
        mixed = model(input_ids=IDS, use_cache=False).logits
    apply_patches(model)
    ones = torch.ones_like(IDS)
    calls = {
        "no mask": {"use_cache": False},
        "ones": {"use_cache": False, "attention_mask": ones},
        "cache": {},
        "cache and ones": {"attention_mask": ones},
        "positions": {"position_ids": PackedLayout([A, B]).position_ids, "use_cache": True},
    }
    for mode in (True, False):
        model.train(mode)
        for name, kwargs in calls.items():
            with torch.no_grad():
                logits = model(input_ids=IDS, packed_layout=PackedLayout([A, B]), **kwargs).logits
            error = (logits - separate_logits(model_type)).abs().max().item()
            assert error < 1e-4, f"{name}, training={mode}: {error:.1e}"
    assert (mixed - separate_logits(model_type)).abs().max() > 0.1, "one causal row must differ, or nothing is tested"


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3"]
)
def test_no_gradient_crosses_a_boundary(model_type):
    """B01: exactly zero, not small."""
    model = tiny_model(model_type)
    apply_patches(model)
    for rows, others in ((slice(A, None), slice(None, A)), (slice(None, A), slice(A, None))):
        embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = model(inputs_embeds=embeds, packed_layout=PackedLayout([A, B])).logits
        logits[:, rows].logsumexp(-1).sum().backward()
        assert embeds.grad[:, others].eq(0).all()
        assert embeds.grad[:, rows].ne(0).any(-1).all()


def test_two_rows_are_isolated():
    """B03: the layout of a flattened batch serves two rows of equal length as well."""
    model = tiny_model("mistral")
    ids = torch.cat([IDS, IDS.flip(1)])
    splits = [[7, 9], [5, 11]]
    with torch.no_grad():
        expected = torch.stack(
            [
                torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in row.split(split)])
                for row, split in zip(ids, splits, strict=True)
            ]
        )
        apply_patches(model)
        for split, error_is_small in ((splits, True), ([[8, 8], [3, 13]], False)):
            layout = PackedLayout.from_rows(split, [16, 16])
            logits = model(
                input_ids=ids, packed_layout=layout, position_ids=layout.position_ids.view(2, 16), use_cache=False
            ).logits
            assert ((logits - expected).abs().max() < 1e-4) == error_is_small


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_uncached_layouts_give_the_same(model_type):
    model = tiny_model(model_type)
    apply_patches(model)
    with torch.no_grad():
        logits = model(input_ids=IDS, packed_layout=PackedLayout([A, B], cached=False)).logits
    torch.testing.assert_close(logits, separate_logits(model_type), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_backends_give_the_same(backend):
    model = tiny_model("mistral")
    apply_patches(model, PatchConfig(attention_backend=backend))
    with torch.no_grad():
        logits = model(input_ids=IDS, packed_layout=PackedLayout([A, B])).logits
    torch.testing.assert_close(logits, separate_logits("mistral"), rtol=0, atol=1e-4)


def test_unknown_backend_is_named():
    message = (
        "attention_backend='flash' is unknown; choose from 'auto', 'flash_attention_2', 'flash_attention_4', "
        "'triton', 'sdpa', 'eager'"
    )
    with pytest.raises(ValueError, match=message):
        PatchConfig(attention_backend="flash")


@pytest.mark.parametrize(
    ("model_type", "backend", "obstacle"),
    [
        ("llama", "flash_attention_2", "dtype torch.float32"),
        ("gemma2", "flash_attention_2", r"soft-capping \(4.0\)"),
        ("gemma2", "sdpa", r"soft-capping \(4.0\)"),
        ("gpt_oss", "sdpa", "attention sinks"),
        ("gpt_oss", "flash_attention_2", "attention sinks"),
    ],
)
def test_impossible_backend_is_named(model_type, backend, obstacle):
    model = tiny_model(model_type)
    apply_patches(model, PatchConfig(attention_backend=backend))
    message = f"attention_backend='{backend}' cannot do {obstacle}; set attention_backend='auto'"
    with pytest.raises(ValueError, match=message):
        model(input_ids=IDS, packed_layout=PackedLayout([A, B]))


def test_flash_on_the_cpu_is_named():
    model = tiny_model("llama").bfloat16()
    apply_patches(model, PatchConfig(attention_backend="flash_attention_2"))
    with pytest.raises(ValueError, match=r"cannot do device cpu \(needs CUDA sm_80 or newer\)"):
        model(input_ids=IDS, packed_layout=PackedLayout([A, B]))


def test_wrong_layouts_are_named():
    model = tiny_model("llama")
    apply_patches(model)
    with pytest.raises(ValueError, match="packed_layout describes 15 tokens but the attention got 16"):
        model(input_ids=IDS, packed_layout=PackedLayout([7, 8]), position_ids=torch.arange(16)[None])
    cache = DynamicCache(config=model.config)
    model(input_ids=IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="packed_layout was given with 16 cached keys; pass use_cache=False"):
        model(input_ids=IDS, past_key_values=cache, packed_layout=PackedLayout([A, B]))


def test_dropout_reaches_the_packed_call():
    """Attention dropout of the config: on in training, off in evaluation."""
    model = tiny_model("llama", attention_dropout=0.5)
    apply_patches(model)
    layout = PackedLayout([A, B])
    with torch.no_grad():
        torch.manual_seed(0)
        assert (model(input_ids=IDS, packed_layout=layout).logits - separate_logits("llama")).abs().max() > 0.1
        model.eval()
        torch.testing.assert_close(
            model(input_ids=IDS, packed_layout=layout).logits, separate_logits("llama"), rtol=0, atol=1e-4
        )


def test_autocast_takes_one_dtype():
    """Under autocast rotary queries and keys may be fp32 beside bf16 values."""
    model = tiny_model("llama")
    apply_patches(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=IDS, packed_layout=PackedLayout([A, B])).logits.float()
    error = (logits - separate_logits("llama")).norm() / separate_logits("llama").norm()
    assert error < 5e-2


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss"])
def test_static_cache_without_padding(model_type):
    """transformers leaves out the mask of such a prefill; more keys than queries, most of them empty slots."""
    ids = torch.arange(9, 21).view(2, 6)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    model = tiny_model(model_type).eval()
    expected = torch.stack(model.generate(input_ids=ids, **options).logits)
    apply_patches(model)
    for cache in ("static", "dynamic"):
        actual = torch.stack(model.generate(input_ids=ids, cache_implementation=cache, **options).logits)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3, msg=lambda m, c=cache: f"{c}: {m}")
