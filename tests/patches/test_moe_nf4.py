"""Experts in 4 bits through the experts op: what their dequantised weights give, and nothing that outlives its use."""

import contextlib
import copy
import gc

import pytest
import torch
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensor

import unsloth_trl
from tests.largest import LargestTensor
from tests.numerics import ADAMW, EXPERTS, assert_runs_close, run_sft
from tests.patches.test_moe import IDS, assert_same, distance, experts_lora, fill, patch, stacks, step
from tests.tiny import tiny_model
from unsloth_trl.patches.moe import weights
from unsloth_trl.patches.quantization.experts import dequantize_experts, quantize_experts_
from unsloth_trl.patches.quantization.scratch import Scratch


pytest.importorskip("bitsandbytes", reason="the test extra has it")
torch.set_num_threads(1)

ARCHITECTURES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma4_text"]


def quantized(model_type, dense=False):
    """A model with experts in 4 bits, or the same numbers as ordinary weights."""
    model = tiny_model(model_type)
    assert len(quantize_experts_(model)) == 2 * len(stacks(model))
    if dense:
        dequantize_experts(model)
    return model


def with_lora(model_type, **kwargs):
    return fill(get_peft_model(quantized(model_type, **kwargs), experts_lora()))


@pytest.fixture
def poisoned(monkeypatch):
    scratch = Scratch(poison=True)
    monkeypatch.setattr(weights, "Scratch", lambda: scratch)
    return scratch


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_experts_in_4_bits_are_their_dequantised_weights(model_type, poisoned):
    expected = step(with_lora(model_type, dense=True))
    model = with_lora(model_type)
    report = patch(model)
    assert "experts in 4 bits" in report["moe"].modules[0] and "as two thin products" in report["moe"].detail
    assert_same(step(model), expected)
    assert_same(step(model), expected)
    largest = max(
        module._parameters[name].quant_state.shape.numel()
        for module in stacks(model)
        for name in ("gate_up_proj", "down_proj")
    )
    assert 0 < poisoned.nbytes <= 2 * 4 * largest
    report.remove()


def test_two_layers_in_one_graph_do_not_meet(poisoned):
    model = with_lora("qwen3_moe")
    expected = step(with_lora("qwen3_moe", dense=True))
    patch(model)
    model.zero_grad()
    first, second = (model(input_ids=IDS, labels=IDS) for _ in range(2))
    (first.loss + second.loss).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert distance(parameter.grad, 2 * expected[1][name]) < 1e-5, name


def test_only_the_scratch_is_as_large_as_the_weights():
    model = fill(get_peft_model(_many_experts(), experts_lora(r=1)))
    patch(model)
    limit = 32 * 64 * 64
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held = []

    def counts(tensor):
        if tensor.numel() >= limit and tensor.untyped_storage().data_ptr() not in own:
            held.append(tensor.untyped_storage().data_ptr())
        return False

    with LargestTensor(counts):
        model(input_ids=IDS[:1, :4], labels=IDS[:1, :4]).loss.backward()
    slots = [slot for slots in scratch(model)._slots.values() for slot in slots]
    buffers = {slot.buffer.untyped_storage().data_ptr() for slot in slots}
    assert set(held) == buffers and len(buffers) == 2


def _many_experts():
    model = tiny_model("qwen3_moe", num_experts=32, moe_intermediate_size=64)
    quantize_experts_(model)
    return model


def test_merging_into_4_bits_is_refused_and_possible_after_dequantising():
    model = with_lora("qwen3_moe")
    patch(model)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    with pytest.raises(RuntimeError, match="dequantize_experts"):
        model.merge_and_unload()
    dequantize_experts(model)
    with torch.no_grad():
        assert distance(model.merge_and_unload()(input_ids=IDS).logits, expected) < 1e-5


def test_a_patch_that_is_removed_frees_the_scratch():
    model = with_lora("qwen3_moe")
    report = patch(model)
    step(model)
    number = number_of(model)
    assert weights.scratch_of(number).scratch.nbytes > 0
    report.remove()
    assert number not in weights._SCRATCHES and number_of(model) == 0


def test_a_copy_has_a_scratch_of_its_own():
    model = with_lora("qwen3_moe")
    patch(model)
    twin = copy.deepcopy(model)
    assert number_of(twin) != number_of(model)
    number = number_of(twin)
    assert_same(step(twin), step(model))
    del twin
    gc.collect()
    assert number not in weights._SCRATCHES


def packed_memory() -> set[int]:
    """Where bytes are that may be a packed weight's; those that a compiler has made up have none."""
    found = (t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor))
    return {t.untyped_storage().data_ptr() for t in found if t.dtype == torch.uint8 and t.numel() > 1000}


def test_reloading_weights_keeps_nothing_of_the_old_ones():
    gc.collect()
    others = packed_memory()
    model = with_lora("qwen3_moe")
    patch(model)
    for _ in range(3):
        step(model)
        model.load_state_dict(model.state_dict())
    # 2 layers of 2 weights, and the bytes of those that are in a buffer
    assert 4 <= len(packed_memory() - others) <= 4 + 2


def test_evaluation_in_inference_mode_comes_before_training():
    model = with_lora("qwen3_moe")
    patch(model)
    expected = step(with_lora("qwen3_moe", dense=True))
    with torch.inference_mode():
        model(input_ids=IDS)
    assert_same(step(model), expected)


def test_biases_in_another_dtype_beside_4_bits():
    """`prepare_model_for_kbit_training` makes what is not in 4 bits fp32."""

    def run(ours):
        model = tiny_model("gpt_oss").to(torch.bfloat16)
        quantize_experts_(model)
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):
                parameter.data = parameter.data.float()
        model = fill(get_peft_model(model, experts_lora()))
        if ours:
            patch(model)
        return step(model)

    actual, expected = run(True), run(False)
    assert distance(actual[0].float(), expected[0].float()) < 3e-2
    assert actual[1].keys() == expected[1].keys()


def test_a_model_that_is_gone_takes_its_scratch_along():
    model = with_lora("qwen3_moe")
    patch(model)
    step(model)
    number = number_of(model)
    assert number in weights._SCRATCHES
    del model
    gc.collect()
    assert number not in weights._SCRATCHES


# the recomputation of a layer ends before its second product
ORDERS = {"gate_up": (0, 1, 2, 2, 2, 1, 1, 0, 0), "down": (0, 1, 2, 2, 1, 0)}


@pytest.mark.parametrize("purpose", ORDERS)
def test_the_next_weight_is_foreseen(purpose):
    """Three layers, recomputed: from the second step on, who takes the buffer is who is asked for next."""
    model = fill(get_peft_model(_quantized_layers(3), experts_lora()))
    patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    step(model)
    foresight = weights.scratch_of(number_of(model))
    asked, foreseen, use = [], [], foresight.use

    @contextlib.contextmanager
    def watched(weight, dtype, what, who):
        with use(weight, dtype, what, who) as dense:
            yield dense
        if what == purpose:
            asked.append(weight.packed.data_ptr())
            foreseen.append(foresight.expected(purpose))

    foresight.use = watched
    for _ in range(3):
        step(model)
    order = [stacks(model)[i]._parameters[f"{purpose}_proj"].data_ptr() for i in ORDERS[purpose]]
    assert asked == 3 * order
    for i in range(len(order), len(asked) - 1):
        following = foreseen[i]
        if following is None:
            assert asked[i + 1] == asked[i]
        else:
            assert asked[i + 1] == following.packed.data_ptr() != asked[i]


def _quantized_layers(number):
    model = tiny_model("qwen3_moe", num_hidden_layers=number)
    quantize_experts_(model)
    return model


def number_of(model) -> int:
    (number,) = {weights.ScratchNumber.of(module) for module in stacks(model)}
    return number


def scratch(model):
    return weights.scratch_of(number_of(model)).scratch


@pytest.mark.parametrize("config", [{}, {"gradient_checkpointing": True}, ADAMW], ids=str)
def test_training_equals_that_of_the_dequantised_weights(config):
    ours, expected = (
        run_sft(unsloth_trl, "qwen3_moe", model=quantized("qwen3_moe", dense), packing=True, **EXPERTS, **config)
        for dense in (False, True)
    )
    assert_runs_close(ours, expected, 1e-4)
    assert "in 4 bits" in ours.trainer.patch_report["moe"].modules[0]


def test_what_a_graph_repeats_is_dequantised_each_time(monkeypatch):
    """A buffer may hold a weight's numbers when a graph is captured, and another's when it is replayed."""
    model = with_lora("qwen3_moe")
    patch(model)
    expected = step(model)
    held = scratch(model)
    calls = held._calls
    monkeypatch.setattr(weights, "is_capturing", lambda device: True)
    assert_same(step(model), expected)
    assert held._calls == calls, "the buffers were asked"
