"""Parts of a layer in tiles: the same numbers, the weights' gradients summed once, and nothing large in between."""

import gc

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.largest import LargestTensor
from tests.tiny import lora_config, tiny_model
from unsloth_trl import PatchConfig, apply_patches
from unsloth_trl.patches.checkpointing import settings, tiles
from unsloth_trl.patches.checkpointing.patch import current_plan
from unsloth_trl.patches.checkpointing.policy import Plan
from unsloth_trl.patches.checkpointing.settings import Notch
from unsloth_trl.patches.checkpointing.tiles import TiledForward, tileable
from unsloth_trl.patches.quantization.experts import quantize_experts_
from unsloth_trl.patches.registry import base_model


class Gated(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.gate, self.up = nn.Linear(6, 20, dtype=dtype), nn.Linear(6, 20, bias=False, dtype=dtype)
        self.down = nn.Linear(20, 6, dtype=dtype)
        self.up.weight.requires_grad_(False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def tiled(module, tile):
    plan = Plan("recompute", 1)
    plan.use(Notch(tile=tile))
    plan.tiles_now = bool(tile)
    module.forward = TiledForward(module, plan, "layer")
    return module


def outcome(module, x, autocast=False):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(x)
    (out.double() * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    return {"out": out.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("tile", [1, 4, 7, 32])
@pytest.mark.parametrize("shape", [(1, 33, 6), (3, 11, 6)])
def test_equal_in_fp64(tile, shape):
    torch.manual_seed(0)
    module, x = Gated(torch.float64), torch.randn(shape, dtype=torch.float64)
    expected = outcome(module, x)
    actual = outcome(tiled(module, tile), x)
    assert actual.keys() == expected.keys() and "up.weight" not in actual and len(actual) == 6
    for name in expected:
        assert actual[name].shape == expected[name].shape
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weights", ["fp32 under autocast", "bf16"])
def test_the_sum_over_many_tiles_is_as_exact_as_one_product(weights):
    """In bf16 a sum over 512 tiles would lose most of its digits."""
    torch.manual_seed(0)
    x = torch.randn(1, 2048, 6)
    reference = Gated(torch.float64)
    exact = outcome(reference, x.double())
    dtype = torch.float32 if weights.startswith("fp32") else torch.bfloat16
    errors = {}
    for tile in (0, 4):
        module = Gated(dtype)
        module.load_state_dict({k: v.to(dtype) for k, v in reference.state_dict().items()})
        ours = outcome(tiled(module, tile) if tile else module, x.to(dtype), autocast=dtype == torch.float32)
        errors[tile] = {
            n: ((ours[n].double() - exact[n]).norm() / exact[n].norm()).item() for n in exact if n not in ("out", "x")
        }
    for name in errors[0]:
        assert errors[4][name] <= 1.5 * errors[0][name] + 1e-4, (name, errors)


def test_inside_a_checkpoint_the_recomputation_ends_before_the_tiles():
    torch.manual_seed(0)
    runs = []

    class Counted(Gated):
        def forward(self, x):
            runs.append(torch.is_grad_enabled())
            return super().forward(x)

    module = tiled(Counted(torch.float32), 8)
    norm = nn.LayerNorm(6)
    x = torch.randn(1, 32, 6, requires_grad=True)
    checkpoint(lambda x: x + module(norm(x)), x, use_reentrant=False).sum().backward()
    assert runs == [False] * 4 + [True] * 4


def test_dropout_that_comes_later_is_not_tiled():
    """An adapter with dropout, added after the patches: tiles would draw other masks in the backward."""
    torch.manual_seed(0)
    module = tiled(Gated(torch.float64), 4)
    module.gate = nn.Sequential(nn.Dropout(0.5), module.gate)
    x = torch.randn(1, 20, 6, dtype=torch.float64, requires_grad=True)

    def f(x):
        torch.manual_seed(1)
        return module(x)

    torch.autograd.gradcheck(f, x)
    module.eval()
    plan = module.forward.plan
    assert plan.tile_for(20, "layer") == 4
    tiled_out = outcome(module, x)
    plan.tiles_now = False
    for name, value in outcome(module, x).items():
        torch.testing.assert_close(tiled_out[name], value, rtol=1e-12, atol=1e-12)


def test_without_gradients_for_the_input():
    torch.manual_seed(0)
    module, x = Gated(torch.float64), torch.randn(1, 20, 6, dtype=torch.float64)

    def grads():
        module.zero_grad()
        module(x).sum().backward()
        return [p.grad.clone() for p in module.parameters() if p.requires_grad]

    expected = grads()
    tiled(module, 3)
    for a, e in zip(grads(), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_a_second_backward_raises():
    module = tiled(Gated(torch.float32), 4)
    out = module(torch.randn(1, 9, 6, requires_grad=True)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        out.backward()


def test_nothing_is_left_after_the_backward():
    module = tiled(Gated(torch.float32), 4)
    x = torch.randn(1, 64, 6, requires_grad=True)
    out = module(x).sum()
    out.backward()  # `out` and its graph are still here
    gc.collect()
    held = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape in ((1, 64, 6), (1, 64, 20))]
    assert {id(t) for t in held} <= {id(x), id(x.grad)}


def test_what_is_tiled():
    model = tiny_model("llama")
    found = tileable(model.model, list(model.model.layers))
    places = [place for _, place in found]
    layers = model.config.num_hidden_layers
    assert places.count("layer") == 3 * layers and places.count("projection") == 4 * layers
    assert places.count("outside") == 1
    moe = tiny_model("qwen3_moe")
    kinds = {type(module).__name__ for module, _ in tileable(moe.model, list(moe.model.layers))}
    assert "Qwen3MoeSparseMoeBlock" not in kinds and "Qwen3MoeRMSNorm" in kinds
    four_bits = tiny_model("gpt_oss")
    quantize_experts_(four_bits)
    kinds = {type(module).__name__ for module, _ in tileable(four_bits.model, list(four_bits.model.layers))}
    assert "GptOssMLP" not in kinds and "GptOssRMSNorm" in kinds
    dropout = get_peft_model(tiny_model("llama"), lora_config("llama", lora_dropout=0.1))
    decoder = base_model(dropout).model
    assert {place for _, place in tileable(decoder, list(decoder.layers))} == {"layer", "outside"}
    assert not any("MLP" in type(m).__name__ for m, _ in tileable(decoder, list(decoder.layers)))


TOKENS, VOCAB, WIDE = 1024, 70_000, 512


def is_activation(tensor):
    """No weight or its gradient, and no host memory for offloading, which is bytes."""
    return tensor.is_floating_point() and tensor.shape[:1] != (VOCAB,)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_largest_tensor_of_a_long_row(lora, monkeypatch):
    """Nothing of tokens x vocabulary, tokens x tokens or tokens x intermediate, beyond a tile."""
    monkeypatch.setattr(settings, "TILE", 128)
    monkeypatch.setattr(settings, "TILE_FROM", 512)
    model = tiny_model("llama", vocab_size=VOCAB, intermediate_size=WIDE, max_position_embeddings=4096)
    hidden = model.config.hidden_size
    if lora:
        model = get_peft_model(model, lora_config("llama"))
    base = base_model(model)
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(base)
    apply_patches(model, PatchConfig(checkpoint_policy="offload"))
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    from unsloth_trl.patches.layout import PackedLayout

    layout = PackedLayout([TOKENS // 8] * 8)
    ids = torch.randint(3, VOCAB, (1, TOKENS))

    def step():
        out = model(
            input_ids=ids,
            position_ids=layout.position_ids,
            packed_layout=layout,
            shift_labels=ids.roll(-1, 1),
            fused_lm_head=True,
        )
        out.log_probs.sum().backward()

    with LargestTensor(is_activation) as largest:
        step()
    assert current_plan(base).notch.tile == 128
    # TRL's head has at most 4096 tokens and 32768 entries of the vocabulary at once
    assert largest.numel <= TOKENS * 32_768 < TOKENS * VOCAB / 2, (largest.op, largest.shape)
    with LargestTensor(is_activation) as largest:
        out = base.model(input_ids=ids, position_ids=layout.position_ids, packed_layout=layout).last_hidden_state
        out.sum().backward()
    assert largest.numel <= max(TOKENS * hidden, WIDE * hidden) < TOKENS * WIDE / 2, (largest.op, largest.shape)


def test_tiles_are_removed_with_the_report():
    model = tiny_model("llama")
    report = apply_patches(model, PatchConfig())
    assert isinstance(model.model.layers[0].mlp.forward, tiles.TiledForward)
    report.remove()
    assert not any("forward" in vars(module) for module in model.model.modules())
