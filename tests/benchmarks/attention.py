"""Attention alone, forward and backward: the fused kernel, the merged pair and FlashAttention-2, 32/8 heads of 128.

    python tests/benchmarks/attention.py --shared 4096x512 512x512 --plain 512 2048

`--shared PxR` is one prompt of P tokens with `--G` completions of R; FlashAttention-2 has the prompt in front of each
of them. `--plain N` is 16k tokens in segments of N, with FlashAttention-4, too, where the package flash-attn-4 is
installed (`flash_4`). `--size` is the head size. All variants of a row run in turn. Prints a table and one line
`RESULT {json}` for each variant: median milliseconds, the ratio to FlashAttention-2, and TFLOP/s of what has to be
multiplied. `--sweep` tries other blocks for the fused kernel first, and prints the best.
"""

import argparse
import json
from importlib.metadata import version

import torch
from record import provenance, timed

from unsloth_trl.patches.attention import flash_4, fused
from unsloth_trl.patches.attention.fused import Blocks, fused_attention
from unsloth_trl.patches.attention.op import flash_attn_varlen
from unsloth_trl.patches.attention.shared import flash_attn_shared
from unsloth_trl.patches.layout import PackedLayout


ap = argparse.ArgumentParser()
ap.add_argument("--shared", nargs="*", default=["4096x512", "512x512", "1024x4096"])
ap.add_argument("--plain", type=int, nargs="*", default=[512, 2048, 16384])
ap.add_argument("--G", type=int, default=8)
ap.add_argument("--heads", type=int, default=32)
ap.add_argument("--kv_heads", type=int, default=8)
ap.add_argument("--size", type=int, default=128)
ap.add_argument("--rounds", type=int, default=15)
ap.add_argument("--sweep", action="store_true")
a = ap.parse_args()
torch.manual_seed(0)
SCALE = a.size**-0.5


def tensors(tokens: int) -> list[torch.Tensor]:
    heads = (a.heads, a.kv_heads, a.kv_heads, a.heads)
    drawn = [torch.randn(tokens, n, a.size, device="cuda", dtype=torch.bfloat16) for n in heads]
    return [x.requires_grad_() for x in drawn[:3]] + drawn[3:]


def run_of(attend, layout):
    """A forward and a backward of an attention over the segments of `layout`."""
    query, key, value, grad = tensors(layout.num_tokens)
    return lambda: attend(query, key, value, layout, scale=SCALE).backward(grad)


def runs_flash_4(layout) -> bool:
    """Whether FlashAttention-4 can take the row; says so if not."""
    query, _, value, _ = tensors(1)
    refused = flash_4.flash_4_refusal(query, value, layout, None, None, None, 0.0)
    if refused is not None:
        print(f"no FlashAttention-4 for {refused}")
    return refused is None


def medians(variants: dict, rounds: int) -> dict[str, float]:
    """Milliseconds of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 3):
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            took = timed(variants[name], 3_000_000)[0]
            if turn >= 3:
                times[name].append(took)
    return {name: sorted(took)[len(took) // 2] for name, took in times.items()}


def rows():
    """Name, layouts for the fused kernel and for FlashAttention-2, and pairs of a query and a key."""
    for name in a.shared:
        prompt, answer = map(int, name.split("x"))
        shared = PackedLayout([prompt, *[answer] * a.G], [-1, *[0] * a.G]).to("cuda")
        pairs = prompt * (prompt + 1) / 2 + a.G * (answer * prompt + answer * (answer + 1) / 2)
        yield f"shared P{prompt} R{answer} G{a.G}", shared, PackedLayout([prompt + answer] * a.G).to("cuda"), pairs
    for length in a.plain:
        layout = PackedLayout([length] * (16384 // length)).to("cuda")
        yield f"segments of {length}", layout, layout, 16384 // length * length * (length + 1) / 2


SWEEP = {
    "forward": [Blocks(128, n, w, s) for n, w, s in ((64, 8, 2), (64, 8, 3), (128, 8, 2), (64, 4, 3))],
    "query": [Blocks(*b) for b in ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2), (64, 32, 4, 3))],
    "key": [Blocks(*b) for b in ((64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 4, 3), (64, 64, 8, 2))],
}


def sweep(layout) -> None:
    """One direction after the other, the other two as they are; the best is used from here on."""
    chosen = {part: fused.blocks_for(200 * 1024, torch.bfloat16, a.size, part) for part in SWEEP}
    fused.blocks_for = lambda shared, dtype, size, part, long=False: chosen[part]
    for part, candidates in SWEEP.items():
        found = []
        for blocks in candidates:
            chosen[part] = blocks
            try:
                found.append((medians({"fused": run_of(fused_attention, layout)}, 5)["fused"], blocks))
            except Exception as error:  # too much shared memory
                print(f"  {part} {tuple(blocks)}: {type(error).__name__}")
        found.sort()
        chosen[part] = found[0][1]
        print(f"  {part}:", ", ".join(f"{tuple(blocks)} {took:.3f}" for took, blocks in found), flush=True)


for name, layout, repeated, pairs in rows():
    if a.sweep:
        print(name)
        sweep(layout)
    variants = {"fused": run_of(fused_attention, layout), "flash_attention_2": run_of(flash_attn_varlen, repeated)}
    if layout.parents is not None:
        variants["merged pair"] = run_of(flash_attn_shared, layout)
    elif runs_flash_4(layout):
        variants["flash_4"] = run_of(flash_4.flash_attn_4, layout)
    found = medians(variants, a.rounds)
    flops = 4 * a.heads * a.size * pairs * 3.5  # of two products forward and five backward
    print(name)
    for variant, took in found.items():
        ratio = found["flash_attention_2"] / took
        print(f"  {variant:<20}{took:>9.3f} ms {ratio:>7.2f}x {flops / took / 1e9:>7.0f} TFLOP/s")
        result = {
            "task": "attention",
            "mode": {"flash_attention_2": "torch", "flash_4": "flash_4"}.get(variant, "ours"),
            "row": name,
            "variant": variant,
            "heads": [a.heads, a.kv_heads, a.size],
            "median_ms": round(took, 4),
            "ratio_to_flash": round(ratio, 3),
            "tflops": round(flops / took / 1e9, 1),
            **provenance("ours", "attention.py"),
        }
        if variant == "flash_4":
            result["versions"][flash_4.PACKAGE] = version(flash_4.PACKAGE)
        print("RESULT", json.dumps(result), flush=True)
