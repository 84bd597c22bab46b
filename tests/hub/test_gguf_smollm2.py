"""A real model there and back: SmolLM2 with its tokenizer, in f16 and Q8_0."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hub.gguf_models import read_metadata
from unsloth_trl.hub.gguf import export_gguf
from unsloth_trl.models.smollm2 import load_model


TEXTS = [
    "Gravity is a force that pulls objects toward each other. The Moon",
    "def add(a, b):\n    return a + b  # 12 + 345 = 357",
    "<|im_start|>user\nName 3 colours, s'il vous pla\u00eet!<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def exported(smollm2, tmp_path_factory):
    """The model in bf16, its tokenizer, and the files that were made of its folder."""
    folder = tmp_path_factory.mktemp("smollm2")
    model, tokenizer = load_model(smollm2, torch.bfloat16)
    model.save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    files = export_gguf(folder / "merged", folder, ["f16", "q8_0"], name="SmolLM2")
    return model.float().eval(), tokenizer, dict(zip(("f16", "q8_0"), files, strict=True))


@torch.no_grad()
def logits(model, tokenizer):
    return torch.cat([model(tokenizer(text, return_tensors="pt").input_ids).logits[0] for text in TEXTS])


# Relative distance of logits and agreement of the most likely token. f16 holds all digits of bf16: 0 was seen, and
# 1e-4 leaves room for weights below its range. Q8_0 gave 0.020.
@pytest.mark.parametrize("method, bound, same", [("f16", 1e-4, 1.0), ("q8_0", 0.04, 0.95)])
def test_smollm2_logits(method, bound, same, exported):
    model, tokenizer, files = exported
    file = files[method]
    # with its config, since reading that from the file takes seconds; test_gguf.py reads one back
    reloaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, config=model.config
    ).eval()
    got, expected = logits(reloaded, tokenizer), logits(model, tokenizer)
    distance = ((got - expected).norm() / expected.norm()).item()
    agree = (got.argmax(-1) == expected.argmax(-1)).float().mean().item()
    print(f"{method}: distance {distance:.2e}, same token {agree:.3f}")
    assert distance < bound and agree >= same


def test_smollm2_tokens(exported):
    _, tokenizer, files = exported
    file = files["q8_0"]
    again = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert [again(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert again.chat_template == tokenizer.chat_template


def test_smollm2_metadata(exported):
    model, tokenizer, files = exported
    said = read_metadata(files["q8_0"])
    assert said["tokenizer.ggml.eos_token_id"] == model.config.eos_token_id == tokenizer.eos_token_id
    assert said["tokenizer.ggml.pre"] in ("smollm", "gpt-2")
    assert len(said["tokenizer.ggml.tokens"]) == model.config.vocab_size
    size = {method: file.stat().st_size for method, file in files.items()}
    assert size["q8_0"] < 0.6 * size["f16"] and size["f16"] > 2 * model.num_parameters()


def test_smollm2_modelfile(exported):
    _, tokenizer, files = exported
    text = (files["f16"].parent / "Modelfile").read_text()
    assert text.startswith("FROM ./SmolLM2-F16.gguf\n") and f'\nPARAMETER stop "{tokenizer.eos_token}"\n' in text
    assert "<|im_start|>" in text and "TEMPLATE" in text
