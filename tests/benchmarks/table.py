"""The README's table of results, rendered from `results/<gpu>.jsonl`.

`python tests/benchmarks/table.py` prints it; `python -m tests.packaging.readme` writes it into the README.
"""

import json
import pathlib

from unsloth_trl import PatchConfig


ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
NAMES = {"ours": "unsloth_trl", "trl": "TRL", "trl_liger": "TRL + Liger", "unsloth": "Unsloth"}
VERSIONED = {"trl": "trl", "trl_liger": "liger-kernel", "unsloth": "unsloth"}


def load() -> list[dict]:
    """All measured rows, oldest first."""
    files = sorted(RESULTS.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def _name(row: dict) -> str:
    name = NAMES[row["mode"]]
    if row["mode"] in VERSIONED:
        name += f" {row['versions'][VERSIONED[row['mode']]]}"
    return name + (f", `{' '.join(row['set'])}`" if row["set"] else "")


def _line(row: dict, rows: list[dict]) -> str:
    stock = next((r for r in rows if r["mode"] == "trl"), None)
    ratio = f"{row['tok_s'] / stock['tok_s']:.2f}x" if stock else ""
    fastest = f" ({row['tok_s_fastest']:,})" if row["timing"] == "per step" else ""
    return f"| {_name(row)} | {row['tok_s']:,}{fastest} | {ratio} | {row['peak_gib']} GiB | {row['commit']} |"


def _is_current(row: dict) -> bool:
    """Rows of a switch that is no more stay in the file only."""
    return all(hasattr(PatchConfig, switch.split("=")[0]) for switch in row["set"])


def render() -> str:
    """A table for each model and way of timing: those rows of the newest call that has them beside TRL's."""
    groups: dict[tuple, list[dict]] = {}
    for row in load():
        if _is_current(row):
            groups.setdefault((row["model"], row["timing"], row["call"]), []).append(row)
    # times of different calls are times of different machines
    beside_trl = (key for key in sorted(groups) if any(row["mode"] == "trl" for row in groups[key]))
    newest = {key[:2]: key for key in beside_trl}
    parts = []
    for model, timing, call in newest.values():
        rows = groups[model, timing, call]
        first = rows[0]
        how = "median step (fastest step)" if timing == "per step" else "all steady steps in one window"
        versions = f"torch {first['versions']['torch']}, transformers {first['versions']['transformers']}"
        gc = "gradient checkpointing" if first["gc"] else "activations kept"
        parts.append(
            f"**{model} shape, about {round(first['tokens'] / 1000)}k tokens a step**, LoRA r=16, {gc}, bf16, packed "
            f"rows of {first['len']}, {first['gpu']}, {versions}; {how}; call {call}\n\n"
            "| | tokens/s | against TRL | peak memory | commit |\n|---|---|---|---|---|\n"
            + "\n".join(_line(row, rows) for row in rows)
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(render())
