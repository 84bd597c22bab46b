"""`FastLanguageModel.from_pretrained`: where models come from, how they are quantised, what is refused."""

import copy
import json
import re
import sys
import warnings

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Mxfp4Config

from tests.numerics import relative_error
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer
from tests.trainers.cards import pretend, pretend_none
from unsloth_trl import FastLanguageModel, SFTConfig, SFTTrainer, UnsupportedArchitectureWarning, load_in_4bit
from unsloth_trl.models.loading_sources import find_source
from unsloth_trl.models.loading_weights import choose_dtype
from unsloth_trl.patches.quantization.experts import find_experts, packed_weight
from unsloth_trl.patches.quantization.op import NF4Weight, dequantize_nf4


IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
DENSE = {"load_in_4bit": False, "max_seq_length": 64}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
ON_A_CPU = "ignore:load_in_4bit=True on a CPU"


def save(folder, model_type="llama", **overrides):
    tiny_model(model_type, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def test_a_folder(llama):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, tokenizer = FastLanguageModel.from_pretrained(llama, **DENSE)
    expected = tiny_model("llama")
    assert type(model) is type(expected) and not model.training and model.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab() and tokenizer.pad_token == "<pad>"
    assert model.max_seq_length == 64 and model.config.max_position_embeddings == 256
    assert model.use_gradient_checkpointing == "auto" and model.name_or_path == llama


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "float32"])
def test_a_dtype_of_ones_own(llama, dtype):
    model, _ = FastLanguageModel.from_pretrained(llama, dtype=dtype, **DENSE)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype) if isinstance(dtype, str) else dtype}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_on_a_cpu_is_what_bitsandbytes_does(llama, bits):
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    with pytest.warns(
        UserWarning, match=f"load_in_{bits}bit=True on a CPU: .*right.*slow; set load_in_{bits}bit=False"
    ) as found:
        model, _ = FastLanguageModel.from_pretrained(
            llama, max_seq_length=64, load_in_4bit=bits == 4, load_in_8bit=bits == 8
        )
    assert [w.filename for w in found if "on a CPU" in str(w.message)] == [__file__]
    if bits == 4:  # before a forward on the CPU, which unpacks the scales
        assert model.model.layers[0].self_attn.q_proj.weight.quant_state.nested
        assert model.model.layers[0].self_attn.q_proj.compute_dtype == torch.float32
    config = BitsAndBytesConfig(**NF4) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    expected = AutoModelForCausalLM.from_pretrained(llama, quantization_config=config, dtype=torch.float32)
    assert torch.equal(logits(model), logits(expected))
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("Linear4bit" if bits == 4 else "Linear8bitLt") == 14


@pytest.mark.filterwarnings(ON_A_CPU)
def test_experts_are_quantised_too_and_read_again(moe, tmp_path):
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    model, tokenizer = FastLanguageModel.from_pretrained(moe, max_seq_length=64)
    assert torch.equal(logits(model), logits(load_in_4bit(moe, dtype=torch.float32)))
    assert all(packed_weight(m, name) is not None for _, m, names in find_experts(model) for name in names)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path), max_seq_length=64)
    assert all(packed_weight(m, name) is not None for _, m, names in find_experts(again) for name in names)
    assert torch.equal(logits(again), logits(model))


def quant_bytes(model):
    """Everything of the quantised layers, as bytes."""
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            parts = {"packed": module.weight.data, **module.weight.quant_state.as_dict(packed=True)}
            found |= {f"{name}.{key}": part.contiguous().view(torch.uint8).clone() for key, part in parts.items()}
    return found


@pytest.mark.filterwarnings(ON_A_CPU)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=["uint8", "bf16"])
def test_b54_b55_a_quantised_checkpoint_is_read_byte_for_byte(llama, storage, tmp_path):
    """Scales of scales stay in fp32 in a bf16 model, and bytes that look like NaN in bf16 are not touched."""
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    config = BitsAndBytesConfig(**NF4, bnb_4bit_quant_storage=storage)
    first, tokenizer = FastLanguageModel.from_pretrained(
        llama, max_seq_length=64, dtype=torch.bfloat16, quantization_config=config
    )
    with torch.no_grad():  # 0x7FC1 and 0xFFFF are NaN with a payload
        packed = first.model.layers[0].mlp.up_proj.weight.data.view(torch.uint8).view(-1)
        packed[:4] = torch.tensor([0xC1, 0x7F, 0xFF, 0xFF], dtype=torch.uint8)
    before = quant_bytes(first)
    first.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path), max_seq_length=64, dtype=torch.bfloat16)
    state = model.model.layers[0].mlp.up_proj.weight.quant_state
    assert state.nested and state.offset.dtype == state.state2.absmax.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.dtype == storage
    for copied in (model, FastLanguageModel.for_inference(model).to("cpu")):
        after = quant_bytes(copied)
        assert after.keys() == before.keys() and len(after) >= 14 * 5
        assert all(torch.equal(after[name], before[name]) for name in before)
    from bitsandbytes.functional import dequantize_4bit

    truth = dequantize_4bit(model.model.layers[0].mlp.down_proj.weight.data, state_of(model)).float()
    kept = tiny_model("llama").model.layers[0].mlp.down_proj.weight
    assert (truth - kept).abs().max() < 0.25 * kept.abs().max()  # NF4's widest step is a sixth of the range
    assert torch.isfinite(logits(model)).all()


def test_b54_scales_in_bf16_are_read_as_numbers():
    """Not as the bytes of fp32, which gives 1e34."""
    bnb = pytest.importorskip("bitsandbytes", reason="the test extra has it").functional
    dense = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    packed, state = bnb.quantize_4bit(dense, compress_statistics=True, quant_type="nf4")
    truth = bnb.dequantize_4bit(packed, state)
    for cast in ("offset", "absmax", "code"):
        other = copy.deepcopy(state)
        owner = other if cast == "offset" else other.state2
        setattr(owner, cast, getattr(owner, cast).to(torch.bfloat16))
        ours = dequantize_nf4(NF4Weight.from_quant_state(packed, other))
        assert 0 < (ours - truth).abs().max() < 1e-3 * truth.abs().max(), cast


@pytest.mark.filterwarnings(ON_A_CPU)
def test_weights_that_bitsandbytes_reads_wrong_here_are_refused(tmp_path):
    """Blocks of 64 over rows of 96: on some CPUs its forward is off by a third."""
    bnb = pytest.importorskip("bitsandbytes", reason="the test extra has it").functional
    dense = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    packed, state = bnb.quantize_4bit(dense, compress_statistics=True, quant_type="nf4")
    right = (bnb.dequantize_4bit(packed, state) - dense).abs().max() < 0.5
    folder = save(tmp_path, hidden_size=96, num_attention_heads=6, head_dim=16)
    if right:
        model, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=64)
        expected = tiny_model("llama", hidden_size=96, num_attention_heads=6, head_dim=16)
        assert relative_error(logits(model), logits(expected)) < 0.5
    else:
        with pytest.raises(
            ValueError, match="does not read 4-bit weights of width 96 .model.* set load_in_4bit=False"
        ):
            FastLanguageModel.from_pretrained(folder, max_seq_length=64)


def state_of(model):
    return model.model.layers[0].mlp.down_proj.weight.quant_state


@pytest.mark.filterwarnings(ON_A_CPU)
def test_a_quantised_checkpoint_stays_as_it_is(llama, tmp_path):
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    model, tokenizer = FastLanguageModel.from_pretrained(llama, max_seq_length=64)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="is saved in 4 bits and is loaded so; load_in_4bit=False would need"):
        again, _ = FastLanguageModel.from_pretrained(str(tmp_path), **DENSE)
    assert torch.equal(logits(again), logits(model))
    with pytest.warns(UserWarning, match="is saved in 4 bits and is loaded so; load_in_8bit=True would need") as found:
        FastLanguageModel.from_pretrained(str(tmp_path), load_in_8bit=True, **DENSE)
    assert [w.filename for w in found if "is saved in 4 bits" in str(w.message)] == [__file__]


def test_without_bitsandbytes(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ImportError, match=r"4-bit weights need bitsandbytes: pip install 'unsloth_trl\[quant\]', or set"
    ):
        FastLanguageModel.from_pretrained(llama, max_seq_length=64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_seq_len": 64}, TypeError, "unexpected keyword argument 'max_seq_len'; did you mean 'max_seq_length'"),
        ({"load_in_4_bit": True}, TypeError, "did you mean 'load_in_4bit'"),
        ({"zzz": 1}, TypeError, "'zzz'; it takes model_name, max_seq_length, dtype"),
        ({"fast_inference": True}, ValueError, "fast_inference=True is not done here: .*GRPOConfig.use_vllm=True"),
        ({"load_in_8bit": True}, ValueError, "load_in_4bit=True and load_in_8bit=True: set one"),
        ({"load_in_16bit": True}, ValueError, "load_in_4bit=True and load_in_16bit=True: set one"),
        (
            {"full_finetuning": True, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
            ValueError,
            "full_finetuning=True and quantization_config: .* leave quantization_config out",
        ),
        ({"dtype": "float8"}, ValueError, "dtype='float8' is not torch.bfloat16, torch.float16 or torch.float32"),
        (
            {"use_gradient_checkpointing": "on"},
            ValueError,
            "'on' is unknown; choose from 'auto', 'unsloth', True, False",
        ),
        ({"use_gradient_checkpointing": 1}, ValueError, "use_gradient_checkpointing=1 is unknown"),
        ({"model_name": None}, TypeError, "model_name=None is neither a name nor a folder"),
        ({"max_seq_length": 0}, ValueError, "max_seq_length=0 is not a number of tokens"),
        ({"load_in_4bit": False, "resize_model_vocab": 100}, ValueError, "=100 is less than the 128 rows"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(llama, arguments, error, message):
    with pytest.raises(error, match=message):
        FastLanguageModel.from_pretrained(**{"model_name": llama, "max_seq_length": 64} | arguments)


def test_arguments_for_vllm_have_no_effect_and_say_so(llama):
    with pytest.warns(UserWarning, match="gpu_memory_utilization, max_lora_rank is for vLLM"):
        model, _ = FastLanguageModel.from_pretrained(
            llama,
            fast_inference=False,
            gpu_memory_utilization=0.6,
            max_lora_rank=16,
            use_exact_model_name=True,
            **DENSE,
        )
    assert model.num_parameters() == tiny_model("llama").num_parameters()


@pytest.mark.parametrize(
    ("capability", "full", "expected"),
    [
        ((8, 0), False, torch.bfloat16),
        ((7, 5), False, torch.float16),
        ((8, 0), True, torch.bfloat16),
        ((7, 5), True, torch.float32),
    ],
)
def test_dtype_by_card(monkeypatch, capability, full, expected):
    pretend(monkeypatch, capability)
    assert choose_dtype(None, None, full) == choose_dtype(None, {"": 0}, full) == expected
    assert choose_dtype(None, "cpu", full) == choose_dtype(None, {"": "cpu"}, full) == torch.float32


def test_dtypes_that_a_card_or_a_scaler_does_not_take(monkeypatch):
    pretend(monkeypatch, (7, 5))
    with pytest.raises(ValueError, match="bfloat16 needs a GPU from Ampere .* Tesla T4; set dtype=None"):
        choose_dtype("bfloat16", None, False)
    with pytest.raises(ValueError, match="float16 with full_finetuning=True.* set dtype=torch.float32"):
        choose_dtype(torch.float16, None, True)
    pretend_none(monkeypatch)
    assert choose_dtype(None, None, False) == choose_dtype(None, "auto", False) == torch.float32
    assert choose_dtype("torch.bfloat16", None, False) == torch.bfloat16


@pytest.mark.filterwarnings(ON_A_CPU)
@pytest.mark.parametrize("four_bits", [False, True], ids=["16bit", "4bit"])
def test_fp16_has_adapters_in_fp32_and_finite_losses(llama, four_bits):
    """What a T4 gets; fp16 on the CPU stands for it."""
    if four_bits:
        pytest.importorskip("bitsandbytes", reason="the test extra has it")
    model, _ = FastLanguageModel.from_pretrained(llama, dtype=torch.float16, max_seq_length=64, load_in_4bit=four_bits)
    model = FastLanguageModel.get_peft_model(
        model, r=4, lora_alpha=8, modules_to_save=None if four_bits else ["lm_head"]
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32} and len(trained) == 28 + (not four_bits)
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name} == {torch.float16}
    optimizer = torch.optim.SGD(trained.values(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before, losses = {name: p.detach().clone() for name, p in trained.items()}, []
    FastLanguageModel.for_training(model)
    for _ in range(4):
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0]
    moved = [name for name, p in trained.items() if not torch.equal(p, before[name])]
    assert len(moved) == len(trained)
    FastLanguageModel.for_inference(model)  # fp32 and fp16 meet there without autocast
    assert torch.isfinite(logits(model)).all() and model.generate(input_ids=IDS, max_new_tokens=3).shape[1] > 9


def test_full_finetuning(llama):
    model, _ = FastLanguageModel.from_pretrained(llama, full_finetuning=True, **DENSE)
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="get_peft_model: the model was loaded with full_finetuning=True"):
        FastLanguageModel.get_peft_model(model)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "load_in_4bit=True"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit=True"),
        ({"load_in_8bit": True}, "load_in_4bit=True and load_in_8bit=True"),
        ({"load_in_16bit": True}, "load_in_4bit=True"),
        ({"dtype": torch.bfloat16}, "load_in_4bit=True"),
    ],
    ids=str,
)
def test_full_finetuning_wins_over_quantised_weights_and_says_so(llama, asked, named, tmp_path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model, tokenizer = FastLanguageModel.from_pretrained(llama, 64, full_finetuning=True, **asked)
    dtype = asked.get("dtype", torch.float32)  # on a CPU
    said = [warning for warning in found if issubclass(warning.category, UserWarning)]
    assert [warning.filename for warning in said] == [__file__], [str(warning.message) for warning in said]
    text = str(said[0].message)
    assert f"full_finetuning=True and {named}: quantised weights cannot be trained" in text
    assert f"is loaded in {dtype}, and all of its weights are" in text
    assert f"Set {named.replace('True', 'False')} with it" in text
    assert all(p.requires_grad and p.dtype == dtype for p in model.parameters())
    assert not hasattr(model.config, "quantization_config") and getattr(model, "hf_quantizer", None) is None
    whole = AutoModelForCausalLM.from_pretrained(llama, dtype=dtype)
    assert torch.equal(logits(model), logits(whole))
    if asked:
        return
    args = SFTConfig(str(tmp_path), max_steps=1, report_to="none", learning_rate=0.1, gradient_checkpointing=False)
    rows = Dataset.from_list([{"input_ids": list(range(3, 20))}] * 8)
    SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer).train()
    before = dict(whole.named_parameters())
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)


def test_full_finetuning_without_quantised_weights_says_nothing(llama):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        FastLanguageModel.from_pretrained(llama, full_finetuning=True, **DENSE)


def test_full_finetuning_of_a_checkpoint_that_is_dequantised(tmp_path):
    folder = save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, _ = FastLanguageModel.from_pretrained(
            folder, 64, full_finetuning=True, quantization_config=Mxfp4Config(dequantize=True)
        )
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert getattr(model, "hf_quantizer", None) is None
    assert torch.equal(logits(model), logits(tiny_model("llama").eval()))


@pytest.mark.filterwarnings(ON_A_CPU)
def test_full_finetuning_of_a_quantised_checkpoint_is_refused(llama, tmp_path):
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    model, tokenizer = FastLanguageModel.from_pretrained(llama, 64)
    for made in (model, tokenizer):
        made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="full_finetuning=True: .* is saved in quantised weights, .* load its orig"):
        FastLanguageModel.from_pretrained(str(tmp_path), full_finetuning=True)


@pytest.mark.parametrize(
    ("model_type", "overrides", "messages"),
    [
        (
            "gpt2",
            {"n_embd": 16, "n_layer": 1, "n_head": 2},
            ["model_type 'gpt2' is not among the verified.*Trains|TRL"],
        ),
        (
            "llama",
            {"sliding_window": 4, "attn_logit_softcapping": 9.0},
            ["without sliding_window", "without attn_logit"],
        ),
        ("qwen3_next", {}, ["gated delta net layers keep state.*packing=True is refused.*Set packing=False"]),
    ],
    ids=["unknown", "two gaps", "state"],
)
def test_each_gap_is_one_warning_before_weights_are_read(tmp_path, model_type, overrides, messages):
    if model_type == "gpt2":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **overrides}))
    else:
        tiny_config(model_type, **overrides).save_pretrained(tmp_path)
    with pytest.warns(UnsupportedArchitectureWarning) as found, pytest.raises(OSError, match="no file named"):
        FastLanguageModel.from_pretrained(str(tmp_path), **DENSE)
    said = [str(w.message) for w in found if w.category is UnsupportedArchitectureWarning]
    assert len(said) == len(messages)
    for text, message in zip(said, messages, strict=True):
        assert re.search(message, text), text
        assert "strict=True makes this an error" in text
    assert all(w.filename == __file__ for w in found if w.category is UnsupportedArchitectureWarning)
    with pytest.raises(ValueError, match="strict=True makes this an error; set strict=False"):
        FastLanguageModel.from_pretrained(str(tmp_path), strict=True, **DENSE)
    with warnings.catch_warnings(), pytest.raises(UnsupportedArchitectureWarning):
        warnings.simplefilter("error")
        FastLanguageModel.from_pretrained(str(tmp_path), **DENSE)


def test_verified_architectures_say_nothing(llama):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsupportedArchitectureWarning)
        FastLanguageModel.from_pretrained(llama, strict=True, **DENSE)


def test_folders_that_are_refused(llama, tmp_path):
    with pytest.raises(FileNotFoundError, match="model_name='./missing': there is no such folder"):
        FastLanguageModel.from_pretrained("./missing", **DENSE)
    with pytest.raises(FileNotFoundError, match="there is no such GGUF file"):
        FastLanguageModel.from_pretrained("/missing/model.gguf", **DENSE)
    with pytest.raises(ValueError, match="has neither config.json nor adapter_config.json; pass the folder"):
        FastLanguageModel.from_pretrained(str(tmp_path), **DENSE)
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(ValueError, match="pass one of its checkpoints, such as '.*/checkpoint-7'"):
        FastLanguageModel.from_pretrained(str(tmp_path), **DENSE)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="set gguf_file='model.gguf'"):
        FastLanguageModel.from_pretrained(str(tmp_path), **DENSE)
    with pytest.raises(FileNotFoundError, match="gguf_file='other.gguf': there is no such file"):
        FastLanguageModel.from_pretrained(str(tmp_path), gguf_file="other.gguf", **DENSE)
    with pytest.raises(ValueError, match="is a file; pass the folder that it is in"):
        FastLanguageModel.from_pretrained(f"{llama}/config.json", **DENSE)


def test_names_on_the_hub():
    source = find_source("owner/model", revision="main")
    assert (source.name, source.kwargs, source.label) == ("owner/model", {"revision": "main"}, "owner/model")
    for source in (find_source("owner/model/a.gguf"), find_source("owner/model", "a.gguf")):
        assert (source.name, source.gguf_file, source.label) == ("owner/model", "a.gguf", "owner/model/a.gguf")


@pytest.mark.parametrize("length", [256, 512])
def test_positions(llama, length):
    if length == 256:
        model, _ = FastLanguageModel.from_pretrained(llama, max_seq_length=256, load_in_4bit=False)
        assert model.config.rope_parameters["rope_type"] == "default"
        return
    with pytest.warns(
        UserWarning, match="more than the 256 positions.*scaled linearly by 2, .*Set max_seq_length=256"
    ):
        model, _ = FastLanguageModel.from_pretrained(llama, max_seq_length=512, load_in_4bit=False)
    assert model.config.max_position_embeddings == model.max_seq_length == 512
    plain = tiny_model("llama")
    # position 2p of the longer model is position p of the shorter one
    for p in (0, 7, 255):
        longer = model.model.rotary_emb(torch.zeros(1), torch.tensor([[2 * p]]))
        for a, b in zip(longer, plain.model.rotary_emb(torch.zeros(1), torch.tensor([[p]])), strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def test_positions_that_are_asked_for(llama, tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    model, _ = FastLanguageModel.from_pretrained(llama, max_seq_length=1024, load_in_4bit=False, rope_scaling=yarn)
    assert model.config.rope_parameters | yarn == model.config.rope_parameters
    assert model.config.rope_parameters["original_max_position_embeddings"] == 256
    with pytest.raises(ValueError, match="has no rope_type"):
        FastLanguageModel.from_pretrained(llama, rope_scaling={"factor": 2.0}, **DENSE)
    gpt_oss = save(tmp_path / "gpt_oss", "gpt_oss")
    with pytest.raises(
        ValueError, match="more than the 256 positions .* RoPE of its own .yarn.; set max_seq_length=256"
    ):
        FastLanguageModel.from_pretrained(gpt_oss, load_in_4bit=False)


def test_inference_and_training(llama):
    model, tokenizer = FastLanguageModel.from_pretrained(llama, **DENSE)
    model = FastLanguageModel.get_peft_model(model, r=4)
    assert FastLanguageModel.for_training(model, use_gradient_checkpointing=False) is model and model.training
    base = model.get_base_model()
    assert base.config.use_cache is False and base.use_gradient_checkpointing is False
    assert FastLanguageModel.for_inference(model) is model and not model.training and base.config.use_cache is True
    prompt = tokenizer("w10 w20 w30", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    ids = prompt["input_ids"]
    for _ in range(5):  # what a cache must not change
        following = model(input_ids=ids, use_cache=False).logits[:, -1]
        following[:, tokenizer.eos_token_id] = -float("inf")
        ids = torch.cat([ids, following.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generated, ids)
    with pytest.raises(ValueError, match="use_gradient_checkpointing='x' is unknown"):
        FastLanguageModel.for_training(model, use_gradient_checkpointing="x")
    assert isinstance(model, PeftModel)
