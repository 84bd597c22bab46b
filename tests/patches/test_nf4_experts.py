"""Experts in 4 bits: what the module holds and shows, PEFT on top, scratch buffers, loading and saving."""

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.patches.test_nf4 import by_bitsandbytes
from tests.tiny import lora_config, tiny_model
from unsloth_trl.patches.quantization.experts import (
    dequantize_experts,
    find_experts,
    packed_weight,
    quantize_experts,
    quantize_experts_,
)
from unsloth_trl.patches.quantization.loading import load_in_4bit
from unsloth_trl.patches.quantization.op import dequantize_nf4
from unsloth_trl.patches.quantization.scratch import Scratch


bnb = pytest.importorskip("bitsandbytes")

ROOT = Path(__file__).parents[2]
MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))


def rounded(model, dtype=torch.float32):
    """Round the experts of an ordinary model as 4 bits do; what bitsandbytes says is the truth."""
    for _, module, names in find_experts(model):
        for name in names:
            parameter = getattr(module, name)
            packed, state = bnb.functional.quantize_4bit(
                parameter.data, compress_statistics=True, quant_type="nf4", blocksize=64
            )
            parameter.data.copy_(by_bitsandbytes(packed, state))
            parameter.requires_grad_(False)
    return model


def logits(model) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def in_4_bits(model) -> list[str]:
    return [f"{path}.{n}" for path, module, names in find_experts(model) for n in names if packed_weight(module, n)]


@pytest.mark.parametrize("model_type", MODELS)
def test_experts_are_those_of_bitsandbytes(model_type):
    model, expected = tiny_model(model_type), rounded(tiny_model(model_type))
    number = model.num_parameters()
    names = quantize_experts_(model)
    assert names == in_4_bits(model) and len(names) == (2 if model_type == "deepseek_v3" else 4)
    for path, module, weights in find_experts(model):
        assert type(module).__name__ == type(expected.get_submodule(path)).__name__
        assert isinstance(module, type(expected.get_submodule(path)))
        for name in weights:
            truth = getattr(expected.get_submodule(path), name)
            shown, stored = getattr(module, name), module._parameters[name]
            assert torch.equal(shown, truth) and shown.dtype == truth.dtype and not shown.requires_grad
            for e in range(truth.shape[0]):
                assert torch.equal(dequantize_nf4(packed_weight(module, name), experts=(e, e + 1))[0], truth[e])
            # nothing of the weight is left in 16 or 32 bits
            assert stored.dtype == torch.uint8 and stored.numel() * 2 == truth.numel()
            assert packed_weight(module, name).nbytes < 0.54 * truth.numel()
    assert torch.equal(logits(model), logits(expected))
    model.is_loaded_in_4bit = True
    assert model.num_parameters() == number
    assert all(not p.requires_grad for n, p in model.named_parameters() if n in names)


def test_memory_is_freed():
    module = next(find_experts(tiny_model("qwen3_moe")))[1]
    storages = [module._parameters[name].untyped_storage() for name in ("gate_up_proj", "down_proj")]
    pointers = [storage._weak_ref() for storage in storages]
    del storages
    quantize_experts(module)
    gc.collect()
    assert all(torch.UntypedStorage._expired(pointer) for pointer in pointers)


def test_unknown_parameters_are_named():
    module = next(find_experts(tiny_model("qwen3_moe")))[1]
    with pytest.raises(ValueError, match="Qwen3MoeExperts has no parameter 'up_proj'"):
        quantize_experts(module, ["up_proj"])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: copy.deepcopy(model).to("meta").to_empty(device="cpu"),
    ],
    ids=["deepcopy", "pickle", "meta"],
)
def test_copies_and_state_dicts(model_type, copied):
    model = tiny_model(model_type)
    quantize_experts_(model)
    before = logits(model)
    twin = copied(model)
    assert in_4_bits(twin) == in_4_bits(model)
    for _, module, names in find_experts(twin):
        for name in names:
            module._parameters[name].zero_()
    assert torch.equal(logits(model), before) and not torch.equal(logits(twin), before)
    state = model.state_dict()
    assert sum(key.endswith(".quant_state.bitsandbytes__nf4") for key in state) == len(in_4_bits(model))
    result = twin.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    # without its own buffers, which are no part of a state dict
    twin.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    assert torch.equal(logits(twin), before)
    for _, module, names in find_experts(model):  # no memory is shared
        for name in names:
            module._parameters[name].zero_()
    assert torch.equal(logits(twin), before)


def test_a_cast_leaves_the_scales():
    model = tiny_model("qwen3_moe")
    quantize_experts_(model)
    module = next(find_experts(model))[1]
    before = module.gate_up_proj.clone()
    model.to(torch.bfloat16)
    assert packed_weight(module, "gate_up_proj").nested_absmax.dtype == torch.float32
    assert torch.equal(module.gate_up_proj, before)


@pytest.mark.parametrize("model_type", MODELS)
def test_peft_on_top(model_type, tmp_path):
    def adapted(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(model, lora_config(model_type, target_parameters=TARGETS))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(0, 0.1)
        return model

    model = tiny_model(model_type)
    plain = logits(model)
    quantize_experts_(model)
    ours, theirs = adapted(model), adapted(rounded(tiny_model(model_type)))
    for _ in range(2):  # the second step meets what the first left of PEFT's parametrizations
        outputs = [peft_model(input_ids=IDS, labels=IDS, use_cache=False) for peft_model in (ours, theirs)]
        assert torch.equal(outputs[0].logits, outputs[1].logits) and not torch.allclose(outputs[0].logits, plain)
        for output in outputs:
            output.loss.backward()
    grads = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert sum("mlp.experts" in name for name in grads) == 2 * len(in_4_bits(ours))
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(grads[name], parameter.grad) and parameter.grad.any(), name

    ours.save_pretrained(tmp_path)
    again = tiny_model(model_type)
    quantize_experts_(again)
    assert torch.equal(logits(PeftModel.from_pretrained(again, tmp_path)), outputs[0].logits)


def test_merging_raises_before_it_loses_anything():
    config = lora_config("qwen3_moe", target_modules=[], target_parameters=TARGETS)
    model = tiny_model("qwen3_moe")
    quantize_experts_(model)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    before = logits(model)
    for merge in (model.merge_adapter, lambda: model.merge_and_unload(safe_merge=True)):
        with pytest.raises(RuntimeError, match="call dequantize_experts"):
            merge()
        assert torch.equal(logits(model), before)
    module = next(find_experts(model))[1]
    for write in (lambda w: w.add_(1), lambda w: w.__setitem__(0, 0), lambda w: torch.nn.init.zeros_(w)):
        with pytest.raises(RuntimeError, match="dequantised from 4 bits"):
            write(module.gate_up_proj)
    with pytest.raises(RuntimeError, match="dequantised from 4 bits"):
        module.gate_up_proj += 1
    assert len(dequantize_experts(model)) == 4 and not in_4_bits(model)
    assert torch.equal(logits(model), before)
    torch.testing.assert_close(logits(model.merge_and_unload()), before, rtol=1e-4, atol=1e-4)


class _Project(torch.autograd.Function):
    """As an experts function does: the packed weight is saved, the buffer is held twice, forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, scratch, purpose):
        ctx.held = weight, scratch, purpose
        with scratch.use(weight, purpose=purpose) as dense:
            return torch.einsum("eti,eoi->eto", x, dense)

    @staticmethod
    def backward(ctx, grad):
        weight, scratch, purpose = ctx.held
        with scratch.use(weight, purpose=purpose) as dense:
            return torch.einsum("eto,eoi->eti", grad, dense), None, None, None


def square_weights(number=3):
    model = tiny_model("qwen3_moe", num_hidden_layers=number, moe_intermediate_size=32, hidden_size=64)
    quantize_experts_(model)
    return [packed_weight(module, "gate_up_proj") for _, module, _ in find_experts(model)]


@pytest.mark.parametrize("purposes", ["one", "each"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("poison", [False, True])
def test_layers_share_a_buffer_in_one_graph(poison, slots, purposes):
    weights = square_weights()
    scratch = Scratch(slots, poison)
    x = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ours = theirs = x
    for i, weight in enumerate(weights):
        if slots == 2 and i:
            assert scratch.prefetch(weight, purpose=str(i) if purposes == "each" else "")
        ours = _Project.apply(ours, weight, scratch, str(i) if purposes == "each" else "")
        theirs = torch.einsum("eti,eoi->eto", theirs, dequantize_nf4(weight))
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.autograd.grad(ours, x, grad)[0], torch.autograd.grad(theirs, x, grad)[0])
    # as many buffers as slots, not one a layer
    number = len(weights) if purposes == "each" else slots
    assert 0 < scratch.nbytes <= number * weights[0].numel * 4
    scratch.clear()
    assert scratch.nbytes == 0


def test_scratch_finds_what_it_holds(monkeypatch):
    calls = []

    def counted(weight, **kwargs):
        calls.append(weight)
        return dequantize_nf4(weight, **kwargs)

    monkeypatch.setattr("unsloth_trl.patches.quantization.scratch.dequantize_nf4", counted)
    a, b, c = square_weights()
    scratch = Scratch(2)
    with scratch.use(a):
        assert scratch.prefetch(b)
        # both are taken: one in use, one filled but idle, which a later hint may have
        assert scratch.prefetch(c)
        with scratch.use(c) as dense:
            assert torch.equal(dense, dequantize_nf4(c))
            assert not scratch.prefetch(b)
            with pytest.raises(RuntimeError, match="are in use"):
                scratch.get(b)
            with pytest.raises(RuntimeError, match="still in use"):
                scratch.clear()
    done = len(calls)
    with scratch.use(c), scratch.use(a) as dense:  # as the backward does after the recompute
        assert torch.equal(dense, dequantize_nf4(a))
    assert len(calls) == done
    a.packed.bitwise_not_()  # other weights, loaded into the same memory
    with scratch.use(a) as dense:
        assert torch.equal(dense, dequantize_nf4(a))
    assert len(calls) == done + 1
    with pytest.raises(RuntimeError, match="not in use"):
        scratch.release(a)


def test_poison_and_autograd_show_who_reads_on():
    a, b, _ = square_weights()
    scratch = Scratch(poison=True)
    with scratch.use(a) as dense:
        assert not dense.isnan().any()
    assert dense.isnan().all()
    scratch, x = Scratch(), torch.ones(64, requires_grad=True)
    with scratch.use(a) as dense:
        y = (dense @ x).sum()  # saves the buffer
    with scratch.use(b):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("model_type", MODELS)
def test_load_save_load(model_type, tmp_path):
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "16")
    attn = {"attn_implementation": model.config._attn_implementation, "dtype": torch.float32}
    loaded = load_in_4bit(tmp_path / "16", **attn)
    expected = rounded(model)
    assert (
        type(loaded) is type(model) and loaded.is_loaded_in_4bit and loaded.num_parameters() == model.num_parameters()
    )
    assert in_4_bits(loaded) == [f"{path}.{n}" for path, _, names in find_experts(model) for n in names]
    assert any(isinstance(module, bnb.nn.Linear4bit) for module in loaded.modules())
    for path, module, names in find_experts(loaded):
        for name in names:
            assert torch.equal(getattr(module, name), getattr(expected.get_submodule(path), name))
    before = logits(loaded)
    # twice: what was loaded in 4 bits saves too
    for folder in ("4", "4 again"):
        loaded.save_pretrained(tmp_path / folder)
        loaded = load_in_4bit(tmp_path / folder, **attn)
        assert torch.equal(logits(loaded), before) and in_4_bits(loaded)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "4", **attn)), before)

    # in evaluation bitsandbytes packs weights anew on a CPU with AVX-512, which it cannot for all widths
    tuned = get_peft_model(loaded, lora_config(model_type, target_parameters=TARGETS)).train()
    tuned(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    grads = {name: p.grad for name, p in tuned.named_parameters() if p.requires_grad}
    assert all(grad.any() for name, grad in grads.items() if "lora_B" in name)


def test_what_to_quantise_can_be_chosen(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    some = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", "layers.0.mlp.experts"],
    )
    loaded = load_in_4bit(tmp_path, quantization_config=some, dtype=torch.float32)
    assert in_4_bits(loaded) == [f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert packed_weight(loaded.model.layers[1].mlp.experts, "down_proj").nested_absmax is None  # their default
    assert logits(loaded).isfinite().all()
    with pytest.raises(ValueError, match="load_in_4bit=True"):
        load_in_4bit(tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(ValueError, match="packed as uint8"):
        wide = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
        load_in_4bit(tmp_path, quantization_config=wide)
    loaded.config.quantization_config = {"quant_method": "fp8"}
    loaded.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"quantised already \(fp8\)"):
        load_in_4bit(tmp_path)


PEAK = """
import json, sys, threading, time
import bitsandbytes, torch
from unsloth_trl.patches.quantization.loading import load_in_4bit

def anonymous():  # not the pages of the checkpoint that are mapped
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

bitsandbytes.functional.quantize_4bit(torch.randn(4096), quant_type="nf4", compress_statistics=True)
start, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch)
thread.start()
model = load_in_4bit(sys.argv[1])
done.set()
thread.join()
print(json.dumps({"peak": peak[0] - start, "left": anonymous() - start, "model": model.get_memory_footprint()}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_never_much_more_than_a_layer_in_16_bits(tmp_path):
    model = tiny_model(
        "qwen3_moe", hidden_size=512, moe_intermediate_size=256, num_experts=32, num_hidden_layers=4
    ).to(torch.bfloat16)
    shard, total = 32 << 20, sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size=shard)
    del model
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["model"] < 0.35 * total  # the rest of so small a model counts
    assert result["peak"] < result["model"] + 2 * shard < total
