"""`unsloth-trl sft` and `grpo`: TRL's recipes as they are, and one line for what is wrong in them."""

import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from trl.scripts import grpo as trl_grpo
from trl.scripts import sft as trl_sft

from tests.numerics import relative_error
from tests.tiny import lora_config, tiny_model, tiny_tokenizer
from unsloth_trl import cli


ROOT = Path(__file__).parents[1]
REWARDS = """
three = 3
def by_length(completion_ids, **kwargs):
    return [float(len(ids)) + sum(ids) % 7 for ids in completion_ids]
"""


def words(rng: random.Random, n: int) -> str:
    return " ".join(f"w{rng.randrange(9, 128)}" for _ in range(n))


def write_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, data in several forms, and a module with a reward."""
    folder = tmp_path_factory.mktemp("files")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rng = random.Random(0)
    chats = [
        {
            "messages": [
                {"role": "user", "content": words(rng, 4)},
                {"role": "assistant", "content": words(rng, rng.randint(2, 8))},
            ]
        }
        for _ in range(24)
    ]
    (folder / "adapter").mkdir()
    lora_config("llama").save_pretrained(folder / "adapter")
    (folder / "chats").mkdir()
    write_lines(folder / "chats" / "train.jsonl", chats)
    write_lines(folder / "chats" / "test.jsonl", chats[:4])
    (folder / "parquet").mkdir()
    Dataset.from_list(chats).to_parquet(folder / "parquet" / "train.parquet")
    DatasetDict({"train": Dataset.from_list(chats)}).save_to_disk(folder / "saved")
    write_lines(folder / "prompts.jsonl", [{"prompt": words(rng, 4)} for _ in range(16)])
    (folder / "empty.jsonl").touch()
    (folder / "header.csv").write_text("text\n")
    write_lines(folder / "questions.json", [{"question": "w9", "answer": "w10"}])
    (folder / "broken.jsonl").write_text('{"prompt": "w9", "completion": "w10"}\n{"prompt": \n')
    write_lines(folder / "numbers.jsonl", [{"prompt": "w9", "completion": 10}])
    write_lines(folder / "kinds.jsonl", [{"prompt": "w9", "completion": "w10"}, {"prompt": ["w9"], "completion": 1}])
    (folder / "no_model").mkdir()
    (folder / "tiny_rewards_of_test_cli.py").write_text(REWARDS)
    return folder


@pytest.fixture(autouse=True)
def importable(files, monkeypatch):
    for config in (huggingface_hub.constants, datasets.config):  # read when they were imported
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    # the command line puts the working directory in front, as TRL does
    monkeypatch.setattr(sys, "path", [str(files), *sys.path])


def write_recipe(folder: Path, files: Path, **fields) -> list[str]:
    """The arguments for a recipe, of which one with the value `...` is left out."""
    recipe = {
        "model_name_or_path": str(files / "model"),
        "dataset_name": str(files / "chats"),
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "use_peft": True,
        "lora_r": 4,
        "lora_dropout": 0.0,
        "seed": 3,
    } | fields
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not ...}))
    return ["--config", str(path)]


def losses_of(output_dir: Path) -> list[float]:
    state = max(output_dir.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    return [row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row]


def run_trl(script, arguments: list[str]) -> None:
    script.main(*script.make_parser().parse_args_and_config(arguments, fail_with_unknown_args=False))


def assert_same_run(ours: Path, theirs: Path) -> None:
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=1e-4) and len(losses_of(ours)) == 3
    got, expected = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    assert got.keys() == expected.keys()
    moved = [name for name, value in expected.items() if "lora_B" in name and value.norm() > 0]
    assert len(moved) == 4  # q_proj and v_proj of two layers; B begins as zero: it is the update
    for name in moved:
        assert relative_error(got[name], expected[name]) < 1e-3, name


def test_a_recipe_of_trl_gives_the_same_run(files, tmp_path, capsys):
    recipe = {"packing": True, "max_length": 64, "eval_strategy": "steps", "eval_steps": 3}
    assert cli.main(["sft", *write_recipe(tmp_path / "ours", files, **recipe)]) == 0
    printed = capsys.readouterr().out
    assert "unsloth_trl patches:\n  applied     attention" in printed
    assert f"saved to {tmp_path / 'ours' / 'out'}" in printed
    run_trl(trl_sft, write_recipe(tmp_path / "theirs", files, **recipe))
    assert_same_run(tmp_path / "ours" / "out", tmp_path / "theirs" / "out")
    saved = {path.name for path in (tmp_path / "ours" / "out").iterdir()}
    assert {"adapter_config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= saved


def test_grpo_with_a_reward_by_its_dotted_path(files, tmp_path):
    recipe = {
        "dataset_name": str(files / "prompts.jsonl"),
        "reward_funcs": ["tiny_rewards_of_test_cli.by_length"],
        "num_generations": 2,
        "max_completion_length": 6,
        "per_device_train_batch_size": 4,
        "beta": 0.1,
        "learning_rate": 0.5,
    }
    assert cli.main(["grpo", *write_recipe(tmp_path / "ours", files, **recipe)]) == 0
    # TRL's script takes folders, and no single file
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "train.jsonl").write_bytes((files / "prompts.jsonl").read_bytes())
    recipe["dataset_name"] = str(tmp_path / "prompts")
    run_trl(trl_grpo, write_recipe(tmp_path / "theirs", files, **recipe))
    assert_same_run(tmp_path / "ours" / "out", tmp_path / "theirs" / "out")


@pytest.mark.parametrize("name", ["parquet", "saved", "chats/train.jsonl"])
def test_data_of_this_machine_in_every_form(name, files, tmp_path):
    recipe = write_recipe(tmp_path, files, dataset_name=str(files / name), max_steps=1)
    assert cli.main(["sft", *recipe, "--save_strategy", "no"]) == 0
    text = (tmp_path / "out" / "README.md").exists()
    assert text and (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_resume_goes_on_as_if_nothing_had_happened(files, tmp_path):
    recipe = write_recipe(tmp_path, files, save_steps=1, max_steps=4)
    assert cli.main(["sft", *recipe]) == 0
    whole = losses_of(tmp_path / "out")
    for step in (3, 4):
        (tmp_path / "out" / f"checkpoint-{step}").rename(tmp_path / f"gone-{step}")
    (tmp_path / "out" / "adapter_model.safetensors").unlink()
    assert cli.main(["sft", *recipe, "--resume_from_checkpoint", "True"]) == 0
    assert losses_of(tmp_path / "out") == pytest.approx(whole, abs=1e-6) and len(whole) == 4
    assert cli.main(["sft", *recipe, "--resume_from_checkpoint", str(tmp_path / "gone-3")]) == 0
    assert losses_of(tmp_path / "out") == pytest.approx(whole, abs=1e-6)


def test_qlora_of_a_mixture_has_its_experts_in_4_bits(tmp_path, files):
    pytest.importorskip("bitsandbytes")
    # 4-bit blocks of 64
    tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=64).save_pretrained(tmp_path / "moe")
    tiny_tokenizer().save_pretrained(tmp_path / "moe")
    recipe = write_recipe(
        tmp_path,
        files,
        model_name_or_path=str(tmp_path / "moe"),
        max_steps=1,
        load_in_4bit=True,
        lora_target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
    )
    assert cli.main(["sft", *recipe]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base weights quantised: bitsandbytes_4bit_experts, bnb_4bit_quant_type=nf4" in card
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(".experts." in name and "lora_B" in name and value.norm() > 0 for name, value in adapter.items())


@pytest.mark.parametrize(
    ("command", "fields", "arguments", "message"),
    [
        ("sft", {}, ["--learning_rat", "1"], "unknown option --learning_rat; did you mean --learning_rate?"),
        ("sft", {}, ["--lora-rr=4"], "unknown option --lora_rr; did you mean --lora_r?"),
        ("sft", {}, ["steps"], "unexpected argument 'steps'; options begin with --"),
        ("sft", {}, ["--lora_rank", "8"], "unknown option --lora_rank; write --lora_r"),
        ("sft", {"max_seq_length": 64}, [], "recipe.yaml: unknown key 'max_seq_length'; write max_length"),
        ("grpo", {"max_seq_length": 64}, [], "unknown key 'max_seq_length'; TRL's GRPO takes prompts whole: filter"),
        (
            "sft",
            {},
            ["--use_gradient_checkpointing", "unsloth"],
            "set gradient_checkpointing=False, checkpoint_policy",
        ),
        ("sft", {"packin": True}, [], "recipe.yaml: unknown key 'packin'; did you mean packing?"),
        (
            "sft",
            {"learning_rate": "fast"},
            [],
            "argument --learning_rate/--learning-rate: invalid float value: 'fast'",
        ),
        ("sft", {"attention_backend": "fast"}, [], "attention_backend='fast' is unknown"),
        ("sft", {}, ["--config", "missing.yaml"], "--config missing.yaml: there is no such file"),
        ("sft", {}, ["--config"], "--config needs the name of a YAML file"),
        ("sft", {"model_name_or_path": ...}, [], "pass --model_name_or_path: a name on the Hub or a folder"),
        ("sft", {"model_name_or_path": "~/nowhere"}, [], f"{Path.home() / 'nowhere'}: there is no such folder"),
        ("sft", {"model_name_or_path": "FILES/adapter"}, [], "adapter is an adapter: pass its base model, and a"),
        ("sft", {"model_name_or_path": "./nowhere"}, [], "--model_name_or_path ./nowhere: there is no such folder"),
        (
            "sft",
            {"dataset_name": ...},
            [],
            "pass --dataset_name (a name on the Hub, a folder or a file), or `datasets`",
        ),
        ("sft", {"dataset_name": "./nowhere"}, [], "--dataset_name ./nowhere: there is no such file or folder"),
        ("sft", {"dataset_name": "nowhere.jsonl"}, [], "nowhere.jsonl: there is no such file or folder"),
        ("sft", {"dataset_name": "FILES/empty.jsonl"}, [], "empty.jsonl: no rows in it (the file is empty)"),
        ("sft", {"dataset_name": "FILES/header.csv"}, [], "header.csv: no rows in it ("),
        ("sft", {"dataset_name": "FILES/broken.jsonl"}, [], "broken.jsonl cannot be read: JSON parse error"),
        (
            "sft",
            {"dataset_name": "FILES/numbers.jsonl"},
            [],
            "the column 'completion' of the dataset is int64; it has",
        ),
        (
            "sft",
            {"dataset_name": "FILES/kinds.jsonl"},
            [],
            "'prompt' of the dataset has rows of the kinds list, str; it",
        ),
        ("sft", {"dataset_name": "nowhere"}, [], "--dataset_name nowhere: there is no such file or folder here, and"),
        (
            "sft",
            {"model_name_or_path": "nowhere"},
            [],
            "--model_name_or_path nowhere: there is no such folder here, an",
        ),
        ("sft", {"model_name_or_path": "FILES/no_model"}, [], "no_model: in that folder: "),
        ("sft", {"output_dir": "FILES/header.csv"}, [], "header.csv is a file; name another folder"),
        ("sft", {"output_dir": "FILES/header.csv/out"}, [], "header.csv is a file; name another folder"),
        ("sft", {}, ["--config", "FILES/no_model"], "no_model is a folder: pass a YAML file"),
        ("sft", {"dataset_train_split": "trian"}, [], "the dataset has no split 'trian', but 'train', 'test': set --"),
        (
            "sft",
            {"dataset_name": "FILES/questions.json"},
            [],
            "has the columns question, answer; sft needs 'messages'",
        ),
        ("sft", {"dataset_name": "FILES/tiny_rewards_of_test_cli.py"}, [], "the ending is none of .json, .jsonl, "),
        ("sft", {"load_in_4bit": True, "use_peft": False}, [], "--load_in_4bit needs --use_peft"),
        ("sft", {"resume_from_checkpoint": "./gone"}, [], "--resume_from_checkpoint ./gone: there is no such folder"),
        ("sft", {"resume_from_checkpoint": True}, [], "resume_from_checkpoint=True needs a checkpoint in output_dir="),
        ("grpo", {}, [], "pass --reward_funcs (names of TRL, or dotted paths such as my_rewards.by_length)"),
        ("grpo", {"reward_funcs": ["nice"]}, [], "the dataset has the columns messages; grpo needs 'prompt'"),
        (
            "grpo",
            {"reward_funcs": ["nice"], "dataset_name": "FILES/prompts.jsonl"},
            [],
            "--reward_funcs nice: not one of accuracy_reward, ",
        ),
        (
            "grpo",
            {"reward_funcs": ["tiny_rewards_of_test_cli.by_lenght"], "dataset_name": "FILES/prompts.jsonl"},
            [],
            "has no attribute 'by_lenght'; did you mean tiny_rewards_of_test_cli.by_length?",
        ),
        (
            "grpo",
            {"reward_funcs": ["tiny_rewards_of_test_cli.three"], "dataset_name": "FILES/prompts.jsonl"},
            [],
            "--reward_funcs tiny_rewards_of_test_cli.three is 3, not a function",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_line_and_exit_status_2(command, fields, arguments, message, files, tmp_path, capfd):
    here = {
        key: value.replace("FILES", str(files)) if isinstance(value, str) else value for key, value in fields.items()
    }
    here |= {"num_generations": 2} if command == "grpo" else {}
    arguments = [argument.replace("FILES", str(files)) for argument in arguments]
    recipe = [] if "--config" in arguments else write_recipe(tmp_path, files, **here)
    capfd.readouterr()
    assert cli.main([command, *recipe, *arguments]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("unsloth-trl")]
    assert len(errors) == 1 and errors[0].startswith(f"unsloth-trl {command}: error: ") and message in errors[0]
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.fixture
def full_disk():
    """No file can be larger than some bytes: the kernel refuses, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_at_the_end(files, tmp_path, capsys, full_disk):
    recipe = write_recipe(tmp_path, files, use_peft=False, save_strategy="no", max_steps=1)
    capsys.readouterr()
    full_disk(20_000)
    assert cli.main(["sft", *recipe]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"unsloth-trl sft: error: the model could not be saved in {tmp_path / 'out'}: " in error
    assert "GiB are free there now). It is still in memory: make room, or name a folder on another disk" in error
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_cannot_be_written(files, tmp_path):
    """In a process of its own, which gives up root's privilege."""
    recipe = write_recipe(tmp_path, files, output_dir=str(tmp_path / "locked" / "out"))
    (tmp_path / "locked").mkdir(mode=0o555)
    code = (
        "import sys; from tests.packaging.cache_runs import drop_capabilities; drop_capabilities();"
        "from unsloth_trl.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "sft", *recipe],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    locked = tmp_path / "locked"
    assert f"--output_dir {locked / 'out'}: {locked} cannot be written; name another folder" in done.stderr


def test_a_recipe_that_is_not_yaml(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: [1\nb: 2")
    assert cli.main(["sft", "--config", str(recipe)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"unsloth-trl sft: error: {recipe} is not YAML: ") and "line 2" in error
    recipe.write_text("- a")
    assert cli.main(["sft", f"--config={recipe}"]) == 2
    assert "must contain a YAML mapping" in capsys.readouterr().err


def test_debug_shows_the_traceback(files, tmp_path):
    with pytest.raises(ValueError, match="unknown key 'packin'"):
        cli.main(["--debug", "sft", *write_recipe(tmp_path, files, packin=True)])


def test_an_error_of_the_program_keeps_its_traceback(files, tmp_path, monkeypatch):
    """A line would not say enough for a bug report."""
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: [][1])
    with pytest.raises(IndexError):
        cli.main(["sft", *write_recipe(tmp_path, files, max_steps=1)])


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_help_lists_the_options_of_all_parts(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for option in ("config", "model_name_or_path", "dataset_name", "learning_rate", "lora_r", "checkpoint_policy"):
        assert f"--{option}" in printed, option
    assert ("--reward_funcs" in printed and "--share_prompts" in printed) == (command == "grpo")


def run_process(*arguments: str, cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE", "LOCAL_RANK"))}
    env |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_recipe_with_options_of_accelerate_launch(files, tmp_path, capfd):
    """The process that trains was started by the launcher, and has its precision and its environment."""
    recipe = write_recipe(tmp_path, files, num_processes=1, cpu=True, mixed_precision="no", num_machines=1)
    assert cli.main(["sft", *recipe, "--dynamo_backend", "no", "--max_steps", "2"]) == 0
    assert f"saved to {tmp_path / 'out'}" in capfd.readouterr().out
    assert len(losses_of(tmp_path / "out")) == 2


def test_two_processes_train_as_one_with_their_batches(files, tmp_path):
    alone = write_recipe(tmp_path / "alone", files, per_device_train_batch_size=4)
    assert cli.main(["sft", *alone]) == 0
    both = write_recipe(tmp_path / "both", files)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    printed = run_process(*launcher, "-m", "unsloth_trl.cli", "sft", *both, cwd=tmp_path)
    assert printed.count("saved to") == 1
    assert losses_of(tmp_path / "both" / "out") == pytest.approx(losses_of(tmp_path / "alone" / "out"), rel=1e-4)
