"""The model card of a run: what it says, that it was measured, and what it keeps to itself."""

import copy
import inspect
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
import trl
import yaml
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import GenerationConfig, TrainerCallback
from trl import TrlParser

import unsloth_trl
from tests.tiny import lora_config, tiny_model, tiny_rows, tiny_tokenizer
from tests.trainers.grpo_runs import make_grpo
from unsloth_trl import GRPOConfig, SFTConfig, SFTTrainer
from unsloth_trl.hub.card import BaseModel, base_of, is_local, mend_base, shown_config
from unsloth_trl.trainers import measurement
from unsloth_trl.trainers.measurement import Measured
from unsloth_trl.trainers.publishing import Publishing


SNAPSHOT = "models--owner--tiny-model/snapshots/" + "a" * 40
CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}


class Clock(TrainerCallback):
    """A clock that goes on in steps, whose time counts, and in evaluations and checkpoints, whose time does not."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def on_step_begin(self, args, state, control, **kwargs):
        self.seconds += 0.02

    def on_save(self, args, state, control, **kwargs):
        self.seconds += 0.6

    on_evaluate = on_save


def make_trainer(output_dir, name="", lora=True, init=None, **config):
    model = tiny_model("llama")
    model.config._name_or_path = name
    defaults = {"max_steps": 12, "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 2}
    return SFTTrainer(
        model,
        SFTConfig(str(output_dir), **(CPU | defaults | config)),
        train_dataset=Dataset.from_list(tiny_rows(40, seed=0)),
        processing_class=tiny_tokenizer(),
        peft_config=lora_config("llama") if lora else None,
        **(init or {}),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run with a checkpoint, its base in a folder of the Hub's cache."""
    output_dir = tmp_path_factory.mktemp("card") / "my-run"
    trainer = make_trainer(
        output_dir,
        str(tmp_path_factory.mktemp("cache") / SNAPSHOT),
        learning_rate=3e-3,
        packing=True,
        max_length=64,
        save_strategy="steps",
        save_steps=6,
        hub_token="hf_secret",
        model_init_kwargs=None,
    )
    trainer.train()
    trainer.create_model_card(dataset_name="owner/words")
    return trainer


def card_of(trainer) -> ModelCard:
    return ModelCard.load(Path(trainer.args.output_dir) / "README.md")


def test_metadata_and_tags(run):
    data = card_of(run).data
    assert data.base_model == "owner/tiny-model" and data.datasets == ["owner/words"]
    assert {"trl", "sft", "unsloth_trl", "generated_from_trainer"} <= set(data.tags)


def test_the_card_has_data_config_patches_and_versions(run):
    text = card_of(run).text
    assert f"- train: {len(run.train_dataset)} rows, packed up to 64 tokens (bfd)" in text
    assert "- steps so far: 12, epochs: " in text
    assert str(run.patch_report) in text
    assert "r=4; lora_alpha=8" in text and "target_modules: down_proj" in text
    for line in ("unsloth_trl: 0.1.0", f"TRL: {trl.__version__}", f"Transformers: {transformers.__version__}"):
        assert f"- {line}" in text
    assert "[owner/tiny-model](https://huggingface.co/owner/tiny-model)" in text
    assert "None" not in text.split("### What was done to the model")[0]
    assert 'pipeline("text-generation", model="my-run"' in text


def test_the_configuration_is_a_recipe_for_the_same_run(run, tmp_path):
    shown = re.search(r"```yaml\n(.*?)```", card_of(run).text, re.S)[1]
    assert yaml.safe_load(shown)["learning_rate"] == 3e-3
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(shown)
    (parsed,) = TrlParser(SFTConfig).parse_args_and_config(["--config", str(recipe)])
    same = ("learning_rate", "packing", "max_length", "max_steps", "per_device_train_batch_size", "use_cpu", "bf16")
    assert {name: getattr(parsed, name) for name in same} == {name: getattr(run.args, name) for name in same}
    assert parsed.learning_rate == 3e-3 and parsed.packing and parsed.max_length == 64


def test_speed_is_what_was_measured(run):
    measured = run._measurement.measured
    logged = {row["step"]: row["num_tokens"] for row in run.state.log_history if "loss" in row}
    assert measured.warm_up == 3 and measured.steps == 9
    assert measured.tokens == logged[12] - logged[3] > 100
    assert f"{measured.tokens / measured.seconds:,.0f} tokens a second on CPU" in card_of(run).text
    assert "over 9 steps after 3 to warm up" in card_of(run).text
    assert "peak device memory" not in card_of(run).text  # there is no device


def test_a_stretch_with_an_evaluation_or_a_checkpoint_is_not_measured(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measurement, "time", clock)
    trainer = make_trainer(
        tmp_path,
        init={"eval_dataset": Dataset.from_list(tiny_rows(4, seed=1)), "callbacks": [clock]},
        max_steps=20,
        logging_steps=4,
        save_strategy="steps",
        save_steps=10,
        eval_strategy="steps",
        eval_steps=7,
    )
    trainer.train()
    measured = trainer._measurement.measured
    # the first 5 warm up, and 7, 10 and 14 interrupt stretches
    assert (measured.warm_up, measured.steps) == (5, 1 + 2 + 2 + 4)
    every_step = make_trainer(tmp_path / "again", max_steps=20)
    every_step.train()
    logged = {row["step"]: row["num_tokens"] for row in every_step.state.log_history if "loss" in row}
    counted = [(7, 8), (10, 12), (14, 16), (16, 20)]
    assert measured.tokens == sum(logged[end] - logged[begin] for begin, end in counted)
    assert measured.seconds == pytest.approx(measured.steps * 0.02)


def test_a_run_that_is_too_short_has_no_speed(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.create_model_card()
    assert trainer._measurement.measured.tokens_per_second is None
    assert "tokens a second" not in card_of(trainer).text and "measured in this run" not in card_of(trainer).text


def test_memory_is_named_as_far_as_it_is_known():
    exact = Measured(peak_memory=3 * 2**29, device="Some Card")
    assert exact.lines("tokens") == ["peak device memory: 1.50 GiB allocated"]
    earlier = Measured(peak_memory=2**30, peak_is_earlier=True)
    assert earlier.lines("tokens") == [
        "peak device memory at most: 1.00 GiB in this process, before this run or in it"
    ]


@pytest.mark.gpu
def test_memory_of_a_device_is_its_peak(tmp_path):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(tmp_path, use_cpu=False, bf16=True, packing=True, max_length=64)
    trainer.train()
    trainer.create_model_card()
    measured = trainer._measurement.measured
    assert measured.peak_memory == torch.cuda.max_memory_allocated() > 0 and not measured.peak_is_earlier
    assert f"peak device memory: {measured.peak_memory / 2**30:.2f} GiB allocated" in card_of(trainer).text
    assert f"tokens a second on {torch.cuda.get_device_name()}: tokens of" in card_of(trainer).text
    large = torch.empty(2**28, device="cuda")
    del large  # a peak that was before the run
    again = make_trainer(tmp_path / "again", use_cpu=False, bf16=True, packing=True, max_length=64)
    again.train()
    assert again._measurement.measured.peak_is_earlier


def test_grpo_measures_whole_generations(tmp_path):
    """Two optimizer steps on each of two micro-batches, once more each: 4 steps until completions are new."""
    trainer = make_grpo(
        unsloth_trl,
        "llama",
        lora=True,
        output_dir=str(tmp_path),
        max_steps=12,
        num_iterations=2,
        steps_per_generation=2,
        logging_steps=1,
    )
    trainer.train()
    trainer.create_model_card()
    measured = trainer._measurement.measured
    assert trainer._steps_per_cycle == 4 and (measured.warm_up, measured.steps) == (4, 8)
    # a generation is logged with the first step that uses it
    logged = {row["step"]: row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row}
    assert list(logged) == [1, 5, 9] and measured.tokens == logged[9] - logged[1] > 0
    card = card_of(trainer)
    assert {"trl", "grpo", "unsloth_trl"} <= set(card.data.tags)
    assert "tokens a second on CPU: prompts and completions" in card.text and "DeepSeekMath" in card.text


def test_b60_an_adapter_names_the_repository_and_not_the_cache(run, tmp_path):
    folder = Path(run.args.output_dir) / "checkpoint-12"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/tiny-model"
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "owner/tiny-model"
    assert "base_model:adapter:owner/tiny-model" in card.data.tags
    assert not [tag for tag in card.data.tags if "snapshots" in tag]
    for name in ("README.md", "adapter_config.json", "tokenizer_config.json", "generation_config.json"):
        assert "snapshots" not in (folder / name).read_text(), name


def test_b60_a_local_base_is_said_in_the_card(tmp_path):
    base = tmp_path / "secret-place" / "my-base"
    base.mkdir(parents=True)
    trainer = make_trainer(tmp_path / "out", str(base))
    trainer.save_model()
    trainer.create_model_card(dataset_name=str(tmp_path))
    card = card_of(trainer)
    assert "**The base model is not on the Hub**: it was loaded from a local folder named `my-base`" in card.text
    assert "a model that is not on the Hub (the folder `my-base`)" in card.text
    assert card.data.base_model is None and card.data.datasets is None
    assert "secret-place" not in card.content and str(tmp_path) not in card.content
    # PEFT writes the path into its card when the model is saved again
    trainer.save_model()
    assert "secret-place" not in card_of(trainer).content
    assert {"trl", "sft", "unsloth_trl", "lora"} <= set(card_of(trainer).data.tags)


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("owner/name", False),
        ("gpt2", False),
        ("/home/me/model", True),
        ("./model", True),
        ("~/model", True),
        ("C:\\models\\x", True),
        ("d:/models/x", True),
        ("\\\\server\\share", True),
    ],
)
def test_b60_what_is_a_path(name, local):
    assert is_local(name) is local


def test_b60_a_folder_that_looks_like_a_repository(tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert not is_local("models/tiny")
    monkeypatch.chdir(tmp_path)
    assert is_local("models/tiny")


def test_b60_the_name_in_the_adapter_counts_first(tmp_path):
    trainer = make_trainer(tmp_path, str(tmp_path))
    assert base_of(trainer.model) == BaseModel(path=str(tmp_path))
    trainer.model.peft_config["default"].base_model_name_or_path = "owner/other"
    assert base_of(trainer.model) == BaseModel(repo_id="owner/other")


def test_b60_a_gguf_file_as_the_base(tmp_path):
    """Its name is no repository, and the Hub takes no card that says so."""
    trainer = make_trainer(tmp_path / "out", "owner/model/folder/file-Q8_0.gguf")
    trainer.model.peft_config["default"].base_model_name_or_path = "owner/model/folder/file-Q8_0.gguf"
    assert base_of(trainer.model) == BaseModel(repo_id="owner/model")
    trainer.save_model()
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/model/folder/file-Q8_0.gguf"  # what the loader finds again
    for card in (ModelCard.load(tmp_path / "out" / "README.md"), _made(trainer)):
        assert card.data.base_model == "owner/model" and "file-Q8_0.gguf" not in str(card.data.tags)
    for gone in ("gone/model.gguf", "gone/models/tiny"):
        trainer.model.peft_config["default"].base_model_name_or_path = gone
        trainer.model.config._name_or_path = gone
        assert base_of(trainer.model) == BaseModel(path=gone)


def _made(trainer):
    trainer.create_model_card()
    return card_of(trainer)


def test_b60_the_warning_needs_no_trainer(tmp_path):
    """accelerate's logger raises in a process without its state, such as that of `unsloth-trl merge`."""
    code = (
        "from unsloth_trl.hub.card import BaseModel, warn_of_local_base\n"
        "warn_of_local_base(BaseModel(path='/home/me/model'), 'owner/name', False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert (
        "Pushing to owner/name: the base model is known only as the folder '/home/me/model', so the card"
        in done.stderr
    )


def test_b62_a_folder_with_the_other_kind_is_said_before_training(tmp_path, caplog):
    make_trainer(tmp_path).save_model()
    make_trainer(tmp_path)
    assert "is to get" not in caplog.text
    make_trainer(tmp_path, lora=False)
    assert f"the folder {tmp_path} holds an adapter (adapter_config.json, adapter_model.safetensors)" in caplog.text
    assert "and is to get whole weights" in caplog.text and "use another folder, before the model is" in caplog.text


def test_several_datasets_are_named_each(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    trainer = make_trainer(tmp_path, "owner/tiny-model")
    trainer.create_model_card(dataset_name=["owner/a", "owner/b", str(tmp_path / "rows.jsonl")])
    card = card_of(trainer)
    assert card.data.datasets == ["owner/a", "owner/b"]
    links = ", ".join(f"[owner/{name}](https://huggingface.co/datasets/owner/{name})" for name in "ab")
    assert f"on the {links}, `rows.jsonl` dataset" in card.text and str(tmp_path) not in card.content


def test_a_card_that_names_a_repository_is_left_as_it_is(tmp_path):
    text = "---\nbase_model: owner/name\ntags:\n- a\n---\ntext\n"
    (tmp_path / "README.md").write_text(text)
    mend_base(tmp_path, BaseModel(path="/x"))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "owner/name" and card.data.tags == ["a"] and card.text.strip() == "text"


def test_an_adapter_is_saved_with_the_generation_config(run, tmp_path):
    run.model.generation_config.max_new_tokens = 11
    run.save_model(str(tmp_path))
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 11


@pytest.mark.parametrize("config", [SFTConfig, GRPOConfig])
def test_b63_the_token_is_in_no_file_and_not_printed(config):
    args = config("out", hub_token="hf_secret", learning_rate=0.5, **CPU)
    assert b"hf_secret" not in pickle.dumps(args)
    loaded = pickle.loads(pickle.dumps(args))
    assert (loaded.hub_token, loaded.learning_rate, type(loaded)) == (None, 0.5, config)
    assert "hf_secret" not in repr(args) and "hf_secret" not in str(args) and "hf_secret" not in shown_config(args)
    named = config("out", model_init_kwargs={"token": "hf_secret", "revision": "x"}, **CPU)
    assert pickle.loads(pickle.dumps(named)).model_init_kwargs == {"revision": "x"}
    assert named.model_init_kwargs["token"] == "hf_secret" and b"hf_secret" not in pickle.dumps(named)
    # inside of the process it is still there
    for other in (copy.copy(args), copy.deepcopy(args)):
        assert other.hub_token == "hf_secret" and other is not args and other == args
    copy.deepcopy(args).report_to.append("x")
    assert args.report_to == ["none"] or args.report_to == []


def test_b63_training_args_of_a_run(run):
    stored = Path(run.args.output_dir) / "checkpoint-12" / "training_args.bin"
    assert b"hf_secret" not in stored.read_bytes()
    loaded = torch.load(stored, weights_only=False)
    assert isinstance(loaded, SFTConfig) and loaded.max_length == 64 and loaded.hub_token is None
    assert run.args.hub_token == "hf_secret"
    assert "hf_secret" not in card_of(run).content


def test_shown_config_has_no_place_or_account():
    args = SFTConfig(
        "/home/me/out",
        hub_model_id="me/x",
        run_name="mine",
        model_init_kwargs={"token": "hf_secret"},
        lr_scheduler_kwargs={"num_cycles": 2, "file": "/home/me/schedule"},
        chat_template_path="/home/me/chat.jinja",
        **CPU,
    )
    shown = yaml.safe_load(shown_config(args))
    assert shown == {"bf16": False, "use_cpu": True}
    args = GRPOConfig("out", vllm_server_base_url="http://10.0.0.1", vllm_server_host="10.0.0.1", beta=0.1, **CPU)
    assert yaml.safe_load(shown_config(args)) == {
        "beta": 0.1,
        "bf16": False,
        "steps_per_generation": 1,
        "use_cpu": True,
    }


@pytest.mark.parametrize("method", ["init_hf_repo", "push_to_hub", "_save", "create_model_card"])
def test_overridden_methods_are_those_they_were_written_for(method):
    theirs = inspect.signature(getattr(trl.SFTTrainer, method)).parameters
    ours = dict(inspect.signature(getattr(Publishing, method)).parameters)
    if "private" not in theirs:  # transformers 5.17
        ours.pop("private", None)
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
