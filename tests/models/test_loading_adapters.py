"""Adapters: new ones by `get_peft_model`, those from disk, new tokens, and the methods for saving."""

import copy
import json
import pickle
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.models.test_loading import DENSE, IDS, ON_A_CPU, logits, save
from tests.numerics import CPU, relative_error
from tests.tiny import lora_config, tiny_model, tiny_tokenizer
from unsloth_trl import FastLanguageModel, SFTConfig, SFTTrainer, add_new_tokens
from unsloth_trl.models.loading_sources import adapter_vocabulary, find_source, read_adapter
from unsloth_trl.models.saving_methods import METHODS
from unsloth_trl.models.vocabulary import set_padding, vocabulary_rows


NEW = ["<think>", "</think>", "<answer>"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """140 rows for the 128 entries of the tokenizer, by whether the head is tied."""
    return {
        tied: save(tmp_path_factory.mktemp(f"padded-{tied}"), vocab_size=140, tie_word_embeddings=tied)
        for tied in (False, True)
    }


def load(folder, **kwargs):
    return FastLanguageModel.from_pretrained(folder, **DENSE | kwargs)


def lora(model):
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


def train(model, tokenizer, output_dir, rows=None, **config):
    rows = rows or [{"input_ids": [3 + i, 10, 11, 12, 2]} for i in range(4)]
    settings = CPU | {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.05, "optim": "sgd"} | config
    trainer = SFTTrainer(
        model,
        SFTConfig(str(output_dir), **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_unsloth_s_call_is_peft_s_adapter(llama):
    model, _ = load(llama)
    model = FastLanguageModel.get_peft_model(
        model,
        r=8,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=True,
        loftq_config=None,
    )
    torch.manual_seed(3407)
    config = lora_config("llama", r=8, lora_alpha=16, use_rslora=True)
    expected = peft.get_peft_model(tiny_model("llama"), config)
    ours, theirs = lora(model), lora(expected)
    assert ours.keys() == theirs.keys() and len(ours) == 28
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {p.requires_grad for name, p in model.named_parameters() if "lora_" not in name} == {False}
    # alpha over the root of r, 16 / sqrt(8)
    assert model.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] == pytest.approx(5.6569, abs=1e-4)
    assert model.peft_config["default"].task_type == "CAUSAL_LM"
    assert model.use_gradient_checkpointing == model.get_base_model().use_gradient_checkpointing == "unsloth"


def test_the_seed_is_the_adapter_s_alone(llama):
    def adapter(seed):
        model, _ = load(llama)
        before = random_states()
        model = FastLanguageModel.get_peft_model(model, r=4, random_state=seed)
        assert random_states() == before
        return lora(model)

    torch.manual_seed(1)
    first = adapter(3407)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first.values(), adapter(3407).values(), strict=True))
    other = adapter(1)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


@pytest.mark.parametrize(
    ("model_type", "expected", "warned"),
    [
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj", "o_proj", "mlp.experts"}, False),
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, True),
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "mlp.experts"}, True),
    ],
)
def test_targets_by_default(model_type, expected, warned):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = FastLanguageModel.get_peft_model(tiny_model(model_type), r=4)
    said = [str(w.message) for w in found if "the LoRA goes on" in str(w.message)]
    assert len(said) == warned
    names = {name.split(".lora_")[0] for name in lora(model)}
    for part in expected:
        assert any(part in name for name in names), part
    assert not any(name.endswith((".gate", "lm_head")) for name in names)


def test_all_linear_layers_are_not_the_experts():
    with pytest.warns(UserWarning, match="'all-linear' leaves out stacked experts"):
        FastLanguageModel.get_peft_model(tiny_model("qwen3_moe"), r=4, target_modules="all-linear")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lora_aplha": 8}, TypeError, "unexpected keyword argument 'lora_aplha'; did you mean 'lora_alpha'"),
        ({"target_modules": ["q_prj"]}, ValueError, r"target_modules=\['q_prj'\] match no module"),
        ({"qat_scheme": "int4"}, ValueError, "qat_scheme='int4' is not done here"),
        ({"max_seq_length": 512}, ValueError, "max_seq_length=512 is more than the 256 positions.* from_pretrained"),
        ({"use_gradient_checkpointing": "no"}, ValueError, "use_gradient_checkpointing='no' is unknown"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(arguments, error, message):
    model = tiny_model("llama")
    with pytest.raises(error, match=message):
        FastLanguageModel.get_peft_model(model, **arguments)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_a_model_with_an_adapter(llama):
    model, _ = load(llama)
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    before = lora(model)
    with pytest.warns(UserWarning, match="has this adapter already .'default'.: it is trained on"):
        again = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    assert again is model and all(torch.equal(p, before[name]) for name, p in lora(again).items())
    with pytest.raises(
        ValueError, match="an adapter already .'default' with {'r': 4}., and another one was asked for"
    ):
        FastLanguageModel.get_peft_model(model, r=16, lora_alpha=8)


@pytest.mark.filterwarnings(ON_A_CPU)
@pytest.mark.parametrize("four_bits", [False, True], ids=["16bit", "4bit"])
def test_an_adapter_folder_is_trained_on(llama, four_bits, tmp_path):
    if four_bits:
        pytest.importorskip("bitsandbytes", reason="the test extra has it")
    model, tokenizer = load(llama, load_in_4bit=four_bits)
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    train(model, tokenizer, tmp_path / "out")
    model.save_pretrained(tmp_path / "adapter")  # without a tokenizer: the base's will do
    again, other = load(str(tmp_path / "adapter"), load_in_4bit=four_bits)
    assert isinstance(again, PeftModel) and other.get_vocab() == tokenizer.get_vocab()
    ours, theirs = lora(model), lora(again)
    assert all(torch.equal(ours[name].float(), theirs[name]) for name in ours) and len(ours) == len(theirs)
    # on 4 bits TRL trains in bf16, and the adapter is computed in what it is in
    tolerance = 1e-2 if four_bits else 1e-5
    assert relative_error(logits(again), logits(model.eval())) < tolerance
    trained = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trained == set(lora(again)) and len(trained) == 28
    saved = {name: p.clone() for name, p in lora(again).items()}
    train(again, other, tmp_path / "more")
    assert not any(torch.equal(p, saved[name]) for name, p in lora(again).items() if "lora_B" in name)


def test_adapter_folders_that_are_refused(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model, _ = load(Path(llama))
    adapter = tmp_path / "adapter"
    FastLanguageModel.get_peft_model(model, r=4).save_pretrained(adapter)
    with pytest.raises(ValueError, match="full_finetuning=True: .* is an adapter, whose base stays frozen; merge it"):
        load(str(adapter), full_finetuning=True)
    with pytest.raises(ValueError, match="resize_model_vocab=200: .* is an adapter, which has the vocabulary"):
        load(str(adapter), resize_model_vocab=200)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for base, message in (
        ("/gone/model", "the base of the adapter .* is '/gone/model', which is not there"),
        (None, "names no base"),
        ("moved/tiny", f"'moved/tiny', which is no folder in {Path.cwd()} and cannot be loaded from the Hub"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises((OSError, ValueError), match=f"{message}.*set ?base_model_name_or_path|{message}"):
            load(str(adapter))


def test_b62_a_folder_with_a_model_and_an_adapter(llama, tmp_path):
    model, _ = load(llama)
    adapter = tmp_path / "adapter"
    FastLanguageModel.get_peft_model(model, r=4).save_pretrained(adapter)
    shutil.copy(f"{llama}/config.json", adapter)
    shutil.copy(f"{llama}/model.safetensors", adapter)
    with pytest.raises(
        ValueError, match="config.json, model.safetensors. and an adapter.*: remove config.json and the w"
    ):
        load(str(adapter))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("number", "rows"), [(3, 140), (20, 148)], ids=["room", "more"])
def test_b58_a_padded_matrix_never_shrinks(padded, tied, number, rows):
    model, tokenizer = load(padded[tied])
    before = [p.detach().clone() for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)]
    assert len(tokenizer) == 128 and [len(b) for b in before] == [140, 140]
    state = random_states()
    assert add_new_tokens(model, tokenizer, [f"<new{i}>" for i in range(number)]) == number
    assert random_states() == state
    after = [p.detach() for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)]
    ids = tokenizer.convert_tokens_to_ids([f"<new{i}>" for i in range(number)])
    assert ids == list(range(128, 128 + number)) == model.added_token_ids
    for old, new in zip(before, after, strict=True):
        assert len(new) == rows and torch.equal(new[:128], old[:128])
        assert torch.allclose(new[128 : 128 + number], old[:128].mean(0).expand(number, -1), atol=1e-6)
        assert torch.equal(new[128 + number : 140], old[128 + number : 140])
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert model.config.vocab_size == rows and model(input_ids=torch.tensor([ids])).logits.shape[-1] == rows


def test_new_tokens_that_are_refused(llama):
    model, tokenizer = load(llama)
    with pytest.warns(UserWarning, match=r"new_tokens has \['w10'\], which are in the vocabulary already"):
        assert add_new_tokens(model, tokenizer, ["w10"]) == 0
    for arguments, message in (
        ({"new_tokens": "<a>"}, "new_tokens='<a>' is not a list of texts"),
        ({"new_tokens": ["<a>"], "method": "interpolation"}, "method='interpolation' is unknown; set method='mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            add_new_tokens(model, tokenizer, **arguments)
    with pytest.raises(ValueError, match="has an adapter already; add tokens before get_peft_model"):
        add_new_tokens(FastLanguageModel.get_peft_model(model, r=4), tokenizer, ["<a>"])
    gemma4 = tiny_model("gemma4_text")
    with pytest.raises(ValueError, match="embeddings for each layer .vocab_size_per_layer_input."):
        add_new_tokens(gemma4, tokenizer, ["<a>"])
    assert len(tokenizer) == 128 and vocabulary_rows(model) == 128


@pytest.mark.filterwarnings(ON_A_CPU, "ignore:2 tokens were added")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_new_tokens_on_4_bits_train_and_generate(llama, dtype, tmp_path):
    """TRL makes what is trained on a quantised base bf16, whatever the base is."""
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    model, tokenizer = load(llama, load_in_4bit=True, dtype=dtype)
    add_new_tokens(model, tokenizer, ["<a>", "<b>"])
    model = FastLanguageModel.get_peft_model(model, r=4)
    if dtype != torch.float16:  # which the Trainer does not train on a CPU
        train(model, tokenizer, tmp_path / "out", bf16=dtype == torch.bfloat16)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    FastLanguageModel.for_inference(model)
    assert model.generate(input_ids=IDS, max_new_tokens=3).shape[1] > 9
    again, _ = load(str(tmp_path / "adapter"), load_in_4bit=True, dtype=dtype)
    assert relative_error(logits(again), logits(model)) < 2e-2


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("base", ["full", "padded"])
def test_b59_an_adapter_with_new_tokens_is_read_by_its_path(padded, llama, tied, base, tmp_path):
    folder = padded[tied] if base == "padded" else save(tmp_path / "base", tie_word_embeddings=tied)
    model, tokenizer = load(folder)
    add_new_tokens(model, tokenizer, NEW)
    ids = tokenizer.convert_tokens_to_ids(NEW)
    with pytest.warns(UserWarning, match="3 tokens were added: modules_to_save gets .'embed_tokens'"):
        model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    start = model.get_input_embeddings().weight[ids].detach().clone()
    train(model, tokenizer, tmp_path / "out", rows=[{"input_ids": [10, *ids, 11, 2]} for _ in range(4)])
    for kind in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert not torch.isclose(kind.weight[ids], start).all(-1).any(), "their rows are trained"
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")

    again, other = load(str(tmp_path / "adapter"))
    assert other.convert_tokens_to_ids(NEW) == ids
    assert vocabulary_rows(again.get_base_model()) == (140 if base == "padded" else 131)
    for mine, theirs in (
        (again.get_input_embeddings(), model.get_input_embeddings()),
        (again.get_output_embeddings(), model.get_output_embeddings()),
    ):
        assert torch.equal(mine.weight[ids], theirs.weight[ids])
    batch = torch.tensor([[10, *ids, 11]])
    assert torch.allclose(again(input_ids=batch).logits, model.eval()(input_ids=batch).logits, atol=1e-5)
    assert any(p.requires_grad for name, p in again.named_parameters() if "embed_tokens" in name)
    if base == "full":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / "adapter" / name).unlink()
        with pytest.raises(
            ValueError, match="trained with 131 rows of embeddings, its base has 128, .*no tokenizer files"
        ):
            load(str(tmp_path / "adapter"))


def test_b59_new_rows_that_the_adapter_trains_by_themselves(llama, tmp_path):
    """PEFT's `trainable_token_indices` saves these rows and nothing else of the matrix."""
    model, tokenizer = load(save(tmp_path / "base", tie_word_embeddings=True))
    add_new_tokens(model, tokenizer, NEW)
    indices = {"embed_tokens": model.added_token_ids}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = FastLanguageModel.get_peft_model(model, r=4, trainable_token_indices=indices)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "trainable_tokens_delta" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    tokenizer.save_pretrained(tmp_path / "adapter")
    source = find_source(str(tmp_path / "adapter"))
    assert adapter_vocabulary(read_adapter(source), source, ("embed_tokens", "lm_head")) == (None, 130)
    again, _ = load(str(tmp_path / "adapter"))
    batch = torch.tensor([[10, 128, 129, 130, 11]])
    assert torch.allclose(again(input_ids=batch).logits, model.eval()(input_ids=batch).logits, atol=1e-5)


def test_an_adapter_of_a_smaller_vocabulary(padded, tmp_path):
    model, tokenizer = load(padded[False])
    model.resize_token_embeddings(128)
    model = FastLanguageModel.get_peft_model(model, r=4, modules_to_save=["embed_tokens", "lm_head"])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="has 128 rows of embeddings and its base 140: the rows above are cut off"):
        again, _ = load(str(tmp_path))
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    ("vocabulary", "chosen", "pad"),
    [
        (["[PAD]"], "[PAD]", "[PAD]"),
        (["<|finetune_right_pad_id|>"],) + ("<|finetune_right_pad_id|>",) * 2,
        ([], "<unk>", "<unk>"),
    ],
    ids=["pad", "llama3", "unk"],
)
def test_padding_where_there_is_none(llama, vocabulary, chosen, pad):
    tokenizer, model = tiny_tokenizer(*vocabulary), tiny_model("llama", pad_token_id=None)
    model.generation_config.pad_token_id = None
    vocab = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    tokenizer = renamed(tokenizer, {"<pad>": "<none>"})
    assert tokenizer.pad_token is None and len(vocab) == 128
    assert set_padding(tokenizer, model) == chosen and tokenizer.pad_token == pad
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert vocabulary_rows(model) == 128


def renamed(tokenizer, names):
    """A tokenizer without padding, and with other names for some entries."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    text = tokenizer.backend_tokenizer.to_str()
    for old, new in names.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), bos_token="<bos>", eos_token="<eos>")


def test_padding_that_is_left_alone(llama):
    model = tiny_model("llama")
    kept = tiny_tokenizer()
    kept.pad_token = "<eos>"  # the checkpoint's choice
    assert set_padding(kept, model) is None and kept.pad_token == "<eos>"
    bare = renamed(tiny_tokenizer(), {"<pad>": "<none>", "<unk>": "<nothing>"})
    assert set_padding(bare, model) is None and bare.pad_token == "<eos>"
    beyond = renamed(tiny_tokenizer(), {"<pad>": "<none>", "<unk>": "<nothing>", "w127": "<|pad|>"})
    assert set_padding(beyond, tiny_model("llama", vocab_size=127)) is None, "its id has no row"
    untouched, tokenizer = load(llama, fix_tokenizer=False)
    assert tokenizer.pad_token == "<pad>" and untouched.num_parameters() == model.num_parameters()


def test_tokens_without_a_row(tmp_path):
    folder = save(tmp_path, vocab_size=120)
    with pytest.warns(
        UserWarning, match="8 tokens .* beyond the 120 rows of the embedding; set resize_model_vocab=128"
    ):
        load(folder)
    model, _ = load(folder, resize_model_vocab=128)
    weight = model.get_input_embeddings().weight
    assert len(weight) == 128 and torch.allclose(weight[127], weight[:120].mean(0), atol=1e-6)
    with pytest.raises(ValueError, match="resize_model_vocab=64 is less than the 120 rows"):
        load(folder, resize_model_vocab=64)


def test_methods_for_saving_belong_to_one_model(llama, tmp_path):
    model, tokenizer = load(llama)
    base_methods = {name: getattr(model, name) for name in METHODS}
    model = FastLanguageModel.get_peft_model(model, r=4)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for name in METHODS:
        assert getattr(model, name).owner is model and base_methods[name].owner is model.get_base_model()
        assert not hasattr(type(model), name) and not hasattr(type(model.get_base_model()), name)
        for twin in copies:
            assert getattr(twin, name).owner is twin and twin is not model
            assert getattr(twin.get_base_model(), name).owner is twin.get_base_model()
    with torch.no_grad():
        for twin, scale in zip([model, *copies], (0.1, 0.2, 0.3), strict=True):
            for name, parameter in lora(twin).items():
                parameter.copy_(
                    scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    copies[0].save_pretrained_merged(str(tmp_path / "merged"), tokenizer, save_method="merged_16bit")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert relative_error(logits(merged), logits(copies[0].eval())) < 5e-2  # it is written in bf16
    assert relative_error(logits(merged), logits(model.eval())) > 0.1


def test_methods_for_saving_do_not_lose_an_adapter(llama):
    model, tokenizer = load(llama)
    wrapped = peft.get_peft_model(model, lora_config("llama"))
    with pytest.raises(
        ValueError, match="save_pretrained_merged: PEFT has put an adapter around this model.*trainer.model"
    ):
        wrapped.save_pretrained_merged("out", tokenizer)
    assert "save_pretrained_merged of Llama" in repr(model.save_pretrained_merged)
    with pytest.raises(ReferenceError, match="save_pretrained_merged: the model is gone; keep it in a variable"):
        load(llama)[0].save_pretrained_merged("out", tokenizer)


def test_ids_are_what_both_files_share():
    assert IDS.max() < 128
