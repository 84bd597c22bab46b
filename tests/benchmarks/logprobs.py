"""How far the log-probabilities of shared-prompt rows are from TRL's in bf16, beside what padding alone does to TRL's.

    python tests/benchmarks/logprobs.py

A random model of 12 layers whose logits are spread as a trained model's are, groups of 8 completions, log-probs from
each trainer's own method: TRL's on the padded batch, TRL's again on a wider one and one row at a time without padding
(other batch shapes), ours. Prints one line `RESULT {json}` with a histogram of the absolute differences and the errors
against fp32.
"""

import itertools
import json
import random
import tempfile

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

import unsloth_trl
from tests.tiny import tiny_tokenizer


BINS = [0.0, 1e-4, 1e-3, 3e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, float("inf")]
PROMPTS, GROUP, PROMPT, COMPLETION = 4, 8, (200, 700), (50, 400)


def model(dtype: torch.dtype, attn: str):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        initializer_range=0.05,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn)
    with torch.no_grad():  # a standard deviation of about 2 between the logits of a token
        built.lm_head.weight.normal_(0, 2 / config.hidden_size**0.5)
    return built.to("cuda", dtype)


def batch(device: str = "cuda"):
    """Padded ids, mask and completion width, as TRL hands them over."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 32000) for _ in range(rng.randint(*PROMPT))] for _ in range(PROMPTS)]
    rows = [
        (p, [rng.randrange(3, 32000) for _ in range(rng.randint(*COMPLETION))]) for p in prompts for _ in range(GROUP)
    ]
    left, right = max(len(p) for p, _ in rows), max(len(c) for _, c in rows)
    ids = torch.zeros(len(rows), left + right, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (p, c) in enumerate(rows):
        ids[i, left - len(p) : left + len(c)] = torch.tensor(p + c)
        mask[i, left - len(p) : left + len(c)] = 1
    return ids.to(device), mask.to(device), right


def trainer(library, built):
    return library.GRPOTrainer(
        built,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=library.GRPOConfig(
            tempfile.mkdtemp(), per_device_train_batch_size=8, num_generations=8, report_to="none", bf16=True
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w9"] * 8}),
        processing_class=tiny_tokenizer(),
    )


@torch.no_grad()
def scores(built_trainer, ids, mask, width: int, batch_size: int | None) -> torch.Tensor:
    """Log-probs of the real completion tokens, fp32, one after the other."""
    out, _, _ = built_trainer._get_per_token_logps_and_entropies(
        built_trainer.model, ids, mask, width, batch_size=batch_size
    )
    return out[mask[:, -width:].bool()].float()


def measure() -> dict:
    """The three sets of log-probs, compared."""
    ids, mask, width = batch()
    real = {}
    theirs = trainer(trl, model(torch.bfloat16, "flash_attention_2"))
    real["padded"] = scores(theirs, ids, mask, width, 8)
    # the longest prompt has no padding in the first shape: here every row has other positions than there
    further = [torch.nn.functional.pad(x, (64, 0)) for x in (ids, mask)]
    real["padded further"] = scores(theirs, *further, width, 8)
    rows = []
    for row, keep in zip(ids, mask.bool(), strict=True):
        completion = int(keep[-width:].sum())
        rows.append(scores(theirs, row[keep][None], torch.ones_like(row[keep][None]), completion, None))
    real["row by row"] = torch.cat(rows)
    del theirs
    ours = trainer(unsloth_trl, model(torch.bfloat16, "sdpa"))
    real["shared"] = scores(ours, ids, mask, width, 8)
    counts = vars(ours.token_counts)
    del ours
    exact = trainer(trl, model(torch.float32, "sdpa"))
    exact.accelerator.autocast = lambda *args, **kwargs: torch.autocast("cuda", enabled=False)
    truth = scores(exact, ids, mask, width, 2)
    result = {"tokens": counts, "num_labels": truth.numel(), "bins": BINS[:-1]}
    for name, pair in {
        "TRL row by row - TRL padded": ("row by row", "padded"),
        "TRL padded further - TRL padded": ("padded further", "padded"),
        "shared - TRL padded": ("shared", "padded"),
        "shared - TRL row by row": ("shared", "row by row"),
    }.items():
        difference = (real[pair[0]] - real[pair[1]]).abs()
        counted = [int(((difference >= low) & (difference < high)).sum()) for low, high in itertools.pairwise(BINS)]
        result[name] = {"histogram": counted, **_summary(difference)}
    for name, values in real.items():
        result[f"error of {name}"] = _summary((values - truth).abs())
    return result


def _summary(difference: torch.Tensor) -> dict[str, float]:
    quantile = torch.quantile(difference[: 2**24], torch.tensor([0.5, 0.99], device=difference.device)).tolist()
    return {
        "mean": round(difference.mean().item(), 6),
        "p50": round(quantile[0], 6),
        "p99": round(quantile[1], 6),
        "max": round(difference.max().item(), 6),
    }


if __name__ == "__main__":
    from tests.benchmarks.record import provenance

    print("RESULT", json.dumps({"task": "logprobs", "mode": "ours", **measure(), **provenance("ours", "logprobs.py")}))
