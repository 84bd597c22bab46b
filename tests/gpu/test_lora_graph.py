"""A linear layer and its LoRA as one op of a graph that is compiled for the GPU, over 16 and over 4 bits."""

import copy

import pytest
import torch

from tests.numerics import relative_error
from tests.patches.test_lora_graph import four_bits, run, with_lora
from unsloth_trl.patches.lora.graph import fuse_lora


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits, bias", [(16, False), (4, False), (4, True)])
def test_compiled_for_the_gpu(bits, bias):
    """Errors against fp64 are at most 1.2 times PEFT's, and a second run asks the device for nothing."""
    torch._dynamo.reset()
    found = []

    def backend(graph, inputs):
        found.append(fuse_lora(graph))
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    model, truth = four_bits(True, bias) if bits == 4 else (with_lora(torch.bfloat16), None)
    if truth is None:
        truth = copy.deepcopy(model).double()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    width = 64 if bits == 4 else 12
    rows = 400 if bits == 4 else 40  # enough for our own way back from 4 bits
    x = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = run(truth, x.double())
    model.to("cuda")

    def on_gpu(callable):
        model.zero_grad()
        rows = x.cuda().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            out = callable(rows)
        out.float().square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"out": out.detach(), "x": rows.grad} | grads

    stock, fused = on_gpu(model), torch.compile(model, backend=backend)
    actual = on_gpu(fused)
    assert found == [3]
    for name, value in expected.items():
        errors = [relative_error(other[name].cpu(), value) for other in (actual, stock)]
        assert errors[0] <= 1.2 * errors[1] + 1e-3 and errors[1] < 0.1, (name, errors)
    rows = x.cuda().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            fused(rows).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
