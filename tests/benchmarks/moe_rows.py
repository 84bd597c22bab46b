"""Time and bandwidth of each row kernel of a mixture at the size of Qwen3-30B-A3B, on one GPU.

    python -m tests.benchmarks.moe_rows

Bytes are those that a kernel has to move at least: each input and output once, tokens not once for each choice. Prints
a table and one line `RESULT {json}`.
"""

import argparse
import json

import torch

from tests.benchmarks.record import provenance
from unsloth_trl.patches.moe import rows
from unsloth_trl.patches.moe.counting_sort import sort_rows
from unsloth_trl.patches.moe.routing import route


COPY = 4.3e12  # bytes per second that a copy reaches on an H200


def milliseconds(call, repetitions: int) -> float:
    """Median of `repetitions` runs, each after the L2 cache was flushed."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repetitions // 2]


def nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def measure(tokens: int, top_k: int, experts: int, hidden: int, inner: int, rank: int, kind: str, repetitions: int):
    """Rows of the table: name, milliseconds, GB/s, and the share of a copy's bandwidth."""
    torch.manual_seed(0)
    num_rows = tokens * top_k

    def f(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    index = torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices
    routing = sort_rows(index, experts)
    x, weights = f(tokens, hidden), torch.rand(tokens, top_k, device="cuda")
    gu, h, y = f(num_rows, 2 * inner), f(num_rows, inner), f(num_rows, hidden)
    xa, a, b = f(num_rows, rank), f(experts, rank, hidden), f(experts, rank, 2 * inner)
    ha, a_down, b_down = f(num_rows, rank), f(experts, rank, inner), f(experts, rank, hidden)
    order = routing.order
    calls = {
        "gather": (lambda: rows.gather_project(x, routing), nbytes(x, y, order)),
        "gather_project": (lambda: rows.gather_project(x, routing, a), nbytes(x, y, order, a, xa)),
        "project": (lambda: rows.project(x, routing, a), nbytes(x, order, a, xa)),
        "gate_forward, no LoRA": (lambda: rows.gate_forward(gu, routing, kind), nbytes(gu, h)),
        "gate_forward": (
            lambda: rows.gate_forward(gu, routing, kind, xa, b, a_down),
            nbytes(gu, h, xa, b, a_down, ha),
        ),
        "gate_backward_weighted": (
            lambda: rows.gate_backward_weighted(gu, h, routing, kind, weights, xa, b, ha, a_down),
            nbytes(gu, gu, h, h, xa, xa, b, ha, a_down, weights, weights, order),
        ),
        "combine": (lambda: rows.combine(y, routing, weights), nbytes(y, x, weights, routing.place)),
        "add_product_": (lambda: rows.add_product_(y, ha, b_down, routing), nbytes(y, y, ha, b_down)),
        "sort_rows": (
            lambda: sort_rows(index, experts),
            nbytes(index, order, routing.place, routing.expert, routing.offsets),
        ),
        "route and tiles": (
            lambda: route(index, experts).tiles(rows.TILE_ROWS),
            nbytes(index, order, routing.place, routing.expert, routing.offsets),
        ),
    }
    table = []
    for name, (call, moved) in calls.items():
        took = milliseconds(call, repetitions)
        speed = moved / took * 1e3
        table.append({"kernel": name, "ms": round(took, 4), "GB/s": round(speed / 1e9), "of_copy": speed / COPY})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 4096), ("top_k", 8), ("experts", 128), ("hidden", 2048), ("inner", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--kind", choices=rows.KINDS, default="silu")
    parser.add_argument("--repetitions", type=int, default=50)
    args = vars(parser.parse_args())
    table = measure(**args)
    for row in table:
        print(f"{row['kernel']:24} {row['ms']:8.4f} ms {row['GB/s']:6} GB/s {row['of_copy']:6.1%}")
        row["of_copy"] = round(row["of_copy"], 3)
    result = {"task": "moe_rows", "mode": "ours", **args, "kernels": table, **provenance("ours", "moe_rows.py")}
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
