"""The GRPO demo: a few steps of reinforcement learning on a task of reasoning-gym, scored by reasoning-gym."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from unsloth_trl.demo import _check_extras, demo_lora, open_model, run_settings
from unsloth_trl.demo_folder import DemoError, output_folder


SYSTEM_PROMPT = "Reply with the answer only."
# with two examples in the prompt a 135M model reverses two words now and then, and learns to within seven steps
TASK = "word_sequence_reversal"
TASK_OPTIONS = {"min_words": 2, "max_words": 2}
NUM_EXAMPLES = 2
NUM_STEPS = 7
PROMPTS_PER_STEP = 4
NUM_GENERATIONS = 8
MAX_COMPLETION_LENGTH = 16
TEMPERATURE = 0.9
LEARNING_RATE = 4e-4
# what a run has to show
MIN_DIFFERING_SHARE = 0.5
MIN_REWARD_GAIN = 0.1

_COLUMNS = (
    "step",
    "mean reward",
    "groups that differ",
    "mean length",
    "grad_norm",
    "tokens shared",
    "tokens unshared",
)


@dataclass(frozen=True)
class Step:
    """
    One optimizer step, as the trainer logged it.

    Args:
        step (`int`): Its number, from 1.
        reward (`float`): Mean reward of its completions.
        num_differing (`int`): Groups whose completions did not all get the same reward.
        num_groups (`int`): Prompts of the step.
        mean_length (`float`): Tokens of a completion.
        grad_norm (`float`): Norm of the gradient before clipping.
        shared (`int`): Tokens that went through the model in scoring, each prompt once.
        unshared (`int`): What they would have been with the prompt repeated for each of its completions.
    """

    step: int
    reward: float
    num_differing: int
    num_groups: int
    mean_length: float
    grad_norm: float
    shared: int
    unshared: int


@dataclass(frozen=True)
class Requirement:
    """Something that the run has to show, and whether it did."""

    met: bool
    text: str


@dataclass(frozen=True)
class Group:
    """The completions of one prompt and the answer that reasoning-gym expects."""

    expected: str
    answers: list[str]


@dataclass
class GrpoDemoResult:
    """What the demo measured; the summary is made from it."""

    steps: list[Step]
    requirements: list[Requirement]
    first: Group
    last: Group
    shared: int
    unshared: int
    train_seconds: float
    total_seconds: float
    patch_report: str
    output_dir: Path


def run_grpo_demo(
    model: str | None = None, output_dir: str | None = None, max_steps: int | None = None, seed: int = 0
) -> GrpoDemoResult:
    """
    Train with rollouts, print a line per step, and say plainly what the run did and did not show.

    Args:
        model (`str`, *optional*): A chat model on the Hub or in a local folder. Defaults to SmolLM2-135M-Instruct.
        output_dir (`str`, *optional*): Where to write the adapter and the plot.
        max_steps (`int`, *optional*): Optimizer steps. Defaults to `NUM_STEPS`.
        seed (`int`, *optional*, defaults to `0`): Seed of the data and of the run.

    Raises:
        DemoError: If an option cannot be honoured.
        ModelUnavailableError: If the default model can neither be found nor downloaded.
    """
    _check_extras()
    num_steps = NUM_STEPS if max_steps is None else max_steps
    if num_steps < 1:
        raise DemoError(f"--max_steps {max_steps} trains nothing; pass 1 or more")
    with output_folder(output_dir) as folder:
        return _run(model, folder, num_steps, seed)


def _run(model: str | None, folder: Path, num_steps: int, seed: int) -> GrpoDemoResult:
    started = time.perf_counter()
    base, tokenizer, _ = open_model(model, seed)

    dataset, rows = build_prompts(num_steps * PROMPTS_PER_STEP, seed)
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, return_dict=True
    )
    mean_prompt = sum(map(len, prompts["input_ids"])) / len(rows)
    print(
        f"Task: {TASK} of reasoning-gym with its own scorer; each step has {PROMPTS_PER_STEP} new prompts of about "
        f"{mean_prompt:.0f} tokens and {NUM_GENERATIONS} completions of each, up to {MAX_COMPLETION_LENGTH} tokens"
    )
    groups: list[Group] = []
    trainer = _build_trainer(base, tokenizer, rows, make_reward(dataset, groups), num_steps, folder, seed)
    table = StepTable(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(table)
    train_started = time.perf_counter()
    trainer.train()
    train_seconds = time.perf_counter() - train_started

    # no embedding is trained, and looking for that would ask the Hub
    trainer.model.save_pretrained(folder, save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    write_plot(folder / "reward.png", table.steps)
    result = GrpoDemoResult(
        steps=table.steps,
        requirements=check_requirements(table.steps),
        first=groups[0],
        last=groups[-1],
        shared=trainer.token_counts.shared,
        unshared=trainer.token_counts.unshared,
        train_seconds=train_seconds,
        total_seconds=time.perf_counter() - started,
        patch_report=str(trainer.patch_report),
        output_dir=folder,
    )
    print(format_result(result))
    return result


def build_prompts(num_prompts: int, seed: int):
    """
    Prompts of the task, each with the same solved examples before it.

    Args:
        num_prompts (`int`): How many.
        seed (`int`): Seed of the task.

    Returns:
        The dataset of reasoning-gym, which scores answers, and a list of rows with `prompt` and `index`, the place of
        the question in that dataset. No question is asked twice, and no example is asked.
    """
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(TASK, size=2 * num_prompts + NUM_EXAMPLES, seed=seed, **TASK_OPTIONS)
    shared = [{"role": "system", "content": SYSTEM_PROMPT}]
    asked = set()
    rows = []
    for index, item in enumerate(dataset):
        question = item["question"].strip()
        if index < NUM_EXAMPLES:
            shared.append({"role": "user", "content": question})
            shared.append({"role": "assistant", "content": item["answer"]})
        elif question not in asked and len(rows) < num_prompts:
            rows.append({"prompt": [*shared, {"role": "user", "content": question}], "index": index})
        asked.add(question)
    return dataset, rows


def make_reward(dataset, groups: list[Group]) -> Callable[..., list[float]]:
    """
    The scorer of reasoning-gym as a reward function of TRL.

    Args:
        dataset: The dataset of reasoning-gym that the prompts come from.
        groups (`list[Group]`): Gets the completions of every prompt, in the order in which they are scored.
    """

    def score_answer(completions: list[list[dict]], index: list[int], **kwargs) -> list[float]:
        answers = [completion[-1]["content"].strip() for completion in completions]
        for place in dict.fromkeys(index):
            own = [answer for answer, other in zip(answers, index, strict=True) if other == place]
            groups.append(Group(dataset[place]["answer"], own))
        return [
            float(dataset.score_answer(answer=answer, entry=dataset[place]))
            for answer, place in zip(answers, index, strict=True)
        ]

    return score_answer


class StepTable(TrainerCallback):
    """A progress bar, and a line of the table for each step above it."""

    def __init__(self, trainer):
        self.steps: list[Step] = []
        self._trainer = trainer
        self._bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._bar = tqdm(total=state.max_steps, desc="GRPO", unit="step")
        self._bar.write(format_line(_COLUMNS))
        self._bar.write(format_line(["-" * len(name) for name in _COLUMNS]))

    def on_step_end(self, args, state, control, **kwargs):
        self._bar.update()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._bar is None or "reward" not in (logs or {}):
            return
        counts = self._trainer.token_counts
        num_groups = args.generation_batch_size // args.num_generations
        step = Step(
            step=state.global_step,
            reward=logs["reward"],
            num_differing=round((1 - logs["frac_reward_zero_std"]) * num_groups),
            num_groups=num_groups,
            mean_length=logs["completions/mean_length"],
            grad_norm=logs["grad_norm"],
            shared=counts.shared - sum(step.shared for step in self.steps),
            unshared=counts.unshared - sum(step.unshared for step in self.steps),
        )
        self.steps.append(step)
        self._bar.write(format_step(step))
        self._bar.set_postfix(reward=f"{step.reward:.3f}")

    def on_train_end(self, args, state, control, **kwargs):
        self._bar.close()
        self._bar = None


def format_line(cells: Sequence[str]) -> str:
    """A line of the table, every cell as wide as its column's name."""
    return "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, _COLUMNS, strict=True))


def format_step(step: Step) -> str:
    """The line of one step."""
    return format_line(
        [
            str(step.step),
            f"{step.reward:.3f}",
            f"{step.num_differing} of {step.num_groups}",
            f"{step.mean_length:.1f}",
            f"{step.grad_norm:.3f}",
            f"{step.shared:,}",
            f"{step.unshared:,}",
        ]
    )


def check_requirements(steps: Sequence[Step]) -> list[Requirement]:
    """
    What a run has to show: groups to learn from, a gradient at every step, and a mean reward that rises.

    The reward is compared between the first and the last third of the steps, whose prompts are all different.
    """
    num_groups = sum(step.num_groups for step in steps)
    share = sum(step.num_differing for step in steps) / num_groups
    differing = Requirement(
        share >= MIN_DIFFERING_SHARE,
        f"rewards differ within {share:.0%} of {num_groups} groups (required: {MIN_DIFFERING_SHARE:.0%})",
    )
    without = [str(step.step) for step in steps if not step.grad_norm > 0]  # nan too
    if without:
        gradient = Requirement(False, f"grad_norm is not above 0 at step {', '.join(without)}")
    else:
        smallest = min(step.grad_norm for step in steps)
        gradient = Requirement(True, f"grad_norm is above 0 at every step (smallest: {smallest:.3f})")
    third = len(steps) // 3
    if not third:
        text = f"whether the mean reward rises cannot be said: it takes 3 steps, there were {len(steps)}"
        return [differing, gradient, Requirement(False, text)]
    first = sum(step.reward for step in steps[:third]) / third
    last = sum(step.reward for step in steps[-third:]) / third
    rising = Requirement(
        last - first >= MIN_REWARD_GAIN,
        f"mean reward: {first:.3f} in the first third of the steps, {last:.3f} in the last "
        f"(required: {MIN_REWARD_GAIN:.2f} more)",
    )
    return [differing, gradient, rising]


def write_plot(path: Path, steps: Sequence[Step]) -> None:
    """Mean reward and mean completion length of each step, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    numbers = [step.step for step in steps]
    upper.plot(numbers, [step.reward for step in steps], "o-")
    upper.set_ylabel("mean reward")
    upper.set_ylim(0, 1.02)
    lower.plot(numbers, [step.mean_length for step in steps], "o-", color="tab:orange")
    lower.set_ylabel("mean completion length (tokens)")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("step")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def format_result(result: GrpoDemoResult) -> str:
    """The summary that is printed at the end."""
    lines = [f"{'met' if each.met else 'NOT MET':<7}  {each.text}" for each in result.requirements]
    missed = sum(not each.met for each in result.requirements)
    if missed:
        lines.append(f"This run did not show {missed} of the {len(lines)} things that it should show.")
    if result.shared:
        times = result.unshared / result.shared
        tokens = f"{result.shared:,} with shared prompts, {result.unshared:,} without ({times:.1f} times as many)"
    else:
        tokens = "not counted, since prompts were not shared; the report below says why"
    facts = {
        "first prompt": _describe(result.first),
        "last prompt": _describe(result.last),
        "tokens scored": tokens,
        "time": f"{result.total_seconds:.0f} s in all, {result.train_seconds / len(result.steps):.1f} s a step",
        "adapter, reward.png": str(result.output_dir),
    }
    width = max(map(len, facts))
    listed = [f"{name.ljust(width)}  {value}" for name, value in facts.items()]
    return "\n".join(["", *lines, "", *listed, "", result.patch_report])


def _describe(group: Group) -> str:
    """The expected answer and the most frequent ones that were given."""
    common = Counter(group.answers).most_common(3)
    given = ", ".join(f"{count}x {json.dumps(answer, ensure_ascii=False)}" for answer, count in common)
    rest = len(group.answers) - sum(count for _, count in common)
    more = f", {rest} other" if rest else ""
    return f"expected {json.dumps(group.expected, ensure_ascii=False)}, got {given}{more}"


def _build_trainer(base, tokenizer, rows, reward, num_steps: int, folder: Path, seed: int):
    from unsloth_trl.config import GRPOConfig
    from unsloth_trl.trainers.grpo import GRPOTrainer

    on_gpu = base.device.type == "cuda"
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=PROMPTS_PER_STEP * NUM_GENERATIONS,
        num_generations=NUM_GENERATIONS,
        max_completion_length=MAX_COMPLETION_LENGTH,
        temperature=TEMPERATURE,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        beta=0.0,
        shuffle_dataset=False,
        **run_settings(on_gpu, base.dtype, seed),
    )
    return GRPOTrainer(
        base,
        reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=demo_lora(),
    )
