"""Each notebook runs at a tiny size, and its losses, files and printed numbers are right."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hub.hub_client import TOKEN
from tests.hub.hub_server import HubServer
from tests.hub.merge_runs import logits
from tests.notebooks.notebook_runs import printed, run_notebook, save_conversations, save_tiny
from unsloth_trl import FastLanguageModel


pytest.importorskip("bitsandbytes", reason="the test extra has it")
# what is no part of the texts below: warnings of libraries are the user's to read in the notebook
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

# a rate at which two steps move the logits far more than rounding does
TRAINING = {"max_steps": 2, "learning_rate": 5e-2, "measure_steps": 2}
CHAT = TRAINING | {"num_rows": 24, "max_seq_length": 128, "max_new_tokens": 4}


def check_measured(output: Path, steps: int, loss: float, grad_norm: float) -> dict[str, dict]:
    """The runs of the last cell by name; the first two, TRL's and ours, agree to the relative errors given."""
    measured = json.loads((output / "measured.json").read_text())
    theirs, ours = list(measured.values())[:2]
    assert list(measured)[0] == "TRL"
    for what, tolerance in (("loss", loss), ("grad_norm", grad_norm)):
        assert len(ours[what]) == steps
        assert ours[what] == pytest.approx(theirs[what], rel=tolerance, abs=1e-6)
        assert max(map(abs, theirs[what])) > 1e-2, "nothing is compared"
    assert len(set(ours["grad_norm"])) == steps
    for run in measured.values():
        assert run["tokens"] == theirs["tokens"] > 0 and run["tokens_per_second"] > 0
        assert run["peak_gib"] is None  # there is no GPU to measure
    return measured


def check_saved(output: Path, base: str, load_in_4bit: bool, gguf: str, rounding: float) -> None:
    """
    Adapter on base, merged model and GGUF file compute the same, and not what the base does.

    Merged weights are bf16, and `rounding` is what the GGUF file rounds beside that.
    """
    options = {"max_seq_length": 64, "load_in_4bit": load_in_4bit}
    live = logits(FastLanguageModel.from_pretrained(str(output / "adapter"), **options)[0])
    untrained = logits(FastLanguageModel.from_pretrained(base, **options)[0])
    merged = AutoModelForCausalLM.from_pretrained(output / "merged_16bit", dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(
        output / "gguf", gguf_file=gguf, dtype=torch.float32, config=merged.config
    )
    assert gap(logits(merged), live) < 0.05
    assert gap(logits(read), logits(merged)) < rounding
    assert gap(untrained, live) > 0.3
    assert f"FROM ./{gguf}" in (output / "gguf" / "Modelfile").read_text()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative difference, median over tokens: rounding turns the attention of a few in these random models."""
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).median().item()


def test_sft(tmp_path):
    base, data = save_tiny(tmp_path / "base", "llama"), save_conversations(tmp_path / "data")
    with HubServer() as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # xet has a storage of its own, which this server is not
            "HF_TOKEN": TOKEN,
        }
        notebook = run_notebook(
            "sft", tmp_path, environment, model_name=base, dataset_name=data, push_to="someone/tiny", **CHAT
        )
    output = tmp_path / "output"
    check_measured(output, 3, loss=1e-3, grad_norm=2e-2)  # adapters of QLoRA are bf16
    check_saved(output, base, True, "model-Q8_0.gguf", rounding=0.1)

    rows = [json.loads(line)["messages"] for line in (Path(data) / "train.jsonl").read_text().splitlines()]
    replies = {turn["content"] for row in rows for turn in row if turn["role"] == "assistant"}
    learned = printed(notebook, "row = trainer.train_dataset[0]").splitlines()[0]
    assert learned.endswith("<|end|>") and len(learned.split("<|end|>")) > 2
    assert set(learned.split("<|end|>")[:-1]) <= replies
    assert "packed rows with their boundaries" in printed(notebook, "result = trainer.train()")

    assert hub.repos.keys() == {"someone/tiny", "someone/tiny-merged", "someone/tiny-gguf"}
    assert all(repo.private for repo in hub.repos.values())
    for name, file in (("", "adapter_model.safetensors"), ("-merged", "model.safetensors"), ("-gguf", "*.gguf")):
        files = hub.repos[f"someone/tiny{name}"].files
        assert any(Path(path).match(file) for path in files), sorted(files)
        assert not any(TOKEN.encode() in content for content in files.values())
    assert TOKEN not in (tmp_path / "sft.ipynb").read_text()


def test_grpo(tmp_path):
    base = save_tiny(tmp_path / "base", "llama", likely_eos=True)
    notebook = run_notebook(
        "grpo",
        tmp_path,
        model_name=base,
        load_in_4bit=False,
        num_prompts=16,
        num_examples=2,
        prompts_per_step=2,
        num_generations=4,
        max_completion_length=8,
        **TRAINING,
    )
    output = tmp_path / "output"
    check_measured(output, 3, loss=1e-3, grad_norm=1e-3)
    check_saved(output, base, False, "model-Q8_0.gguf", rounding=0.1)

    assert re.findall(r"right \[.*", printed(notebook, "def right_number")) == [
        "right [1.0] digits [0.5]",
        "right [0.0] digits [0.125]",
        "right [0.0] digits [0.5]",
    ]
    counts = re.search(r"^(.+) tokens\n(.+) with .* (.+) in TRL's", printed(notebook, "counts ="), re.M).groups()
    shared, unshared, padded = (int(number.replace(",", "")) for number in counts)
    # of each group of 4, 3 prompts are left out but for the token that each completion starts with
    assert padded >= unshared > 2.5 * shared
    plot = next(cell for cell in notebook.cells if "plt.show()" in cell.source)
    assert any("image/png" in item.get("data", {}) for item in plot.outputs)
    assert "once a group" in printed(notebook, "result = trainer.train()")


def test_moe(tmp_path):
    base, data = save_tiny(tmp_path / "base", "qwen3_moe", norm_topk_prob=True), save_conversations(tmp_path / "data")
    notebook = run_notebook(
        "moe",
        tmp_path,
        model_name=base,
        dataset_name=data,
        save_merged=True,
        gguf_method="bf16",
        lora_r=8,
        measure_layers=2,
        **CHAT,
    )
    output = tmp_path / "output"
    measured = check_measured(output, 3, loss=1e-4, grad_norm=1e-3)
    dense, rounded = (measured[name]["loss"] for name in ("unsloth_trl", "unsloth_trl, 4 bits"))
    assert rounded == pytest.approx(dense, rel=0.02) and rounded != pytest.approx(dense, rel=1e-5)
    check_saved(output, base, True, "model-BF16.gguf", rounding=1e-5)

    assert "4 of 4 stacked expert weights are in 4 bits" in printed(notebook, "packed_weight")
    # 2 layers of 4 experts, rank 8: gate and up with 64 inputs, 64 outputs and twice the rank; down with 32 and 64
    on_experts = 2 * 4 * (16 * (64 + 64) + 8 * (32 + 64))
    assert f"{on_experts:,} of these on experts" in printed(notebook, "print_trainable_parameters")
    assert "(moe_backend='auto'); LoRA of 4 stacked weights as two thin products" in printed(notebook, "SFTTrainer(")
    assert "fits: " in printed(notebook, "estimate_memory")


def test_long_context(tmp_path):
    base = save_tiny(tmp_path / "base", "llama")
    notebook = run_notebook(
        "long_context",
        tmp_path,
        model_name=base,
        max_seq_length=1024,
        num_samples=3,
        max_new_tokens=4,
        save_merged=True,
        gguf_method="f16",
        **TRAINING,
    )
    output = tmp_path / "output"
    measured = check_measured(output, 3, loss=1e-3, grad_norm=2e-2)
    assert list(measured) == ["TRL", "recompute", "offload"]
    for what in ("loss", "grad_norm"):
        assert measured["offload"][what] == measured["recompute"][what]
    check_saved(output, base, True, "model-F16.gguf", rounding=1e-5)

    low, high = map(
        int, re.search(r"([\d,]+) to ([\d,]+) tokens", printed(notebook, "num_facts").replace(",", "")).groups()
    )
    assert 0.9 * 1024 < low <= high <= 1024
    plan = printed(notebook, "SFTTrainer(")
    assert "checkpoint_policy='offload': 2 recompute from inputs in host memory" in plan
    table = printed(notebook, "lengths = [")
    assert [int(n) for n in re.findall(r"(\d+) +[\d.]+ +[\d.]+ +True$", table, re.M)] == 3 * [
        256,
        512,
        1024,
        2048,
        4096,
    ]
