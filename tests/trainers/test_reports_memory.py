"""What users reported about memory (B85, B87), each at the level of the trainer. Nothing here needs a GPU."""

import gc
import weakref

import numpy as np
import pytest
import torch

from tests.largest import LargestTensor
from tests.tiny import tiny_model
from tests.trainers import runs


VOCAB = 32_000


def evaluating(tmp_path, n, packing, **init):
    model = tiny_model("llama", vocab_size=VOCAB, tie_word_embeddings=True)
    return runs.trainer(
        tmp_path,
        model=model,
        init={"eval_dataset": runs.dataset(n, seed=3, low=8, high=8), **init},
        packing=packing,
        per_device_eval_batch_size=4,
        max_length=8,
    )


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_b85_evaluation_keeps_no_logits(tmp_path, packing):
    """V = 32000: no tensor grows with the number of evaluated samples, none has (samples, tokens, V) elements."""
    weights = VOCAB * 64
    peaks = []
    for n in (40, 200):
        trainer = evaluating(tmp_path, n, packing)
        with LargestTensor() as largest:
            metrics = trainer.evaluate()
        assert metrics["eval_loss"] > 0
        peaks.append(largest.numel)
    assert peaks[0] == peaks[1] <= weights
    assert peaks[1] < 200 * 8 * VOCAB / 10


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_b85_only_what_is_preprocessed_is_kept(tmp_path, packing):
    kept = []

    def compute_metrics(prediction):
        kept.append((prediction.predictions.shape, prediction.predictions.dtype))
        return {}

    trainer = evaluating(
        tmp_path,
        40,
        packing,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    with LargestTensor() as largest:
        trainer.evaluate()
    shape, dtype = kept[0]
    assert len(shape) == 2 and np.prod(shape) == 40 * 8 and dtype == np.int64
    assert largest.numel <= max(4 * 8 * VOCAB, VOCAB * 64), "one batch of logits at a time"


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_training_builds_no_logits_of_prompts(tmp_path, packing):
    """64 tokens of which 3 are trained, in fp32 on the CPU: the head runs over 3 rows."""
    rows = [{"input_ids": list(range(3, 67)), "labels": [-100] * 61 + [64, 65, 66]} for _ in range(4)]
    trainer = runs.trainer(
        tmp_path,
        model=tiny_model("llama", vocab_size=VOCAB),
        data=runs.Dataset.from_list(rows),
        packing=packing,
        max_length=64,
        max_steps=1,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=1,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = trainer._prepare_inputs(batch)
    with torch.no_grad(), LargestTensor() as largest:
        trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(3))
    # fp32 copies of the head's chunks are allowed; 64 rows of logits are not
    assert largest.numel <= VOCAB * 64 < 64 * VOCAB + 1
    shapes = []
    handle = trainer.model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    trainer.train()
    handle.remove()
    assert not shapes, "the head's own forward would build logits for every token"


def test_b87_nothing_grows_with_the_number_of_split_patterns(tmp_path):
    """500 batches with different splits through one model; afterwards only the live batch holds tensors."""
    trainer = runs.trainer(tmp_path, packing=True)
    trainer.model.eval()
    generator = torch.Generator().manual_seed(0)
    layouts, results, kept = [], {}, {}

    def pattern():
        cuts = torch.randperm(31, generator=generator)[: int(torch.randint(1, 8, (1,), generator=generator))] + 1
        edges = [0, *sorted(cuts.tolist()), 32]
        return [b - a for a, b in zip(edges[:-1], edges[1:], strict=True)]

    ids = list(range(3, 35))

    def loss(splits):
        batch = trainer._prepare_inputs(trainer.data_collator([{"input_ids": ids, "seq_lengths": splits}]))
        layouts.append(weakref.ref(batch["packed_layout"]))
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, batch).item()

    def count():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    first = pattern()
    before_loss = loss(first)
    trainer._device_metrics.drain("eval")
    before = count()
    for _ in range(500):
        splits = pattern()
        results[tuple(splits)] = loss(splits)
        trainer._device_metrics.drain("eval")
    assert len(results) > 400 and len({round(v, 4) for v in results.values()}) > 300
    assert count() <= before
    assert not [ref for ref in layouts if ref() is not None], "a layout outlived its batch"
    # the same answer after all the others have been through
    assert loss(first) == pytest.approx(before_loss, abs=1e-7)
    for splits in list(results)[:5]:
        kept[splits] = loss(list(splits))
    assert kept == {splits: pytest.approx(results[splits], abs=1e-7) for splits in kept}


def test_b87_a_trainer_that_is_gone_leaves_its_model_free(tmp_path):
    model = tiny_model("llama")
    trainer = runs.trainer(tmp_path, model=model, packing=True, max_steps=2)
    trainer.train()
    watch = weakref.ref(model)
    report = trainer.patch_report
    del trainer, model
    gc.collect()
    assert watch() is None
    report.remove()  # with nothing to remove it from


def test_metrics_on_the_device_are_drained_at_each_log_line(tmp_path):
    """Bounded by the micro-batches between two log lines, also where evaluation logs in between."""
    sizes = []

    class Watch(runs.unsloth_trl.SFTTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            sizes.append(len(self._device_metrics._rows["train"]))
            return loss

    trainer = runs.trainer(
        tmp_path,
        Watch,
        init={"eval_dataset": runs.dataset(4, seed=3)},
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        max_steps=12,
    )
    trainer.train()
    assert len(sizes) == 24 and max(sizes) <= 4
    assert trainer._device_metrics._rows == {"train": [], "eval": []}
