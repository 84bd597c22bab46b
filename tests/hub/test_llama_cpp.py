"""B64: llama.cpp's programs are found under all of their names and places, run, and never made up for."""

import os
import stat
import sys

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from tests.hub.gguf_models import byte_level_tokenizer, model_folder, read_metadata, split_steps
from tests.tiny import EXPERT_PARAMETERS, lora_config, tiny_model
from unsloth_trl.hub.gguf import GGUFExportError, export_gguf, save_pretrained_gguf
from unsloth_trl.hub.llama_cpp import (
    LlamaCppNotFoundError,
    find_converter,
    find_quantizer,
    num_tensors,
    run_quantizer,
)


# a program that takes llama-quantize's arguments and prints as it does; {body} is what it does with them
PROGRAM = """#!{python}
import shutil, sys
source, target, method = sys.argv[1:]
print("main: quantizing", flush=True)
for i in (1, 2):
    print(f"[   {{i}}/   2] blk.{{i}}.weight - converting to {{method}}")
{body}
"""
COPY = "shutil.copy(source, target); open(target, 'ab').write(method.encode())"
PLACES = (
    "llama-quantize",
    "quantize",
    "llama-quantize.exe",
    "build/bin/llama-quantize",
    "build/bin/quantize",
    "build/bin/Release/llama-quantize.exe",
    "build/bin/Release/quantize.exe",
    "bin/llama-quantize",
    "bin/Release/llama-quantize.exe",
    "build/llama-quantize",
)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer(split_steps(None))


@pytest.fixture(autouse=True)
def no_llama_cpp_of_this_machine(monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def plant(path, body=COPY):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROGRAM.format(python=sys.executable, body=body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("place", PLACES)
def test_b64_the_quantizer_is_found_and_run(place, tokenizer, tmp_path):
    tree = tmp_path / "llama.cpp"
    planted = plant(tree / place)
    assert find_quantizer(tree) == planted
    assert find_quantizer(planted) == planted
    model_folder(tmp_path / "merged", "llama", tokenizer, num_hidden_layers=1)
    (file,) = export_gguf(tmp_path / "merged", tmp_path / "out", "q4_k_m", llama_cpp_path=tree)
    assert file.name == "model-Q4_K_M.gguf" and file.read_bytes().endswith(b"Q4_K_M")
    # of the 16-bit file that was quantised nothing is left
    assert sorted(os.listdir(tmp_path / "out")) == ["Modelfile", "model-Q4_K_M.gguf"]
    assert read_metadata(file)["general.file_type"] == 32


def test_b64_on_path_and_in_the_working_directory(tmp_path, monkeypatch):
    # in a folder of this test: the suite's own has to stay empty
    monkeypatch.chdir(tmp_path)
    planted = plant(tmp_path / "llama.cpp" / "build" / "bin" / "llama-quantize")
    assert find_quantizer() == planted
    plant(tmp_path / "empty" / "quantize")  # anyone's program of that name
    assert find_quantizer() == planted
    on_path = plant(tmp_path / "empty" / "llama-quantize")
    assert find_quantizer() == on_path


@pytest.mark.parametrize("name", ["convert_hf_to_gguf.py", "convert-hf-to-gguf.py"])
def test_b64_the_converter_is_found_and_named(name, tokenizer, tmp_path):
    assert find_converter(tmp_path) is None
    planted = tmp_path / "llama.cpp" / name
    planted.parent.mkdir()
    planted.write_text("")
    assert find_converter(tmp_path / "llama.cpp") == planted
    model_folder(tmp_path / "merged", "olmo2", tokenizer)
    with pytest.raises(ValueError, match=f"python {planted} FOLDER --outtype q8_0"):
        export_gguf(tmp_path / "merged", tmp_path / "out", llama_cpp_path=tmp_path / "llama.cpp")


def test_b64_missing_is_an_error_before_merging(tokenizer, tmp_path):
    model = get_peft_model(tiny_model("llama", vocab_size=512), lora_config("llama"))
    for path, where in ((None, "on PATH or in ./llama.cpp"), (tmp_path, f"in llama_cpp_path='{tmp_path}'")):
        with pytest.raises(LlamaCppNotFoundError) as raised:
            save_pretrained_gguf(model, tmp_path / "out", tokenizer, ["q8_0", "q5_k_m"], llama_cpp_path=path)
        message = str(raised.value)
        assert "quantization_method='q5_k_m' needs llama.cpp's program llama-quantize" in message
        assert f", which is not {where}:" in message
        assert "brew install llama.cpp" in message and "\n" not in message
    assert not (tmp_path / "out").exists()


def test_b64_not_executable(tmp_path):
    planted = plant(tmp_path / "llama-quantize")
    planted.chmod(0o644)
    with pytest.raises(LlamaCppNotFoundError, match=rf"not executable: chmod \+x {planted}"):
        find_quantizer(tmp_path)


def test_the_16_bit_file_is_made_once(tokenizer, tmp_path):
    plant(tmp_path / "llama.cpp" / "llama-quantize")
    model_folder(tmp_path / "merged", "llama", tokenizer, num_hidden_layers=1)
    methods = ["q6_k", "bf16", "quantized"]
    files = export_gguf(tmp_path / "merged", tmp_path / "out", methods, llama_cpp_path=tmp_path / "llama.cpp")
    assert [file.name for file in files] == ["model-Q6_K.gguf", "model-BF16.gguf", "model-Q4_K_M.gguf"]
    assert files[0].read_bytes() == files[1].read_bytes() + b"Q6_K"
    assert (tmp_path / "out" / "Modelfile").read_text().startswith("FROM ./model-Q6_K.gguf\n")


@pytest.mark.parametrize(
    "dtype, file_type", [(torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 32)], ids=["f32", "f16", "bf16"]
)
def test_what_is_quantised_loses_nothing(dtype, file_type, tokenizer, tmp_path):
    plant(tmp_path / "llama.cpp" / "llama-quantize")
    model_folder(tmp_path / "merged", "llama", tokenizer, dtype, num_hidden_layers=1)
    (file,) = export_gguf(tmp_path / "merged", tmp_path, "q4_k_m", llama_cpp_path=tmp_path / "llama.cpp")
    assert read_metadata(file)["general.file_type"] == file_type


FAILURES = {
    "status": ("print('llama_model_quantize: bad magic'); sys.exit(3)", "failed with status 3 and said: .*bad magic"),
    "nothing written": ("pass", "ended without an error, but wrote no whole GGUF file"),
    "half written": ("open(target, 'wb').write(open(source, 'rb').read(20))", "wrote no whole GGUF file"),
}


@pytest.mark.parametrize("body, message", FAILURES.values(), ids=FAILURES)
def test_a_quantizer_that_fails(body, message, tokenizer, tmp_path):
    plant(tmp_path / "llama.cpp" / "llama-quantize", body)
    model_folder(tmp_path / "merged", "llama", tokenizer, num_hidden_layers=1)
    with pytest.raises(RuntimeError, match=message):
        export_gguf(tmp_path / "merged", tmp_path / "out", ["q8_0", "q4_k_m"], llama_cpp_path=tmp_path / "llama.cpp")
    assert os.listdir(tmp_path / "out") == []


def test_b64_the_merged_folder_is_kept_on_failure(tokenizer, tmp_path):
    tree = tmp_path / "llama.cpp"
    plant(tree / "llama-quantize", "sys.exit(1)")
    model = get_peft_model(tiny_model("llama", vocab_size=512), lora_config("llama", init_lora_weights=False)).eval()
    out = tmp_path / "out"
    with pytest.raises(GGUFExportError, match=r"failed with status 1.*the merged 16-bit model is in .*merged_16bit: "):
        save_pretrained_gguf(model, out, tokenizer, "q4_k_m", llama_cpp_path=tree)
    assert os.listdir(out) == ["merged_16bit"]
    # and what the message says works
    plant(tree / "llama-quantize")
    (file,) = export_gguf(out / "merged_16bit", out, ["q4_k_m"], llama_cpp_path=tree)
    assert num_tensors(file) == 21


def adapter_gguf_cases():
    """model_type, config and the names of parameters that get an adapter besides the attention's."""
    full = {"use_sliding_window": False}
    return [
        ("llama", {}, None),
        ("qwen3", {**full, "tie_word_embeddings": True}, None),
        ("gemma3_text", {}, None),
        ("qwen3_moe", {"norm_topk_prob": True}, EXPERT_PARAMETERS),
    ]


@pytest.mark.parametrize("model_type, config, parameters", adapter_gguf_cases())
def test_a_model_with_an_adapter(model_type, config, parameters, tokenizer, tmp_path):
    """From the live model to the file: the adapter is in it."""
    adapter = lora_config(model_type, init_lora_weights=False, target_parameters=parameters)
    model = get_peft_model(tiny_model(model_type, vocab_size=512, **config).to(torch.bfloat16), adapter).eval()
    (file,) = save_pretrained_gguf(model, tmp_path / "out", tokenizer, "bf16", name="mine")
    assert sorted(os.listdir(tmp_path / "out")) == ["Modelfile", "merged_16bit", "mine-BF16.gguf"]
    ids = torch.arange(10, 40)[None]

    @torch.no_grad()
    def logits(model):
        return model(ids, use_cache=False).logits.float()

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged_16bit", dtype=torch.float32)
    reloaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, config=merged.config
    )
    assert torch.allclose(logits(reloaded), logits(merged), rtol=0, atol=1e-4)
    live = logits(model)
    with model.disable_adapter():
        base = logits(model)
    rounding, moved = ((other - live).norm().item() / live.norm().item() for other in (logits(reloaded), base))
    print(f"{model_type}: {rounding:.3f} from the live model, whose adapter moves its logits by {moved:.2f}")
    # what bf16 rounds in the live model's own forward
    assert rounding < 0.1 < 0.5 < moved


def test_num_tensors(tmp_path, tokenizer):
    model_folder(tmp_path, "llama", tokenizer, num_hidden_layers=1)
    (source,) = export_gguf(tmp_path, tmp_path, "f16")
    run_quantizer(plant(tmp_path / "llama-quantize"), source, tmp_path / "q", "q6_k")
    assert num_tensors(tmp_path / "q") == num_tensors(source) == 12
    assert num_tensors(tmp_path / "config.json") is None
