"""Our `SFTTrainer` beside TRL's: the same numbers under the same names, whatever the options."""

import copy
import warnings

import peft
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, DataCollatorForVisionLanguageModeling

import unsloth_trl
from tests.tiny import PAD, lora_config, randomize, tiny_model, tiny_tokenizer, tiny_vlm
from tests.trainers import runs
from unsloth_trl.data import PackedDataCollator


def other_model(model_type, **config):
    """A tiny model of a type that tests.tiny does not have."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **(sizes | config)), dtype=torch.float32
        )
        randomize(model, model_type)
    return model.train()


def unverified_model():
    """An architecture outside the verified table that could be packed."""
    return other_model("starcoder2")


# -- metrics


class OwnCollator(DataCollatorForLanguageModeling):
    """Trains the last token of a row only."""

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        last = batch["attention_mask"].sum(1, keepdim=True) - 1
        batch["labels"][torch.arange(batch["labels"].shape[1]) != last] = -100
        return batch


def test_a_users_collator_stays(tmp_path):
    own = OwnCollator(pad_token_id=PAD)
    ours, _ = runs.train_both(tmp_path, init=lambda: {"data_collator": own}, max_steps=3)
    assert ours.data_collator is own
    for name in ("attention", "lm_head", "collator"):
        assert not ours.patch_report[name].applied
        assert "your own data_collator (OwnCollator)" in ours.patch_report[name].detail


def test_a_users_collator_under_packing_is_refused_as_in_trl(tmp_path):
    with pytest.raises(ValueError, match="custom data collator is not supported when using padding-free"):
        runs.trainer(tmp_path, init={"data_collator": OwnCollator(pad_token_id=PAD)}, packing=True)


def test_a_flattening_collator_of_the_user_trains_as_in_trl(tmp_path):
    own = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)
    ours, _ = runs.train_both(tmp_path, init=lambda: {"data_collator": own}, max_steps=3)
    assert ours.data_collator is own and type(own) is DataCollatorForLanguageModeling


def test_vision_model(tmp_path):
    parts = tiny_vlm()

    def data():
        return Dataset.from_list(parts[2])

    ours, _ = runs.train_both(
        tmp_path,
        model=lambda: tiny_vlm()[0],
        data=data,
        init=lambda: {"processing_class": parts[1]},
        max_length=None,
        max_steps=3,
    )
    assert type(ours.data_collator) is DataCollatorForVisionLanguageModeling
    detail = ours.patch_report["collator"].detail
    assert detail == "the batches of DataCollatorForVisionLanguageModeling are used as they are"
    assert runs.log_of(ours)[0]["loss"] > 0


# -- adapters


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["peft_config", "PeftModel"])
def test_lora(tmp_path, packing, wrapped):
    def model():
        base = tiny_model("llama")
        torch.manual_seed(3)
        return peft.get_peft_model(base, lora_config("llama", init_lora_weights=False)) if wrapped else base

    def init():
        return {} if wrapped else {"peft_config": lora_config("llama", init_lora_weights=False)}

    ours, _ = runs.train_both(tmp_path, model=model, init=init, packing=packing, learning_rate=0.1)
    assert isinstance(ours.model, peft.PeftModel)
    assert ours.patch_report["lm_head"].applied


PROMPT_LEARNING = [
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
]
prompt_learning = pytest.mark.parametrize("config", PROMPT_LEARNING, ids=lambda c: c.peft_type.value)


@prompt_learning
def test_prompt_learning_unpacked(tmp_path, config):
    ours, _ = runs.train_both(
        tmp_path, init=lambda: {"peft_config": copy.deepcopy(config)}, max_steps=3, learning_rate=1.0
    )
    for name in ("attention", "lm_head", "collator"):
        assert f"{config.peft_type.value} moves every position" in ours.patch_report[name].detail
    assert type(ours.data_collator) is DataCollatorForLanguageModeling


@pytest.mark.parametrize(
    ("config", "fields"),
    [(config, {"packing": True}) for config in PROMPT_LEARNING]
    + [(PROMPT_LEARNING[0], {"padding_free": True, "max_length": None}), (PROMPT_LEARNING[0], {"eval_packing": True})],
    ids=lambda value: value.peft_type.value if isinstance(value, peft.PeftConfig) else next(iter(value)),
)
def test_prompt_learning_packed_is_an_error(tmp_path, config, fields):
    with pytest.raises(ValueError, match=f"packing with {config.peft_type.value} puts virtual tokens"):
        runs.trainer(tmp_path, init={"peft_config": copy.deepcopy(config)}, **fields)


# -- architectures outside the table


def as_path(tmp_path, model):
    folder = str(tmp_path / "model")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("by_path", [False, True], ids=["object", "path"])
def test_unverified_architecture_trains_unpacked(tmp_path, by_path):
    model = as_path(tmp_path, unverified_model()) if by_path else unverified_model()
    args = runs.config(tmp_path / "ours", packing=True, eval_packing=True)
    with pytest.warns(unsloth_trl.UnsupportedArchitectureWarning, match="'starcoder2'.* trains unpacked"):
        ours = unsloth_trl.SFTTrainer(model, args, train_dataset=runs.dataset(), processing_class=tiny_tokenizer())
    assert (ours.args.packing, ours.args.eval_packing, ours.padding_free) == (False, False, False)
    assert (args.packing, args.eval_packing) == (True, True), "the user's object is not ours to change"
    theirs = runs.trainer(tmp_path / "trl", trl.SFTTrainer, model=unverified_model(), packing=False)
    ours.train()
    theirs.train()
    runs.assert_logs_equal(runs.log_of(ours), runs.log_of(theirs))


@pytest.mark.parametrize("by_path", [False, True], ids=["object", "path"])
def test_unverified_architecture_strict(tmp_path, by_path, monkeypatch):
    model = as_path(tmp_path, unverified_model()) if by_path else unverified_model()

    def fail(*args, **kwargs):
        raise AssertionError("the weights were loaded first")

    monkeypatch.setattr(trl.trainer.sft_trainer, "create_model_from_path", fail)
    with pytest.raises(ValueError, match="'starcoder2' .*strict=True"):
        runs.trainer(tmp_path, model=model, packing=True, strict=True)


def test_unverified_architecture_allowed(tmp_path):
    pair = []
    for cls in (unsloth_trl.SFTTrainer, trl.SFTTrainer):
        fields = {"packing": True}
        if cls is unsloth_trl.SFTTrainer:
            with pytest.warns(unsloth_trl.UnsupportedArchitectureWarning, match="allow_unverified=True packs it"):
                trainer = runs.trainer(tmp_path, cls, model=unverified_model(), allow_unverified=True, **fields)
            assert trainer.args.packing and trainer.patch_report["attention"].applied
        else:
            trainer = runs.trainer(tmp_path, cls, model=unverified_model(), **fields)
        trainer.train()
        pair.append(runs.log_of(trainer))
    runs.assert_logs_equal(*pair)


# Falcon computes its attention itself; the layers of the others do not hand unknown keywords on.
@pytest.mark.parametrize("model_type", ["falcon", "nemotron", "stablelm"])
def test_an_architecture_that_loses_the_layout_is_an_error(tmp_path, model_type):
    """Allowed or not: packed rows without their boundaries must not train."""
    with pytest.warns(unsloth_trl.UnsupportedArchitectureWarning):
        trainer = runs.trainer(tmp_path, model=other_model(model_type), packing=True, allow_unverified=True)
    with pytest.raises(ValueError, match="packed_layout"):
        trainer.train()


def test_unverified_architecture_without_packing_is_silent(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", unsloth_trl.UnsupportedArchitectureWarning)
        runs.train_both(tmp_path, model=unverified_model, max_steps=2)
        runs.trainer(tmp_path, model=unverified_model(), packing=True, patches="none")


# -- arguments


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_config_of_trl_is_accepted(tmp_path, packing):
    args = runs.config(tmp_path, trl.SFTConfig, packing=packing)
    ours = unsloth_trl.SFTTrainer(
        tiny_model("llama"), args, train_dataset=runs.dataset(), processing_class=tiny_tokenizer()
    )
    assert ours.args is args
    assert ours.patch_report["attention"].applied is packing
    theirs = runs.trainer(tmp_path, trl.SFTTrainer, packing=packing)
    ours.train()
    theirs.train()
    runs.assert_logs_equal(runs.log_of(ours), runs.log_of(theirs))


def test_plain_training_arguments_are_accepted_as_in_trl(tmp_path):
    trainers = [
        cls(
            tiny_model("llama"),
            TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2, logging_steps=1),
            train_dataset=runs.dataset(),
            processing_class=tiny_tokenizer(),
        )
        for cls in (unsloth_trl.SFTTrainer, trl.SFTTrainer)
    ]
    assert all(isinstance(trainer.args, trl.SFTConfig) for trainer in trainers)
    for trainer in trainers:
        trainer.train()
    runs.assert_logs_equal(*map(runs.log_of, trainers))


def test_without_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = unsloth_trl.SFTTrainer(
        tiny_model("llama"), train_dataset=runs.dataset(), processing_class=tiny_tokenizer()
    )
    assert type(trainer.args) is unsloth_trl.SFTConfig
    assert trainer.args.output_dir == "-SFT"
    assert trainer.patch_report["lm_head"].applied


def test_positional_arguments_go_where_trl_puts_them(tmp_path):
    args, data, held_out, tokenizer = runs.config(tmp_path), runs.dataset(), runs.dataset(3, 1), tiny_tokenizer()
    trainer = unsloth_trl.SFTTrainer(tiny_model("llama"), args, None, data, held_out, tokenizer)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (24, 3)
    assert trainer.processing_class is tokenizer


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_users_args_are_not_changed(tmp_path, packing):
    """Beyond what TRL's own trainer writes into them."""
    changed = []
    for cls, config in ((unsloth_trl.SFTTrainer, unsloth_trl.SFTConfig), (trl.SFTTrainer, trl.SFTConfig)):
        args = runs.config(tmp_path, config, packing=packing)
        before = copy.deepcopy(args.__dict__)
        trainer = cls(tiny_model("llama"), args, train_dataset=runs.dataset(), processing_class=tiny_tokenizer())
        trainer.train()
        assert trainer.args is args
        changed.append({key for key, value in args.__dict__.items() if str(before.get(key)) != str(value)})
    assert changed[0] == changed[1]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_streaming_dataset(tmp_path, packing, kind):
    def data():
        if kind == "tokens":
            return runs.dataset().to_iterable_dataset()
        texts = [" ".join(f"w{i}" for i in range(9 + n, 14 + 2 * n)) for n in range(24)]
        return Dataset.from_dict({"text": texts}).to_iterable_dataset()

    ours, _ = runs.train_both(tmp_path, data=data, packing=packing, max_steps=2)
    batch = next(iter(ours.get_train_dataloader()))
    assert ("packed_layout" in batch) is packing and "label_positions" in batch
    if packing:
        assert batch["packed_layout"].num_segments >= 2


def test_model_given_as_a_path(tmp_path):
    folder = as_path(tmp_path, tiny_model("llama"))
    ours, theirs = runs.train_both(tmp_path, model=lambda: folder, packing=True, max_steps=2)
    objects, _ = runs.train_both(tmp_path, packing=True, max_steps=2)
    runs.assert_logs_equal(runs.log_of(ours), runs.log_of(objects))
    assert ours.processing_class.pad_token == "<pad>"


def test_a_conversation_trains_the_assistant_only(tmp_path):
    def data():
        turn = [
            {"role": "user", "content": "w10 w11 w12"},
            {"role": "assistant", "content": "w20 w21"},
            {"role": "user", "content": "w13"},
            {"role": "assistant", "content": "w22"},
        ]
        return Dataset.from_list([{"messages": turn}, {"messages": turn[:2]}] * 6)

    ours, _ = runs.train_both(tmp_path, data=data, assistant_only_loss=True, packing=True, max_steps=2)
    batch = next(iter(ours.get_train_dataloader()))
    decoded = ours.processing_class.decode(batch["labels"][batch["labels"] != -100])
    assert set(decoded.split()) == {"w20", "w21", "w22", "<eos>"}


# -- signature columns


class OtherColumns(unsloth_trl.SFTTrainer):
    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["input_ids", "labels", "weight"]


@pytest.mark.parametrize("cls", [unsloth_trl.SFTTrainer, OtherColumns])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_boundaries_reach_the_collator(tmp_path, cls, adapter):
    """B04: whatever a subclass thinks the columns are, the packed rows keep their boundaries."""
    init = {"eval_dataset": runs.dataset(9, seed=4)} | ({"peft_config": lora_config("llama")} if adapter else {})
    trainer = runs.trainer(tmp_path, cls, init=init, packing=True, per_device_train_batch_size=1)
    assert trainer.args.remove_unused_columns
    expected = sorted(tuple(lengths) for lengths in trainer.train_dataset["seq_lengths"])
    assert any(len(lengths) > 1 for lengths in expected)
    assert sorted(b["packed_layout"].seqlens for b in trainer.get_train_dataloader()) == expected
    lengths = [n for row in trainer.eval_dataset["seq_lengths"] for n in row]
    assert [n for b in trainer.get_eval_dataloader() for n in b["packed_layout"].seqlens] == lengths


# -- saving


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_resume_continues_the_run(tmp_path, packing):
    def run(cls, folder, resume=None, steps=4):
        trainer = runs.trainer(
            folder,
            cls,
            init={"peft_config": lora_config("llama")},
            packing=packing,
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            learning_rate=0.05,
            optim="adamw_torch",
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(unsloth_trl.SFTTrainer, tmp_path / "whole")
    resumed = run(unsloth_trl.SFTTrainer, tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"))
    theirs = run(trl.SFTTrainer, tmp_path / "trl", str(tmp_path / "whole" / "checkpoint-2"))
    for name, parameter in whole.model.named_parameters():
        other = dict(resumed.model.named_parameters())[name]
        assert torch.allclose(parameter, other, rtol=1e-5, atol=1e-6), name
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (whole, resumed, theirs)]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    logs = [[dict(entry) for entry in runs.log_of(trained)] for trained in (whole, resumed, theirs)]
    counts = [[entry.pop("num_tokens") for entry in entries if "num_tokens" in entry] for entries in logs]
    assert counts[1] == counts[0] != counts[2]  # TRL's begins at zero again
    runs.assert_logs_equal(*logs[1:])


def test_saved_adapter_is_plain_peft(tmp_path):
    trainer = runs.trainer(
        tmp_path, init={"peft_config": lora_config("llama")}, packing=True, learning_rate=0.5, max_steps=3
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    ids = torch.arange(3, 15)[None]
    trained = trainer.model.eval()(input_ids=ids).logits
    reloaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter").eval()(input_ids=ids).logits
    assert torch.allclose(trained, reloaded, atol=1e-5)
    assert (trained - tiny_model("llama").eval()(input_ids=ids).logits).abs().max() > 1e-2
    card = (tmp_path / "adapter" / "README.md").read_text() if (tmp_path / "adapter" / "README.md").exists() else ""
    assert str(tmp_path) not in card
    assert set(trainer.model.get_base_model().model_tags) >= {"trl", "sft", "unsloth_trl"}


# -- the report


def test_report_of_a_packed_run(tmp_path):
    trainer = runs.trainer(tmp_path, packing=True, accelerator_config={"non_blocking": True})
    assert str(trainer.patch_report).splitlines() == [
        "unsloth_trl patches:",
        "  applied     attention on model: packed rows: sdpa over segments (device cpu); other calls: sdpa or eager "
        "(was 'sdpa')",
        "  applied     lm_head on LlamaForCausalLM: log-probabilities at the labelled positions, which come with the "
        "batch; TRL's kernel",
        "  not applied lora: the model has no LoRA on a linear layer",
        "  not applied moe: the model has no stacked experts",
        "  not applied checkpointing: gradient_checkpointing=False",
        "  not applied compilation: compile_layers='auto' is off: no measured gain on cpu",
        "  not applied cuda_graphs: cuda_graphs='auto' is off: no CUDA device",
        "  applied     collator on data_collator: packed rows with their boundaries, labelled positions",
        "  applied     metrics on log: on the device until they are logged",
        "  applied     nan filter on training_step: on the device",
    ]
    assert isinstance(trainer.data_collator, PackedDataCollator)


def test_report_of_a_padded_run(tmp_path):
    report = runs.trainer(tmp_path, logging_nan_inf_filter=False).patch_report
    assert "  not applied attention: no batch is packed, so the model keeps its own attention" in str(report)
    assert report["lm_head"].applied and report["collator"].detail == "padded rows, labelled positions"
    with pytest.raises(KeyError, match="nan filter"):
        report["nan filter"]


def test_patches_none_is_trl(tmp_path):
    model = tiny_model("llama")
    attention = model.config._attn_implementation
    trainer = runs.trainer(tmp_path, model=model, packing=True, patches="none")
    assert str(trainer.patch_report).splitlines()[1:] == ["  not applied all: patches='none'"]
    assert type(trainer.data_collator) is DataCollatorForLanguageModeling
    assert model.config._attn_implementation == attention
    theirs = runs.trainer(tmp_path, trl.SFTTrainer, packing=True)
    trainer.train()
    theirs.train()
    runs.assert_logs_equal(runs.log_of(trainer), runs.log_of(theirs), rel=1e-6)


def test_a_second_trainer_on_the_same_model(tmp_path):
    model = tiny_model("llama")
    first = runs.trainer(tmp_path, model=model, packing=True, max_steps=1)
    first.train()
    second = runs.trainer(tmp_path, model=model, packing=False, max_steps=1)
    assert first.patch_report.removed and not second.patch_report.removed
    second.train()
    third = runs.trainer(tmp_path, trl.SFTTrainer, model=model, packing=True, max_steps=1)
    third.train()
    assert runs.log_of(third)[0]["loss"] > 0


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_copy_of_a_trained_model_has_its_own_weights(tmp_path, lora):
    """TRL's fused head, which stays on the model, finds the model's own forward where a copy does not reach."""
    init = {"peft_config": lora_config("llama")} if lora else {}
    trainer = runs.trainer(tmp_path / "first", init=init, max_steps=1)
    trainer.train()
    model, ids = trainer.model.eval(), torch.tensor([[5, 9, 11, 4]])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert torch.equal(twin(input_ids=ids).logits, before)
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
        moved = twin(input_ids=ids).logits
        assert (moved - before).norm() > 0.01 * before.norm() and torch.equal(model(input_ids=ids).logits, before)
    # a trainer on the copy trains and evaluates the copy
    second = runs.trainer(tmp_path / "second", model=twin, max_steps=2, learning_rate=0.1)
    second.train()
    twin.eval()
    with torch.no_grad():
        assert not torch.equal(twin(input_ids=ids).logits, moved)
        assert torch.equal(model.eval()(input_ids=ids).logits, before)
    loss = second.evaluate(second.train_dataset)["eval_loss"]
    fresh = runs.trainer(tmp_path / "third", model=twin)
    assert loss == pytest.approx(fresh.evaluate(fresh.train_dataset)["eval_loss"], rel=1e-5)
