"""What the tests of pushing run in a process of their own: huggingface_hub reads HF_ENDPOINT when it is imported."""

import contextlib
import io
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from datasets import Dataset
from huggingface_hub import snapshot_download
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.tiny import lora_config, tiny_model, tiny_rows, tiny_tokenizer


TOKEN = "hf_writetoken"


class Said:
    """Everything that a call writes: standard streams, log records, warnings, and its error with all notes."""

    def __init__(self):
        self.stream = io.StringIO()

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(contextlib.redirect_stdout(self.stream))
        self.stack.enter_context(contextlib.redirect_stderr(self.stream))
        self.stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        self.handler = logging.StreamHandler(self.stream)
        for name in (None, "huggingface_hub", "transformers", "unsloth_trl"):
            logging.getLogger(name).addHandler(self.handler)
            self.stack.callback(logging.getLogger(name).removeHandler, self.handler)
        return self

    def __exit__(self, *exception):
        self.stack.close()


def call(function, *args, **kwargs) -> tuple[Any, str, str]:
    """What a function returns, what was said, and its error as "Type: message", of which pickles make no trouble."""
    with Said() as said:
        try:
            result, error = function(*args, **kwargs), ""
        except Exception as raised:
            result, error = None, f"{type(raised).__name__}: {raised}"
    return result, said.stream.getvalue(), error


def save_base(folder: str) -> None:
    """A tiny base model with a generation config and a tokenizer."""
    model = tiny_model("llama")
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def save_bpe_base(folder: str, templates: bool = False) -> None:
    """The same with a tokenizer that GGUF has a form for, and maybe with two chat templates."""
    from tests.hub.gguf_models import byte_level_tokenizer, model_folder, split_steps

    tokenizer = byte_level_tokenizer(split_steps(None))
    if templates:
        tokenizer.chat_template = {"default": tokenizer.chat_template, "tools": "{{ messages }}{{ tools }}"}
    model = model_folder(Path(folder), "llama", tokenizer)
    model.generation_config.max_new_tokens = 7
    model.generation_config.save_pretrained(folder)


def adapted(base: str, seed: int = 0):
    """A model with an adapter that changes it, the same for the same seed, and its tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, lora_config("llama", init_lora_weights=False))
    return model, AutoTokenizer.from_pretrained(base)


def trainer(base: str, output_dir: str, **config):
    from unsloth_trl import SFTConfig, SFTTrainer

    defaults = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "hub_token": TOKEN,
        "hub_private_repo": True,
    }
    peft = config.pop("peft", True)
    config_class = trl.SFTConfig if config.pop("of_trl", False) else SFTConfig
    return SFTTrainer(
        base,
        config_class(output_dir, **(defaults | config)),
        train_dataset=Dataset.from_list(tiny_rows(16, seed=0)),
        peft_config=lora_config("llama") if peft else None,
    )


class WaitForPush(TrainerCallback):
    """Steps take no time here: the next checkpoint would be written over the files that are being uploaded."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_save(self, args, state, control, **kwargs):
        self.trainer._finish_current_push()


def train(base: str, output_dir: str, resume: str | None = None, **config) -> list[float]:
    """Train, push at the end if asked to, and give the losses."""
    made = trainer(base, output_dir, **config)
    made.add_callback(WaitForPush(made))
    made.train(resume_from_checkpoint=resume)
    if made.args.push_to_hub:
        made.push_to_hub(dataset_name="someone/words")
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def make_trainer(base: str, output_dir: str, **config) -> None:
    trainer(base, output_dir, **config)


def download(repo_id: str, folder: str, patterns: str | None = None, revision: str | None = None) -> list[str]:
    snapshot_download(repo_id, revision=revision, local_dir=folder, allow_patterns=patterns, token=TOKEN)
    shutil.rmtree(Path(folder) / ".cache", ignore_errors=True)
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def push_merged(base: str, repo_id: str, token: str | None = TOKEN, seed: int = 0, **options) -> str:
    from unsloth_trl.hub.push import push_to_hub_merged

    model, tokenizer = adapted(base, seed)
    tokenizer = tokenizer if options.pop("with_tokenizer", True) else None
    if options.get("save_method") != "lora":
        options = {"dtype": torch.float32} | options
    return push_to_hub_merged(model, repo_id, tokenizer, token=token, **options).oid


def push_gguf(base: str, repo_id: str, token: str | None = TOKEN, **options) -> str:
    from unsloth_trl.hub.push import push_to_hub_gguf

    model, tokenizer = adapted(base)
    return push_to_hub_gguf(model, repo_id, tokenizer, token=token, **options).oid


def save_adapter(base: str, folder: str) -> None:
    model, tokenizer = adapted(base)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def command_line(*arguments: str) -> int:
    """The exit status of the command line, whose user is logged in."""
    from unsloth_trl import cli

    with mock.patch.dict(os.environ, {"HF_TOKEN": TOKEN}):
        return cli.main(arguments)
