"""Experts of one layer, forward and backward: frozen, with Split-LoRA, and with LoRA as PEFT does it.

    python tests/benchmarks/moe_layer.py --tokens 4096 8192

The shape is Qwen3-30B-A3B's: 128 experts of 2048 x 768, 8 for a token. Every variant runs in turn, `--rounds` times;
the gradient of the input is computed in all. Prints a table and one line `RESULT {json}` for each variant: median
milliseconds, the ratio to the frozen experts on the same backend, and the peak above what is there before.
"""

import argparse
import json

import torch
from peft import LoraConfig, get_peft_model
from record import provenance, timed
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from unsloth_trl.patches.moe import patch
from unsloth_trl.patches.moe.split_lora import SplitLoraForward, can_split
from unsloth_trl.patches.quantization.experts import quantize_experts


ap = argparse.ArgumentParser()
ap.add_argument("--tokens", type=int, nargs="+", default=[4096])
ap.add_argument("--r", type=int, default=16)
ap.add_argument("--rounds", type=int, default=20)
ap.add_argument("--backends", nargs="+", default=["grouped_mm", "triton"])
ap.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
ap.add_argument("--no-peft", action="store_true", help="leave PEFT's own forward out")
ap.add_argument("--nf4", action="store_true", help="also with experts in 4 bits")
ap.add_argument("--profile", default=None, help="write a table of the kernels of Split-LoRA on the first backend here")
a = ap.parse_args()
dtype = getattr(torch, a.dtype)
torch.manual_seed(0)
patch.register()
config = Qwen3MoeConfig(
    hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, hidden_act="silu"
)


class Layer(nn.Module):
    """The experts under a name, so that PEFT finds their parameters."""

    def __init__(self):
        super().__init__()
        self.experts = Qwen3MoeExperts(config)

    def forward(self, x, index, weights):
        return self.experts(x, index, weights)


def build(lora: bool, nf4: bool) -> nn.Module:
    with torch.device("cuda"):
        layer = Layer().to(dtype)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.02)
            parameter.requires_grad_(False)
    if nf4:
        quantize_experts(layer.experts)
    if not lora:
        return layer
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    layer = get_peft_model(layer, LoraConfig(r=a.r, lora_alpha=a.r, target_modules=[], target_parameters=targets))
    for name, parameter in layer.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.02)
    return layer


def split(layer: nn.Module) -> nn.Module:
    for module in layer.modules():
        if can_split(module):
            module.forward = SplitLoraForward(module)
    return layer


base, ours, theirs = build(False, False), split(build(True, False)), None if a.no_peft else build(True, False)
variants = {}
for backend in a.backends:
    variants[f"frozen, {backend}"] = (base, patch.NAMES[backend])
    variants[f"Split-LoRA, {backend}"] = (ours, patch.NAMES[backend])
if theirs is not None:
    variants["frozen, transformers"] = (base, "grouped_mm")
    variants["PEFT, transformers"] = (theirs, "grouped_mm")
if a.nf4:
    packed, packed_lora = build(False, True), split(build(True, True))
    variants[f"frozen in 4 bits, {a.backends[0]}"] = (packed, patch.NAMES[a.backends[0]])
    variants[f"Split-LoRA in 4 bits, {a.backends[0]}"] = (packed_lora, patch.NAMES[a.backends[0]])


def run(layer: nn.Module, implementation: str, inputs) -> tuple[float, float]:
    """Milliseconds of a forward and a backward, and GiB above what was there."""
    config._experts_implementation = implementation
    x, index, weights, grad = inputs
    x = x.detach().requires_grad_()
    weights = weights.detach().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    took, peak, _ = timed(lambda: layer(x, index, weights).backward(grad))
    return took, peak


for tokens in a.tokens:
    scores = torch.randn(tokens, 128, device="cuda") + torch.randn(128, device="cuda")  # some experts are liked more
    weights, index = scores.softmax(-1).topk(8, dim=-1)
    x, grad = (torch.randn(tokens, 2048, device="cuda", dtype=dtype) for _ in range(2))
    inputs = x, index, (weights / weights.sum(-1, keepdim=True)).to(dtype), grad
    times: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, float] = {}
    for layer, implementation in variants.values():
        for _ in range(3):
            run(layer, implementation, inputs)
    for turn in range(a.rounds):
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            took, peaks[name] = run(*variants[name], inputs)
            times[name].append(took)
    medians = {name: sorted(took)[len(took) // 2] for name, took in times.items()}
    print(f"{tokens} tokens, r={a.r}, {a.dtype}")
    for name, median in medians.items():
        kind, _, backend = name.rpartition(", ")
        frozen = medians[f"frozen{' in 4 bits' if '4 bits' in kind else ''}, {backend}"]
        print(f"  {name:<36}{median:>8.3f} ms  {median / frozen:>5.2f}x of frozen  {peaks[name]:>6.2f} GiB")
        result = {
            "task": "moe_layer",
            "mode": "trl" if backend == "transformers" else "ours",
            "variant": name,
            "tokens": tokens,
            "r": a.r,
            "dtype": a.dtype,
            "median_ms": round(median, 4),
            "min_ms": round(min(times[name]), 4),
            "ratio_to_frozen": round(median / frozen, 3),
            "peak_gib": round(peaks[name], 3),
            **provenance("ours", "moe_layer.py"),
        }
        print("RESULT", json.dumps(result), flush=True)
    if a.profile:
        name = f"Split-LoRA, {a.backends[0]}"
        with torch.profiler.profile() as profile:
            for _ in range(5):
                run(*variants[name], inputs)
        with open(a.profile, "w") as f:
            f.write(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40))
