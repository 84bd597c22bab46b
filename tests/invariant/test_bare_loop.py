"""The patches without our trainers: in a bare accelerate loop, and as accelerate hooks on submodules."""

import functools

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import get_peft_model
from torch.utils.data import DataLoader

import unsloth_trl
from tests.numerics import SGD, assert_updates_close, masked_rows, run_sft, snapshot, updates_since
from tests.tiny import lora_config, tiny_model
from unsloth_trl import PatchConfig, apply_patches
from unsloth_trl.data import PackedDataCollator
from unsloth_trl.patches.attention import patch as attention
from unsloth_trl.patches.attention.patch import PackedLayoutHook


ROWS = masked_rows(25)
MODEL_TYPES = ["llama", "gemma2", "kimi_k25", "qwen3_moe"]


@pytest.fixture(autouse=True)
def own_precision():
    """An accelerator takes the precision of the one before it in the process, a trainer's of another test."""
    AcceleratorState._reset_state(reset_partial_state=True)


def new_model(model_type, lora):
    model = tiny_model(model_type)
    torch.manual_seed(0)
    return get_peft_model(model, lora_config(model_type, init_lora_weights=False)) if lora else model


@functools.cache
def trainer_run(model_type, lora):
    return run_sft(
        unsloth_trl,
        None,
        model=new_model(model_type, lora),
        rows=ROWS,
        packing=True,
        gradient_accumulation_steps=1,
        max_steps=4,
        train_sampling_strategy="sequential",
        router_aux_loss_coef=0.0,
        **SGD,
    )


def packed_batches():
    rows = Dataset.from_list(trainer_run("llama", False).trainer.train_dataset.to_list())
    return DataLoader(rows, batch_size=2, collate_fn=PackedDataCollator(pad_token_id=0))


def train_by_hand(model, accelerator, call):
    """Four SGD steps; returns the losses and the updates."""
    inner = accelerator.unwrap_model(model)
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=SGD["learning_rate"])
    optimizer, loader = accelerator.prepare(optimizer, packed_batches())
    before, losses = snapshot(inner), []
    for batch, _ in zip(loader, range(4), strict=False):
        loss = call(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, updates_since(before, inner)


def labelled_loss(model, batch):
    log_probs = model(**batch, fused_lm_head=True).log_probs
    return -log_probs.sum() / log_probs.numel()


def plain_loss(model, batch):
    """Without the labelled head: the logits, shifted."""
    logits = model(input_ids=batch["input_ids"], packed_layout=batch["packed_layout"]).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], ignore_index=-100)


def assert_as_trainer(result, model_type, lora=False):
    losses, updates = result
    expected = trainer_run(model_type, lora)
    assert losses == pytest.approx([step["loss"] for step in expected.logs], rel=1e-5)
    assert len({round(loss, 3) for loss in losses}) == 4
    assert_updates_close(updates, expected.updates, 1e-4)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_apply_patches_before_prepare(model_type, lora):
    model = new_model(model_type, lora)
    report = apply_patches(model, PatchConfig())
    assert report["attention"].applied and report["lm_head"].applied
    accelerator = Accelerator(cpu=True)
    result = train_by_hand(accelerator.prepare(model), accelerator, labelled_loss)
    assert_as_trainer(result, model_type, lora)


class CountingHook(ModelHook):
    """Another library's hook."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("first", ["ours", "other"])
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
@pytest.mark.parametrize("model_type", ["llama", "kimi_k25"])
def test_hook_beside_another_one(model_type, when, first):
    model = new_model(model_type, False)
    implementation = model.config._attn_implementation
    decoder = model.get_decoder()
    other = CountingHook()

    def attach():
        attention.register()
        model.set_attn_implementation(attention.NAMES["auto"])
        for hook in [PackedLayoutHook(), other] if first == "ours" else [other, PackedLayoutHook()]:
            add_hook_to_module(decoder, hook, append=True)

    accelerator = Accelerator(cpu=True)
    if when == "before prepare":
        attach()
    prepared = accelerator.prepare(model)
    if when == "after prepare":
        attach()
    assert isinstance(decoder._hf_hook, SequentialHook) and len(decoder._hf_hook.hooks) == 2
    assert_as_trainer(train_by_hand(prepared, accelerator, plain_loss), model_type)
    assert other.calls == 4

    # and detached again
    remove_hook_from_submodules(model)
    model.set_attn_implementation(implementation)
    assert not hasattr(decoder, "_hf_hook") and not hasattr(decoder, "_old_forward")
    fresh = tiny_model(model_type)
    fresh.load_state_dict(model.state_dict())
    ids = torch.arange(3, 19)[None]
    assert torch.equal(model(input_ids=ids).logits, fresh(input_ids=ids).logits)
    assert other.calls == 4


def test_hook_on_a_model_that_stays_unhooked_elsewhere():
    """Without a layout the hook changes nothing."""
    model, plain = tiny_model("llama"), tiny_model("llama")
    attention.register()
    model.set_attn_implementation(attention.NAMES["auto"])
    add_hook_to_module(model.get_decoder(), PackedLayoutHook(), append=True)
    ids = torch.arange(3, 19).view(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for kwargs in ({}, {"attention_mask": mask}):
        assert torch.equal(model(input_ids=ids, **kwargs).logits, plain(input_ids=ids, **kwargs).logits)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_through_align_devices_hooks(model_type, lora):
    """The hooks that device_map leaves on every submodule; the root's has no device of its own."""
    model = new_model(model_type, lora)
    for module in model.modules():
        device = None if module is model else "cpu"
        add_hook_to_module(module, AlignDevicesHook(execution_device=device, io_same_device=True), append=True)
    apply_patches(model)
    accelerator = Accelerator(cpu=True)
    result = train_by_hand(model, accelerator, labelled_loss)
    assert_as_trainer(result, model_type, lora)


def test_through_cpu_offload():
    """Weights live in a map on the host and come to the execution device for each call."""
    model = tiny_model("llama").eval()
    batch = next(iter(packed_batches()))
    apply_patches(model)
    with torch.no_grad():
        expected = model(**batch, fused_lm_head=True).log_probs
        model = cpu_offload(model, execution_device=torch.device("cpu"))
        assert next(model.parameters()).device.type == "meta"
        actual = model(input_ids=batch["input_ids"], packed_layout=batch["packed_layout"]).logits
    logs = actual.log_softmax(-1)[0, batch["label_positions"]]
    labels = batch["labels"][0, batch["label_positions"] + 1]
    torch.testing.assert_close(logs.gather(-1, labels[:, None])[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_patches_after_prepare_of_a_wrapped_model_are_refused():
    wrapped = torch.nn.Sequential(tiny_model("llama"))
    with pytest.raises(
        TypeError, match="expected a transformers PreTrainedModel .* got Sequential; apply the patches"
    ):
        apply_patches(wrapped)
