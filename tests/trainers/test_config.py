import copy
import dataclasses
import logging
import pickle
import types
import typing

import pytest
import torch
import trl
import yaml

import unsloth_trl
from tests.tiny import tiny_model
from tests.trainers import cards, runs
from unsloth_trl.config import PatchArguments
from unsloth_trl.patches.config import PatchConfig


OURS = {
    "patches": "none",
    "attention_backend": "sdpa",
    "packed_metadata": False,
    "lean_lora": False,
    "frozen_head": False,
    "moe_backend": "native_torch",
    "split_lora": False,
    "checkpoint_policy": "offload",
    "max_pinned_gb": 2.5,
    "staging_buffers": 1,
    "compile_layers": "on",
    "cuda_graphs": "on",
    "strict": True,
    "allow_unverified": True,
    "save_on_interrupt": True,
}
CPU = {"use_cpu": True, "bf16": False}


def parse(*arguments):
    return trl.TrlParser(unsloth_trl.SFTConfig).parse_args_and_config(list(arguments))


def test_defaults():
    args = unsloth_trl.SFTConfig("out", **CPU)
    assert {name: getattr(args, name) for name in OURS} == {
        "patches": "auto",
        "attention_backend": "auto",
        "packed_metadata": True,
        "lean_lora": True,
        "frozen_head": True,
        "moe_backend": None,
        "split_lora": True,
        "checkpoint_policy": "auto",
        "max_pinned_gb": None,
        "staging_buffers": 2,
        "compile_layers": "auto",
        "cuda_graphs": "auto",
        "strict": False,
        "allow_unverified": False,
        "save_on_interrupt": False,
    }


def test_the_test_knows_every_field():
    assert {field.name for field in dataclasses.fields(PatchArguments)} == OURS.keys()


@pytest.mark.parametrize("name", list(OURS))
def test_every_field_from_yaml(tmp_path, name):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"output_dir": "from-yaml", name: OURS[name], **CPU, "max_length": 77}))
    (args,) = parse("--config", str(path))
    assert type(args) is unsloth_trl.SFTConfig
    assert getattr(args, name) == OURS[name] and type(getattr(args, name)) is type(OURS[name])
    assert (args.output_dir, args.max_length) == ("from-yaml", 77)


@pytest.mark.parametrize("name", list(OURS))
def test_every_field_from_the_command_line(name):
    (args,) = parse(f"--{name}", str(OURS[name]), "--output_dir", "out", "--use_cpu", "--bf16", "false")
    assert getattr(args, name) == OURS[name] and type(getattr(args, name)) is type(OURS[name])


def test_a_flag_without_value_and_its_negation():
    (args,) = parse("--output_dir", "out", "--use_cpu", "--strict", "--no_packed_metadata")
    assert args.strict is True and args.packed_metadata is False


def test_the_command_line_wins_over_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"output_dir": "out", "attention_backend": "sdpa", "strict": True, **CPU}))
    (args,) = parse("--config", str(path), "--attention_backend", "eager")
    assert args.attention_backend == "eager" and args.strict is True


@pytest.mark.parametrize("name", ["patches", "attention_backend"])
def test_a_wrong_choice_on_the_command_line_names_it(name, capsys):
    with pytest.raises(SystemExit):
        parse("--output_dir", "out", "--use_cpu", f"--{name}", "fastest")
    error = capsys.readouterr().err
    assert f"--{name}" in error and "fastest" in error


@pytest.mark.parametrize("name", ["patches", "attention_backend"])
def test_a_wrong_value_names_field_and_value(name):
    with pytest.raises(ValueError, match=f"{name}='fastest' is unknown; choose .*'auto'"):
        unsloth_trl.SFTConfig("out", **CPU, **{name: "fastest"})


@pytest.mark.parametrize("name", [name for name, value in OURS.items() if isinstance(value, bool)])
def test_a_value_that_is_no_bool_names_field_and_value(name):
    """The string 'false' is true."""
    with pytest.raises(ValueError, match=f"{name}='false'"):
        unsloth_trl.SFTConfig("out", **CPU, **{name: "false"})


def test_strict_and_allow_unverified_contradict():
    with pytest.raises(ValueError, match="strict=True and allow_unverified=True contradict"):
        unsloth_trl.SFTConfig("out", **CPU, strict=True, allow_unverified=True)


def test_no_field_is_a_bool_or_a_string():
    hints = typing.get_type_hints(unsloth_trl.SFTConfig)
    for field in dataclasses.fields(PatchArguments):
        hint = hints[field.name]
        kind = typing.get_origin(hint)
        assert hint in (bool, int, float) or kind in (typing.Literal, typing.Union, types.UnionType), field.name
        if kind is typing.Literal:
            assert all(isinstance(value, str) for value in typing.get_args(hint)), field.name
        assert not {bool, str} <= set(typing.get_args(hint)), field.name
        assert field.metadata["help"], field.name
        assert field.name in unsloth_trl.SFTConfig.__doc__ or field.name in PatchArguments.__doc__


def test_no_field_hides_one_of_trl():
    assert not {f.name for f in dataclasses.fields(PatchArguments)} & {
        f.name for f in dataclasses.fields(trl.SFTConfig)
    }


def test_the_patches_get_what_the_user_set():
    args = unsloth_trl.SFTConfig("out", **CPU, attention_backend="sdpa", packed_metadata=False)
    assert PatchConfig.from_args(args) == PatchConfig("sdpa", packed_metadata=False)
    assert PatchConfig.from_args(trl.SFTConfig("out", **CPU)) == PatchConfig()


def test_pickle_and_copy():
    args = unsloth_trl.SFTConfig("out", **CPU, attention_backend="eager", strict=True)
    for other in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args), copy.copy(args)):
        assert type(other) is unsloth_trl.SFTConfig
        assert {name: getattr(other, name) for name in OURS} == {name: getattr(args, name) for name in OURS}
        assert other.to_dict() == args.to_dict()


def test_to_dict_round_trip():
    args = unsloth_trl.SFTConfig("out", **CPU, attention_backend="eager", packing=True)
    again = unsloth_trl.SFTConfig(**args.to_dict())
    assert again.to_dict() | {"logging_dir": None} == args.to_dict() | {"logging_dir": None}


def test_saved_with_a_checkpoint(tmp_path):
    trainer = runs.trainer(tmp_path, attention_backend="sdpa", packing=True, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert (saved.attention_backend, saved.packing) == ("sdpa", True)


# -- copies to the device


@pytest.mark.parametrize("given", [{"non_blocking": False}, {"split_batches": True}, {}])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_users_accelerator_config_is_kept(given, on_gpu, monkeypatch):
    if on_gpu:
        cards.pretend(monkeypatch)
    args = unsloth_trl.SFTConfig("out", bf16=False, use_cpu=not on_gpu, accelerator_config=dict(given))
    config = args.accelerator_config
    assert config.non_blocking is False
    assert config.split_batches is given.get("split_batches", False)


def test_copies_do_not_wait_on_a_gpu(monkeypatch):
    def non_blocking(**fields):
        return unsloth_trl.SFTConfig("out", bf16=False, **fields).accelerator_config.non_blocking

    cards.pretend(monkeypatch)
    assert non_blocking() is True
    assert non_blocking(dataloader_pin_memory=False) is False
    monkeypatch.undo()
    assert non_blocking(use_cpu=True) is False


def test_the_cpu_gets_no_advice_about_pinned_memory(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = runs.trainer(tmp_path, model=tiny_model("llama"))
    assert trainer.args.accelerator_config.non_blocking is False
    assert not [r.getMessage() for r in caplog.records if "non_blocking" in r.getMessage()]
    assert "non-blocking batch copies" not in str(trainer.patch_report)
