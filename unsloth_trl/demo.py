"""The demo: train a LoRA adapter on small reasoning tasks and compare the model before and after."""

import importlib.util
import json
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tqdm.auto import tqdm
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback

from unsloth_trl import SFTConfig, SFTTrainer
from unsloth_trl.demo_folder import DemoError, output_folder
from unsloth_trl.models.names import is_path
from unsloth_trl.models.smollm2 import ModelSource, load_model, resolve_smollm2


SYSTEM_PROMPT = "Reply with the answer only."
# a 135M model learns these in a minute or two, and their lengths differ enough for padding to cost something
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "needle_haystack": {"min_num_statements": 2, "max_num_statements": 6},
    "family_relationships": {},
}
MAX_NEW_TOKENS = 12
RELOAD_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Scale:
    """How much the demo does, by device."""

    max_steps: int
    batch_size: int
    max_length: int
    held_out_per_task: int


@dataclass
class DemoResult:
    """What the demo measured; the table is made from it."""

    loss_before: float
    loss_after: float
    accuracy_before: float
    accuracy_after: float
    num_held_out: int
    example: tuple[str, str, str, str]  # question, expected answer, answer before, answer after
    tokens_per_second: float
    padding_avoided: float
    samples_per_step: int
    reload_error: float
    patch_report: str
    output_dir: Path


def run_demo(
    model: str | None = None, output_dir: str | None = None, max_steps: int | None = None, seed: int = 0
) -> DemoResult:
    """
    Train, measure before and after, save, reload with plain PEFT, and print a table.

    Args:
        model (`str`, *optional*): A chat model on the Hub or in a local folder. Defaults to SmolLM2-135M-Instruct.
        output_dir (`str`, *optional*): Where to write the adapter and the loss curve.
        max_steps (`int`, *optional*): Training steps. Defaults to what the device does in about two minutes.
        seed (`int`, *optional*, defaults to `0`): Seed of the data and of the run.

    Raises:
        DemoError: If an option cannot be honoured or the reloaded adapter computes something else.
        ModelUnavailableError: If the default model can neither be found nor downloaded.
    """
    _check_extras()
    with output_folder(output_dir) as folder:
        return _run(model, folder, max_steps, seed)


def _run(model: str | None, folder: Path, max_steps: int | None, seed: int) -> DemoResult:
    scale = choose_scale(torch.cuda.is_available(), max_steps)
    base, tokenizer, source = open_model(model, seed)

    num_train = scale.max_steps * scale.batch_size * scale.max_length // 40 // len(TASKS) + 8
    train_rows, held_out = build_rows(num_train, scale.held_out_per_task, seed)
    answers_before = generate_answers(base, tokenizer, held_out, "Answers before")

    trainer = _build_trainer(base, tokenizer, train_rows, held_out, scale, folder, seed)
    loss_before = trainer.evaluate()["eval_loss"]
    started = time.perf_counter()
    trainer.train()
    train_seconds = time.perf_counter() - started
    loss_after = trainer.evaluate()["eval_loss"]
    answers_after = generate_answers(trainer.model, tokenizer, held_out, "Answers after ")

    # no embedding is trained, and looking for that would ask the Hub
    trainer.model.save_pretrained(folder, save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    patch_report = str(trainer.patch_report)
    # mixed precision has wrapped the forward in autocast, which hides small differences behind large ones
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    reload_error = check_reload(trained, tokenizer, source, folder, held_out[:4])
    steps = [(log["step"], log["loss"]) for log in trainer.state.log_history if "loss" in log]
    write_loss_curve(folder / "loss.png", steps, (loss_before, loss_after))

    chats = [row["prompt"] + row["completion"] for row in train_rows]
    lengths = list(map(len, tokenizer.apply_chat_template(chats, return_dict=True)["input_ids"]))
    samples_per_step = max(1, round(len(lengths) * scale.batch_size / len(trainer.train_dataset)))
    num_tokens = next(log["num_tokens"] for log in reversed(trainer.state.log_history) if "num_tokens" in log)
    result = DemoResult(
        loss_before=loss_before,
        loss_after=loss_after,
        accuracy_before=accuracy(answers_before, held_out),
        accuracy_after=accuracy(answers_after, held_out),
        num_held_out=len(held_out),
        example=_choose_example(held_out, answers_before, answers_after),
        tokens_per_second=num_tokens / train_seconds,
        padding_avoided=padding_share(lengths, samples_per_step),
        samples_per_step=samples_per_step,
        reload_error=reload_error,
        patch_report=patch_report,
        output_dir=folder,
    )
    print(format_result(result))
    return result


def choose_scale(use_gpu: bool, max_steps: int | None) -> Scale:
    """Sizes for the device; few held-out rows if only a few steps are asked for."""
    scale = Scale(200, 8, 512, 64) if use_gpu else Scale(45, 1, 256, 10)
    if max_steps is None:
        return scale
    if max_steps < 1:
        raise DemoError(f"--max_steps {max_steps} trains nothing; pass 1 or more")
    held_out = scale.held_out_per_task if max_steps >= 20 else 4
    return Scale(max_steps, scale.batch_size, scale.max_length, held_out)


def resolve_model(model: str | None) -> ModelSource:
    """The model to train: the default one, a local folder, or a name on the Hub."""
    if model is None:
        return resolve_smollm2()
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise DemoError(f"--model {model}: the folder has no config.json; pass the folder of a saved model")
        return ModelSource(model, model, "folder")
    if is_path(model):
        raise DemoError(f"--model {model}: there is no such folder; pass a model folder or a name on the Hub")
    return ModelSource(model, model, "Hub")


def build_rows(num_train_per_task: int, num_held_out_per_task: int, seed: int) -> tuple[list[dict], list[dict]]:
    """
    Prompt/completion chat rows from the tasks of reasoning-gym.

    Returns:
        Two lists of rows with `prompt`, `completion` and `task`, the training rows shuffled. No question is in both,
        and none is twice among the held-out ones.
    """
    import reasoning_gym

    train, held_out = [], []
    # one dataset per task, cut in two: two seeds next to each other would share their items
    for task, options in TASKS.items():
        questions = set()
        size = 2 * num_train_per_task + 4 * num_held_out_per_task
        chosen = []
        for item in reasoning_gym.create_dataset(task, size=size, seed=seed, **options):
            row = _to_row(task, item["question"].strip(), item["answer"].strip())
            question = row["prompt"][-1]["content"]
            if len(questions) < num_held_out_per_task and question not in questions:
                questions.add(question)
                held_out.append(row)
            elif question not in questions and len(chosen) < num_train_per_task:
                chosen.append(row)
            elif len(chosen) == num_train_per_task:
                break
        train += chosen
    random.Random(seed).shuffle(train)
    return train, held_out


def _to_row(task: str, question: str, answer: str) -> dict:
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": answer}], "task": task}


@torch.inference_mode()
def generate_answers(model, tokenizer, rows: Sequence[dict], description: str, batch_size: int = 12) -> list[str]:
    """Greedy answers to the prompts of `rows`, in their order."""
    was_training, side = model.training, tokenizer.padding_side
    model.eval()
    tokenizer.padding_side = "left"
    answers = [""] * len(rows)
    # similar lengths together, so that little of a batch is padding
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["prompt"][-1]["content"]))
    with tqdm(total=len(rows), desc=description, unit="answer") as bar:
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = tokenizer.apply_chat_template(
                [rows[i]["prompt"] for i in indices],
                add_generation_prompt=True,
                padding=True,
                return_dict=True,
                return_tensors="pt",
            ).to(model.device)
            tokens = model.generate(
                **batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
            texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            for index, text in zip(indices, texts, strict=True):
                answers[index] = text.strip()
            bar.update(len(indices))
    tokenizer.padding_side = side
    model.train(was_training)
    return answers


def accuracy(answers: Sequence[str], rows: Sequence[dict]) -> float:
    """Share of answers that are exactly the expected ones."""
    expected = [row["completion"][0]["content"] for row in rows]
    return sum(a == b for a, b in zip(answers, expected, strict=True)) / len(expected)


def padding_share(lengths: Sequence[int], batch_size: int) -> float:
    """
    Share of a padded run that would be padding: one minus tokens over padded tokens.

    Args:
        lengths (`Sequence[int]`): Tokens of each sample, in the order of training.
        batch_size (`int`): Samples that are padded to the longest among them.
    """
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    padded = sum(len(batch) * max(batch) for batch in batches)
    return 1 - sum(lengths) / padded


def check_reload(trained, tokenizer, source: ModelSource, folder: Path, rows: Sequence[dict]) -> float:
    """
    Reload the adapter in `folder` with plain PEFT on a fresh base model and compare logits in fp32.

    Returns:
        `float`: The largest difference, relative to the largest logit.

    Raises:
        DemoError: If it is above `RELOAD_TOLERANCE`.
    """
    device = trained.device
    # the base as it was trained: a checkpoint in fp32 is rounded if training was in bf16
    fresh, _ = load_model(source, trained.get_input_embeddings().weight.dtype)
    reloaded = PeftModel.from_pretrained(fresh, folder).to(device).float().eval()
    trained = trained.float().eval()
    batch = tokenizer.apply_chat_template(
        [row["prompt"] + row["completion"] for row in rows], padding=True, return_dict=True, return_tensors="pt"
    ).to(device)
    with torch.inference_mode():
        expected = trained(**batch).logits
        got = reloaded(**batch).logits
    # logits at padded positions mean nothing
    real = batch["attention_mask"].bool()
    difference = (got[real] - expected[real]).abs().max() / expected[real].abs().max()
    error = difference.item()
    if not error <= RELOAD_TOLERANCE:  # also catches nan
        raise DemoError(
            f"the adapter in {folder}, reloaded with PEFT, gives other logits than the trained model: relative "
            f"difference {error:.1e}, allowed {RELOAD_TOLERANCE:.0e}. Please report this as a bug"
        )
    return error


def write_loss_curve(path: Path, steps: Sequence[tuple[int, float]], held_out: tuple[float, float]) -> None:
    """The training loss of each step and the held-out loss before and after, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*steps, strict=True), label="training")
    axes.plot([0, steps[-1][0]], held_out, "o", label="held out, before and after")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def format_result(result: DemoResult) -> str:
    """The table that is printed at the end."""
    question, expected, before, after = result.example
    rows = [
        ("", "before", "after"),
        ("held-out loss", f"{result.loss_before:.3f}", f"{result.loss_after:.3f}"),
        (f"exact answers of {result.num_held_out}", f"{result.accuracy_before:.0%}", f"{result.accuracy_after:.0%}"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    facts = {
        "question": json.dumps(question),
        "expected": json.dumps(expected),
        "before": json.dumps(before),
        "after": json.dumps(after),
        "tokens/s trained": f"{result.tokens_per_second:,.0f}",
        "padding avoided": f"{result.padding_avoided:.0%} of a padded run of {result.samples_per_step} samples a step",
        "reloaded in PEFT": f"logits agree (relative difference {result.reload_error:.1e})",
        "adapter, loss.png": str(result.output_dir),
    }
    width = max(map(len, facts))
    listed = [f"{name.ljust(width)}  {value}" for name, value in facts.items()]
    return "\n".join(["", *lines, "", *listed, "", result.patch_report])


class _ProgressBar(TrainerCallback):
    """One bar for training with the loss on it, one for each evaluation; no line per step."""

    def __init__(self):
        self._training = self._evaluation = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._training = tqdm(total=state.max_steps, desc="Training", unit="step")

    def on_step_end(self, args, state, control, **kwargs):
        self._training.update()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._training is not None and "loss" in (logs or {}):
            self._training.set_postfix(loss=f"{logs['loss']:.3f}")

    def on_train_end(self, args, state, control, **kwargs):
        self._training.close()
        self._training = None

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self._evaluation is None:
            self._evaluation = tqdm(total=len(eval_dataloader), desc="Held-out loss", unit="batch")
        self._evaluation.update()

    def on_evaluate(self, args, state, control, **kwargs):
        self._evaluation.close()
        self._evaluation = None


def run_settings(on_gpu: bool, dtype: torch.dtype, seed: int) -> dict:
    """What the configs of both demos have in common."""
    return {
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        # the activations of so small a model fit, and recomputing them costs a third of the time
        "gradient_checkpointing": False,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "bf16": dtype == torch.bfloat16,
        "fp16": on_gpu and dtype == torch.float32,
        "seed": seed,
    }


def demo_lora() -> LoraConfig:
    """The adapter that both demos train."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def _build_trainer(base, tokenizer, train_rows, held_out, scale: Scale, folder: Path, seed: int) -> SFTTrainer:
    on_gpu = base.device.type == "cuda"
    config = SFTConfig(
        output_dir=str(folder),
        max_steps=scale.max_steps,
        per_device_train_batch_size=scale.batch_size,
        per_device_eval_batch_size=4 * scale.batch_size,
        packing=True,
        max_length=scale.max_length,
        learning_rate=1e-3 if not on_gpu else 5e-4,
        lr_scheduler_type="cosine",
        warmup_steps=min(5, scale.max_steps // 4),
        **run_settings(on_gpu, base.dtype, seed),
    )
    trainer = SFTTrainer(
        base,
        config,
        train_dataset=Dataset.from_list(train_rows).remove_columns("task"),
        eval_dataset=Dataset.from_list(held_out).remove_columns("task"),
        processing_class=tokenizer,
        peft_config=demo_lora(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_ProgressBar())
    return trainer


def _training_dtype(use_gpu: bool) -> torch.dtype:
    # as the trainers' configs: torch counts emulated bf16 as supported, and they refuse it
    has_bf16 = use_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float32


def open_model(option: str | None, seed: int):
    """
    Seed the run, and find and load its model.

    Args:
        option (`str`, *optional*): `--model`.
        seed (`int`): Of the run.

    Returns:
        The model, on the GPU if there is one, its tokenizer, and the `ModelSource`.

    Raises:
        DemoError: If it is no chat model that can be trained.
        ModelUnavailableError: If the default model can neither be found nor downloaded.
    """
    set_seed(seed)
    # the switch has one name in transformers 5.17 and another in later ones
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
    use_gpu = torch.cuda.is_available()
    source, dtype = resolve_model(option), _training_dtype(use_gpu)
    base, tokenizer = _load(source, dtype, option)
    base.to("cuda" if use_gpu else "cpu")
    print(f"Model: {source.name}, from the {source.origin}, {str(dtype).removeprefix('torch.')} on {base.device.type}")
    return base, tokenizer, source


def _load(source: ModelSource, dtype: torch.dtype, option: str | None):
    try:
        model, tokenizer = load_model(source, dtype)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DemoError(
            f"--model {option or source.path}: it cannot be loaded as a causal language model ({reason}); pass a "
            "model folder or a name on the Hub"
        ) from error
    if tokenizer.chat_template is None:
        raise DemoError(f"--model {option}: its tokenizer has no chat template; pass an instruct or chat model")
    if getattr(model, "hf_quantizer", None) is not None:
        raise DemoError(f"--model {option}: its weights are quantised; pass the model in 16 or 32 bits")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _choose_example(rows, before: Sequence[str], after: Sequence[str]) -> tuple[str, str, str, str]:
    """A question that training fixed, or the first one if there is none."""
    expected = [row["completion"][0]["content"] for row in rows]
    fixed = [i for i, answer in enumerate(expected) if before[i] != answer and after[i] == answer]
    index = fixed[0] if fixed else 0
    return rows[index]["prompt"][-1]["content"], expected[index], before[index], after[index]


def _check_extras() -> None:
    missing = [name for name in ("reasoning_gym", "matplotlib") if not importlib.util.find_spec(name)]
    if missing:
        raise DemoError(f"{' and '.join(missing)} not found: pip install 'unsloth_trl[demo]'")
