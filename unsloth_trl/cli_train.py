"""`unsloth-trl sft` and `grpo`: TRL's recipes, options and datasets with the trainers of this package."""

import argparse
import dataclasses
import difflib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from accelerate.logging import get_logger
from transformers import AutoConfig, AutoProcessor
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.scripts.grpo import GRPOScriptArguments

from .cli import CommandError
from .cli_data import check_columns, dataset_names, load_data, take_split
from .config import GRPOConfig, SFTConfig
from .hub.card import is_local
from .hub.checkpoints import existing_part
from .messages import first_line
from .unknown_arguments import option_instead


logger = get_logger(__name__)


@dataclasses.dataclass
class _Parsed:
    """The options of a run, each in TRL's dataclass for it or ours."""

    script: ScriptArguments
    training: SFTConfig | GRPOConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


class _Parser(TrlParser):
    """TRL's parser, with errors of one line: its usage alone has some hundred."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def run(command: str, arguments: Sequence[str], debug: bool) -> int:
    """
    Train as the options and the recipe say.

    Args:
        command (`str`): "sft" or "grpo".
        arguments (`Sequence[str]`): The options after it.
        debug (`bool`): For processes that are launched from here.

    Returns:
        `int`: The exit status.

    Raises:
        CommandError: If an option, a key of the recipe, a file, a dataset or a reward function is not right.
    """
    parser = make_parser(command)
    parsed, launch_options, remaining = _parse(parser, list(arguments))
    if launch_options and not _is_launched():
        return _launch(command, launch_options, remaining, debug)
    if launch_options:
        logger.warning(f"This process was launched already, without {' '.join(launch_options)} of the recipe.")
    _check(command, parsed)
    dataset = load_data(parsed.script, parsed.mixture)
    train_dataset = take_split(dataset, parsed.script.dataset_train_split, "dataset_train_split")
    evaluates = parsed.training.eval_strategy != "no"
    eval_dataset = take_split(dataset, parsed.script.dataset_test_split, "dataset_test_split") if evaluates else None
    for rows in (train_dataset, eval_dataset):
        if rows is not None:
            check_columns(command, rows, getattr(parsed.training, "dataset_text_field", None))
    trainer = _make_trainer(command, parsed, train_dataset, eval_dataset)
    trainer.accelerator.print(trainer.patch_report)
    trainer.train(resume_from_checkpoint=_checkpoint(parsed.training))
    output = parsed.training.output_dir
    if parsed.training.push_to_hub:
        try:
            trainer.push_to_hub(dataset_name=dataset_names(parsed.script, parsed.mixture))
        except OSError as error:
            raise CommandError(f"the model is saved in {output}, but was not pushed: {error}") from error
        trainer.accelerator.print(f"saved to {output} and pushed to {trainer.hub_model_id}")
    else:
        trainer.save_model(output)
        trainer.accelerator.print(f"saved to {output}")
    if parsed.training.world_size > 1:
        # threads of the process group let go of what they gathered, for which they need Python: the group, which goes
        # with the trainer, waits for them and lets no one have it
        time.sleep(0.1)
    if hasattr(trainer, "end"):  # transformers 5.18
        trainer.end()
    return 0


def make_parser(command: str) -> TrlParser:
    """TRL's parser for its own dataclasses, with our config in place of its trainer's."""
    script, config = {"sft": (ScriptArguments, SFTConfig), "grpo": (GRPOScriptArguments, GRPOConfig)}[command]
    parser = _Parser(
        (script, config, ModelConfig, DatasetMixtureConfig),
        prog=f"unsloth-trl {command}",
        usage=f"unsloth-trl {command} [--config RECIPE.yaml] [--OPTION VALUE ...]",
        description="All options of TRL's script and the switches of this package; each may stand in the recipe, and "
        "the command line wins. A recipe's `env` sets environment variables, and options of `accelerate launch`, such "
        "as num_processes, start it.",
        allow_abbrev=False,
    )
    # for --help only: TRL takes this option out before the others are parsed
    parser.add_argument("--config", metavar="RECIPE.yaml", default=None, help="a YAML file of options")
    return parser


def _parse(parser: TrlParser, arguments: list[str]) -> tuple[_Parsed, list[str], list[str]]:
    """The parsed options, those for `accelerate launch`, and the arguments without these."""
    arguments = [part for argument in arguments for part in _cut_config(argument)]
    recipe = None
    if "--config" in arguments:
        place = arguments.index("--config") + 1
        if place == len(arguments):
            raise CommandError("--config needs the name of a YAML file")
        recipe = arguments[place]
        if Path(recipe).is_dir():
            raise CommandError(f"--config {recipe} is a folder: pass a YAML file")
    try:
        *made, of_recipe, of_line = parser.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
    except yaml.YAMLError as error:
        raise CommandError(f"{recipe} is not YAML: {error}") from error
    except FileNotFoundError as error:
        if recipe is not None and not Path(recipe).is_file():
            raise CommandError(f"--config {recipe}: there is no such file") from error
        raise
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from error
    launch = _launch_actions() if of_recipe or of_line else {}
    known = {action.dest for action in parser._actions}
    for option in _options(of_recipe[::2]):
        if option not in launch:
            raise CommandError(f"{recipe}: unknown key {option!r}{_closest(option, known)}")
    for option in _options(of_line):
        if option not in launch:
            raise CommandError(f"unknown option --{option}{_closest(option, known, '--')}")
    return _Parsed(*made[:4]), _as_arguments(of_recipe, launch) + of_line, _without(arguments, of_line)


def _cut_config(argument: str) -> list[str]:
    name, equals, value = argument.partition("=")
    return [name, value] if name == "--config" and equals else [argument]


def _options(left_over: Sequence[str]) -> list[str]:
    """The names in what a parser has left over."""
    if left_over and not left_over[0].startswith("--"):
        raise CommandError(f"unexpected argument {left_over[0]!r}; options begin with --")
    return [word[2:].partition("=")[0].replace("-", "_") for word in left_over if word.startswith("--")]


def _closest(name: str, known: set[str], prefix: str = "") -> str:
    if (instead := option_instead(name, known, prefix)) is not None:
        return f"; {instead}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{close[0]}?" if close else "; see --help for all of them"


def _without(arguments: list[str], left_over: list[str]) -> list[str]:
    """`arguments` without those that the parser has left over, which are some of them in their order."""
    rest, kept = list(left_over), []
    for argument in arguments:
        if rest and argument == rest[0]:
            rest.pop(0)
        else:
            kept.append(argument)
    return kept


def _launch_actions() -> dict[str, argparse.Action]:
    """The options of `accelerate launch` by their names, and the one that TRL's command line has beside them."""
    from accelerate.commands.launch import launch_command_parser

    actions = {
        option.lstrip("-").replace("-", "_"): action
        for action in launch_command_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    return actions | {"accelerate_config": argparse.Action(["--accelerate_config"], "accelerate_config")}


def _as_arguments(of_recipe: list[str], actions: dict[str, argparse.Action]) -> list[str]:
    """A recipe's options for the launcher; `cpu: true` is `--cpu`, and `cpu: false` is nothing."""
    arguments = []
    for option, value in zip(of_recipe[::2], of_recipe[1::2], strict=True):
        if actions[option.removeprefix("--")].nargs != 0:
            arguments += [option, value]
        elif value.lower() == "true":
            arguments.append(option)
    return arguments


def _is_launched() -> bool:
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def _launch(command: str, options: list[str], arguments: list[str], debug: bool) -> int:
    """Run the same command through `accelerate launch`, whose options TRL's recipes may have."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    options = resolve_accelerate_config_argument(options)
    script = ["--module", "unsloth_trl.cli", *(["--debug"] if debug else []), command]
    try:
        launch_command(launch_command_parser().parse_args([*options, *script, *arguments]))
    except subprocess.CalledProcessError as error:
        return error.returncode  # it has said why
    return 0


def _check(command: str, parsed: _Parsed) -> None:
    """What can be said to be wrong before anything is loaded."""
    model = parsed.model
    if model.model_name_or_path is None:
        raise CommandError("pass --model_name_or_path: a name on the Hub or a folder")
    if model.model_name_or_path.startswith("~"):
        model.model_name_or_path = str(Path(model.model_name_or_path).expanduser())
    if is_local(model.model_name_or_path) and not Path(model.model_name_or_path).exists():
        raise CommandError(f"--model_name_or_path {model.model_name_or_path}: there is no such folder")
    _check_output(parsed.training.output_dir)
    folder = Path(model.model_name_or_path)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise CommandError(
            f"--model_name_or_path {folder} is an adapter: pass its base model, and a checkpoint of the same run as "
            "--resume_from_checkpoint; or merge it first (unsloth-trl merge) and train the result"
        )
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name) and not model.use_peft:
            raise CommandError(f"--{name} needs --use_peft: quantised weights cannot be trained, adapters on them can")
    if command == "grpo" and not (parsed.script.reward_funcs or parsed.script.reward_model_name_or_path):
        raise CommandError(
            "pass --reward_funcs (names of TRL, or dotted paths such as my_rewards.by_length) or "
            "--reward_model_name_or_path"
        )
    _checkpoint(parsed.training)
    try:  # the config alone, before any data is looked at
        AutoConfig.from_pretrained(
            model.model_name_or_path,
            revision=model.model_revision,
            trust_remote_code=parsed.training.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        said = first_line(error).rstrip(".")
        where = "in that folder" if folder.is_dir() else "there is no such folder here, and from the Hub"
        raise CommandError(
            f"--model_name_or_path {model.model_name_or_path}: {where}: {said}; pass a folder with a model or a "
            "name on the Hub"
        ) from error


def _check_output(output: str) -> None:
    """Say that nothing can be written before anything is loaded, and not after."""
    folder = Path(output).absolute()
    place = existing_part(folder)
    if not place.is_dir():
        raise CommandError(f"--output_dir {output}: {place} is a file; name another folder")
    if not os.access(place, os.W_OK):
        raise CommandError(f"--output_dir {output}: {place} cannot be written; name another folder")


def _checkpoint(args: Any) -> str | bool | None:
    """`resume_from_checkpoint` for `train`: a folder, or `True` for the last one in `output_dir`."""
    value = args.resume_from_checkpoint
    if value is None or str(value).lower() in ("false", "none", ""):
        return None
    if str(value).lower() == "true":
        return True
    if not Path(value).is_dir():
        raise CommandError(
            f"--resume_from_checkpoint {value}: there is no such folder; pass a checkpoint, or True for the last one "
            "in --output_dir"
        )
    return value


def _make_trainer(command: str, parsed: _Parsed, train_dataset, eval_dataset):
    from . import GRPOTrainer, SFTTrainer

    args, options = parsed.training, parsed.model
    args.model_init_kwargs = {
        "revision": options.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": options.attn_implementation,
        "dtype": options.dtype,
    } | (args.model_init_kwargs or {})
    common = {
        "model": options.model_name_or_path,
        "args": args,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "quantization_config": get_quantization_config(options),
        "peft_config": get_peft_config(options),
    }
    if options.load_in_4bit and _has_experts(options.model_name_or_path, args.model_init_kwargs):
        common |= _load_experts_in_4bit(common.pop("quantization_config"), options.model_name_or_path, args)
    if command == "sft":
        return SFTTrainer(**common)
    return GRPOTrainer(**common, reward_funcs=_reward_functions(parsed.script))


def _has_experts(name: str, init: dict[str, Any]) -> bool:
    from .models.memory_terms import meta_model
    from .patches.quantization.experts import find_experts

    config = AutoConfig.from_pretrained(name, revision=init["revision"], trust_remote_code=init["trust_remote_code"])
    # what is quantised already keeps its form, and code from the Hub its own experts
    if getattr(config, "quantization_config", None) is not None or getattr(config, "auto_map", None):
        return False
    return any(True for _ in find_experts(meta_model(config)))


def _load_experts_in_4bit(quantization_config: Any, name: str, args: Any) -> dict[str, Any]:
    """The model object and its tokenizer: transformers' own 4-bit loading leaves stacked experts in 16 bits."""
    from .patches.quantization.loading import load_in_4bit

    init, args.model_init_kwargs = args.model_init_kwargs, None
    if "device_map" not in init:
        alone = args.distributed_state.distributed_type == "NO" and args.device.type not in ("cpu", "mps")
        init["device_map"] = "auto" if alone else None
    model = load_in_4bit(name, quantization_config=quantization_config, **init)
    tokenizer = AutoProcessor.from_pretrained(
        name, revision=init["revision"], trust_remote_code=init["trust_remote_code"]
    )
    return {"model": model, "processing_class": tokenizer}


def _reward_functions(script: GRPOScriptArguments) -> list[Any]:
    """Reward models and functions as TRL's script takes them: its own by name, and dotted paths."""
    from trl import rewards

    own = {
        "accuracy_reward": lambda: rewards.accuracy_reward,
        "reasoning_accuracy_reward": lambda: rewards.reasoning_accuracy_reward,
        "think_format_reward": lambda: rewards.think_format_reward,
        "get_soft_overlong_punishment": lambda: rewards.get_soft_overlong_punishment(1280, 256),
    }
    made = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or []:
        if name in own:
            made.append(own[name]())
            continue
        module, dot, function = name.rpartition(".")
        if not dot:
            raise CommandError(f"--reward_funcs {name}: not one of {', '.join(own)}, and no dotted path")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as TRL does: the module is where the command is run
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise CommandError(f"--reward_funcs {name}: {error}") from error
        if not hasattr(found, function):
            functions = [known for known, value in vars(found).items() if callable(value)]
            close = difflib.get_close_matches(function, functions, n=1, cutoff=0.6)
            hint = f"; did you mean {module}.{close[0]}?" if close else ""
            raise CommandError(f"--reward_funcs {name}: module {module!r} has no attribute {function!r}{hint}")
        if not callable(getattr(found, function)):
            raise CommandError(f"--reward_funcs {name} is {getattr(found, function)!r}, not a function")
        made.append(getattr(found, function))
    return made
