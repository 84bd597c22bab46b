"""How fast weights come back from 4 bits, beside bitsandbytes' `dequantize_4bit` and a copy of as many bytes.

    python tests/benchmarks/nf4.py

The experts of a layer of Qwen3-30B-A3B and the linear layers of Qwen3-14B, NF4 with double quantisation, to bf16.
Calls go over as many weights as no cache holds and are replayed from a CUDA graph, so that the device's time is
measured and not the host's. GB/s count each byte that has to be read and written once. Prints a line `RESULT {json}`
for each shape.
"""

import json
import math
import statistics
from collections.abc import Callable

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from record import provenance

from unsloth_trl.patches.quantization.op import NF4Weight, dequantize_nf4


SHAPES = [
    (128, 1536, 2048),
    (128, 2048, 768),
    (5120, 5120),
    (1024, 5120),
    (17408, 5120),
    (5120, 17408),
]
WORKING_SET = 2**29  # bytes, several times what the largest cache holds


def milliseconds(calls: list[Callable], replays: int = 30) -> float:
    """Of one call, the median over replays of all."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # where a capture wants its warm-up
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def measure(shape: tuple[int, ...]) -> dict[str, float]:
    torch.manual_seed(0)
    dense = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    number = math.ceil(WORKING_SET / dense.nbytes)
    quantized = [quantize_4bit(dense, blocksize=64, compress_statistics=True, quant_type="nf4") for _ in range(number)]
    weights = [NF4Weight.from_quant_state(packed, state) for packed, state in quantized]
    outs = [torch.empty_like(dense) for _ in range(number)]
    moved = weights[0].nbytes + dense.nbytes
    halves = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in range(number)]
    calls = {
        "ours": [lambda w=w, out=out: dequantize_nf4(w, out=out) for w, out in zip(weights, outs, strict=True)],
        "bitsandbytes": [lambda pair=pair: dequantize_4bit(*pair) for pair in quantized],
        "copy": [lambda half=half: half[0].copy_(half[1]) for half in halves],
    }
    result = {}
    for name, each in calls.items():
        result[f"{name}_ms"] = milliseconds(each)
        result[f"{name}_gb_s"] = moved / result[f"{name}_ms"] / 1e6
    theirs = dequantize_4bit(*quantized[0]).view(shape)
    result["unequal_share"] = (theirs != dequantize_nf4(weights[0], out=outs[0])).float().mean().item()
    return {key: round(value, 4) for key, value in result.items()}


def main() -> None:
    for shape in SHAPES:
        result = {"task": "nf4", "mode": "ours", "shape": shape} | measure(shape)
        print("RESULT", json.dumps(result | provenance("ours", "nf4.py")), flush=True)


if __name__ == "__main__":
    main()
