"""The command line: `unsloth-trl demo`. Nothing heavy is imported before a subcommand runs."""

import argparse
import sys
from collections.abc import Sequence

from unsloth_trl import __version__


def build_parser() -> argparse.ArgumentParser:
    """The parser of `unsloth-trl` with all its subcommands; each sets `run`, a function of the parsed options."""
    parser = argparse.ArgumentParser(
        prog="unsloth-trl", description="TRL's trainers with the same losses and adapters in less time and memory."
    )
    parser.add_argument("--version", action="version", version=f"unsloth_trl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*): Options in place of the process's own.

    Returns:
        `int`: The exit status: 0, or 1 after an error that was reported in one line. Wrong options exit with 2.
    """
    options = build_parser().parse_args(argv)
    return options.run(options)


def _demo(options: argparse.Namespace) -> int:
    # torch and transformers take seconds to import, too long for --help
    from unsloth_trl.demo import DemoError, run_demo
    from unsloth_trl.demo_grpo import run_grpo_demo
    from unsloth_trl.models.smollm2 import ModelUnavailableError

    run = run_grpo_demo if options.grpo else run_demo
    try:
        run(options.model, options.output_dir, options.max_steps, options.seed)
    except (DemoError, ModelUnavailableError) as error:
        print(f"unsloth-trl demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("unsloth-trl demo: interrupted", file=sys.stderr)
        return 130
    return 0


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
