"""The README's table of results, rendered from `results/<gpu>.jsonl`.

`python -m tests.benchmarks.table` prints it; `python -m tests.packaging.readme` writes it into the README.
"""

import json
import pathlib

from tests.benchmarks import parts
from tests.benchmarks.training import PIECES
from unsloth_trl import GRPOConfig, PatchConfig


ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
NAMES = {"ours": "unsloth_trl", "trl": "TRL", "trl_liger": "TRL + Liger", "unsloth": "Unsloth"}
TIMINGS = {
    "per step": "median step (fastest step), synchronised at both ends",
    "events": "median step (fastest step) between events of the device, nothing synchronised",
    "window": "all steady steps in one window",
}
VERSIONED = {"trl": "trl", "trl_liger": "liger-kernel", "unsloth": "unsloth"}


def load() -> list[dict]:
    """All measured rows, oldest first."""
    files = sorted(RESULTS.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def _name(row: dict) -> str:
    name = NAMES[row["mode"]] + (", QLoRA with experts in 4 bits" if _is_moe(row) and row["qlora"] else "")
    if row["mode"] in VERSIONED:
        name += f" {row['versions'][VERSIONED[row['mode']]]}"
    name += f", `{' '.join(row['set'])}`" if row["set"] else ""
    name += "" if row.get("gc", 1) else ", activations kept"
    return name + "".join(f", without {PIECES[piece]}" for piece in row.get("without", []))


def _is_moe(row: dict) -> bool:
    """Of such a model the rows in 4 bits stand beside those in 16: no peer has any."""
    return "a3b" in row["model"]


def _line(row: dict, stock: dict) -> str:
    # a step with a row that is not full is no fast one
    fastest = "" if row["timing"] == "window" or row.get("short_step") else f" ({row['tok_s_fastest']:,})"
    ratio = f"{row['tok_s'] / stock['tok_s']:.2f}x"
    return f"| {_name(row)} | {row['tok_s']:,}{fastest} | {ratio} | {row['peak_gib']} GiB | {row['commit']} |"


def _grpo_line(row: dict, rows: list[dict]) -> str:
    stock = next(r for r in rows if r["mode"] == "trl")
    ratio = f"{stock['median_s'] / row['median_s']:.2f}x"
    memory = f"{row['peak_gib']} GiB | {row['peak_gib'] / stock['peak_gib']:.2f}x"
    return f"| {_name(row)} | {row['median_s']:.3f} ({row['min_s']:.3f}) | {ratio} | {memory} | {row['commit']} |"


def _is_current(row: dict) -> bool:
    """Rows of a switch that is no more, and those that were found to be wrong, stay in the file only."""
    if row.get("void"):
        return False
    config = GRPOConfig if row.get("task") == "grpo" else PatchConfig
    return all(hasattr(config, switch.split("=")[0]) for switch in row["set"])


def _sortable(row: dict, key: str) -> tuple[str, float]:
    """Numbers by size; rows from before a field had its default."""
    value = row.get(key, {"dtype": "bfloat16", "gpus": 1}.get(key, 0))
    return (value, 0) if isinstance(value, str) else ("", value)


def _values(row: dict, keys: tuple[str, ...]) -> list[tuple[str, float]]:
    return [("", 0) if key == "qlora" and _is_moe(row) else _sortable(row, key) for key in keys]


def _adapter(row: dict) -> str:
    return "QLoRA (NF4)" if row.get("qlora") else "LoRA"


def _newest_beside_trl(rows: list[dict], *keys: str) -> list[list[dict]]:
    """
    For each value of `keys` the rows of the newest call that has TRL's: two calls are two machines. And those of older
    ones that have a peer which no newer one has.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if _is_current(row):
            groups.setdefault((*_values(row, keys), row["call"]), []).append(row)
    found: dict[tuple, list[list[dict]]] = {}
    peers: dict[tuple, set[str]] = {}
    for (*key, _), group in sorted(groups.items(), reverse=True):
        modes, known = {row["mode"] for row in group}, peers.setdefault(tuple(key), {"ours"})
        if "trl" in modes and modes - known:
            found.setdefault(tuple(key), []).append(group)
            known |= modes
    return [group for _, newest in sorted(found.items()) for group in newest]


def _where(row: dict) -> str:
    return f"{row['gpu']}, torch {row['versions']['torch']}, transformers {row['versions']['transformers']}"


def _step(row: dict) -> str:
    gpus = row.get("gpus", 1)
    of_each = "" if gpus == 1 else f" on each of {gpus} GPUs ({'FSDP2' if row['sharded'] else 'DDP'})"
    return f"{row['model']} shape, about {round(row['tokens'] / 1000)}k tokens a step{of_each}"


def _sft(rows: list[dict]) -> str:
    first = rows[0]
    how = TIMINGS[first["timing"]]
    gc = "gradient checkpointing" if first["gc"] else "activations kept"
    dtype = "fp16" if first.get("dtype") == "float16" else "bf16"
    return (
        f"**{_step(first)}**, {_adapter(first)} r=16, "
        f"{gc}, {dtype}, packed rows of {first['len']}, {_where(first)}; {how}; call {first['call']}\n\n"
        "| | tokens/s | against TRL | peak memory | commit |\n|---|---|---|---|---|\n"
        + "\n".join(_line(row, next(r for r in rows if r["mode"] == "trl")) for row in rows)
    )


def _grpo(rows: list[dict]) -> str:
    first = rows[0]
    accumulation = f", {first['ga']} micro-batches a step" if first["ga"] > 1 else ""
    lengths = f"of {first['R']}" if first.get("fixed") else f"{first['R'] // 2} to {first['R']}"
    return (
        f"**GRPO, {first['model']} shape, prompt {first['P']}, completions {lengths}, groups "
        f"of {first['G']}**, {first['bs']} rows a micro-batch{accumulation}, beta {first['beta']:g}, "
        f"{_adapter(first)} r=16, gradient checkpointing, bf16, {_where(first)}; "
        f"scoring and update, median (fastest) seconds; call {first['call']}\n\n"
        "| | seconds a step | against TRL | peak memory | against TRL | commit |\n|---|---|---|---|---|---|\n"
        + "\n".join(_grpo_line(row, rows) for row in rows)
    )


def _policies(rows: list[dict]) -> str:
    """Policies of one run, which takes them in turn; ratios are to the recomputed step of the same round."""
    first = rows[0]
    return (
        f"**Checkpoint policies, {first['model']} shape, {first['bs'] * first['len'] // 1024}k tokens a step**, "
        f"{_adapter(first)} r=16, bf16, {_where(first)}; steps in turn, call {first['call']}\n\n"
        "| | seconds a step | against recompute | peak memory | host memory | commit |\n|---|---|---|---|---|---|\n"
        + "\n".join(
            f"| {row['policy']}: {row['plan']} | {row['median_s']:.3f} ({row['min_s']:.3f}) | "
            f"{row['ratio_to_recompute']:.3f}x | {row['peak_gib']} GiB | {_held(row)} | {row['commit']} |"
            for row in rows
        )
    )


def _held(row: dict) -> str:
    return f"{row['host_gib']} GiB" if "host memory" in row["plan"] else "-"


def _is_limit(row: dict) -> bool:
    return bool(row.get("vram") or row.get("one_sample"))


def _limits(rows: list[dict]) -> str:
    """Runs that ask what fits: on a part of the card's memory, or of one long row."""
    newest = {(row["mode"], _run(row), *row["set"]): row for row in rows if _is_current(row)}
    return (
        f"**What fits**, QLoRA (NF4) r=16, {_where(rows[0])}; a smaller card is a limit on the process's memory\n\n"
        "| | run | device memory | seconds a step | tokens/s | peak memory | call, commit |\n"
        "|---|---|---|---|---|---|---|\n"
        + "\n".join(
            f"| {_name(row)} | {_run(row)} | {_memory(row)} | {_seconds(row)} | {_tokens(row):,} | "
            f"{row['peak_gib']} GiB | {row['call']}, {row['commit']} |"
            for _, row in sorted(newest.items(), key=lambda item: (item[1].get("vram", 0), item[0]))
        )
    )


def _seconds(row: dict) -> str:
    return f"{row['median_s']:.2f}" + (" (the first, with its warm-up)" if "--skip 0" in row["command"] else "")


def _memory(row: dict) -> str:
    return f"{row['vram']:g} GiB" if row.get("vram") else "whole card"


def _run(row: dict) -> str:
    dtype = "fp16" if row.get("dtype") == "float16" else "bf16"
    if "task" not in row:
        return f"SFT {row['model']}, {'one sample' if row.get('one_sample') else 'rows'} of {row['len']}, {dtype}"
    completions = "generated completions" if row.get("generate") else "completions"
    return f"GRPO {row['model']}, prompt {row['P']}, {row['G']} {completions} of {row['R']}, {dtype}"


def _tokens(row: dict) -> int:
    """Tokens a second: in GRPO prompt and completion of each row, however often a trainer computes the prompt."""
    return row["tok_s"] if "task" not in row else round(row["bs"] * (row["P"] + row["R"]) / row["median_s"])


def _switches(rows: list[dict]) -> list[str]:
    """Calls that have several runs of ours and no peer: what a switch does."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if _is_current(row):
            keys = ("model", "timing", "len", "bs", "gpus", "sharded", "qlora")
            groups.setdefault((row["call"], *_values(row, keys)), []).append(row)
    made = []
    for group in groups.values():
        if len(group) < 2 or any(row["mode"] != "ours" for row in group):
            continue
        first = group[0]
        made.append(
            f"**Switches, {_step(first)}**, {_adapter(first)} r=16, "
            f"bf16, {_where(first)}; {TIMINGS[first['timing']]}; call {first['call']}\n\n"
            "| | tokens/s | against the first | peak memory | commit |\n|---|---|---|---|---|\n"
            + "\n".join(_line(row, first) for row in group)
        )
    return made


def render() -> str:
    """Tables: models and ways of timing, switches, checkpoint policies, GRPO shapes, what fits, single parts."""
    rows = load()
    sft = [row for row in rows if "task" not in row and not _is_limit(row)]
    grpo = [row for row in rows if row.get("task") == "grpo" and not _is_limit(row)]
    limits = [row for row in rows if row.get("task") in (None, "grpo") and _is_limit(row)]
    sft_keys = ("model", "gpus", "sharded", "timing", "len", "bs", "qlora", "dtype")
    grpo_keys = ("model", "P", "R", "G", "bs", "ga", "beta", "qlora", "fixed")
    turns: dict[tuple, list[dict]] = {}
    for row in rows:
        if row.get("task") == "checkpointing":
            turns.setdefault((row["model"], row["len"], row["bs"], row["qlora"], row["call"]), []).append(row)
    return "\n\n".join(
        [_sft(group) for group in _newest_beside_trl(sft, *sft_keys)]
        + _switches(sft)
        + [_policies(group) for _, group in sorted(turns.items())]
        + [_grpo(group) for group in _newest_beside_trl(grpo, *grpo_keys)]
        + ([_limits(limits)] if limits else [])
        + parts.render(rows, _where)
    )


if __name__ == "__main__":
    print(render())
