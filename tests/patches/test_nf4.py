"""The way back from 4 bits has bitsandbytes' bits: the CPU path, the kernel interpreted, the kernel compiled."""

import pytest
import torch

from tests.targets import TARGETS, in_interpreter
from unsloth_trl.patches.quantization import reference
from unsloth_trl.patches.quantization.experts import quantize_nf4
from unsloth_trl.patches.quantization.op import NF4Weight, dequantize_nf4, dequantize_nf4_triton


bnb = pytest.importorskip("bitsandbytes").functional

# rows and experts that end within a block, an odd number of elements, fewer than a block, many blocks of scales
SHAPES = [(4, 48, 50), (3, 5, 7), (2, 1, 3), (5, 64, 64), (3, 130, 90)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantized(shape, blocksize=64, compress_statistics=True, quant_type="nf4", dtype=torch.float32, seed=0):
    """A weight in 4 bits, and what bitsandbytes makes of it in fp32."""
    generator = torch.Generator().manual_seed(seed)
    # scales that differ from block to block by orders of magnitude
    dense = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[0]).view(-1, 1, 1)
    packed, state = bnb.quantize_4bit(
        dense.to(dtype), blocksize=blocksize, compress_statistics=compress_statistics, quant_type=quant_type
    )
    weight = NF4Weight.from_quant_state(packed, state)
    state.dtype = torch.float32
    return weight, by_bitsandbytes(packed, state)


def by_bitsandbytes(packed: torch.Tensor, state) -> torch.Tensor:
    """
    bitsandbytes' way back, as one row: on CPUs with AVX-512 it reads wrong scales (0.50.2) where a quantisation block
    is longer than the last dimension.
    """
    shape, state.shape = state.shape, (1, state.shape.numel())
    try:
        return bnb.dequantize_4bit(packed, state).view(shape)
    finally:
        state.shape = shape


def through_kernel(weight: NF4Weight, experts: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """The result of the kernel, and whether it wrote what it should and nothing beside it."""
    row = weight.numel // weight.shape[0]
    count = (experts[1] - experts[0]) * row
    around = torch.full((count + 32,), float("nan"), dtype=dtype)
    out = around[16 : 16 + count]
    dequantize_nf4_triton(
        weight.packed,
        weight.absmax,
        weight.code,
        weight.nested_absmax,
        weight.nested_code,
        weight.offset,
        weight.blocksize,
        weight.nested_blocksize,
        experts[0] * row,
        out,
    )
    return out, bool(around[:16].isnan().all() and around[16 + count :].isnan().all() and not out.isnan().any())


def interpreted() -> dict[str, list]:
    """Cases of the kernel that differ from bitsandbytes by a bit; run with TRITON_INTERPRET."""
    wrong, cases = [], 0
    for shape in SHAPES:
        for blocksize in (32, 64, 4096):
            for compress_statistics in (True, False):
                weight, expected = quantized(shape, blocksize, compress_statistics)
                for dtype in (torch.float32, torch.float16):
                    for experts in ((0, shape[0]), (1, shape[0] - 1), (shape[0] - 1, shape[0])):
                        if experts[0] == experts[1]:
                            continue
                        cases += 1
                        out, written = through_kernel(weight, experts, dtype)
                        same = torch.equal(out, expected[slice(*experts)].reshape(-1).to(dtype))
                        if not (same and written):
                            wrong.append([shape, blocksize, compress_statistics, str(dtype), experts])
    return {"wrong": wrong, "cases": cases}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compress_statistics", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_bitsandbytes(shape, compress_statistics, dtype, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", 1 << 12)  # so that the biggest shape has several
    for blocksize in (32, 64, 4096):
        for quant_type in ("nf4", "fp4"):
            weight, expected = quantized(shape, blocksize, compress_statistics, quant_type, dtype)
            assert weight.dtype == dtype and weight.shape == shape
            result = dequantize_nf4(weight)
            assert result.dtype == dtype and not result.requires_grad
            assert torch.equal(result, expected.to(dtype))
            assert torch.equal(dequantize_nf4(weight, dtype=torch.float32), expected)


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_some_experts_into_a_buffer(shape, blocksize):
    weight, expected = quantized(shape, blocksize)
    for first in range(shape[0]):
        for last in range(first, shape[0] + 1):
            count = (last - first) * shape[1] * shape[2]
            around = torch.full((count + 2,), float("nan"))
            result = dequantize_nf4(weight, experts=(first, last), out=around[1:-1])
            assert result.shape == (last - first, *shape[1:])
            assert torch.equal(result, expected[first:last])
            assert count == 0 or result.data_ptr() == around[1:].data_ptr()
            assert around[0].isnan() and around[-1].isnan()


def test_what_does_not_fit_is_named():
    weight, _ = quantized((3, 4, 5))
    for kwargs, message in [
        ({"experts": (1, 4)}, "of 3"),
        ({"experts": (2, 1)}, "of 3"),
        ({"dtype": torch.float64}, "the result can be"),
        ({"out": torch.empty(59)}, "does not hold"),
        ({"out": torch.empty(5, 4, 3).transpose(0, 2)}, "does not hold"),
        ({"out": torch.empty(60), "dtype": torch.bfloat16}, "asked for"),
    ]:
        with pytest.raises(ValueError, match=message):
            dequantize_nf4(weight, **kwargs)


def test_op_check():
    weight, _ = quantized((3, 5, 7))
    fields = ("packed", "absmax", "code", "nested_absmax", "nested_code", "offset", "blocksize", "nested_blocksize")
    arguments = (*(getattr(weight, name) for name in fields), 35, torch.empty(35))
    torch.library.opcheck(torch.ops.unsloth_trl.dequantize_nf4, arguments)


def test_the_buffer_counts_its_versions():
    # what autograd saved of a buffer must not be replaced without notice
    weight, _ = quantized((3, 5, 7))
    buffer = torch.empty(weight.numel)
    x = torch.ones(7, requires_grad=True)
    y = (dequantize_nf4(weight, out=buffer) @ x).sum()
    dequantize_nf4(weight, out=buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("compress_statistics", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("numel", [1, 63, (1 << 20) + 1, 3 << 20])
def test_quantised_in_pieces_as_in_one(numel, compress_statistics):
    dense = torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(torch.bfloat16)
    packed, state = bnb.quantize_4bit(dense, compress_statistics=compress_statistics, quant_type="nf4")
    ours, ours_state = quantize_nf4(dense, compress_statistics=compress_statistics)
    assert torch.equal(packed, ours) and packed.shape == ours.shape
    expected, got = state.as_dict(), ours_state.as_dict()
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert torch.equal(value, got[key]) if isinstance(value, torch.Tensor) else value == got[key], key


def test_kernel_interpreted():
    pytest.importorskip("triton")
    result = in_interpreter("tests.patches.test_nf4")
    assert result["cases"] >= 120
    assert not result["wrong"], result["wrong"]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("nested, blocksize, wide", [(True, 64, False), (False, 32, False), (True, 4096, True)])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_kernel_compiles(target, nested, blocksize, wide, even):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from unsloth_trl.patches.quantization.kernels import dequantize_nf4_kernel as kernel
    from unsloth_trl.patches.quantization.op import TILE

    index, out = ("i64" if wide else "i32"), {torch.float16: "*fp16", torch.bfloat16: "*bf16"}[target.dtype]
    types = ["*u8", "*u8" if nested else "*fp32", "*fp32", "*fp32", "*fp32", "*fp32", out, index, index]
    names = kernel.arg_names
    constants = {
        "NESTED": nested,
        "NESTED_BLOCKSIZE": 256,
        "BLOCKSIZE": blocksize,
        "BLOCKS": max(TILE // blocksize, 1),
        "EVEN": even,
    }
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": 4, "enable_fp_fusion": False},
    )
    assert compiled.metadata.shared <= target.shared
    if target.backend == "cuda":
        assert "fma" not in compiled.asm["ptx"]  # a fused scale would round once where bitsandbytes rounds twice
        assert "st.global.v4.b32" in compiled.asm["ptx"]  # 16 bytes a thread
    else:
        assert "v_fma" not in compiled.asm["amdgcn"]
