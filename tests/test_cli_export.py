"""`unsloth-trl merge` and `export-gguf`: from an adapter's folder to weights that others run."""

import json
import resource
import shutil

import gguf
import huggingface_hub
import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tests.hub.gguf_models import byte_level_tokenizer, model_folder, read_tensors, split_steps
from tests.tiny import lora_config, tiny_model, tiny_tokenizer
from unsloth_trl import FastLanguageModel, cli
from unsloth_trl.models.base_state import BASE_STATE


IDS = torch.tensor([[7, 60, 99, 300]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base model, an adapter that changes it, and the logits of both together."""
    folder = tmp_path_factory.mktemp("folders")
    tokenizer = byte_level_tokenizer(split_steps(None))
    model = model_folder(folder / "base", "llama", tokenizer, dtype=torch.float32)
    torch.manual_seed(0)
    model = get_peft_model(model, lora_config("llama", init_lora_weights=False)).eval()
    model.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return folder, model(input_ids=IDS).logits


def logits_of(folder) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=IDS).logits


def error_of(arguments, capsys) -> str:
    assert cli.main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("unsloth-trl")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="module")
def merged(folders, tmp_path_factory):
    folder, _ = folders
    out = tmp_path_factory.mktemp("merged") / "my-model"
    assert cli.main(["merge", str(folder / "adapter"), str(out)]) == 0
    return out


def test_merged_weights_compute_what_the_adapter_does(folders, merged):
    folder, expected = folders
    change = (logits_of(folder / "base") - expected).norm()
    # written in bf16, which rounds at 2 ** -9
    assert (logits_of(merged) - expected).norm() < 0.02 * expected.norm() < 0.2 * change
    assert (
        AutoTokenizer.from_pretrained(merged).chat_template
        == AutoTokenizer.from_pretrained(folder / "adapter").chat_template
    )
    assert not (merged / "adapter_config.json").exists()


def test_another_base_can_be_named(folders, merged, tmp_path, capsys, monkeypatch):
    folder, _ = folders
    moved = tmp_path / "moved"
    (folder / "base").rename(moved)
    try:
        error = error_of(["merge", str(folder / "adapter"), str(tmp_path / "out")], capsys)
        adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
        config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "gone/tiny"}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        unknown = error_of(["merge", str(adapter), str(tmp_path / "out")], capsys)
        assert f"the base model of {adapter} is gone/tiny, which is neither a folder here nor can be had" in unknown
        assert f"the base model of {folder / 'adapter'} is the folder {folder / 'base'}, which is not here" in error
        assert "pass --base" in error
        assert cli.main(["merge", str(folder / "adapter"), str(tmp_path / "out"), "--base", str(moved)]) == 0
    finally:
        moved.rename(folder / "base")
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(merged))


def test_rows_for_new_tokens_and_for_padding(tmp_path):
    """131 entries in 192 rows: what counts is what the adapter was trained with, not how long its tokenizer is."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.save_pretrained(tmp_path / "base")  # without a tokenizer, which the adapter has
    tokenizer.add_tokens(["<a>", "<b>", "<c>"])
    model.resize_token_embeddings(192)
    config = lora_config("llama", init_lora_weights=False, modules_to_save=["embed_tokens", "lm_head"])
    model = get_peft_model(model, config).eval()
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    ids = torch.tensor([[9, 128, 130, 60]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        got = merged(input_ids=ids).logits
    assert got.shape[-1] == 192 and (got - expected).norm() < 0.02 * expected.norm()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == 131
    loaded, own = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), 64, load_in_4bit=False)
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-5) and len(own) == 131


@pytest.fixture(scope="module")
def qlora(folders, tmp_path_factory):
    """An adapter over the base in 4 bits and with twice its positions, and the logits of both together."""
    folder, _ = folders
    out = tmp_path_factory.mktemp("qlora")
    with pytest.warns(UserWarning, match="RoPE is scaled linearly by 2"):
        model, tokenizer = FastLanguageModel.from_pretrained(folder / "base", 512)
    torch.manual_seed(0)
    model = FastLanguageModel.get_peft_model(model, r=4, init_lora_weights=False).train()  # as in training
    model.save_pretrained_merged(out, tokenizer, save_method="lora")
    with torch.no_grad():
        return out, model(input_ids=IDS).logits


def test_b56_merged_with_what_the_adapter_was_trained_on(folders, qlora, tmp_path, capsys):
    out, expected = qlora
    assert cli.main(["merge", str(out), str(tmp_path / "merged")]) == 0
    assert "was trained on its base in 4 bits, and is merged with what these 4 bits are" in capsys.readouterr().out
    assert cli.main(["merge", str(out), str(tmp_path / "original"), "--original_weights"]) == 0
    ours, original = logits_of(tmp_path / "merged"), logits_of(tmp_path / "original")
    assert (ours - expected).norm() < 0.02 * expected.norm() < 0.2 * (original - expected).norm()
    for name in ("merged", "original"):
        config = AutoConfig.from_pretrained(tmp_path / name)
        assert config.rope_parameters["factor"] == 2 and config.max_position_embeddings == 512
        assert not (tmp_path / name / BASE_STATE).exists()


def test_an_adapter_is_loaded_as_it_was_trained(qlora):
    out, expected = qlora
    model, _ = FastLanguageModel.from_pretrained(out, 64)
    assert model.config.rope_parameters["factor"] == 2 and model.get_base_model().max_seq_length == 64
    with torch.no_grad():
        assert torch.allclose(model.train()(input_ids=IDS).logits, expected, atol=1e-4)
    with pytest.warns(
        UserWarning, match="on its base in 4 bits and is loaded on it in 16.*load_in_4bit=True, load_in_8"
    ):
        FastLanguageModel.from_pretrained(out, 64, load_in_4bit=False)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_b56_experts_in_4_bits(nested, tmp_path):
    """With TRL's default, and with that of FastLanguageModel."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", 64, quantization_config=four)
    torch.manual_seed(0)
    model = FastLanguageModel.get_peft_model(model, r=4, init_lora_weights=False).train()
    model.save_pretrained_merged(tmp_path / "adapter", tokenizer, save_method="lora")
    ids = torch.tensor([[9, 12, 50, 60]])
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "off"), "--original_weights"]) == 0
    loaded, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", 64)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert torch.allclose(loaded.train()(input_ids=ids).logits, expected, atol=1e-4)
        ours, off = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(input_ids=ids).logits
            for name in ("merged", "off")
        )
    assert (ours - expected).norm() < 0.05 * expected.norm() < 0.5 * (off - expected).norm()


@pytest.mark.parametrize("four", [False, True], ids=["fp32", "4bit"])
def test_a_base_in_a_gguf_file(four, folders, tmp_path):
    folder, _ = folders
    assert cli.main(["export-gguf", str(folder / "base"), str(tmp_path), "--quantization_method", "f32"]) == 0
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base-F32.gguf", 64, load_in_4bit=four)
    torch.manual_seed(0)
    model = FastLanguageModel.get_peft_model(model, r=4, init_lora_weights=False).train()
    model.save_pretrained_merged(tmp_path / "adapter", tokenizer, save_method="lora")
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    got, plain = logits_of(tmp_path / "merged"), logits_of(folder / "base")
    assert (got - expected).norm() < 0.02 * expected.norm() < 0.2 * (plain - expected).norm()


def test_gguf_of_an_adapter_and_of_merged_weights_is_the_same(folders, merged, tmp_path, capsys):
    folder, _ = folders
    for source in (folder / "adapter", merged):
        out = tmp_path / source.name
        assert cli.main(["export-gguf", str(source), str(out), "--quantization_method", "f16", "q8_0"]) == 0
    printed = capsys.readouterr().out
    for name in ("adapter-F16.gguf", "adapter-Q8_0.gguf"):
        assert f"wrote {tmp_path / 'adapter' / name}" in printed
        other = tmp_path / "my-model" / name.replace("adapter", "my-model")
        mine, theirs = read_tensors(tmp_path / "adapter" / name), read_tensors(other)
        assert mine.keys() == theirs.keys() and len(mine) == 21
        assert all((mine[key] == theirs[key]).all() for key in mine)
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "my-model" / "my-model-Q8_0.gguf").tensors}
    assert gguf.GGMLQuantizationType.Q8_0 in kinds
    weights = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
    tensors = read_tensors(tmp_path / "my-model" / "my-model-F16.gguf")
    expected = weights["model.layers.1.mlp.down_proj.weight"].numpy()
    assert abs(tensors["blk.1.ffn_down.weight"].reshape(expected.shape) - expected).max() < 1e-3


def test_b62_a_folder_with_two_kinds_is_refused(folders, merged, tmp_path, capsys):
    folder, _ = folders
    both = shutil.copytree(merged, tmp_path / "both")
    shutil.copytree(folder / "adapter", both, dirs_exist_ok=True)
    for command in ("merge", "export-gguf"):
        error = error_of([command, str(both), str(tmp_path / "out")], capsys)
        assert f"{both} holds an adapter (adapter_config.json, adapter_model.safetensors) and a whole model" in error
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_full_while_merging(folders, tmp_path, capsys):
    """`check_disk` has found room, and another program takes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        error = error_of(["merge", str(folders[0] / "adapter"), str(tmp_path / "out")], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in error and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", "./nowhere", "OUT"], "./nowhere: there is no such folder"),
        (
            ["merge", "nowhere", "OUT"],
            "nowhere is no folder here, and no adapter of that name can be had from the Hub",
        ),
        (["export-gguf", "nowhere", "OUT"], "nowhere is no folder here with a model, and from the Hub: "),
        (["merge", "BASE", "OUT"], "has no adapter_config.json, so there is nothing to merge"),
        (["merge", "RUN", "OUT"], "so there is nothing to merge; it has checkpoints: pass "),
        (["merge", "ADAPTER", "BASE"], "BASE"),
        (["export-gguf", "BASE", "OUT", "--quantization_method", "q9_9"], "quantization_method='q9_9' is not known"),
        (["export-gguf", "BASE", "OUT", "--quantization_method", "q4_k_m", "--llama_cpp_path", "./no"], "./no"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line(arguments, message, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder, _ = folders
    here = {"BASE": str(folder / "base"), "ADAPTER": str(folder / "adapter"), "OUT": str(tmp_path / "out")}
    here["RUN"] = str(tmp_path / "run")
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "base").iterdir()}
    error = error_of([here.get(argument, argument) for argument in arguments], capsys)
    assert here.get(message, message) in error
    assert not (tmp_path / "out").exists()
    assert before == {path.name: path.stat().st_mtime_ns for path in (folder / "base").iterdir()}
