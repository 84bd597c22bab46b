"""Inputs, eager chains and errors for the tests of the row kernels; `main` is for Triton's interpreter."""

import torch

from tests.targets import mend_interpreter
from unsloth_trl.patches.moe import counting_sort, rows
from unsloth_trl.patches.moe import rows_reference as reference
from unsloth_trl.patches.moe.routing import Routing, route


# tokens, choices, experts of this process, experts in all, hidden, intermediate, ranks of gate_up and down, activation
CASES = {
    "silu": (23, 3, 5, 5, 50, 36, 5, 16, "silu"),
    "gelu": (17, 2, 4, 4, 32, 80, 16, 3, "gelu_tanh"),
    "gpt-oss": (19, 4, 7, 7, 40, 34, 8, 8, "gpt_oss"),
    "other-ranks": (21, 4, 3, 6, 36, 20, 20, None, "silu"),  # of 6 experts 3 are here
    "no-gate-up-lora": (5, 2, 15, 15, 20, 24, None, 7, "gpt_oss"),  # most experts without rows
    "no-lora": (9, 3, 4, 6, 300, 150, None, None, "gelu_tanh"),
    "one-row": (1, 1, 3, 3, 24, 16, 4, 4, "silu"),
    "none-here": (4, 2, 3, 6, 24, 16, 4, 4, "silu"),
    "no-tokens": (0, 2, 3, 3, 24, 16, 4, 4, "silu"),
}
KINDS = ("silu", "gelu", "gpt-oss")  # of the cases, one for each activation
# below these an error says nothing about the kernel; above the caps it is wrong whatever eager does
FLOOR = {torch.float32: 3e-7, torch.float16: 2e-4, torch.bfloat16: 2e-3}
ROUNDOFF = 2**-24  # of fp32, whose sums are chains in the kernels and trees in PyTorch
CAP = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def draw(case: tuple, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict:
    """All inputs of a layer's steps, rounded to `dtype`; rows of no expert are NaN."""
    num_tokens, top_k, num_experts, in_all, hidden, inner, rank, rank_down, kind = case
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(num_tokens, in_all, generator=generator)
    index = score.topk(top_k, dim=1).indices
    if case is CASES["none-here"]:
        index = index * 0 + num_experts
    index = index.clamp(max=num_experts)  # those of other processes are one number
    routing = route(index, num_experts)
    num_rows, beyond = routing.num_rows, routing.expert >= num_experts

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

    def by_row(width, scale=1.0):
        x = normal(num_rows, width, scale=scale)
        x[beyond.to(device)] = float("nan")
        return x

    inputs = {
        "x": normal(num_tokens, hidden),
        "grad": normal(num_tokens, hidden),
        "weights": torch.rand(num_tokens, top_k, generator=generator).to(dtype).to(device),
        "gu": by_row(2 * inner, 4.0 if kind == "gpt_oss" else 1.5),
        "dh": by_row(inner),
        "y": by_row(hidden),
        "xa": None if rank is None else by_row(rank),
        "a": None if rank is None else normal(num_experts, rank, hidden, scale=hidden**-0.5),
        "b": None if rank is None else normal(num_experts, rank, 2 * inner, scale=rank**-0.5),
        "dyb": None if rank_down is None else by_row(rank_down),
        "a_down": None if rank_down is None else normal(num_experts, rank_down, inner, scale=inner**-0.5),
        "b_down": None if rank_down is None else normal(num_experts, rank_down, hidden, scale=rank_down**-0.5),
        "kind": kind,
    }
    tensors = (routing.order, routing.place, routing.offsets)
    return {**inputs, "routing": Routing(*(t.to(device) for t in tensors)), "index": index.to(device)}


def to(inputs: dict, dtype: torch.dtype) -> dict:
    """The same numbers in another dtype."""
    return {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in inputs.items()
    }


def steps(module, prefix: str, suffix: str, i: dict) -> dict[str, torch.Tensor]:
    """Each step's results by name, from the functions `{prefix}{step}{suffix}` of `module`."""

    def call(step, *args):
        in_place = "_" if step.endswith("_") else ""
        return getattr(module, f"{prefix}{step.removesuffix('_')}{suffix}{in_place}")(*args)

    routing, kind, alpha, limit = i["routing"], i["kind"], 1.702, 7.0
    out = {}
    out["xs"], out["xa"] = call("gather_project", i["x"], routing, i["a"])
    if i["a"] is not None:
        _, out["xa_alone"] = call("gather_project", i["x"], routing, i["a"], False)
    out["h"], out["ha"] = call("gate_forward", i["gu"], routing, kind, i["xa"], i["b"], i["a_down"], alpha, limit)
    pieces = (i["gu"], i["dh"], routing, kind, i["weights"], i["xa"], i["b"], i["dyb"], i["a_down"])
    names = ("dgu", "h_weighted", "dgub", "dweights")
    out.update(zip(names, call("gate_backward", *pieces, alpha, limit, True), strict=True))
    out["out"] = call("combine", i["y"], routing, i["weights"])
    out["sum"] = call("combine", i["y"], routing, None)
    if i["b_down"] is not None:
        out["y_added"] = call("add_product_", i["y"].clone(), i["dyb"], i["b_down"], routing)
    return {name: x for name, x in out.items() if x is not None}


def eager(inputs: dict) -> dict[str, torch.Tensor]:
    return steps(reference, "", "_reference", inputs)


def kernels(inputs: dict) -> dict[str, torch.Tensor]:
    return steps(rows, "launch_", "", inputs)


def compare(inputs: dict, dtype: torch.dtype, ours) -> dict[str, float]:
    """By name of the result: the error against fp64 over what is allowed, infinite for a wrong shape or dtype."""
    truth, plain, found = eager(to(inputs, torch.float64)), eager(inputs), ours(inputs)
    assert truth.keys() == found.keys()
    last = int(inputs["routing"].offsets[-1])
    longest = max(inputs["x"].shape[1], inputs["gu"].shape[1])
    floor = max(FLOOR[dtype], ROUNDOFF * longest**0.5)
    ratios = {}
    for name, expected in truth.items():
        got, theirs = found[name], plain[name]
        right = torch.float32 if name == "dweights" else dtype
        if got.shape != expected.shape or got.dtype != right:
            ratios[name] = float("inf")
            continue
        if name not in ("out", "sum", "dweights"):
            expected, got, theirs = expected[:last], got[:last], theirs[:last]
        if not expected.numel():
            continue
        norm = expected.norm().item()
        if not norm:  # all slots of other processes
            ratios[name] = 0.0 if not got.any() else float("inf")
            continue
        error, others = ((x.double() - expected).norm().item() / norm for x in (got, theirs))
        ratio = error / min(CAP[dtype], max(1.5 * others, floor))
        ratios[name] = ratio if ratio == ratio else float("inf")
    return ratios


def sorts() -> dict[str, bool]:
    """Whether the counting sort is `route`, by size."""
    same = {}
    for num_tokens, top_k, num_experts, in_all, block in [
        (1, 1, 1, 1, 16),
        (37, 4, 8, 8, 16),
        (150, 3, 5, 9, 32),
        (301, 2, 130, 200, 64),
        (2300, 8, 20, 24, 128),
    ]:
        generator = torch.Generator().manual_seed(num_tokens)
        index = torch.rand(num_tokens, in_all, generator=generator).topk(top_k, dim=1).indices.clamp(max=num_experts)
        same[f"{num_tokens}x{top_k} of {num_experts}"] = same_sort(index, num_experts, block)
    return same


def same_sort(index: torch.Tensor, num_experts: int, block: int) -> bool:
    found, expected = counting_sort.launch_sort_rows(index, num_experts, block, 4 * block), route(index, num_experts)
    assert found.known_tiles.keys() == {block, 4 * block}
    pairs = [(getattr(found, name), getattr(expected, name)) for name in ("order", "place", "offsets", "expert")]
    pairs += [(found.tiles(rows), expected.tiles(rows)) for rows in found.known_tiles]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def main() -> dict:
    mend_interpreter()

    # what a kernel leaves out shows up as NaN
    def poisoned(empty):
        def call(*args, **kwargs):
            out = empty(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-1)

        return call

    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)
    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    errors = {}
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.float16) if name in KINDS else (torch.float32,):
            # programs of 32 rows in fp16, of 16 in fp32
            rows._MANY_ROWS = 0 if dtype == torch.float16 else 2**31
            found = compare(draw(case, dtype), dtype, kernels)
            errors[f"{name} {str(dtype).removeprefix('torch.')}"] = found
    return {"errors": errors, "sorts": sorts()}
