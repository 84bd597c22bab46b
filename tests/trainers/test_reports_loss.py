"""What users reported about the loss and its metrics (B14 to B17, B86, B88), each at the level of the trainer."""

import math

import pytest
import torch
import trl
from datasets import Dataset
from transformers import LlamaForCausalLM

import unsloth_trl
from tests.tiny import lora_config, tiny_model
from tests.trainers import runs
from tests.trainers.bigram import bigram_model


class NoKeywords(LlamaForCausalLM):
    """A model whose forward takes no loss keywords."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        packed_layout=None,
    ):
        layout = {} if packed_layout is None else {"packed_layout": packed_layout}
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            **layout,
        )


SHORT, LONG = [10, 11, 12], [20, 21, 22, 23, 24, 25, 26]
LOSSES = {10: (11, 4.0), 11: (12, 2.0)} | {t: (t + 1, 1.0) for t in LONG[:5]} | {25: (26, 3.0)}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("keywords", [True, False], ids=["kwargs", "no kwargs"])
def test_b14_loss_does_not_depend_on_accumulation(tmp_path, keywords, packing):
    """Micro-batches [4, 2] and [1, 1, 1, 1, 1, 3]: 1.75 in any cut; 2.1667 is a mean of means, 4.3333 a sum."""
    logged = {}
    for batch_size, accumulation in ((1, 2), (2, 1)):
        model = bigram_model(LOSSES)
        if not keywords:
            model.__class__ = NoKeywords
        trainer = runs.trainer(
            tmp_path,
            model=model,
            data=Dataset.from_dict({"input_ids": [SHORT, LONG]}),
            packing=packing,
            max_length=7,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
        )
        assert len(trainer.train_dataset) == 2
        trainer.train()
        logged[batch_size] = trainer.state.log_history[0]["loss"]
    assert logged == {1: pytest.approx(1.75, abs=1e-5), 2: pytest.approx(1.75, abs=1e-5)}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_b15_each_window_gets_its_own_count(tmp_path, packing):
    """Five micro-batches at two a window: the last window has one."""
    seen = []

    class Spy(unsloth_trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append((inputs["label_positions"].numel(), int(num_items_in_batch)))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = runs.trainer(
        tmp_path,
        Spy,
        data=Dataset.from_list([{"input_ids": list(range(3, 3 + n))} for n in (12, 11, 10, 8, 7)]),
        packing=packing,
        max_length=12,
        per_device_train_batch_size=1,
        dataloader_drop_last=False,
        max_steps=-1,
        num_train_epochs=1,
    )
    trainer.train()
    labels = [count for count, _ in seen]
    assert sorted(labels) == [6, 7, 9, 10, 11]
    windows = [labels[0] + labels[1], labels[2] + labels[3], labels[4]]
    assert [items for _, items in seen] == [windows[0]] * 2 + [windows[1]] * 2 + [windows[2]]
    assert trainer.state.global_step == 3


def test_b15_packed_rows_count_their_labels_and_not_their_boundaries(tmp_path):
    seen = []

    class Spy(unsloth_trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append((inputs["packed_layout"].seqlens, int(num_items_in_batch)))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer = runs.trainer(tmp_path, Spy, packing=True, max_steps=1)
    trainer.train()
    first, second = seen
    assert len(first[0]) > 2
    assert first[1] == second[1] == sum(n - 1 for n in (*first[0], *second[0]))


SWITCHES = [
    {"patches": "none"},
    {},
    {"packed_metadata": False},
    {"attention_backend": "eager"},
    {"lean_lora": False},
]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_b17_twenty_steps_equal_trl(tmp_path, packing):
    """Loss and gradient norm of each step, with all off, all on, and one off that does something on the CPU."""

    def curve(cls, **fields):
        trainer = runs.trainer(
            tmp_path,
            cls,
            init={"peft_config": lora_config("llama")},
            packing=packing,
            max_steps=20,
            gradient_accumulation_steps=4,
            per_device_train_batch_size=1,
            **fields,
        )
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [entry["loss"] for entry in log], [entry["grad_norm"] for entry in log]

    losses, norms = curve(trl.SFTTrainer)
    assert len(losses) == 20 and losses[-1] < losses[0]
    for switches in SWITCHES if packing else SWITCHES[1:2]:
        tolerance = 1e-6 if switches == {"patches": "none"} else 1e-4
        ours = curve(unsloth_trl.SFTTrainer, **switches)
        assert ours[0] == pytest.approx(losses, rel=tolerance), switches
        assert ours[1] == pytest.approx(norms, rel=10 * tolerance), switches


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_b86_metrics_and_logits_with_the_fused_head(tmp_path, packing):
    """The metrics are measured, and evaluation produces logits when somebody asks for them."""
    row = [10, 11, 12, 13]
    model = bigram_model({10: (11, 0.1), 11: (12, 6.0), 12: (13, 0.1)})
    expected = torch.log_softmax(model(torch.tensor([row])).logits.double(), -1)[0]
    entropy = -(expected.exp() * expected).sum(-1)[:3].mean().item()
    shapes = []

    def compute_metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {"finite": float(math.isfinite(prediction.predictions.sum()))}

    data = Dataset.from_dict({"input_ids": [row, row]})
    trainer = runs.trainer(
        tmp_path,
        model=model,
        data=data,
        init={"eval_dataset": data, "compute_metrics": compute_metrics},
        packing=packing,
        gradient_accumulation_steps=1,
        max_length=8,
        max_steps=1,
    )
    metrics = trainer.evaluate()
    assert shapes == [(1, 8, 128) if packing else (2, 4, 128)] and metrics["eval_finite"] == 1.0
    trainer.train()
    trained = next(entry for entry in trainer.state.log_history if "loss" in entry)
    for log, prefix in ((metrics, "eval_"), (trained, "")):
        assert log[f"{prefix}entropy"] == pytest.approx(entropy, rel=1e-4)
        assert log[f"{prefix}mean_token_accuracy"] == pytest.approx(2 / 3)
        assert log[f"{prefix}loss"] == pytest.approx(6.2 / 3, rel=1e-4)


ENTROPIES = [2.0, 2.2, 1.8, 1.5, 1.0, 1.3]


def entropy_trainer(cls, tmp_path, rows, labels, packing):
    model = bigram_model({}, {10 + i: entropy for i, entropy in enumerate(ENTROPIES)})
    return runs.trainer(
        tmp_path,
        cls,
        model=model,
        data=Dataset.from_dict({"input_ids": rows, "labels": labels}),
        packing=packing,
        max_length=32,
        gradient_accumulation_steps=1,
        max_steps=1,
    )


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("cls", [unsloth_trl.SFTTrainer, trl.SFTTrainer])
def test_b88_entropy_where_labels_are_predicted(tmp_path, cls, packing):
    """Entropies 2.0, 2.2, 1.8, 1.5, 1.0, 1.3 with labels on the last three: the mean of 1.8, 1.5 and 1.0."""
    ids = [10, 11, 12, 13, 14, 15]
    labels = [-100, -100, -100, 13, 14, 15]
    trainer = entropy_trainer(cls, tmp_path, [ids, ids], [labels, labels], packing)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["entropy"] == pytest.approx(1.43333, abs=1e-4)
    assert log["mean_token_accuracy"] == 0.0  # the likeliest token is always 3


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("cls", [unsloth_trl.SFTTrainer, trl.SFTTrainer])
def test_b88_boundaries_are_left_out(tmp_path, cls, packing):
    """The end of one sample predicts nothing of the next, and accuracy is over the same tokens as entropy."""
    rows = [[10, 3, 11], [12, 13, 3, 14]]  # token 3 is what is predicted after 10 to 15
    labels = [[10, 3, 11], [-100, -100, 3, 14]]
    trainer = entropy_trainer(cls, tmp_path, rows, labels, packing)
    with torch.no_grad():
        after_3 = torch.log_softmax(trainer.model(torch.tensor([[3]])).logits[0, 0].double(), -1)
        entropy_of_3 = -(after_3.exp() * after_3).sum().item()
    trainer.train()
    log = trainer.state.log_history[0]
    # predicted: 3 after 10, 11 after 3; 3 after 13, 14 after 3
    assert log["entropy"] == pytest.approx((2.0 + entropy_of_3 + 1.5 + entropy_of_3) / 4, abs=1e-4)
    assert log["mean_token_accuracy"] == pytest.approx(2 / 4)
    assert log["num_tokens"] == 7


def test_the_bigram_model_is_what_it_says():
    model = bigram_model({10: (11, 1.0), 11: (12, 3.0)}, {20: 2.0, 21: 1.0})
    log_probs = torch.log_softmax(model(torch.tensor([[10, 11, 20, 21]])).logits.double(), -1)[0]
    assert [log_probs[0, 11].item(), log_probs[1, 12].item()] == pytest.approx([-1, -3], abs=1e-5)
    assert (-(log_probs.exp() * log_probs).sum(-1))[2:].tolist() == pytest.approx([2, 1], abs=1e-5)
    assert log_probs[2:].argmax(-1).tolist() == [3, 3]
    assert tiny_model("llama").config.rms_norm_eps > 0
