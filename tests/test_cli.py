import subprocess
import sys

import pytest

from tests.tiny import tiny_config
from unsloth_trl import cli
from unsloth_trl.models import cards
from unsloth_trl.models.cards import Card
from unsloth_trl.models.memory import estimate_memory
from unsloth_trl.patches.checkpointing import ram
from unsloth_trl.patches.checkpointing.ram import HostMemory


GIB = 2**30


@pytest.fixture
def model(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(cards, "local_card", lambda: None)


def run(capsys, *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_estimate_prints_what_the_function_says(model, capsys):
    out = run(
        capsys,
        *["estimate", model, "--batch", "3", "--max_length", "200", "--policy", "offload", "--card", "T4"],
        *["--lora_r", "4", "--optim", "adamw_8bit", "--staging_buffers", "1"],
    )
    expected = estimate_memory(
        tiny_config("llama"),
        batch=3,
        max_length=200,
        policy="offload",
        card=cards.find_card("T4"),
        lora_r=4,
        optim="adamw_8bit",
        staging_buffers=1,
    )
    assert out.startswith(expected.text() + "\n")
    assert "rows of 200, 3 at once, 600 tokens" in out and "LoRA r=4" in out and "adamw_8bit" in out


def test_estimate_of_grpo_with_qlora(model, capsys):
    lengths = ["--max_prompt_length", "65", "--max_completion_length", "32", "--num_generations", "4"]
    out = run(capsys, "estimate", model, "--method", "grpo", "--batch", "8", *lengths, "--qlora", "--card_gb", "24")
    assert "grpo: prompts of 65, completions of 32, 8 at once, 384 tokens" in out  # 2 * 64 + 8 * 32
    assert "in NF4 and bf16" in out
    assert "plan: 2 of 2 layers keep their activations" in out
    assert "fits: 23.5 GiB usable on a card of 24 GiB" in out


def test_estimate_of_full_training(model, capsys):
    out = run(capsys, "estimate", model, "--full", "--card_gb", "24")
    assert "bf16; all weights" in out and "LoRA r" not in out


def test_estimate_plans_for_the_gpu_of_this_machine(model, capsys, monkeypatch):
    monkeypatch.setattr(cards, "local_card", lambda: Card("Some Card", 5 * GIB))
    out = run(capsys, "estimate", model)
    assert "fits: 5.0 GiB usable on Some Card" in out
    assert "plan: 2 of 2 layers keep their activations" in out


def test_estimate_without_a_card_gives_each_policys_peak(model, capsys, no_gpu):
    arguments = ["estimate", model, "--batch", "4", "--max_length", "8192"]
    out = run(capsys, *arguments)
    assert "there is no GPU here to plan for: pass --card or --card_gb" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.endswith("GiB RAM")}
    assert set(lines) == {"recompute", "keep", "offload"}
    for policy, words in lines.items():
        estimate = estimate_memory(tiny_config("llama"), batch=4, max_length=8192, policy=policy)
        assert words[1] == f"{estimate.peak / GIB:.2f}" and words[4] == f"{estimate.slab / GIB:.2f}"
    assert float(lines["keep"][1]) > float(lines["recompute"][1]) > 0
    # one policy needs no card
    assert "no GPU here" not in run(capsys, *arguments, "--policy", "recompute")


def test_estimate_compares_the_slab_with_this_machine(model, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    small = HostMemory(available=100 * 2**20, total=GIB, swap_used=3 * GIB, container=True)
    monkeypatch.setattr(ram, "host_memory", lambda: small)
    tiny_config("llama", num_hidden_layers=20).save_pretrained(model)
    arguments = ["estimate", model, "--batch", "32", "--max_length", "8192", "--policy", "offload"]
    out = run(capsys, *arguments)
    slab = 20 * 32 * 8192 * 64 * 2  # in tiles the last inputs leave too
    assert f"RAM of this container: 0.1 GiB available, 0.0 of it may be page-locked; {slab / GIB:.1f} GiB of" in out
    assert "note: 3.0 GiB are swapped out" in out
    out = run(capsys, *arguments, "--max_pinned_gb", "1")
    assert "1.0 of it may be page-locked" in out and "would stay on the device" not in out
    assert "note: max_pinned_gb=1 is more than nine tenths of the 0.1 GiB that this container has left" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card", "9090"], "card='9090' is unknown; choose from T4, "),
        (["--card_gb", "0"], "card_gb=0 is no more than the driver's own 0.5 GiB"),
        (
            ["--method", "grpo", "--max_length", "9"],
            "--max_length 9 is not for --method grpo, which takes --max_prompt",
        ),
        (["--num_generations", "9"], "--num_generations 9 is not for --method sft, which takes --max_length"),
        (["--method", "grpo", "--num_generations", "1"], "num_generations=1 makes no group; set 2 or more"),
        (["--full", "--qlora"], "full=True with qlora=True: weights in 4 bits cannot be trained"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_estimate_reports_an_error_in_one_line(arguments, message, model, capsys):
    assert cli.main(["estimate", model, *arguments, "--policy", "recompute"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"unsloth-trl estimate: error: {message}") and error.count("\n") == 1


def test_estimate_of_a_folder_without_a_config(tmp_path, capsys):
    assert cli.main(["estimate", str(tmp_path)]) == 2
    assert f"error: {tmp_path} has no config.json; pass the folder of a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate"], "the following arguments are required: MODEL_OR_CONFIG"),
        (["estimate", "m", "--batch", "0"], "--batch: 0 trains nothing; pass 1 or more"),
        (["estimate", "m", "--method", "dpo"], "invalid choice: 'dpo'"),
        (["estimate", "m", "--card", "T4", "--card_gb", "9"], "--card_gb: not allowed with argument --card"),
        (["estimate", "m", "--full", "--lora_r", "8"], "--lora_r: not allowed with argument --full"),
        (["estimate", "m", "--staging_buffers", "7"], "--staging_buffers: invalid choice: 7"),
        (["estimate", "m", "--polices", "auto"], "unrecognized arguments: --polices auto"),
        (["merge", "adapter"], "the following arguments are required: FOLDER"),
        (["export-gguf", "m", "out", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["stf"], "invalid choice: 'stf'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("unsloth-trl") and error.count("\n") == 1


def in_subprocess(*arguments: str) -> str:
    """What the command line prints, without an import that takes long."""
    script = (
        "import sys\nfrom unsloth_trl.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'trl', 'peft', 'psutil'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["estimate", "doctor", "merge", "export-gguf", "demo"])
def test_help_of_subcommands_imports_nothing_heavy(command):
    assert f"unsloth-trl {command}" in in_subprocess(command, "--help")


def test_help_names_every_command():
    printed = in_subprocess("--help")
    for command in ("sft", "grpo", "merge", "export-gguf", "estimate", "doctor", "demo"):
        assert f"\n    {command}" in printed
    assert "--debug" in printed and "exit status 2" in printed


def test_debug_shows_where_an_error_comes_from(model):
    with pytest.raises(ValueError, match="card='9090' is unknown"):
        cli.main(["--debug", "estimate", model, "--card", "9090"])


def test_no_weight_is_made(model, capsys):
    """A model of which one weight has 128 GiB in bf16 is counted without allocating any."""
    hidden = 2**18
    tiny_config("llama", hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1).save_pretrained(model)
    out = run(capsys, "estimate", model, "--policy", "recompute", "--batch", "1")
    # queries and outputs, keys and values of half the heads, three MLP weights, two embeddings and three norms
    count = hidden * hidden * (2 + 2 * 0.5 + 3) + hidden * (2 * 128 + 3)
    assert f"llama, 1 layers, {count / 1e9:.2f} B parameters" in out
    assert f"  weights{2 * count / GIB:>39.2f}" in out
