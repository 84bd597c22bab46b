"""The Python in the README runs from its first block to its last, on tiny models in place of those that it names."""

import re

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import unsloth_trl
from tests.hub.merge_runs import gap, logits
from tests.notebooks.notebook_runs import save_tiny
from tests.packaging.readme import README
from tests.tiny import tiny_model


pytest.importorskip("bitsandbytes", reason="the test extra has it")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

MODELS = {"Qwen/Qwen3-0.6B": "qwen3", "Qwen/Qwen3-8B": "qwen3", "Qwen/Qwen3-30B-A3B": "qwen3_moe"}
NAME = re.compile(r'"([A-Z]\w+/[\w.-]+)"')
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
# what stands before the README's blocks in a user's script
BEFORE = """
from unsloth_trl import SFTConfig
args = SFTConfig("experts", report_to="none")
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What is left in the namespace after each block that has not its own test, by a word of the block."""
    folder = tmp_path_factory.mktemp("readme")
    words = "the quick brown fox jumps over lazy dogs".split()
    chats = [
        {"messages": [{"role": "user", "content": words[i % 8]}, {"role": "assistant", "content": words[(i + 3) % 8]}]}
        for i in range(16)
    ]
    names = {
        "dataset": Dataset.from_list(chats),
        "lora_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    }
    made, left = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(BEFORE, names)
        for block in BLOCKS:
            if "apply_patches" in block:  # test_readme.py
                continue
            for name in NAME.findall(block):
                if name not in made:
                    made[name] = save_tiny(folder / name, MODELS[name])
                block = block.replace(f'"{name}"', repr(made[name]))
            if "add_checkpointing" in block:
                names["model"] = tiny_model("llama").model
            exec(block, names)
            left.append((block, dict(names)))
    return folder, left


def after(left, words: str) -> dict:
    return next(names for block, names in left if words in block)


def test_the_import_is_swapped(ran):
    _, left = ran
    assert len(left) == len(BLOCKS) - 1
    before, swapped = left[0][1], left[1][1]
    assert before["SFTTrainer"] is trl.SFTTrainer and swapped["SFTTrainer"] is unsloth_trl.SFTTrainer
    trainer = swapped["trainer"]
    assert trainer.state.global_step > 0 and trainer.patch_report["attention"].applied
    assert any(p.abs().sum() > 0 for name, p in trainer.model.named_parameters() if "lora_B" in name)
    assert after(left, "GRPOTrainer")["GRPOTrainer"] is unsloth_trl.GRPOTrainer


def test_experts_have_adapters_over_four_bits(ran):
    trainer = after(ran[1], "import SFTTrainer, load_in_4bit")["trainer"]
    assert trainer.patch_report["moe"].applied
    experts = {name: p for name, p in trainer.model.named_parameters() if ".experts." in name}
    assert any(p.requires_grad for p in experts.values())
    assert {p.dtype for name, p in experts.items() if not p.requires_grad} == {torch.uint8}


def test_what_users_of_unsloth_paste(ran):
    folder, left = ran
    names = after(left, "FastLanguageModel.get_peft_model")
    model, trainer = names["model"], names["trainer"]
    assert trainer.args.max_length == 4096 and trainer.args.packing
    assert trainer.args.checkpoint_policy == "offload"
    count = trainer.response_counts["train"]
    assert 0 < count.labels < count.tokens
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    assert gap(logits(merged), logits(model)) < 0.05
    assert any(p.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_saving(ran):
    folder, _ = ran
    assert (folder / "adapter" / "adapter_config.json").is_file()
    assert (folder / "merged" / "model.safetensors").is_file()
    assert not (folder / "merged" / "adapter_config.json").exists()
