"""What users reported about attention (B79, B80, B82): sinks, soft caps, head sizes. B81: `test_fused_attention`."""

import copy

import pytest
import torch
import torch.nn.functional as F

import unsloth_trl
from tests.numerics import assert_updates_close, make_trainer, snapshot, training_logs, updates_since
from tests.patches.attention_report_cases import GROUPS, LENGTHS, SIZES, UNEQUAL
from tests.targets import in_interpreter
from tests.tiny import tiny_model, tiny_rows
from unsloth_trl import PackedLayout, apply_patches


LENGTHS_OF_ROW = [7, 9]
IDS = torch.randint(3, 128, (1, 16), generator=torch.Generator().manual_seed(1))
LEARNING_RATE = 0.1


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton")
    return in_interpreter("tests.patches.attention_report_cases")


def packed(model):
    apply_patches(model)
    return model(input_ids=IDS, packed_layout=PackedLayout(LENGTHS_OF_ROW)).logits


def separate(model):
    return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in IDS.split(LENGTHS_OF_ROW, 1)], 1)


def test_b79_a_sink_takes_its_share(interpreted):
    """Three scores of 0 and a sink of 0 are a quarter each; what it takes is lost, so its gradient is negative."""
    out = torch.tensor(interpreted["sink"]["out"])
    torch.testing.assert_close(out, torch.tensor([[1 / 2, 0, 0], [1 / 3, 1 / 3, 0], [1 / 4] * 3]))
    (gradient,) = interpreted["sink"]["gradient"]
    assert gradient == pytest.approx(-(1 / 2 * 1 / 2 + 1 / 3 * 2 / 3 + 1 / 4 * 3 / 4), abs=1e-6)


def test_b79_sinks_windows_and_packing_together():
    """Logits, and gradients of the sinks, are those of each sample alone in eager attention."""
    found = {}
    for logits_of in (packed, separate):
        model = tiny_model("gpt_oss")
        assert model.config.sliding_window < min(LENGTHS_OF_ROW)
        logits = logits_of(model)
        F.cross_entropy(logits[0, :-1], IDS[0, 1:]).backward()
        found[logits_of] = [logits.detach(), *(layer.self_attn.sinks.grad for layer in model.model.layers)]
    for ours, theirs in zip(*found.values(), strict=True):
        assert theirs.abs().min() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_b80_capped_scores(interpreted):
    """50 * tanh(s / 50) of 100, -30 and 10; and scores that are 400 times as large as usual."""
    assert interpreted["cap"]["lse"] == pytest.approx([48.2014, -26.8525, 9.8688], abs=1e-4)
    assert interpreted["cap"]["error"] < 1e-4 and interpreted["cap"]["effect"] > 1e-2


def test_b80_the_cap_of_a_model_is_applied():
    """Queries and keys of Gemma 2 times 20: our packed row is eager's, and without the cap it would not be."""

    def model(cap):
        made = tiny_model("gemma2", attn_logit_softcapping=cap)
        with torch.no_grad():
            for layer in made.model.layers:
                layer.self_attn.q_proj.weight *= 20
                layer.self_attn.k_proj.weight *= 20
        return made

    with torch.no_grad():
        capped, uncapped, ours = separate(model(50.0)), separate(model(None)), packed(model(50.0))
    torch.testing.assert_close(ours, capped, rtol=0, atol=1e-4)
    assert (capped - uncapped).abs().max() > 1e-2


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_b80_the_cap_of_the_logits_is_in_the_loss(frozen):
    """Loss and update of one packed step are those of cross-entropy on the logits that transformers gives."""
    model = tiny_model("gemma2", final_logit_softcapping=2.0)
    model.get_input_embeddings().requires_grad_(not frozen)
    rows = tiny_rows(4, 3, low=5, high=9)

    def reference(model):
        totals, count = [], 0
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            totals.append(F.cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
        return sum(totals) / count

    stock = copy.deepcopy(model)
    expected = reference(stock)
    expected.backward()
    gradients = {name: p.grad for name, p in stock.named_parameters() if p.requires_grad}
    stock.config.final_logit_softcapping = None
    assert (reference(stock) - expected).abs() > 0.1
    trainer = make_trainer(
        unsloth_trl,
        "gemma2",
        model=model,
        rows=rows,
        packing=True,
        max_length=64,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=LEARNING_RATE,
        max_grad_norm=0.0,
    )
    assert len(trainer.train_dataset) == 1
    assert ("in the forward" in trainer.patch_report["lm_head"].detail) is frozen
    before = snapshot(trainer.model)
    trainer.train()
    (log,) = training_logs(trainer)
    assert log["loss"] == pytest.approx(expected.item(), abs=1e-5)
    updates = {name: -LEARNING_RATE * gradient for name, gradient in gradients.items()}
    assert_updates_close(updates_since(before, trainer.model), updates, 1e-4)


def test_b82_head_sizes_groups_and_lengths(interpreted):
    """Each pair of them, output and gradients in fp16 against fp32 SDPA; and values of another size than queries."""
    found = interpreted["sizes"]
    assert len(found) == len(SIZES) * len(GROUPS) + len(UNEQUAL)
    lengths = {length for part in LENGTHS for length in part}
    assert lengths == {1, 15, 16, 17, 127, 129} and GROUPS == (1, 2, 4, 7)
    assert SIZES == (16, 24, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256) and (24, 16) in UNEQUAL
    for case, errors in found.items():
        assert len(errors) == 4 and max(errors) < 2e-3, case
