"""What users reported about packing (B01 to B13), each at the level of the trainer."""

import pytest
import torch
import trl
from datasets import Dataset
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import unsloth_trl
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers import runs
from tests.trainers.bigram import bigram_model
from unsloth_trl import PackedLayout


def samples(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


def alone(model, ids):
    """Logits of one sample in a row of its own."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def packed_trainer(tmp_path, model, rows, max_length, **fields):
    """A trainer whose packed rows hold exactly the given samples."""
    data = Dataset.from_list([{"input_ids": ids} for ids in rows])
    return runs.trainer(
        tmp_path,
        model=model,
        data=data,
        packing=True,
        max_length=max_length,
        per_device_train_batch_size=len(rows),
        dataloader_drop_last=False,
        **fields,
    )


def train_batch(trainer):
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def segments(batch):
    ends = batch["packed_layout"].cu_seqlens.tolist()
    return [batch["input_ids"][0, a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]


def without_metadata(batch):
    return {key: value for key, value in batch.items() if key not in ("labels", "label_positions")}


MODELS = ["llama", "mistral", "gemma2", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("model_type", MODELS)
def test_b01_samples_of_a_row_do_not_see_each_other(tmp_path, model_type):
    trainer = packed_trainer(tmp_path, tiny_model(model_type), samples(7, 9), max_length=16)
    batch = train_batch(trainer)
    assert sorted(map(len, segments(batch))) == [7, 9]
    trainer.model.eval()
    expected = torch.cat([alone(tiny_model(model_type).eval(), ids) for ids in segments(batch)])
    logits = trainer.model(**without_metadata(batch)).logits[0]
    assert (logits - expected).abs().max() < 1e-4


def test_b01_no_gradient_crosses_the_boundary(tmp_path):
    trainer = packed_trainer(tmp_path, tiny_model("llama"), samples(7, 9), max_length=16)
    batch = train_batch(trainer)
    first = batch["packed_layout"].seqlens[0]
    embeddings = trainer.model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    batch["labels"][:, :first] = -100
    batch.pop("label_positions")
    outputs = trainer.model(inputs_embeds=embeddings, fused_lm_head=True, **batch)
    (gradient,) = torch.autograd.grad(-outputs.log_probs.sum(), embeddings)
    assert not gradient[0, :first].any(), "the loss of the second sample moves the first one"
    assert gradient[0, first:].abs().max() > 1e-3


@pytest.mark.parametrize("extra", ["nothing", "ones mask", "use_cache", "train mode"])
def test_b02_whatever_else_is_in_the_batch(tmp_path, extra):
    """All are the same rows, or an error; never a plain causal row."""
    trainer = packed_trainer(tmp_path, tiny_model("llama"), samples(7, 9), max_length=16)
    batch = without_metadata(train_batch(trainer))
    expected = torch.cat([alone(tiny_model("llama").eval(), ids) for ids in segments(batch)])
    trainer.model.train(extra == "train mode")
    if extra == "ones mask":
        batch["attention_mask"] = torch.ones(1, 16, dtype=torch.int64)
    if extra == "use_cache":
        batch["use_cache"] = True
    assert (trainer.model(**batch).logits[0] - expected).abs().max() < 1e-4
    plain = tiny_model("llama").eval()(input_ids=batch["input_ids"]).logits[0]
    assert (plain - expected).abs().max() > 0.1, "contamination would show"


def test_b03_several_packed_rows_in_a_batch_and_the_next_batch(tmp_path):
    """Two rows with different splits; then the same tokens split otherwise, through the same model."""
    trainer = packed_trainer(tmp_path, tiny_model("llama"), samples(7, 9), max_length=16)
    trainer.model.eval()
    reference = tiny_model("llama").eval()
    for splits, boundaries in (
        ([[7, 9], [5, 11]], [0, 7, 16, 21, 32]),
        ([[8, 8], [3, 13]], [0, 8, 16, 19, 32]),
    ):
        rows = [{"input_ids": ids, "seq_lengths": s} for ids, s in zip(samples(16, 16), splits, strict=True)]
        batch = trainer._prepare_inputs(trainer.data_collator(rows))
        assert batch["packed_layout"].cu_seqlens.tolist() == boundaries
        expected = torch.cat([alone(reference, ids) for ids in segments(batch)])
        assert (trainer.model(**without_metadata(batch)).logits[0] - expected).abs().max() < 1e-4


def test_b08_padding_does_not_change_the_real_tokens(tmp_path):
    """Gemma 3, 13 tokens to 16."""
    logits, losses = [], []
    for multiple in (None, 8):
        trainer = packed_trainer(
            tmp_path, tiny_model("gemma3_text"), samples(7, 6), max_length=13, pad_to_multiple_of=multiple, max_steps=1
        )
        batch = train_batch(trainer)
        length = 13 if multiple is None else 16
        layout = batch["packed_layout"]
        assert {batch[k].shape for k in ("input_ids", "labels", "position_ids")} == {(1, length)}
        assert layout.cu_seqlens[-1] == length and layout.num_segments == (2 if multiple is None else 3)
        assert (batch["labels"][0, 13:] == -100).all()
        logits.append(trainer.model.eval()(**without_metadata(batch)).logits[0, :13])
        trainer.train()
        losses.append(trainer.state.log_history[0])
    assert torch.allclose(*logits, atol=1e-6, rtol=1e-6)
    assert losses[1]["loss"] == pytest.approx(losses[0]["loss"], rel=1e-6)
    assert losses[1]["grad_norm"] == pytest.approx(losses[0]["grad_norm"], rel=1e-5)


def test_b09_positions_with_several_axes_are_no_boundaries():
    positions = torch.arange(256).expand(3, 1, 256)
    with pytest.raises(ValueError, match="2-D positions"):
        PackedLayout.from_position_ids(positions)
    assert PackedLayout.from_position_ids(positions[0]).cu_seqlens.tolist() == [0, 256]


def test_b09_a_layout_of_another_batch_is_refused(tmp_path):
    trainer = packed_trainer(tmp_path, tiny_model("llama"), samples(7, 9), max_length=16)
    batch = without_metadata(train_batch(trainer))
    batch["packed_layout"] = PackedLayout([7, 8])
    with pytest.raises(ValueError, match="packed_layout describes 15 tokens but the attention got 16"):
        trainer.model(**batch | {"position_ids": torch.arange(16)[None]})


@pytest.mark.parametrize("fields", [{"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_b10_a_model_with_state_is_refused(tmp_path, fields):
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    folder = tmp_path / "model"
    AutoConfig.for_model("qwen3_next", **sizes).save_pretrained(folder)  # no weights: refused before they are read
    for model in (tiny_model("kimi_linear"), str(folder)):
        for allowed in (False, True):
            with pytest.raises(
                ValueError, match=r"packing=True is not possible for model_type '(kimi_linear|qwen3_next)'"
            ):
                runs.trainer(tmp_path, model=model, allow_unverified=allowed, **fields)


def test_b10_a_model_with_state_trains_unpacked(tmp_path):
    runs.train_both(tmp_path, model=lambda: tiny_model("kimi_linear"), max_steps=2)


@pytest.mark.parametrize("train_packing", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_b11_eval_loss_does_not_depend_on_eval_packing(tmp_path, model_type, train_packing):
    results = []
    for eval_packing in (False, True):
        trainer = runs.trainer(
            tmp_path,
            model=tiny_model(model_type),
            init={"eval_dataset": runs.dataset(6, seed=2)},
            packing=train_packing,
            eval_packing=eval_packing,
            per_device_eval_batch_size=6,
        )
        assert ("seq_lengths" in trainer.eval_dataset.column_names) is eval_packing
        results.append(trainer.evaluate())
    for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert results[1][key] == pytest.approx(results[0][key], abs=1e-5)


@pytest.mark.parametrize("lengths", [(2048,), (2040, 8)], ids=["one sample", "two samples"])
def test_b12_no_mask_over_all_tokens(tmp_path, lengths, monkeypatch):
    model = tiny_model("llama", max_position_embeddings=2048)
    trainer = packed_trainer(tmp_path, model, samples(*lengths), max_length=2048, max_steps=1)
    trainer.args.gradient_accumulation_steps = 1
    masks = []
    sdpa = F.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        masks.append(None if attn_mask is None else attn_mask.numel())
        assert kwargs["is_causal"]
        return sdpa(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    largest = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: largest.append(kwargs["attention_mask"].numel()), with_kwargs=True
        )
    trainer.train()
    assert masks and set(masks) == {None}
    assert set(largest) == {1}, "the placeholder that stops transformers from building a mask"
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["grad_norm"]))


def test_b13_the_loss_is_the_mean_over_tokens(tmp_path):
    """Losses [1]*7 and [3]*2: 13/9 packed and unpacked, where a mean of the samples' means would be 2."""
    first, second = list(range(10, 18)), list(range(30, 33))
    losses = {t: (t + 1, 1.0) for t in first[:-1]} | {t: (t + 1, 3.0) for t in second[:-1]}
    logged = {}
    for packing in (False, True):
        for cls in (unsloth_trl.SFTTrainer, trl.SFTTrainer):
            trainer = runs.trainer(
                tmp_path,
                cls,
                model=bigram_model(losses),
                data=Dataset.from_dict({"input_ids": [first, second]}),
                packing=packing,
                max_length=16,
                gradient_accumulation_steps=1,
                max_steps=1,
            )
            trainer.train()
            logged[cls, packing] = trainer.state.log_history[0]["loss"]
    assert logged == {key: pytest.approx(13 / 9, abs=1e-6) for key in logged}
    assert 13 / 9 != pytest.approx(2.0, rel=0.1)


def test_padding_free_rows_are_separate_too(tmp_path):
    model = tiny_model("llama")
    rows = samples(7, 9)
    trainer = runs.trainer(
        tmp_path,
        model=model,
        data=Dataset.from_list([{"input_ids": ids} for ids in rows]),
        padding_free=True,
        max_length=None,
    )
    batch = train_batch(trainer)
    expected = torch.cat([alone(tiny_model("llama").eval(), ids) for ids in segments(batch)])
    assert sorted(batch["packed_layout"].seqlens) == [7, 9]
    assert (model.eval()(**without_metadata(batch)).logits[0] - expected).abs().max() < 1e-4


def test_the_end_of_a_sample_is_trained_and_its_start_is_not(tmp_path):
    texts = ["w20 w21 w22", "w30 w31"]
    tokenizer = tiny_tokenizer()
    trainer = runs.trainer(
        tmp_path, data=Dataset.from_dict({"text": texts}), packing=True, init={"processing_class": tokenizer}
    )
    batch = train_batch(trainer)
    decoded = [tokenizer.decode(ids) for ids in segments(batch)]
    assert sorted(decoded) == ["w20 w21 w22<eos>", "w30 w31<eos>"] or sorted(decoded) == [
        "w20 w21 w22 <eos>",
        "w30 w31 <eos>",
    ]


def test_auto_model_classes_stay_untouched(tmp_path):
    """Another model in the same process keeps its own attention and forward."""
    other = tiny_model("llama")
    packed_trainer(tmp_path, tiny_model("llama"), samples(7, 9), max_length=16)
    assert other.config._attn_implementation == "sdpa" and "forward" not in vars(other)
    assert AutoModelForCausalLM.from_config(other.config).config._attn_implementation == "sdpa"
