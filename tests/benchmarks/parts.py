"""Tables of single parts, beside those of whole steps: attention, the frozen head, experts of one layer, 4 bits."""

from typing import Any


def _newest(rows: list[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    """For each value of `keys`, in the order of the first, the rows of its newest call."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        group = groups.setdefault(tuple(str(row[key]) for key in keys), [])
        if group and group[0]["call"] != row["call"]:
            group.clear()
        group.append(row)
    return list(groups.values())


def _source(row: dict[str, Any]) -> str:
    return f"{row['call']}, {row['commit']}"


def attention(rows: list[dict[str, Any]], where: str) -> str:
    """Attention alone: a line for each layout and shape of heads."""
    lines = []
    for group in _newest(rows, "heads", "row"):
        by_variant = {row["variant"]: row for row in group}
        fused, flash = by_variant["fused"], by_variant["flash_attention_2"]
        heads, kv_heads, size = fused["heads"]
        merged, flash_4 = (
            f"{by_variant[name]['median_ms']:.2f} ms" if name in by_variant else "-"
            for name in ("merged pair", "flash_4")
        )
        lines.append(
            f"| {fused['row']} | {heads}/{kv_heads} of {size} | {fused['median_ms']:.2f} ms, {fused['tflops']:.0f} "
            f"TFLOP/s | {merged} | {flash_4} | {flash['median_ms']:.2f} ms | "
            f"{flash['median_ms'] / fused['median_ms']:.2f}x | {_source(fused)} |"
        )
    return (
        f"**Attention alone, forward and backward**, bf16, {where}; P is a prompt, R each of G completions that share "
        "it; FlashAttention-2, the one in PyTorch, has the prompt in front of each; segments are 16k tokens\n\n"
        "| | heads | fused kernel | merged pair | FlashAttention-4 | FlashAttention-2 | fused against it | "
        "call, commit |\n|---|---|---|---|---|---|---|---|\n" + "\n".join(lines)
    )


def head(rows: list[dict[str, Any]], where: str) -> str:
    """Log-probabilities of a frozen head: ours beside TRL's kernel."""
    lines = []
    for group in _newest(rows, "tokens", "vocab", "width"):
        stock = next(row for row in group if row["mode"] == "trl")
        for row in group:
            shape = f"{row['tokens']:,} tokens, {row['vocab']:,} x {row['width']:,}"
            name = "unsloth_trl" if row["mode"] == "ours" else f"TRL {row['versions']['trl']}"
            lines.append(
                f"| {shape}: {name} | {row['median_ms']:.1f} ({row['min_ms']:.1f}) ms | "
                f"{stock['median_ms'] / row['median_ms']:.2f}x | {row['extra_gib']:.2f} GiB | {_source(row)} |"
            )
    return (
        f"**Log-probabilities of a frozen head, forward and backward**, bf16, {where}; median (fastest)\n\n"
        "| | time | against TRL | extra memory | call, commit |\n|---|---|---|---|---|\n" + "\n".join(lines)
    )


def experts(rows: list[dict[str, Any]], where: str) -> str:
    """Experts of one layer: what LoRA costs beside the frozen weights, for each backend."""
    lines = []
    for group in _newest(rows, "variant", "tokens"):
        row = group[-1]
        kind, _, backend = row["variant"].rpartition(", ")
        lines.append(
            f"| {kind}, `{backend}` | {row['median_ms']:.2f} ms | {row['ratio_to_frozen']:.2f}x | "
            f"{row['peak_gib']:.2f} GiB | {_source(row)} |"
        )
    return (
        f"**Experts of one layer of Qwen3-30B-A3B, forward and backward, 4,096 tokens**, bf16, {where}\n\n"
        "| | time | against frozen | memory | call, commit |\n|---|---|---|---|---|\n" + "\n".join(lines)
    )


def grouped_gemm(rows: list[dict[str, Any]], where: str) -> str:
    """Products of sorted rows with stacked experts: ours, PyTorch's and the loop."""
    lines = []
    for group in _newest(rows, "in", "out", "mean_rows"):
        row = group[-1]
        for name in ("forward", "dx", "dw"):
            one = row[name]
            lines.append(
                f"| {row['in']} -> {row['out']}, {row['mean_rows']} rows, {name} | {one['ours_ms']:.2f} ms, "
                f"{one['ours_tflops']} TFLOP/s | {one['torch_ms'] / one['ours_ms']:.2f}x | "
                f"{one['loop_ms'] / one['ours_ms']:.2f}x | {_source(row)} |"
            )
    return (
        f"**Grouped products, {rows[-1]['experts']} experts**, bf16, {where}; rows are the mean of an expert's\n\n"
        "| | Triton | against `grouped_mm` | against the loop | call, commit |\n|---|---|---|---|---|\n"
        + "\n".join(lines)
    )


def nf4(rows: list[dict[str, Any]], where: str) -> str:
    """Weights on their way back from 4 bits: our kernel, bitsandbytes' and a copy of as many bytes."""
    lines = []
    for group in _newest(rows, "shape"):
        row = group[-1]
        ours, shape = row["ours_ms"], " x ".join(map(str, row["shape"]))
        lines.append(
            f"| {shape} | {ours:.3f} ms, {row['ours_gb_s'] / 1000:.2f} TB/s | "
            f"{row['bitsandbytes_ms'] / ours:.2f}x | {row['copy_ms'] / ours:.2f}x | {_source(row)} |"
        )
    return (
        f"**NF4 with double quantisation to bf16**, {where}\n\n"
        "| weight | Triton | against bitsandbytes | against a copy of as many bytes | call, commit |\n"
        "|---|---|---|---|---|\n" + "\n".join(lines)
    )


TABLES = {"attention": attention, "head": head, "moe_layer": experts, "grouped_gemm": grouped_gemm, "nf4": nf4}


def render(rows: list[dict[str, Any]], where) -> list[str]:
    """A table for each part that was measured; `where` says where a row comes from."""
    made = []
    for task, table in TABLES.items():
        own = [row for row in rows if row.get("task") == task and not row.get("void")]
        if own:
            made.append(table(own, where(own[-1])))
    return made
