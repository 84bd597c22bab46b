"""Nothing outside the patched model and its trainer notices them, and nothing of them stays behind."""

import copy
import gc
import json
import pickle
import threading
import weakref
from pathlib import Path

import pytest
import torch
import trl
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

import unsloth_trl
from tests.numerics import (
    assert_updates_close,
    make_trainer,
    masked_rows,
    run_sft,
    snapshot,
    training_logs,
    updates_since,
)
from tests.tiny import lora_config, tiny_model
from unsloth_trl import PackedLayout, apply_patches
from unsloth_trl.data.collators import label_positions


PATCHED_TYPES = ["llama", "gemma2", "gpt_oss", "gemma4_text", "kimi_k25"]
IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(IDS)
PADDED[0, :5] = 0

SHORT = {"rows": masked_rows(8), "gradient_accumulation_steps": 1}  # 4 steps unpacked


@torch.no_grad()
def logits_of(model, **kwargs):
    return model(input_ids=IDS, **kwargs).logits


def state_of(model):
    """What a patch could leave in a model: attributes, hooks and attention implementations."""
    configs = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    modules = {}
    for name, module in model.named_modules():
        hooks = {k: dict(v) for k, v in vars(module).items() if k.startswith("_") and "hooks" in k}
        modules[name] = (type(module), sorted(vars(module)), hooks, module.__dict__.get("forward"))
    return [c._attn_implementation for c in configs], model.config.to_dict(), modules


@pytest.mark.parametrize("model_type", PATCHED_TYPES)
def test_remove_equals_never_applied(model_type):
    model = tiny_model(model_type)
    before, logits = state_of(model), logits_of(model)
    report = apply_patches(model)
    assert state_of(model) != before
    report.remove()
    report.remove()  # the second time does nothing
    assert state_of(model) == before
    assert torch.equal(logits_of(model), logits)
    assert "(removed)" in str(report)
    apply_patches(model)
    apply_patches(model).remove()  # patches of an earlier call are gone, too
    assert state_of(model) == before


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_remove_on_an_adapter_model(model_type):
    model = get_peft_model(tiny_model(model_type), lora_config(model_type, init_lora_weights=False))
    base = model.get_base_model()
    before, logits = state_of(base), logits_of(model)
    report = apply_patches(model)
    assert state_of(base) != before
    report.remove()
    assert state_of(base) == before and torch.equal(logits_of(model), logits)


def test_remove_under_a_later_wrapper():
    """Somebody wraps forward after us: `remove` cannot take itself out from inside, but it does nothing more."""
    model = tiny_model("llama")
    expected = logits_of(model)
    report = apply_patches(model)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    report.remove()
    assert torch.equal(logits_of(model), expected)


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "left"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_stock_trl_afterwards_equals_never_touched(model_type, packing, removed):
    config = {"packing": packing, "rows": masked_rows(14)}
    expected = run_sft(trl, model_type, **config)
    model = tiny_model(model_type)
    weights = copy.deepcopy(model.state_dict())
    ours = run_sft(unsloth_trl, None, model=model, **config)
    if removed:
        ours.trainer.patch_report.remove()
    model.load_state_dict(weights)
    actual = run_sft(trl, None, model=model, **config)
    assert actual.trainer.model is model
    if removed:
        assert actual.logs == expected.logs
        assert all(torch.equal(actual.updates[name], update) for name, update in expected.updates.items())
    else:
        assert_updates_close(actual.updates, expected.updates, 1e-4)
        assert [set(step) for step in actual.logs] == [set(step) for step in expected.logs]
        for a, e in zip(actual.logs, expected.logs, strict=True):
            assert a == pytest.approx(e, rel=1e-5)


def test_second_trainer_on_the_same_model():
    config = {"packing": True, "rows": masked_rows(14)}
    expected = run_sft(unsloth_trl, "llama", **config)
    model = tiny_model("llama")
    weights = copy.deepcopy(model.state_dict())
    first = run_sft(unsloth_trl, None, model=model, **config)
    model.load_state_dict(weights)
    second = run_sft(unsloth_trl, None, model=model, **config)
    assert first.trainer.patch_report.removed and not second.trainer.patch_report.removed
    assert second.logs == expected.logs == first.logs
    assert all(torch.equal(second.updates[name], update) for name, update in expected.updates.items())
    first.trainer.patch_report.remove()  # an old report leaves the new patches alone
    assert model.config._attn_implementation == "unsloth_trl"
    second.trainer.patch_report.remove()
    assert model.config._attn_implementation == "sdpa"


def packed_scores(model):
    layout = PackedLayout([5, 7, 4, 8])
    labels = IDS.view(1, -1).clone()
    labels[layout.position_ids == 0] = -100
    with torch.no_grad():
        return model(
            input_ids=IDS.view(1, -1),
            labels=labels,
            packed_layout=layout,
            label_positions=label_positions(labels),
            fused_lm_head=True,
        ).log_probs


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("model_type", PATCHED_TYPES)
def test_copies_use_their_own_weights(model_type, how):
    model = tiny_model(model_type)
    apply_patches(model)
    before = packed_scores(model)
    assert before.shape == (20,)
    twin = how(model)
    assert torch.equal(packed_scores(twin), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    changed = packed_scores(twin)
    assert (changed - before).abs().max() > 1e-2
    assert torch.equal(packed_scores(model), before)
    plain = tiny_model(model_type)
    plain.load_state_dict(twin.state_dict())
    apply_patches(plain)
    assert torch.equal(packed_scores(plain), changed)


class Turns(TrainerCallback):
    """Lets two trainers in two threads take turns, one micro-batch each."""

    def __init__(self, mine, other, order):
        self.mine, self.other, self.order = mine, other, order

    def _pass(self):
        self.order.append(id(self))
        self.other.release()
        assert self.mine.acquire(timeout=60)

    def on_train_begin(self, args, state, control, **kwargs):
        assert self.mine.acquire(timeout=60)

    def on_substep_end(self, args, state, control, **kwargs):
        self._pass()

    def on_step_end(self, args, state, control, **kwargs):
        self._pass()

    def on_train_end(self, args, state, control, **kwargs):
        self.other.release()


def test_interleaved_trainers_do_not_meet():
    """Two models of one class, micro-batch by micro-batch in turns, packed and unpacked: as each one alone."""
    settings = [
        {"packing": True, "rows": masked_rows(25)},
        {"packing": False, "rows": masked_rows(13, seed=8), "lora": True, "loss_type": "dft"},
    ]
    settings = [s | {"train_sampling_strategy": "sequential"} for s in settings]
    alone = [run_sft(unsloth_trl, "llama", **s) for s in settings]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    order, failures = [], []
    trainers = [make_trainer(unsloth_trl, "llama", **s) for s in settings]
    before = [snapshot(trainer.model) for trainer in trainers]
    for i, trainer in enumerate(trainers):
        trainer.add_callback(Turns(turns[i], turns[1 - i], order))

    def train(trainer):
        try:
            trainer.train()
        except BaseException as error:  # noqa: BLE001 - a thread would swallow it
            failures.append(error)
            [turn.release() for turn in turns]

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures, failures
    assert len(order) == 14 and all(a != b for a, b in zip(order, order[1:], strict=False))
    for trainer, start, expected in zip(trainers, before, alone, strict=True):
        assert training_logs(trainer) == expected.logs
        for name, update in updates_since(start, trainer.model).items():
            assert torch.equal(update, expected.updates[name]), name


@pytest.mark.parametrize(
    ("model_type", "tolerance"), [("llama", 0), ("mistral", 0), ("gemma2", 1e-5), ("gpt_oss", 1e-5)]
)
def test_another_model_with_the_same_config_object(model_type, tolerance):
    """
    transformers keeps the attention implementation in the config, so a model that shares the object is switched
    along. Its calls carry no layout and run as sdpa does, bit for bit; eager models run our eager attention.
    """
    model = tiny_model(model_type)
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    assert other.config is model.config
    masks = [None, PADDED]
    before = [logits_of(other, attention_mask=mask) for mask in masks]
    report = apply_patches(model)
    packed_scores(model)
    after = [logits_of(other, attention_mask=mask) for mask in masks]
    assert "forward" not in vars(other) and not other.get_decoder()._forward_pre_hooks
    for mask, a, b in zip(masks, after, before, strict=True):
        seen = ... if mask is None else mask.bool()
        assert (a - b)[seen].abs().max() <= tolerance
    report.remove()
    assert torch.equal(logits_of(other), before[0])


@pytest.mark.parametrize("model_type", PATCHED_TYPES)
def test_padded_forward_equals_the_unpatched_model(model_type):
    """Left-padded rows, with positions and without, in training mode and not; also after a packed call."""
    plain, model = tiny_model(model_type), tiny_model(model_type)
    apply_patches(model)
    packed_scores(model)
    positions = (PADDED.cumsum(-1) - 1).clamp(min=0)
    seen = PADDED.bool()
    for kwargs in ({"attention_mask": PADDED}, {"attention_mask": PADDED, "position_ids": positions}, {}):
        for mode in (True, False):
            expected, actual = (logits_of(m.train(mode), **kwargs) for m in (plain, model))
            selected = seen if "attention_mask" in kwargs else ...
            assert (actual - expected)[selected].abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.parametrize("model_type", ["gemma4_text", "llama", "gemma2"])
def test_logits_to_keep_equals_the_unpatched_model(model_type, keep):
    """Gemma 4 cuts the queries of layers that read earlier keys: fewer queries than keys, and no mask."""
    plain, model = tiny_model(model_type).eval(), tiny_model(model_type).eval()
    apply_patches(model)
    for mask in (None, PADDED):
        expected, actual = (logits_of(m, logits_to_keep=keep, attention_mask=mask) for m in (plain, model))
        assert expected.shape[1] == (keep or IDS.shape[1])
        tail = torch.ones_like(PADDED) if mask is None else PADDED
        seen = tail[:, -expected.shape[1] :].bool()
        assert (actual - expected)[seen].abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("model_type", PATCHED_TYPES)
def test_generate_equals_the_unpatched_model(model_type, cache):
    plain, model = tiny_model(model_type).eval(), tiny_model(model_type).eval()
    apply_patches(model)
    packed_scores(model)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected, actual = (m.generate(IDS, attention_mask=PADDED, **options) for m in (plain, model))
    assert torch.equal(actual.sequences, expected.sequences) and actual.sequences.shape == (2, 18)
    for a, e in zip(actual.logits, expected.logits, strict=True):
        assert (a - e).abs().max() <= 1e-5 * e.abs().max()


class ForwardInside(TrainerCallback):
    """Runs the model at a step's end, during evaluation and after it, beside an unpatched one."""

    def __init__(self, model_type):
        self.plain = tiny_model(model_type)
        self.errors = {}

    def compare(self, when, model):
        self.plain.load_state_dict(model.state_dict())
        for training in (True, False):
            mode = model.training
            expected = logits_of(self.plain.train(training), attention_mask=PADDED)
            actual = logits_of(model.train(training), attention_mask=PADDED)
            error = (actual - expected)[PADDED.bool()].abs().max() / expected.abs().max()
            self.errors[when, training] = max(self.errors.get((when, training), 0.0), error.item())
            model.train(mode)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.compare("step", model)

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.compare("prediction", model)

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        self.compare("evaluate", model)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "gemma4_text"])
def test_forward_from_a_callback_equals_the_unpatched_model(model_type):
    callback = ForwardInside(model_type)
    config = {"packing": True, "rows": masked_rows(14), "eval_rows": masked_rows(6, seed=3)}
    config |= {"eval_strategy": "steps", "eval_steps": 2}
    quiet = run_sft(unsloth_trl, model_type, **config)
    run = run_sft(unsloth_trl, model_type, trainer_kwargs={"callbacks": [callback]}, **config)
    callback.compare("after", run.trainer.model)
    assert {when for when, _ in callback.errors} == {"step", "prediction", "evaluate", "after"}
    assert max(callback.errors.values()) <= 1e-5, callback.errors
    assert run.logs == quiet.logs, "the extra calls must not change the training"


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "kimi_k25"])
def test_saved_adapter_in_plain_peft(model_type, tmp_path):
    run = run_sft(
        unsloth_trl,
        model_type,
        packing=True,
        lora=True,
        rows=masked_rows(14),
        save_strategy="epoch",
        output_dir=str(tmp_path / "run"),
    )
    run.trainer.save_model(str(tmp_path / "adapter"))
    saved = [*tmp_path.rglob("*.json")]
    assert {"adapter_config.json", "trainer_state.json"} <= {path.name for path in saved}
    for path in saved:
        assert "unsloth" not in path.read_text(), path
    loaded = PeftModel.from_pretrained(tiny_model(model_type), tmp_path / "adapter")
    expected, actual = logits_of(run.trainer.model.eval()), logits_of(loaded.eval())
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected - logits_of(tiny_model(model_type).eval())).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_saved_model_has_no_name_of_ours(model_type, tmp_path):
    model = tiny_model(model_type)
    apply_patches(model)
    model.save_pretrained(tmp_path / "direct")
    trainer = make_trainer(unsloth_trl, model_type, packing=True)
    trainer.save_model(str(tmp_path / "trainer"))
    for folder in ("direct", "trainer"):
        text = Path(tmp_path / folder / "config.json").read_text()
        assert "unsloth" not in text and json.loads(text)["model_type"] == model_type
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        assert loaded.config._attn_implementation in ("sdpa", "eager")
        expected = logits_of(tiny_model(model_type, attn_implementation="eager").eval())
        loaded.set_attn_implementation("eager")
        assert torch.equal(logits_of(loaded.eval()), expected)


def test_report_says_what_was_done():
    report = make_trainer(unsloth_trl, "gemma2", packing=True).patch_report
    text = str(report)
    assert text.splitlines()[0] == "unsloth_trl patches:"
    where = (
        "applied     attention on model: packed rows: eager over segments (soft-capping); other calls: sdpa or eager"
    )
    assert f"  {where} (was 'eager')" in text
    assert "  applied     lm_head on Gemma2ForCausalLM: log-probabilities at the labelled positions" in text
    assert "packed rows with their boundaries, labelled positions" in text
    report = make_trainer(unsloth_trl, "llama", lora=True).patch_report
    assert "  not applied attention: no batch is packed, so the model keeps its own attention" in str(report)
    assert report["lm_head"].applied and not report["attention"].applied
    with pytest.raises(KeyError, match="no patch named 'attn'; there are attention, "):
        report["attn"]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(report)
    report = make_trainer(unsloth_trl, "llama", patches="none").patch_report
    assert str(report) == "unsloth_trl patches:\n  not applied all: patches='none'"


def is_freed(reference):
    gc.collect()
    return reference() is None


def test_a_report_keeps_no_model_alive():
    """Neither the report nor the registry of patched models does."""
    model = tiny_model("llama")
    reference = weakref.ref(model)
    report = apply_patches(model)
    packed_scores(model)
    del model
    assert is_freed(reference)
    report.remove()
    assert report.removed


@pytest.mark.parametrize("library", [unsloth_trl, trl], ids=["ours", "trl"])
def test_a_trainer_frees_its_model(library):
    trainer = make_trainer(library, "llama", packing=True)
    reference = weakref.ref(trainer.model)
    del trainer
    assert is_freed(reference)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
def test_patches_none_is_trl(packing, lora):
    run = run_sft(unsloth_trl, "gemma2", packing=packing, lora=lora, patches="none")
    expected = run_sft(trl, "gemma2", packing=packing, lora=lora)
    assert run.logs == expected.logs
    assert all(torch.equal(run.updates[name], update) for name, update in expected.updates.items())
    base = run.trainer.accelerator.unwrap_model(run.trainer.model)
    base = base.get_base_model() if lora else base
    assert base.config._attn_implementation == "eager" and not base.get_decoder()._forward_pre_hooks
    assert type(run.trainer.data_collator) is type(expected.trainer.data_collator)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_resume_equals_uninterrupted(lora, tmp_path):
    config = {"packing": True, "lora": lora, "optim": "adamw_torch", "learning_rate": 1e-2, "adam_epsilon": 1e-3}
    config |= {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    whole = run_sft(unsloth_trl, "llama", **config)
    assert "unsloth" not in (tmp_path / "checkpoint-2" / "trainer_state.json").read_text()
    trainer = make_trainer(unsloth_trl, "llama", **config)
    before = snapshot(trainer.model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = training_logs(trainer)
    assert len(resumed) == trainer.state.global_step == 4
    assert resumed == whole.logs
    for name, update in updates_since(before, trainer.model).items():
        assert torch.equal(update, whole.updates[name]), name
