"""How fast weights come back from 4 bits, beside bitsandbytes' `dequantize_4bit` and a copy of as many bytes.

    python tests/benchmarks/nf4.py

The experts of a layer of Qwen3-30B-A3B and the linear layers of Qwen3-14B, NF4 with double quantisation, to bf16.
Times are the median over 30 calls; GB/s count each byte that has to be read and written once. Prints a line
`RESULT {json}` for each shape.
"""

import json
import statistics

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


def milliseconds(function, calls: int = 30) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(shape: tuple[int, ...]) -> dict[str, float]:
    torch.manual_seed(0)
    dense = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    packed, state = quantize_4bit(dense, blocksize=64, compress_statistics=True, quant_type="nf4")
    weight, out = NF4Weight.from_quant_state(packed, state), torch.empty_like(dense)
    moved = weight.nbytes + out.nbytes
    half = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    calls = {
        "ours": lambda: dequantize_nf4(weight, out=out),
        "bitsandbytes": lambda: dequantize_4bit(packed, state),
        "copy": lambda: other.copy_(half),
    }
    if len(shape) == 3:
        calls["one_expert"] = lambda: dequantize_nf4(weight, experts=(1, 2), out=out[1])
    result = {}
    for name, call in calls.items():
        torch.cuda.reset_peak_memory_stats()
        result[f"{name}_ms"] = milliseconds(call)
        result[f"{name}_extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        if name != "one_expert":
            result[f"{name}_gb_s"] = moved / result[f"{name}_ms"] / 1e6
    theirs = dequantize_4bit(packed, state).view(shape)
    result["unequal_share"] = (theirs != dequantize_nf4(weight, out=out)).float().mean().item()
    return {key: round(value, 4) for key, value in result.items()}


def main() -> None:
    for shape in SHAPES:
        result = {"task": "nf4", "mode": "ours", "shape": shape} | measure(shape)
        print("RESULT", json.dumps(result | provenance("ours", "nf4.py")), flush=True)


if __name__ == "__main__":
    main()
