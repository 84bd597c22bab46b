"""Grouped products of experts: ours in Triton, PyTorch's `grouped_mm`, and a loop over the experts.

    python tests/benchmarks/grouped_gemm.py
    python tests/benchmarks/grouped_gemm.py --sweep --rows 256 --products forward dw

Random data and random unequal routing. Prints one line `RESULT {json}` for each shape and mean number of rows:
milliseconds of each, TFLOP/s of the large products, how many times as fast as PyTorch ours is, and how far from it.
The loop is the backend `native_torch`, which asks the device where each expert's rows end. With `--sweep` it prints
instead, for each product, what each of several configurations reaches, best first; they are compiled by `--jobs`
processes beforehand.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
from dataclasses import replace

import torch
import torch.nn.functional as F
from record import provenance

from unsloth_trl.patches.moe.gemm import Configuration, triton_grouped_gram, triton_grouped_mm
from unsloth_trl.patches.moe.reference import grouped_gram_reference, grouped_mm_reference
from unsloth_trl.patches.moe.routing import _tiles


SCALE = 2.0
MM_CONFIGURATIONS = [
    Configuration(*blocks, descriptors=descriptors, flatten=flatten, per_sm=per_sm, group=group)
    for blocks, descriptors, flatten, per_sm, group in [
        ((128, 256, 64, 8, 3), True, True, 1, 8),
        ((128, 256, 64, 8, 3), True, True, 1, 16),
        ((128, 256, 64, 8, 4), True, False, 1, 8),
        ((128, 256, 64, 8, 3), False, True, 1, 8),
        ((128, 256, 64, 8, 4), False, False, 1, 8),
        ((128, 128, 64, 8, 4), True, True, 1, 8),
        ((128, 128, 64, 4, 3), True, False, 2, 8),
        ((128, 128, 64, 8, 3), True, False, 2, 8),
        ((128, 128, 64, 4, 3), False, False, 2, 8),
        ((64, 256, 64, 4, 4), True, True, 1, 8),
        ((64, 256, 64, 4, 4), True, False, 1, 8),
        ((64, 128, 64, 4, 4), True, False, 2, 8),
        ((64, 128, 64, 4, 3), True, False, 3, 8),
        ((64, 128, 64, 4, 4), False, False, 2, 8),
        ((64, 128, 128, 4, 3), True, False, 2, 8),
    ]
]
GRAM_CONFIGURATIONS = [
    Configuration(*blocks, descriptors=descriptors)
    for blocks, descriptors in [
        ((128, 128, 64, 4, 2), False),
        ((128, 128, 64, 4, 3), False),
        ((128, 128, 32, 4, 3), False),
        ((128, 128, 64, 8, 3), False),
        ((128, 128, 64, 4, 3), True),
        ((128, 256, 64, 8, 2), False),
        ((128, 256, 64, 8, 3), False),
        ((128, 256, 64, 8, 3), True),
        ((256, 128, 64, 8, 3), True),
        ((64, 128, 64, 4, 3), False),
        ((128, 256, 64, 8, 2), True),
        ((128, 256, 64, 8, 4), True),
        ((256, 128, 64, 8, 4), True),
        ((128, 128, 64, 8, 4), True),
        ((128, 256, 32, 8, 4), False),
        ((64, 256, 64, 4, 3), False),
    ]
]


class Layer:
    """One stacked weight with an adapter, its rows and the gradients of its results, and the ways to multiply them."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, mean_rows: int, rank: int):
        generator = torch.Generator().manual_seed(0)
        self.num_rows = num_experts * mean_rows
        popularity = torch.softmax(0.5 * torch.randn(num_experts, generator=generator), 0)
        expert = torch.multinomial(popularity, self.num_rows, replacement=True, generator=generator)
        ends = expert.bincount(minlength=num_experts).cumsum(0)
        self.offsets = ends.int().cuda()

        def draw(*shape):
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.x, self.dy = draw(self.num_rows, in_features), draw(self.num_rows, out_features)
        self.w = draw(num_experts, out_features, in_features).transpose(1, 2)  # as transformers stores it
        self.a, self.b = draw(num_experts, in_features, rank), draw(num_experts, rank, out_features)
        self.xa = draw(self.num_rows, rank)
        # each row is that of a token, of which there are an eighth as many
        self.token = torch.randint(0, self.num_rows // 8, (self.num_rows,), device="cuda")
        self.flops = 2 * self.num_rows * in_features * out_features
        self.tables: dict[int, torch.Tensor] = {}

    def tiles(self, block: int) -> torch.Tensor:
        if block not in self.tables:
            self.tables[block] = _tiles(self.offsets, self.num_rows, block)
        return self.tables[block]

    def ours(self, product: str, config: Configuration | None = None):
        def mm(x, weight, config=config, **adapter):
            return triton_grouped_mm(x, weight, self.offsets, tiles=self.tiles, config=config, **adapter)

        match product:
            case "forward":
                return lambda: mm(self.x, self.w)
            case "gather":
                return lambda: mm(self.x, self.w, rows=self.token)
            case "dx":
                return lambda: mm(self.dy, self.w.transpose(1, 2))
            case "dw":
                return lambda: triton_grouped_gram(self.x, self.dy, self.offsets, config=config)
            case "lora":
                return lambda: mm(self.x, self.w, xa=mm(self.x, self.a, config=None), b=self.b, scale=SCALE)
            case "xa":
                return lambda: mm(self.x, self.a)
            case "da":
                return lambda: triton_grouped_gram(self.x, self.xa, self.offsets, config=config)

    def torch(self, product: str):
        def mm(x, weight):
            return F.grouped_mm(x, weight, offs=self.offsets)

        match product:
            case "forward":
                return lambda: mm(self.x, self.w)
            case "gather":
                return lambda: mm(self.x[self.token], self.w)
            case "dx":
                return lambda: mm(self.dy, self.w.transpose(1, 2))
            case "dw":
                return lambda: mm(self.x.t(), self.dy)
            case "lora":
                return lambda: torch.add(mm(self.x, self.w), mm(mm(self.x, self.a), self.b), alpha=SCALE)
            case "xa":
                return lambda: mm(self.x, self.a)
            case "da":
                return lambda: mm(self.x.t(), self.xa)

    def loop(self, product: str):
        def mm(x, weight):
            return grouped_mm_reference(x, weight, self.offsets)

        match product:
            case "forward":
                return lambda: mm(self.x, self.w)
            case "gather":
                return lambda: mm(self.x[self.token], self.w)
            case "dx":
                return lambda: mm(self.dy, self.w.transpose(1, 2))
            case "dw":
                return lambda: grouped_gram_reference(self.x, self.dy, self.offsets)
            case "lora":
                return lambda: torch.add(mm(self.x, self.w), mm(mm(self.x, self.a), self.b), alpha=SCALE)
            case "xa":
                return lambda: mm(self.x, self.a)
            case "da":
                return lambda: grouped_gram_reference(self.x, self.xa, self.offsets)


PRODUCTS = ("forward", "gather", "dx", "dw", "lora", "xa", "da")


def milliseconds(function, repeats: int) -> float:
    """Median time on the GPU."""
    for _ in range(3):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def measure(layer: Layer, products: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Times, speeds and the difference of each product."""
    found = {}
    for product in products:
        ways = {"ours": layer.ours(product), "torch": layer.torch(product), "loop": layer.loop(product)}
        expected = ways["torch"]().float()
        difference = ((ways["ours"]().float() - expected).norm() / expected.norm()).item()
        del expected
        row = {f"{name}_ms": round(milliseconds(way, repeats), 4) for name, way in ways.items()}
        if product not in ("xa", "da"):
            row |= {f"{name}_tflops": round(layer.flops / row[f"{name}_ms"] / 1e9) for name in ways}
        row["times_torch"] = round(row["torch_ms"] / row["ours_ms"], 3)
        row["difference"] = float(f"{difference:.1e}")
        found[product] = row
    return found


def configurations(product: str) -> list[Configuration]:
    return GRAM_CONFIGURATIONS if product in ("dw", "da") else MM_CONFIGURATIONS


def fitted(product: str, config: Configuration, rank: int) -> Configuration:
    """With no wider a block than the product is."""
    narrow = max(16, 1 << (rank - 1).bit_length())
    return replace(config, block_n=min(config.block_n, narrow)) if product in ("xa", "da") else config


def compile_all(arguments: tuple, products: list[str], index: int) -> None:
    """Every product with its configuration number `index`: what Triton compiles stays in its cache on the disk."""
    layer = Layer(*arguments)
    for product in products:
        if index < len(configurations(product)):
            try:
                layer.ours(product, fitted(product, configurations(product)[index], arguments[-1]))()
            except Exception as error:
                print(f"{product} {configurations(product)[index]}: {type(error).__name__}", flush=True)


def sweep(layer: Layer, products: list[str], repeats: int, rank: int) -> None:
    """Prints a table: for each product the configurations, best first."""
    for product in products:
        torch_ms = milliseconds(layer.torch(product), repeats)
        rows = []
        for config in (None, *configurations(product)):
            try:
                way = layer.ours(product, config and fitted(product, config, rank))
                rows.append((milliseconds(way, repeats), config))
            except Exception as error:  # more shared memory than there is, for one
                print(f"  {config}: {type(error).__name__}")
        print(f"{product}: torch {torch_ms:.4f} ms, {layer.flops / torch_ms / 1e9:.0f} TFLOP/s")
        for ms, config in sorted(rows, key=lambda row: row[0]):
            name = "default"
            if config is not None:
                name = f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}"
                name += f" g{config.group} x{config.per_sm}{' tma' * config.descriptors}{' flat' * config.flatten}"
            print(f"  {ms:8.4f} ms {layer.flops / ms / 1e9:5.0f} TFLOP/s {torch_ms / ms:5.2f}x  {name}", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--experts", type=int, default=128)
    ap.add_argument("--shapes", nargs="*", default=["2048x1536", "768x2048"])
    ap.add_argument("--rows", nargs="*", type=int, default=[64, 256, 1024], help="mean rows of an expert")
    ap.add_argument("--rank", type=int, default=16)
    ap.add_argument("--products", nargs="*", default=list(PRODUCTS), choices=PRODUCTS)
    ap.add_argument("--repeats", type=int, default=20)
    ap.add_argument("--sweep", action="store_true")
    ap.add_argument("--jobs", type=int, default=8, help="processes that compile for --sweep; 0 to compile one by one")
    a = ap.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in a.shapes]
    if a.sweep and a.jobs:
        # compiled code does not depend on the number of rows
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(a.jobs, mp_context=spawn) as pool:
            number = max(len(configurations(product)) for product in a.products)
            tasks = [
                pool.submit(compile_all, (a.experts, *shape, 16, a.rank), a.products, index)
                for shape in shapes
                for index in range(number)
            ]
            for task in tasks:
                task.result()
    for in_features, out_features in shapes:
        for mean_rows in a.rows:
            layer = Layer(a.experts, in_features, out_features, mean_rows, a.rank)
            if a.sweep:
                print(f"== {a.experts} experts {in_features}x{out_features}, {mean_rows} rows")
                sweep(layer, a.products, a.repeats, a.rank)
                continue
            result = {
                "task": "grouped_gemm",
                "mode": "ours",
                "experts": a.experts,
                "in": in_features,
                "out": out_features,
                "mean_rows": mean_rows,
                "rank": a.rank,
                **measure(layer, a.products, a.repeats),
                **provenance("ours", "grouped_gemm.py"),
            }
            print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
