"""Merged weights are what the adapter computes: by architecture, adapter, dtype, and with our patches on the model."""

import copy
import math

import pytest
import torch
import trl
from peft import IA3Config, LoHaConfig, OFTConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
)

import unsloth_trl
from tests.hub.merge_runs import IDS, adapted, gap, logits, names_in, saved_tensors, stirred, stock_merge
from tests.numerics import run_sft
from tests.tiny import CHAT_TEMPLATE, EXPERT_PARAMETERS, lora_config, tiny_model, tiny_tokenizer
from tests.trainers.grpo_runs import run_grpo
from unsloth_trl.hub.merge import save_pretrained_merged, write_merged


# model type and what differs from `tests.tiny`
MODELS = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {},
    "qwen3_moe": {},
    "gpt_oss": {},
}
TIED = ("qwen3", "gemma3_text")
# fp32: sums in another order. 19 architectures, 3 draws each: 4e-7 to 1e-6
FP32 = 5e-6
ULP = 2**-7  # of bf16, relative


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """Model type, a model with an adapter in fp32, and its logits with and without the adapter."""
    model = adapted(request.param, tiny_model(request.param, **MODELS[request.param]))
    with model.disable_adapter():
        base = logits(model)
    return request.param, model, logits(model), base


def reloaded(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def test_merged_is_adapter_on_base_is_reloaded(case, tmp_path):
    model_type, model, expected, base = case
    report = write_merged(model, tmp_path / "merged", dtype=torch.float32)
    loaded = reloaded(tmp_path / "merged", dtype=torch.float32)
    assert gap(base, expected) > 0.1  # the adapter does something
    assert gap(logits(stock_merge(model)), expected) < FP32
    assert gap(logits(loaded), expected) < FP32
    assert report.verification.passed and report.verification.gap < FP32 and report.base == "live"
    # the live model is what it was, adapters and all
    assert torch.equal(logits(model), expected) and model.training
    assert type(loaded).__name__ == type(model.get_base_model()).__name__


def test_bf16_is_the_fp32_sum_rounded_once(case, tmp_path):
    model_type, model, expected, base = case
    save_pretrained_merged(model, tmp_path / "merged")
    loaded, truth = reloaded(tmp_path / "merged"), stock_merge(model, torch.float64).state_dict()
    state = loaded.state_dict()
    assert loaded.dtype == torch.bfloat16 and state.keys() == truth.keys()
    before, changed = tiny_model(model_type, **MODELS[model_type]).state_dict(), 0
    for name, value in truth.items():
        wide = state[name].double()
        assert ((wide - value).abs() <= ULP / 2 * value.abs() + 2e-7).all(), name
        changed += not torch.allclose(before[name].double(), value, atol=0.01)
    assert changed > 4
    # rounding to bf16 moves these random models by 0.01 to 0.03 in the median, and the adapter by far more
    got = logits(loaded)
    assert gap(got, expected) < 0.5 * gap(base, expected)
    assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.06


def test_in_bf16_from_the_start(case, tmp_path):
    model_type, model, _, _ = case
    model = copy.deepcopy(model).to(torch.bfloat16)
    report = write_merged(model, tmp_path / "merged")
    assert report.dtype == torch.bfloat16 and report.verification.passed
    assert 1e-4 < report.verification.noise < 0.3
    truth = stock_merge(model, torch.float64).state_dict()
    for name, value in reloaded(tmp_path / "merged").state_dict().items():
        assert ((value.double() - truth[name]).abs() <= ULP / 2 * truth[name].abs() + 2e-7).all(), name


def test_tied_embeddings_are_saved_once(case, tmp_path):
    model_type, model, expected, _ = case
    save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32, verify=False)
    loaded = reloaded(tmp_path / "merged")
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == (model_type in TIED) == loaded.config.tie_word_embeddings
    assert ("lm_head.weight" in saved_tensors(tmp_path / "merged")) != tied


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma4_text", "kimi_k25"])
def test_layout_is_that_of_transformers(model_type, tmp_path):
    """Names and numbers of what `save_pretrained` writes for the same model, merged by PEFT."""
    model = adapted(model_type)
    stock = stock_merge(model)
    stock.save_pretrained(tmp_path / "stock")
    save_pretrained_merged(model, tmp_path / "ours", dtype=torch.float32, max_shard_size="60KB")
    theirs, ours = saved_tensors(tmp_path / "stock"), saved_tensors(tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob("model-0*.safetensors"))) > 2
    assert ours.keys() == theirs.keys()
    assert any(".experts.1." in name for name in ours) == (model_type not in ("gpt_oss", "gemma4_text"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
    auto_class = AutoModelForImageTextToText if model_type == "kimi_k25" else AutoModelForCausalLM
    assert gap(logits(auto_class.from_pretrained(tmp_path / "ours")), logits(model)) < FP32


def test_a_checkpoint_of_single_experts_stays_one(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    model = adapted("qwen3_moe", reloaded(tmp_path / "base"))
    save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert saved_tensors(tmp_path / "merged").keys() == saved_tensors(tmp_path / "base").keys()
    assert gap(logits(reloaded(tmp_path / "merged")), logits(model)) < FP32


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_patches_make_no_difference(model_type, tmp_path):
    lora = {"target_parameters": EXPERT_PARAMETERS} if model_type == "qwen3_moe" else {}
    run = run_sft(unsloth_trl, model_type, packing=True, lora=True, lora_kwargs=lora)
    model, report = run.trainer.model, run.trainer.patch_report
    assert report["lora"].applied and report["attention"].applied
    patched = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    save_pretrained_merged(model, tmp_path / "on", dtype=torch.float32)
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == patched
    report.remove()
    save_pretrained_merged(model, tmp_path / "off", dtype=torch.float32)
    on, off = saved_tensors(tmp_path / "on"), saved_tensors(tmp_path / "off")
    assert on.keys() == off.keys() and all(torch.equal(on[name], off[name]) for name in on)
    assert (tmp_path / "on" / "config.json").read_text() == (tmp_path / "off" / "config.json").read_text()
    assert "unsloth" not in (tmp_path / "on" / "config.json").read_text()
    loaded = reloaded(tmp_path / "on")
    assert gap(logits(loaded), logits(model)) < FP32
    with model.disable_adapter():
        assert gap(logits(model), logits(loaded)) > 100 * FP32  # it was trained


@pytest.mark.parametrize("library", [unsloth_trl, trl], ids=["ours", "trl"])
def test_a_model_that_grpo_trained(library, tmp_path):
    model = run_grpo(library, "llama", lora=True, beta=0.1).trainer.model
    save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    loaded = reloaded(tmp_path / "merged")
    assert gap(logits(loaded), logits(model)) < FP32
    with model.disable_adapter():
        assert gap(logits(model), logits(loaded)) > 100 * FP32


SCALES = {
    "rslora-r16": ({"r": 16, "lora_alpha": 16, "use_rslora": True}, 4.0),
    "rslora-r8": ({"r": 8, "lora_alpha": 16, "use_rslora": True}, 16 / math.sqrt(8)),
    "r8": ({"r": 8, "lora_alpha": 16}, 2.0),
    "patterns": ({"r": 4, "lora_alpha": 12, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5}}, 2.5),
}


@pytest.mark.parametrize("options, scale", SCALES.values(), ids=SCALES)
def test_b68_scaling(options, scale, tmp_path):
    """Our fused forward, our merge and PEFT's agree, and with the formula."""
    model = adapted("llama", **options)
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    assert layer.scaling["default"] == pytest.approx(scale)
    lora_A, lora_B = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
    expected = layer.base_layer.weight.detach().double() + scale * (lora_B @ lora_A)
    report = unsloth_trl.apply_patches(model)
    assert report["lora"].applied
    save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert (saved_tensors(tmp_path / "merged")[name] - expected).abs().max() < 1e-6
    assert (stock_merge(model).get_parameter(name) - expected).abs().max() < 1e-6
    assert gap(logits(reloaded(tmp_path / "merged")), logits(model)) < FP32


def test_b68_dora(tmp_path):
    model = adapted("llama", use_dora=True)
    assert gap(logits(model), logits(adapted("llama"))) > 0.01  # the magnitudes count
    save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    ours = saved_tensors(tmp_path / "merged")
    for name, value in stock_merge(model).state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
    assert gap(logits(reloaded(tmp_path / "merged")), logits(model)) < FP32


def test_b68_lora_bias(tmp_path):
    model = adapted("qwen2", lora_bias=True, target_modules=["q_proj", "v_proj"])
    save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    expected = layer.base_layer.bias + 2.0 * layer.lora_B["default"].bias
    name = "model.layers.0.self_attn.q_proj.bias"
    torch.testing.assert_close(saved_tensors(tmp_path / "merged")[name], expected.detach(), rtol=1e-6, atol=1e-7)
    assert layer.lora_B["default"].bias.abs().max() > 0.05
    model = adapted("llama", lora_bias=True, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="lora_bias=True, and model.layers.0.self_attn.q_proj has no bias"):
        save_pretrained_merged(model, tmp_path / "refused")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


@pytest.mark.parametrize(
    "config",
    [
        LoHaConfig(target_modules=["q_proj", "v_proj"], init_weights=False),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
        OFTConfig(target_modules=["q_proj"], init_weights=False),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_other_adapters_of_peft(config, tmp_path):
    model = get_peft_model(tiny_model("llama"), config)
    save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert gap(logits(model), logits(tiny_model("llama"))) > 0.01
    assert gap(logits(reloaded(tmp_path / "merged")), logits(model)) < FP32


def test_the_active_adapters(tmp_path):
    model = adapted("llama")
    model.add_adapter("second", lora_config("llama", r=2, lora_alpha=6, target_modules=["v_proj", "o_proj"]))
    model.set_adapter("second")
    stirred(model, seed=2)
    both = {}
    for active in (["second"], ["default"], ["default", "second"]):
        model.base_model.set_adapter(active)
        folder = tmp_path / "-".join(active)
        save_pretrained_merged(model, folder, dtype=torch.float32)
        both["-".join(active)] = logits(model)
        assert gap(logits(reloaded(folder)), logits(model)) < FP32
    assert gap(both["second"], both["default"]) > 0.1 and gap(both["default-second"], both["default"]) > 0.1


def test_an_adapter_that_is_merged_already(tmp_path):
    model = adapted("llama")
    expected = logits(model)
    model.merge_adapter()
    save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert gap(logits(reloaded(tmp_path / "merged")), expected) < FP32
    model.unmerge_adapter()
    model.add_adapter("second", lora_config("llama"))
    model.set_adapter("second")
    model.merge_adapter(["default"])
    with pytest.raises(ValueError, match="'default' is merged into .*call model.unmerge_adapter"):
        save_pretrained_merged(model, tmp_path / "refused")


TRAINED_WHOLE = {
    "head": ({"modules_to_save": ["lm_head"]}, False),
    "embeddings": ({"modules_to_save": ["embed_tokens"]}, False),
    "both, tied": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "lora on the embeddings": ({"target_modules": ["embed_tokens", "q_proj"]}, False),
    "new tokens": ({"trainable_token_indices": [5, 9]}, True),
}


@pytest.mark.parametrize("options, tied", TRAINED_WHOLE.values(), ids=TRAINED_WHOLE)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_embeddings_and_heads(model_type, options, tied, tmp_path):
    """Tied weights that training made two are saved as two; those that it left one, once."""
    model = adapted(model_type, **options)
    expected = logits(model)
    before = tiny_model(model_type).state_dict()
    was_tied = model.get_base_model().config.tie_word_embeddings
    if was_tied and not tied:
        with pytest.warns(UserWarning, match="were one tensor, and training made them two"):
            save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    else:
        save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float32)
    loaded = reloaded(tmp_path / "merged")
    changed = [name for name, value in loaded.state_dict().items() if not torch.equal(value, before[name])]
    assert "lm_head.weight" in changed or "model.embed_tokens.weight" in changed
    if "trainable_token_indices" in options:
        name = "model.embed_tokens.weight"
        assert (loaded.get_parameter(name) != before[name]).any(1).nonzero().flatten().tolist() == [5, 9]
    assert loaded.config.tie_word_embeddings == (was_tied and tied)
    assert ("lm_head.weight" in saved_tensors(tmp_path / "merged")) != (was_tied and tied)
    assert gap(logits(loaded), expected) < FP32
    assert model.get_base_model().config.tie_word_embeddings == was_tied


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("rows", [128, 140], ids=["padded", "resized"])
def test_b58_no_row_of_the_vocabulary_is_lost(model_type, rows, tmp_path):
    """Fewer tokens than rows: all rows are saved, those of new tokens with what they have."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["new1", "new2", "new3"])
    base = tiny_model(model_type, vocab_size=128 if rows == 128 else 120)
    before = base.get_input_embeddings().weight.detach().clone()
    if rows > base.config.vocab_size:
        base.resize_token_embeddings(rows, mean_resizing=False)
    assert len(tokenizer) == 131 and base.config.vocab_size == rows
    model = adapted(model_type, base)
    save_pretrained_merged(model, tmp_path / "merged", tokenizer, dtype=torch.float32)
    loaded = reloaded(tmp_path / "merged")
    weight = loaded.get_input_embeddings().weight
    assert weight.shape[0] == rows == loaded.config.vocab_size == loaded.get_output_embeddings().weight.shape[0]
    assert torch.equal(weight[: len(before)], before)
    assert torch.equal(weight, base.get_input_embeddings().weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").convert_tokens_to_ids("new3") == 130
    assert gap(logits(loaded, IDS.clamp(max=119)), logits(model, IDS.clamp(max=119))) < FP32


def test_a_fully_trained_model(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="save_method='lora' saves an adapter, and this LlamaForCausalLM has none"):
        save_pretrained_merged(model, tmp_path / "merged", save_method="lora")
    save_pretrained_merged(model, tmp_path / "merged")
    state = reloaded(tmp_path / "merged").state_dict()
    assert all(torch.equal(state[name], value.bfloat16()) for name, value in model.state_dict().items())


def test_a_fully_trained_model_after_autocast(tmp_path):
    """The trainer leaves its autocast around the forward; weights that were trained in fp32 can be saved so."""
    model = run_sft(unsloth_trl, "llama", packing=True, bf16=True).trainer.model
    before = model.forward
    report = write_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert report.verification.gap < FP32 and model.forward is before
    state = reloaded(tmp_path / "merged").state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtype_of_the_checkpoint_it_came_from(dtype, tmp_path):
    """TRL loads in fp32; a card without bf16 needs fp16 back."""
    tiny_model("llama").to(dtype).save_pretrained(tmp_path / "base")
    model = adapted("llama", reloaded(tmp_path / "base", dtype=torch.float32))
    assert write_merged(model, tmp_path / "merged").dtype == dtype
    assert {value.dtype for value in saved_tensors(tmp_path / "merged").values()} == {dtype}
    assert reloaded(tmp_path / "merged").dtype == dtype


def test_what_transformers_keeps_in_fp32_stays_fp32(tmp_path):
    model = adapted("deepseek_v3")
    save_pretrained_merged(model, tmp_path / "merged")
    kinds = {name.rpartition("mlp.")[2]: value.dtype for name, value in saved_tensors(tmp_path / "merged").items()}
    kept = model.get_base_model()._keep_in_fp32_modules_strict
    assert kinds["gate.e_score_correction_bias"] == torch.float32
    assert kinds["gate.weight"] == (torch.float32 if "gate.weight" in kept else torch.bfloat16)
    assert kinds["gate_proj.weight"] == torch.bfloat16


def test_what_does_not_fit_fp16(tmp_path):
    model = adapted("llama")
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight[3, 4] = 1e5
    with pytest.raises(ValueError, match="layers.1.mlp.down_proj.weight has .* not finite in float16.*torch.bfloat16"):
        save_pretrained_merged(model, tmp_path / "merged", dtype=torch.float16)
    assert not names_in(tmp_path)
    save_pretrained_merged(model, tmp_path / "merged")


def test_b63_everything_that_a_model_needs(tmp_path):
    model, tokenizer = adapted("llama"), tiny_tokenizer("<more>")
    model.get_base_model().generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, eos_token_id=[2, 7], pad_token_id=0
    )
    for method in ("merged_16bit", "lora"):
        folder = save_pretrained_merged(model, tmp_path / method, tokenizer, save_method=method)
        assert folder == str(tmp_path / method)
        loaded = AutoTokenizer.from_pretrained(folder)
        assert loaded.chat_template == CHAT_TEMPLATE and loaded.eos_token == "<eos>" and len(loaded) == len(tokenizer)
        text = [{"role": "user", "content": "w20 <more> w21"}]
        assert loaded.apply_chat_template(text)["input_ids"] == tokenizer.apply_chat_template(text)["input_ids"]
    generation = GenerationConfig.from_pretrained(tmp_path / "merged_16bit")
    assert generation.temperature == 0.3 and generation.eos_token_id == [2, 7]


def test_the_adapter_alone(tmp_path):
    model = adapted("qwen3_moe", modules_to_save=["lm_head"])
    save_pretrained_merged(model, tmp_path / "adapter", tiny_tokenizer(), save_method="lora")
    assert not list((tmp_path / "adapter").glob("model*"))
    loaded = PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))


def test_an_adapter_with_a_name(tmp_path):
    """It lies where its path is given, under whatever name it had; of several, each in a folder of its own."""
    model = adapted("llama")
    model.add_adapter("second", lora_config("llama", r=2))
    model.set_adapter("second")
    stirred(model)
    expected = logits(model)
    folder = save_pretrained_merged(model, tmp_path / "one", save_method="lora")
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_model("llama"), folder)), expected)
    model.base_model.set_adapter(["default", "second"])
    save_pretrained_merged(model, tmp_path / "two", save_method="lora")
    assert {"adapter_config.json", "second/adapter_config.json"} < set(names_in(tmp_path / "two"))


def test_wrapped_models(tmp_path, monkeypatch):
    """What a compiler or DDP puts around a model is taken off; of several processes the main one writes."""
    model = adapted("llama")
    save_pretrained_merged(model, tmp_path / "plain")
    save_pretrained_merged(torch.compile(model), tmp_path / "compiled")
    plain, compiled = saved_tensors(tmp_path / "plain"), saved_tensors(tmp_path / "compiled")
    assert plain.keys() == compiled.keys() and all(torch.equal(plain[name], compiled[name]) for name in plain)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args: 1)
    assert save_pretrained_merged(model, tmp_path / "other") == str(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_encoder_decoder_is_saved_without_comparison(tmp_path, caplog):
    config = AutoConfig.for_model(
        "t5", vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config)
    report = write_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert report.verification is None and "encoder-decoder" in caplog.text
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_what_cannot_be_merged_is_named(tmp_path):
    prompt = get_peft_model(tiny_model("llama"), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="'default' is PROMPT_TUNING, which cannot be merged.*save_method='lora'"):
        save_pretrained_merged(prompt, tmp_path / "merged")
    invoked = adapted("llama", alora_invocation_tokens=[5, 6])
    with pytest.raises(ValueError, match="'default' has alora_invocation_tokens"):
        save_pretrained_merged(invoked, tmp_path / "merged")
    off = adapted("llama")
    off.base_model.disable_adapter_layers()
    with pytest.raises(
        ValueError, match="adapters of model.layers.0.self_attn.q_proj are disabled, and would be lost"
    ):
        save_pretrained_merged(off, tmp_path / "merged")
    with pytest.raises(ValueError, match="save_method='merged' is none of 'merged_16bit', 'lora', 'merged_4bit'"):
        save_pretrained_merged(off, tmp_path / "merged", save_method="merged")
    away = adapted("llama")
    layer = away.get_base_model().model.layers[1].mlp.up_proj.base_layer
    layer.weight = torch.nn.Parameter(layer.weight.detach().to("meta"))
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight is offloaded by device_map: load the"):
        save_pretrained_merged(away, tmp_path / "merged")
    split = adapted("llama")
    split.get_base_model().lm_head.weight.ds_shape = (128, 64)  # what DeepSpeed's ZeRO-3 puts on a parameter
    with pytest.raises(ValueError, match="lm_head.weight is split over processes"):
        save_pretrained_merged(split, tmp_path / "merged")
    eight = tiny_model("llama")
    norm = eight.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="model.norm.weight is stored as torch.float8_e4m3fn.*load the model in 16 b"):
        save_pretrained_merged(eight, tmp_path / "merged")
    for wrong, message in (
        ({"tokenizer": "merged_16bit"}, "tokenizer='merged_16bit' is no tokenizer or processor.*save_method="),
        ({"dtype": "float16"}, "dtype='float16' is no floating-point dtype: pass torch.bfloat16"),
    ):
        for method in ("merged_16bit", "lora"):
            with pytest.raises(ValueError, match=message):
                save_pretrained_merged(adapted("llama"), tmp_path / "merged", save_method=method, **wrong)
    with pytest.raises(TypeError, match="a transformers model or a PeftModel around one is needed, got Linear"):
        save_pretrained_merged(torch.nn.Linear(2, 2), tmp_path / "merged")
    assert not names_in(tmp_path)


def test_smollm2(smollm2, tmp_path):
    """A real model: merged, adapter on base, and reloaded, in the bf16 that it was published in."""
    from unsloth_trl.models.smollm2 import load_model

    base, tokenizer = load_model(smollm2, torch.float32)
    ids = tokenizer("The capital of France is Paris, and the capital of Italy is", return_tensors="pt")["input_ids"]
    model = get_peft_model(base, lora_config("llama", r=8, lora_alpha=16))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    with model.disable_adapter():
        before = logits(model, ids)
    expected = logits(model, ids)
    report = write_merged(model, tmp_path / "exact", tokenizer, dtype=torch.float32, max_shard_size="100MB")
    assert len(report.files) > 3 and report.verification.gap < 1e-5
    loaded = reloaded(tmp_path / "exact")
    assert gap(before, expected) > 0.02 and gap(logits(loaded, ids), expected) < 2e-5
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    report = write_merged(model, tmp_path / "bf16", tokenizer, dtype=torch.bfloat16)
    assert report.verification.passed and report.verification.noise < 0.02
    assert gap(logits(reloaded(tmp_path / "bf16", dtype=torch.float32), ids), expected) < 0.3 * gap(before, expected)
