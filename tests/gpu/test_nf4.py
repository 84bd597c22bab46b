"""The 4-bit kernel on a GPU: bit for bit as on the CPU, without a host sync; weights that wait on a side stream."""

import copy

import pytest
import torch

from tests.tiny import tiny_model
from unsloth_trl.patches.quantization.experts import find_experts, packed_weight, quantize_experts_
from unsloth_trl.patches.quantization.op import NF4Weight, dequantize_nf4
from unsloth_trl.patches.quantization.scratch import Scratch


pytestmark = pytest.mark.gpu

SHAPES = [(4, 48, 50), (3, 5, 7), (2, 1, 3), (8, 256, 512)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantized(shape, blocksize=64, compress_statistics=True):
    """A weight on the GPU and the same bytes on the CPU."""
    bnb = pytest.importorskip("bitsandbytes").functional
    dense = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, shape[0])[:, None, None]
    )
    packed, state = bnb.quantize_4bit(
        dense, blocksize=blocksize, compress_statistics=compress_statistics, quant_type="nf4"
    )
    there = copy.deepcopy(state)
    there.to("cuda")
    return NF4Weight.from_quant_state(packed.cuda(), there), NF4Weight.from_quant_state(packed, state), there


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compress_statistics", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("blocksize", [32, 64, 512, 4096])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_the_cpu(shape, blocksize, compress_statistics, dtype):
    weight, host, state = quantized(shape, blocksize, compress_statistics)
    for experts in ((0, shape[0]), (1, shape[0]), (shape[0] - 1, shape[0])):
        expected = dequantize_nf4(host, experts=experts, dtype=dtype)
        around = torch.full((expected.numel() + 64,), float("nan"), dtype=dtype, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = dequantize_nf4(weight, experts=experts, out=around[32:-32])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(result.cpu(), expected)
        assert around[:32].isnan().all() and around[-32:].isnan().all()
    from bitsandbytes.functional import dequantize_4bit

    if weight.packed.numel() > 1 and blocksize >= 64:
        state.dtype = dtype
        theirs = dequantize_4bit(weight.packed.view(-1, 1), state).view(shape)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]  # an ulp
        torch.testing.assert_close(dequantize_nf4(weight, dtype=dtype), theirs, rtol=tolerance, atol=0)


def test_beyond_31_bits():
    shape = (3, 1 << 15, (1 << 15) + 64)
    numel = shape[0] * shape[1] * shape[2]
    generator = torch.Generator("cuda").manual_seed(0)

    def random(size):
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)

    code = torch.linspace(-1, 1, 16, device="cuda")
    nested = {
        "nested_absmax": torch.rand(-(-numel // 64 // 256), device="cuda", generator=generator),
        "nested_code": torch.linspace(-1, 1, 256, device="cuda"),
        "offset": torch.tensor(2.0, device="cuda"),
    }
    weight = NF4Weight(random(numel // 2), random(numel // 64), code, shape, torch.bfloat16, 64, **nested)
    last = dequantize_nf4(weight, experts=(2, 3))
    row, start = 5 * 64, 2 * shape[1] * shape[2] + (shape[1] - 1) * shape[2]
    assert start > 2**31
    digits = torch.stack(
        [weight.packed[start // 2 :][: row // 2] >> 4, weight.packed[start // 2 :][: row // 2] & 15], 1
    )
    block = torch.arange(start // 64, start // 64 + 5, device="cuda")
    scale = nested["nested_code"][weight.absmax[block].long()] * nested["nested_absmax"][block // 256] + 2.0
    expected = code[digits.view(-1).long()] * scale.repeat_interleave(64)
    assert torch.equal(last[0, -1, :row], expected.bfloat16())


def test_a_quantised_model_moves_there_and_back():
    pytest.importorskip("bitsandbytes")
    model = tiny_model("qwen3_moe")
    quantize_experts_(model)
    module = next(find_experts(model))[1]
    before = module.gate_up_proj
    model.to("cuda")
    weight = packed_weight(module, "gate_up_proj")
    assert weight.device.type == weight.nested_absmax.device.type == weight.offset.device.type == "cuda"
    assert torch.equal(module.gate_up_proj.cpu(), before)
    assert model(torch.arange(3, 9, device="cuda")[None]).logits.isfinite().all()
    model.to("cpu")
    assert torch.equal(module.gate_up_proj, before)


@pytest.mark.parametrize("poison", [False, True])
def test_prefetched_weights_are_whole(poison):
    # the products take far longer than the copies, so that a buffer given away too early is overwritten while read
    weights = []
    for i in range(6):
        weight, _, _ = quantized((2, 2048, 2048))
        weight.packed.bitwise_xor_(i * 17)
        weights.append(weight)
    x = torch.randn(2, 4096, 2048, device="cuda", dtype=torch.bfloat16)
    expected = [x @ dequantize_nf4(weight, dtype=torch.bfloat16).mT for weight in weights]
    scratch = Scratch(slots=2, poison=poison)
    for _ in range(3):
        results = []
        for i, weight in enumerate(weights):
            with scratch.use(weight, torch.bfloat16) as dense:
                assert scratch.prefetch(weights[(i + 1) % len(weights)], torch.bfloat16)
                results.append(x @ dense.mT)
        for result, truth in zip(results, expected, strict=True):
            assert torch.equal(result, truth)
    assert scratch.nbytes == 2 * 2 * weights[0].numel
