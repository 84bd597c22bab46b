"""The command line: `unsloth-trl sft | grpo | merge | export-gguf | estimate | doctor | demo`.

Nothing heavy is imported before a subcommand runs.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from unsloth_trl import __version__


class CommandError(ValueError):
    """What the user has to change, in one line."""


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `unsloth-trl` with all its subcommands; each sets `run`, a function of the parsed options."""
    parser = _Parser(
        prog="unsloth-trl",
        description="TRL's trainers with the same losses and adapters in less time and memory.",
        epilog="Errors are one line and exit status 2; `unsloth-trl --debug COMMAND ...` shows where they come from.",
    )
    parser.add_argument("--version", action="version", version=f"unsloth_trl {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, what in (("sft", "supervised fine-tuning"), ("grpo", "reinforcement learning")):
        # the options are TRL's: they are parsed, and --help is made, by its own parser in cli_train.py
        train = commands.add_parser(
            name, help=f"{what} by a recipe or options of TRL (--help lists all)", add_help=False
        )
        train.set_defaults(run=_train)
    _add_export(commands)
    demo = commands.add_parser(
        "demo",
        help="train a LoRA adapter on a small model and compare it before and after",
        description="Train a LoRA adapter with packing on small reasoning tasks and show held-out loss and accuracy "
        "before and after, speed, and what was patched. At most 4 minutes on 2 CPU cores; a GPU is used if there is "
        "one. With --grpo: rollouts on a reasoning task, rewarded by its scorer, with reward and tokens per step; at "
        "most 6 minutes.",
    )
    demo.add_argument("--grpo", action="store_true", help="reinforcement learning with GRPO instead of fine-tuning")
    demo.add_argument(
        "--model",
        metavar="NAME_OR_FOLDER",
        help="a chat model on the Hub or in a local folder (default: SmolLM2-135M-Instruct)",
    )
    demo.add_argument(
        "--output_dir",
        metavar="FOLDER",
        help="where to write the adapter and the plot (default: the first of unsloth_trl_demo, "
        "unsloth_trl_demo-2, ... that is free)",
    )
    demo.add_argument(
        "--max_steps",
        type=_positive,
        metavar="N",
        help="training steps (default: 45 on a CPU, 200 on a GPU; 7 with --grpo)",
    )
    demo.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the data and the run (default: 0)")
    demo.set_defaults(run=_demo)
    _add_estimate(commands)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine: versions, GPU, driver, memory",
        description="Check versions, driver, GPU, free VRAM and RAM (container limits included), swap and pinned "
        "memory, one line each with what to change. The exit status is 1 if something makes training impossible.",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _add_export(commands: argparse._SubParsersAction) -> None:
    merge = commands.add_parser(
        "merge",
        help="merge an adapter into its base model",
        description="Merge an adapter into its base model and write 16-bit weights, which load without PEFT.",
    )
    export = commands.add_parser(
        "export-gguf",
        help="write GGUF files for llama.cpp, Ollama and LM Studio",
        description="Write GGUF files and an Ollama Modelfile of a merged model, or of an adapter, which is merged "
        "first. Types other than f32, f16, bf16 and q8_0 are made by llama.cpp's own program, if it is installed.",
    )
    for command, what in ((merge, "folder or Hub name of an adapter"), (export, "folder or Hub name of either")):
        command.add_argument("model", metavar="MODEL", help=what)
        command.add_argument(
            "output", metavar="FOLDER", help="where to write; what it has of an earlier run is replaced"
        )
        command.add_argument(
            "--base", metavar="NAME_OR_FOLDER", help="base model (default: the one the adapter names)"
        )
        command.add_argument(
            "--dtype",
            choices=["auto", "bfloat16", "float16", "float32"],
            default="auto",
            help="of the weights that are loaded (default: as the base model is stored)",
        )
        command.add_argument(
            "--original_weights",
            action="store_true",
            help="merge with the base as it is stored, though the adapter was trained on it in 4 or 8 bits",
        )
        command.add_argument("--trust_remote_code", action="store_true", help="run model code from the Hub")
        command.add_argument("--push_to_hub", metavar="OWNER/NAME", help="push the result to this repository too")
        command.add_argument("--private", action="store_true", default=None, help="a new repository is private")
        command.set_defaults(run=_export)
    export.add_argument(
        "--quantization_method",
        nargs="+",
        default=["q8_0"],
        metavar="TYPE",
        help="q8_0, f16, bf16, f32, q4_k_m and others of llama.cpp; several make several files (default: q8_0)",
    )
    export.add_argument("--llama_cpp_path", metavar="FOLDER", help="llama.cpp, for the types that it makes")


def _add_estimate(commands: argparse._SubParsersAction) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="say how much VRAM and RAM a run needs, before any weight is loaded",
        description="Say how much VRAM and RAM a run of this package's trainers needs, term by term, and what becomes "
        "of each layer's activations on a card. Only the model's config is read.",
    )
    add = estimate.add_argument
    add("model", metavar="MODEL_OR_CONFIG", help="a model folder, a config.json, or a name on the Hub")
    add("--method", choices=["sft", "grpo"], default="sft", help="trainer (default: sft)")
    add("--batch", type=_positive, default=8, metavar="N", help="per_device_train_batch_size (default: 8)")
    add("--max_length", type=_positive, metavar="N", help="sft: tokens of a row (default: 1024)")
    add("--max_prompt_length", type=_positive, metavar="N", help="grpo: tokens of a prompt (default: 512)")
    add("--max_completion_length", type=_positive, metavar="N", help="grpo: tokens of a completion (default: 512)")
    add("--num_generations", type=_positive, metavar="N", help="grpo: completions per prompt (default: 8)")
    add("--qlora", action="store_true", help="linear layers in 4 bits (NF4)")
    trained = estimate.add_mutually_exclusive_group()
    trained.add_argument(
        "--lora_r", type=_positive, default=16, metavar="N", help="rank of the adapters (default: 16)"
    )
    trained.add_argument("--full", action="store_true", help="train all weights, without adapters")
    card = estimate.add_mutually_exclusive_group()
    card.add_argument(
        "--card", metavar="NAME", help="GPU to plan for, such as 4090 (default: the one in this machine)"
    )
    card.add_argument("--card_gb", type=float, metavar="GIB", help="GPU to plan for by its memory")
    policies = ["auto", "keep", "recompute", "offload"]
    add("--policy", choices=policies, default="auto", help="checkpoint_policy (default: auto)")
    add("--optim", choices=["adamw", "adamw_8bit"], default="adamw", help="optimizer (default: adamw)")
    add(
        "--staging_buffers",
        type=int,
        choices=[1, 2, 3],
        default=2,
        help="offloaded inputs on the device at once (default: 2)",
    )
    add("--max_pinned_gb", type=float, metavar="GIB", help="host memory that may be page-locked (default: half)")
    estimate.set_defaults(run=_estimate)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*): Options in place of the process's own.

    Returns:
        `int`: The exit status: 0, 2 after an error that was reported in one line, or 130 after an interruption;
            `doctor` has 1 where training is impossible.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    options, unknown = parser.parse_known_args(argv)
    if options.run is _train:
        options.arguments = argv[argv.index(options.command) + 1 :]
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return options.run(options)
    except KeyboardInterrupt as interruption:
        print(f"unsloth-trl {options.command}: {interruption or 'interrupted'}", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug or not _is_users(error):
            raise
        print(f"unsloth-trl {options.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _is_users(error: Exception) -> bool:
    """Whether a line says enough. Anything else is a fault of the program, whose traceback a bug report needs."""
    if isinstance(error, (ValueError, OSError, ImportError)):
        return True
    # a library is there if it raised the error
    torch, safetensors = sys.modules.get("torch"), sys.modules.get("safetensors")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # what reads and writes weights has a class of its own for what the disk says
    return safetensors is not None and isinstance(error, safetensors.SafetensorError)


def _train(options: argparse.Namespace) -> int:
    # torch and transformers take seconds to import, too long for the help of all commands
    from unsloth_trl.cli_train import run

    return run(options.command, options.arguments, options.debug)


def _export(options: argparse.Namespace) -> int:
    from unsloth_trl.cli_export import run_export, run_merge

    return run_merge(options) if options.command == "merge" else run_export(options)


def _demo(options: argparse.Namespace) -> int:
    from unsloth_trl.demo import run_demo
    from unsloth_trl.demo_folder import DemoError
    from unsloth_trl.demo_grpo import run_grpo_demo
    from unsloth_trl.models.smollm2 import ModelUnavailableError

    run = run_grpo_demo if options.grpo else run_demo
    try:
        run(options.model, options.output_dir, options.max_steps, options.seed)
    except (DemoError, ModelUnavailableError) as error:
        raise CommandError(str(error)) from error
    return 0


def _estimate(options: argparse.Namespace) -> int:
    from unsloth_trl.models.cards import card_of_size, find_card, local_card
    from unsloth_trl.models.memory import estimate_memory, read_config
    from unsloth_trl.models.memory_terms import read_shape

    lengths = _lengths(options)
    if options.card is not None:
        card = find_card(options.card)
    else:
        card = local_card() if options.card_gb is None else card_of_size(options.card_gb)
    names = ("method", "batch", "qlora", "lora_r", "full", "optim", "staging_buffers")
    settings = {name: getattr(options, name) for name in names} | lengths
    shape = read_shape(read_config(options.model))
    if options.policy != "auto" or card is not None:
        made = [estimate_memory(shape, policy=options.policy, card=card, **settings)]
        print(made[0].text())
    else:
        policies = ("recompute", "keep", "offload")
        made = [estimate_memory(shape, policy=policy, **settings) for policy in policies]
        print(made[0].text())
        print("there is no GPU here to plan for: pass --card or --card_gb; until then, the peak of each policy:")
        for policy, estimate in zip(policies, made, strict=True):
            print(f"  {policy:<10}{estimate.peak / 2**30:>8.2f} GiB VRAM{estimate.slab / 2**30:>8.2f} GiB RAM")
    print(*_about_ram(max(estimate.slab for estimate in made), options.max_pinned_gb), sep="\n")
    return 0


def _lengths(options: argparse.Namespace) -> dict[str, int]:
    """The lengths that were given, all of which the method must have."""
    of_method = {
        "sft": ("max_length",),
        "grpo": ("max_prompt_length", "max_completion_length", "num_generations"),
    }
    given = {name: getattr(options, name) for names in of_method.values() for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in of_method[options.method]:
            wanted = " and ".join(f"--{other}" for other in of_method[options.method][:2])
            raise ValueError(f"--{name} {value} is not for --method {options.method}, which takes {wanted}")
    return given


def _about_ram(slab: int, max_pinned_gb: float | None) -> list[str]:
    """This machine's host memory beside what a plan would page-lock."""
    from unsloth_trl.patches.checkpointing.ram import host_memory, pinned_limit
    from unsloth_trl.trainers.ram import host_memory_findings

    memory, limit = host_memory(), pinned_limit(max_pinned_gb)
    where = "this container" if memory.container else "this machine"
    line = (
        f"RAM of {where}: {memory.available / 2**30:.1f} GiB available, {limit / 2**30:.1f} of it may be page-locked"
    )
    if slab > limit:
        line += f"; {(slab - limit) / 2**30:.1f} GiB of layer inputs would stay on the device instead"
    return [line, *(f"note: {finding}" for finding in host_memory_findings(memory, max_pinned_gb))]


def _doctor(options: argparse.Namespace) -> int:
    from unsloth_trl.doctor import run_doctor

    return run_doctor()


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _positive(text: str) -> int:
    number = _whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} trains nothing; pass 1 or more")
    return number


def _seed(text: str) -> int:
    number = _whole_number(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is out of range; pass 0 to {2**32 - 1}")
    return number


if __name__ == "__main__":
    sys.exit(main())
