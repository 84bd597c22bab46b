"""Through the trainer on a GPU: no host synchronisation in the steady step, and bf16 as exact as TRL's."""

import functools
import tempfile

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

import unsloth_trl
from tests import tiny


pytestmark = pytest.mark.gpu


def keep(grads, name, p):
    grads[name] = p.grad.detach().double().cpu()


class SyncDebug(TrainerCallback):
    """Any host synchronisation in steps 7 to 12 raises: before them a clock is set, and steps 3 to 5 are timed."""

    def __init__(self):
        self.watched = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 6:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args, state, control, **kwargs):
        self.watched += torch.cuda.get_sync_debug_mode() == 2
        if state.global_step == 12:
            torch.cuda.set_sync_debug_mode("default")


def arguments(module, **kwargs):
    defaults = {
        "output_dir": tempfile.mkdtemp(),
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "bf16": True,
        "disable_tqdm": True,
    }
    return module.SFTConfig(**{**defaults, **kwargs})


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_no_host_synchronisation(model_type, packing, lora):
    if not packing:
        pytest.skip("a padded batch runs transformers' own mask building, which asks whether anything is masked")
    watch = SyncDebug()
    trainer = unsloth_trl.SFTTrainer(
        tiny.tiny_model(model_type).to("cuda", torch.bfloat16),
        arguments(unsloth_trl, packing=packing, gradient_accumulation_steps=2, max_steps=13, logging_steps=13),
        train_dataset=Dataset.from_list(tiny.tiny_rows(300, 0)),
        processing_class=tiny.tiny_tokenizer(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]) if lora else None,
        callbacks=[watch],
    )
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.watched == 6
    kernel = "triton" if torch.cuda.get_device_capability()[0] == 9 else "flash_attention_2"
    assert f"packed rows: {kernel}" in str(trainer.patch_report)
    assert trainer.state.log_history[0]["loss"] > 0


@pytest.mark.parametrize(
    "model_type, liger",
    [(name, False) for name in ("llama", "qwen3", "mistral", "gemma3_text", "deepseek_v3", "gpt_oss")]
    + [("llama", True), ("qwen3", True), ("gemma3_text", True)],
)
def test_bf16_error_is_trls(model_type, liger):
    """Loss and LoRA update after one step against fp64 on the CPU: at most 1.5x the error of TRL's path."""
    if liger:
        pytest.importorskip("liger_kernel")
    rows = Dataset.from_list(tiny.tiny_rows(8, 3, low=20, high=32))

    def run(module, dtype, device, **kwargs):
        model = tiny.tiny_model(model_type).to(device, dtype)
        if model_type in ("deepseek_v3", "gpt_oss"):
            model.set_experts_implementation("eager")  # the default has no fp64
        trainer = module.SFTTrainer(
            model,
            arguments(
                module,
                packing=False,
                max_steps=1,
                logging_steps=1,
                optim="sgd",
                per_device_train_batch_size=8,
                **kwargs,
            ),
            train_dataset=rows,
            processing_class=tiny.tiny_tokenizer(),
            peft_config=tiny.lora_config(model_type),
        )
        grads = {}
        for name, p in trainer.model.named_parameters():
            if p.requires_grad:
                p.data = p.data.to(dtype if dtype == torch.float64 else torch.float32)
                p.register_post_accumulate_grad_hook(functools.partial(keep, grads, name))
        trainer.train()
        return grads

    cpu = {"bf16": False, "use_cpu": True}
    truth = run(trl, torch.float64, "cpu", **cpu)
    stock = run(trl, torch.bfloat16, "cuda")
    # flattened, so that the packed kernel runs, over the same eight samples
    packed = {"padding_free": True, "max_length": None, "use_liger_kernel": liger}
    ours = run(unsloth_trl, torch.bfloat16, "cuda", **packed)

    def error(grads):
        return (
            (sum((grads[n] - truth[n]).norm() ** 2 for n in truth) / sum(truth[n].norm() ** 2 for n in truth))
            .sqrt()
            .item()
        )

    assert sum(g.norm() for g in truth.values()) > 0
    assert error(ours) <= 1.5 * error(stock), (error(ours), error(stock))
