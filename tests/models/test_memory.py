import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from tests.benchmarks.models import config as benchmark_config
from tests.tiny import tiny_config, tiny_model
from unsloth_trl.models import memory_terms
from unsloth_trl.models.cards import Card, card_of_size, find_card
from unsloth_trl.models.memory import MemoryEstimate, estimate_memory, read_config
from unsloth_trl.models.memory_terms import Training, nf4_bytes, read_shape, saved_per_token
from unsloth_trl.patches.checkpointing.settings import TILE, TILE_FROM, Notch


GIB = 2**30
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200.jsonl"


@pytest.fixture(scope="module")
def shapes():
    """Shapes of the benchmarks' models, each read once."""
    read = {}

    def shape(name):
        if name not in read:
            read[name] = read_shape(benchmark_config(name))
        return read[name]

    return shape


def measured(estimate: MemoryEstimate, **fields) -> float:
    """GiB of the newest benchmark row of ours with these fields, without other switches, under the same plan."""
    fields = {"mode": "ours", "qlora": 0, "vram": 0} | fields
    plan = estimate.notch.describe(estimate.num_layers)
    fits = []
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        row = {"qlora": 0, "vram": 0} | json.loads(line)
        # rows from before there was a planner are recomputed ones
        lines = row.get("plan") or f"{estimate.num_layers} recompute from inputs on the device"
        last = lines if isinstance(lines, str) else lines[-1].partition(": ")[2].rstrip(".")
        switches = [switch for switch in row.get("set", []) if not switch.startswith("checkpoint_policy")]
        if last == plan and not switches and all(row.get(name) == value for name, value in fields.items()):
            fits.append(row["peak_gib"])
    assert fits, fields
    return fits[-1]


def grpo(prompt: int, completion: int, **more) -> dict:
    """The options of a benchmark with groups of 8."""
    lengths = {"max_prompt_length": prompt, "max_completion_length": completion}
    return {"method": "grpo", "batch": 8, "num_generations": 8, **lengths, **more}


DENSE = {
    "sft-0.6b": ("qwen3-0.6b", {"batch": 4, "max_length": 4096}, {"bs": 4, "gc": 1}),
    "sft-8b": ("llama-8b", {"batch": 2, "max_length": 4096}, {"bs": 2, "gc": 1}),
    "sft-8b-in-turns": ("llama-8b", {"batch": 2, "max_length": 4096}, {"task": "checkpointing", "bs": 2, "len": 4096}),
    "grpo-8b-P4096": ("llama-8b", grpo(4096, 512), {"task": "grpo", "P": 4096, "R": 512, "bs": 8}),
    "grpo-8b-P512": ("llama-8b", grpo(512, 1024), {"task": "grpo", "P": 512, "R": 1024, "bs": 8}),
    "grpo-8b-P2048": ("llama-8b", grpo(2048, 256), {"task": "grpo", "P": 2048, "R": 256, "bs": 8}),
    "grpo-8b-P256": ("llama-8b", grpo(256, 1024), {"task": "grpo", "P": 256, "R": 1024, "bs": 8}),
}


@pytest.mark.parametrize("row", DENSE)
def test_within_a_tenth_of_the_measured_peak(row, shapes):
    model, options, fields = DENSE[row]
    estimate = estimate_memory(shapes(model), policy="recompute", **options)
    assert estimate.peak / GIB == pytest.approx(measured(estimate, model=model, **fields), rel=0.10)


IN_TURNS = {"task": "checkpointing", "bs": 2, "len": 4096}
OTHER_POLICIES = {
    "keep": ("keep", {}, IN_TURNS),
    "offload": ("offload", {}, IN_TURNS),
    "offload-1-buffer": ("offload", {"staging_buffers": 1}, IN_TURNS),
    "grpo-20k-qlora": (
        "offload",
        grpo(512, 20000, qlora=True),
        {"task": "grpo", "P": 512, "R": 20000, "bs": 8, "qlora": 1},
    ),
}


@pytest.mark.parametrize("row", OTHER_POLICIES)
def test_other_policies_near_the_measured_peak(row, shapes):
    policy, options, fields = OTHER_POLICIES[row]
    estimate = estimate_memory(shapes("llama-8b"), policy=policy, **{"batch": 2, "max_length": 4096} | options)
    assert estimate.peak / GIB == pytest.approx(measured(estimate, model="llama-8b", **fields), rel=0.15)


def test_tied_embeddings_are_counted_once(shapes):
    tied, loose = (tiny_config("llama", tie_word_embeddings=tie) for tie in (True, False))
    one, two = (estimate_memory(c, batch=1, max_length=64).weights for c in (tied, loose))
    assert two - one == 2 * tied.vocab_size * tied.hidden_size
    assert shapes("qwen3-0.6b").num_parameters == 596_049_920
    assert shapes("llama-8b").num_parameters == 8_030_261_248


@pytest.mark.parametrize("tie", [True, False])
def test_qlora_weights_are_those_of_bitsandbytes(tie, tmp_path):
    pytest.importorskip("bitsandbytes", reason="the test extra has it")
    tiny_model("qwen3", tie_word_embeddings=tie, intermediate_size=200).to(torch.bfloat16).save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=nf4, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    nbytes = quantized = 0
    for parameter in model.parameters():
        nbytes += parameter.nbytes
        if (state := getattr(parameter, "quant_state", None)) is not None:
            parts = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
            nbytes += sum(part.nbytes for part in parts)
            quantized += 1
    assert quantized == 14
    config = AutoConfig.from_pretrained(tmp_path)
    assert estimate_memory(config, batch=1, max_length=64, qlora=True).weights == nbytes
    assert estimate_memory(config, batch=1, max_length=64).weights > nbytes


def test_nf4_takes_half_a_byte_and_a_64th():
    numel = 4096 * 14336
    assert nf4_bytes(numel) / numel == pytest.approx(1 / 2 + 1 / 64 + 4 / (64 * 256), rel=1e-4)


def test_qlora_trains_bf16_adapters(shapes):
    plain, qlora = (estimate_memory(shapes("llama-8b"), qlora=qlora) for qlora in (False, True))
    assert plain.adapter == 2 * qlora.adapter == 4 * 41_943_040
    assert plain.optimizer == 2 * qlora.optimizer == 8 * 41_943_040
    assert plain.weights / qlora.weights > 2.7
    # autocast makes bf16 copies of fp32 adapters, which layers that keep their activations save
    kept = [estimate_memory(shapes("llama-8b"), qlora=qlora, policy="keep").kept for qlora in (False, True)]
    assert kept[0] - kept[1] == 2 * 41_943_040
    # fp16's loss scaler takes no bf16 gradients
    assert estimate_memory(shapes("llama-8b"), qlora=True, card=find_card("T4")).adapter == plain.adapter
    assert estimate_memory(shapes("llama-8b"), qlora=True, card=find_card("L4")).adapter == qlora.adapter


def test_eight_bit_optimizer_and_full_training(shapes):
    shape = shapes("llama-8b")
    states = {optim: estimate_memory(shape, optim=optim).optimizer for optim in ("adamw", "adamw_8bit")}
    assert states["adamw"] / states["adamw_8bit"] == pytest.approx(4 / (1 + 4 / 256), rel=1e-3)
    full = estimate_memory(shape, full=True)
    assert (full.adapter, full.gradients, full.optimizer) == (0, full.weights, 2 * full.weights)
    assert full.head - estimate_memory(shape).head >= 4 * shape.vocab * shape.hidden
    # tensors of fewer than 4096 elements, here all, keep states in fp32
    tiny = {optim: estimate_memory(tiny_config("llama"), optim=optim) for optim in states}
    assert tiny["adamw"].optimizer == tiny["adamw_8bit"].optimizer > 0


def test_experts_are_packed_and_count_by_their_choices(shapes):
    config = tiny_config("qwen3_moe")
    shape = read_shape(config)
    experts = sum(layer.experts.weights for layer in shape.layers)
    assert experts == sum(p.numel() for n, p in tiny_model("qwen3_moe").named_parameters() if "experts" in n) > 0
    linear = sum(i * o for i, o in shape.linears)
    qlora = estimate_memory(shape, batch=1, max_length=64, qlora=True)
    packed = [i * o for i, o in shape.linears]
    packed += [p.numel() for n, p in tiny_model("qwen3_moe").named_parameters() if "experts" in n]
    assert qlora.weights == 2 * (shape.num_parameters - linear - experts) + sum(map(nf4_bytes, packed))
    plain = estimate_memory(shape, batch=1, max_length=64)
    assert plain.weights == 2 * shape.num_parameters
    assert qlora.workspace - plain.workspace == 2 * experts // len(shape.layers)  # what a layer's are dequantised into
    assert any("in NF4, as unsloth_trl.load_in_4bit loads them" in note for note in qlora.notes)
    model = get_peft_model(
        tiny_model("qwen3_moe"), LoraConfig(r=1, target_parameters=["gate_up_proj", "down_proj"], target_modules=[])
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert any(f"LoRA on them has {trained / 1e6:.2f} M more weights per rank" in note for note in plain.notes)

    training = Training(64, 64, 16)
    one, two = (read_shape(tiny_config("qwen3_moe", num_experts_per_tok=k)).layers[0] for k in (1, 2))
    more = saved_per_token(two, training) - saved_per_token(one, training)
    assert more == 2 * 2 * config.moe_intermediate_size + 3 * 8 + 4  # what the activation reads, indices, a weight
    assert shapes("qwen3-30b-a3b").layers[0].experts == memory_terms.ExpertsShape(128, 8, 768, 128 * 3 * 768 * 2048)


def test_fewer_key_heads_save_less():
    few, many = (read_shape(tiny_config("llama", num_key_value_heads=n)) for n in (1, 4))
    training = Training(64, 64, 16)
    head_size = 16
    saved = [saved_per_token(shape.layers[0], training) for shape in (few, many)]
    assert saved[1] - saved[0] == 2 * 2 * 3 * head_size  # keys and values of 3 heads, bf16
    caches = [estimate_memory(shape, **grpo(32, 32)).generation for shape in (few, many)]
    assert caches[1] == 4 * caches[0] == 2 * 2 * 2 * 4 * head_size * 8 * 64


@pytest.mark.parametrize(
    ("batch", "generations", "prompts"), [(8, 8, 1), (16, 8, 2), (4, 8, 1), (12, 8, 2), (6, 2, 3)], ids=str
)
def test_tokens_of_grpo(batch, generations, prompts):
    shape = read_shape(tiny_config("llama"))
    options = {"batch": batch, "num_generations": generations, "max_prompt_length": 33, "max_completion_length": 20}
    assert estimate_memory(shape, method="grpo", **options).tokens == prompts * 32 + batch * 20


def test_architectures_outside_the_table_do_not_share_prompts():
    estimate = estimate_memory(tiny_config("llama", attn_logit_softcapping=30.0), **grpo(33, 20))
    assert estimate.tokens == 8 * (32 + 20)
    assert any("without shared prompts" in note and "attn_logit_softcapping" in note for note in estimate.notes)


def test_policies_trade_one_term_for_another(shapes):
    shape, options = shapes("llama-8b"), {"batch": 2, "max_length": 4096}
    keep, recompute, offload = (
        estimate_memory(shape, policy=policy, **options) for policy in ("keep", "recompute", "offload")
    )
    one_input = 8192 * 4096 * 2
    assert recompute.layer_inputs == 32 * one_input
    assert (recompute.kept, recompute.staging, recompute.slab) == (0, 0, 0)
    assert (offload.layer_inputs, offload.staging, offload.slab) == (0, 2 * one_input, 30 * one_input)
    assert (keep.layer_inputs, keep.staging, keep.slab) == (0, 0, 0)
    assert keep.kept > 16 * recompute.working_set > 0
    # while all layers keep theirs: the gradient of a layer's output, and two of the MLP's widest activation
    assert keep.working_set == 8192 * 2 * (4096 + 2 * 14336)
    assert recompute.peak - offload.peak == 30 * one_input
    half = estimate_memory(shape, policy=Notch(keep=16), **options)
    assert recompute.peak < half.peak < keep.peak and half.layer_inputs == 16 * one_input
    assert half.working_set == keep.working_set


def test_offloading_fewer_layers_than_stay_moves_nothing():
    shape = read_shape(tiny_config("llama"))
    offload, recompute = (estimate_memory(shape, batch=1, max_length=64, policy=p) for p in ("offload", "recompute"))
    assert offload.slab == offload.staging == 0
    assert offload.layer_inputs == recompute.layer_inputs == 2 * 64 * 64 * 2


def test_long_rows_are_tiled(shapes):
    shape = shapes("llama-8b")
    short = estimate_memory(shape, batch=1, max_length=TILE_FROM - 1, policy="offload")
    long = estimate_memory(shape, batch=1, max_length=TILE_FROM, policy="offload")
    assert (short.notch.tile, long.notch.tile) == (0, TILE)
    assert long.working_set < 0.6 * short.working_set
    # nothing that grows with tokens is as wide as the MLP
    longer = estimate_memory(shape, batch=1, max_length=2 * TILE_FROM, policy="offload")
    assert (longer.working_set - long.working_set) / TILE_FROM < 2 * 4 * 14336
    assert long.slab == 32 * TILE_FROM * 4096 * 2  # the last inputs leave too


def test_shared_prompts_sum_gradients_in_fp32(shapes):
    layer, tokens, prompts = shapes("llama-8b").layers[0], 2**17, 2**12
    shared, alone = (
        memory_terms._attention_backward(layer, Training(tokens, tokens - prompts, 16, shared=shared))
        for shared in (True, False)
    )
    assert shared - alone == 2 * 4 * 1024 * prompts


def test_card_decides_the_plan(shapes):
    shape, options = shapes("llama-8b"), {"batch": 2, "max_length": 4096, "policy": "auto"}
    plans = {name: estimate_memory(shape, card=find_card(name), **options) for name in ("H200", "A6000", "L4")}
    assert plans["H200"].notch == Notch(keep=32) and plans["H200"].slab == 0
    assert 0 < plans["A6000"].notch.keep < 32 and plans["A6000"].notch.offload and plans["A6000"].slab > 0
    assert plans["L4"].notch.offload and plans["L4"].notch.keep < plans["A6000"].notch.keep
    for name, plan in plans.items():
        assert plan.fits and plan.peak <= find_card(name).usable, name
    # as many as fit beside one recomputed layer, under the planner's reserve of a twentieth
    recompute = estimate_memory(shape, **options | {"policy": "recompute"})
    a_layer = saved_per_token(shape.layers[0], Training(8192, 8192, 16)) * 8192
    room = 0.95 * find_card("A6000").usable - (recompute.peak - recompute.layer_inputs)
    assert plans["A6000"].notch.keep == int(room / a_layer)
    # a copy that takes longer than its layer, 67 MB and 0.12 s here, is made only where nothing else fits
    for bandwidth, offloads in ((4e8, False), (8e8, True)):
        card = Card("slow", find_card("A6000").usable, flops=60e12, bandwidth=bandwidth)
        assert estimate_memory(shape, card=card, **options).notch.offload is offloads
    tight = Card("tight", 19 * GIB, bandwidth=1e6)
    assert estimate_memory(shape, card=tight, **options).notch == Notch(offload=True)


def test_what_does_not_fit_says_what_to_change(shapes):
    card, options = card_of_size(12), {"batch": 2, "max_length": 4096, "policy": "auto"}
    plain = estimate_memory(shapes("llama-8b"), card=card, **options)
    assert not plain.fits and plain.peak > card.usable
    text = plain.text()
    assert "does not fit: 11.5 GiB usable on a card of 12 GiB; try the model in 4 bits (qlora), a smaller" in text
    qlora = estimate_memory(shapes("llama-8b"), card=card, qlora=True, **options)
    assert qlora.fits and "fits: 11.5 GiB usable" in qlora.text()
    long = estimate_memory(shapes("llama-8b"), card=card, qlora=True, **options | {"max_length": 2**17})
    assert "try shorter rows, fewer at once" in long.text() and "qlora)" not in long.text()
    full = estimate_memory(shapes("llama-8b"), card=card, full=True, **options)
    assert "try LoRA instead of full training" in full.text()


def test_generation_is_told_apart(shapes):
    estimate = estimate_memory(
        shapes("llama-8b"), policy="offload", card=find_card("4090"), **grpo(512, 20000, qlora=True)
    )
    assert estimate.generation == 32 * 2 * 1024 * 2 * 8 * 20512
    assert estimate.peak < estimate.card.usable < estimate.generation_peak
    assert not estimate.fits
    assert "does not fit while generating: 23.1 GiB usable on RTX 4090" in estimate.text()
    assert estimate_memory(shapes("llama-8b")).generation_peak == 0


def test_text_has_every_term_and_they_add_up(shapes):
    estimate = estimate_memory(
        shapes("llama-8b"), batch=2, max_length=4096, policy=Notch(keep=8, offload=True), qlora=True
    )
    lines = estimate.text().splitlines()
    assert lines[0] == (
        "llama, 32 layers, 8.03 B parameters in NF4 and bf16; LoRA r=16 on 224 linear layers (41.9 M), adamw"
    )
    assert lines[1] == "sft: rows of 4096, 2 at once, 8,192 tokens"
    values = {line[2:40].strip(): float(line[40:]) for line in lines if line.startswith("  ")}
    peak = values.pop("peak")
    assert values.pop("offload slab (page-locked)") == pytest.approx(24 * 8192 * 4096 * 2 / GIB, abs=0.006)
    at_another_time = values.pop("head and log-probs (at another time)")
    assert set(values) == {
        "weights",
        "adapter",
        "gradients",
        "optimizer",
        "layer inputs",
        "kept layers",
        "one layer's working set",
        "staging buffers",
        "batch and workspace",
    }
    alternative = at_another_time - values["one layer's working set"]
    assert peak == pytest.approx(sum(values.values()) + max(0, alternative), abs=0.06) and peak > 10
    assert "plan: 8 of 32 layers keep their activations, 24 recompute from inputs in host memory" in estimate.text()
    assert "TRL loads a model given by name in fp32" in lines[-1]


def test_notes_name_what_is_not_counted():
    def notes(model_type, **options):
        return " ".join(estimate_memory(tiny_config(model_type), batch=1, **options).notes)

    assert "max_position_embeddings=256" in notes("llama", max_length=257)
    assert "max_position_embeddings" not in notes("llama", max_length=256)
    assert "runs eagerly" in notes("gemma2", max_length=64) and "runs eagerly" in notes("gpt_oss", max_length=64)
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "fp8"}
    estimate = estimate_memory(config, batch=1, max_length=64)
    assert any("checkpoint is quantised" in note for note in estimate.notes)
    assert estimate.weights == estimate_memory(tiny_config("llama"), batch=1, max_length=64).weights


def test_the_config_stays_as_it_is():
    config = tiny_config("gpt_oss")
    before = config.to_dict(), config._attn_implementation, config.dtype
    read_shape(config)
    assert (config.to_dict(), config._attn_implementation, config.dtype) == before


def test_image_text_wrappers_are_counted_with_their_tower():
    shape = read_shape(tiny_config("kimi_k25"))
    assert shape.num_parameters == sum(p.numel() for p in tiny_model("kimi_k25").parameters())
    assert len(shape.layers) == 2 and shape.layers[0].attention is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "dpo"}, "method='dpo' is unknown; choose from 'sft', 'grpo'"),
        ({"optim": "sgd"}, "optim='sgd' is unknown; choose from 'adamw', 'adamw_8bit'"),
        ({"policy": "swap"}, "policy='swap' is unknown; choose from 'auto', 'keep', 'recompute', 'offload'"),
        ({"policy": "auto"}, "policy='auto' depends on the card: pass one"),
        ({"staging_buffers": 4}, "staging_buffers=4 is not 1, 2 or 3"),
        ({"full": True, "qlora": True}, "full=True with qlora=True"),
        ({"batch": 0}, "batch=0 is not above 0; set 1 or more"),
        ({"max_length": -5}, "max_length=-5 is not above 0"),
        ({"lora_r": 0}, "lora_r=0 is not above 0"),
        ({"method": "grpo", "num_generations": 1}, "num_generations=1 makes no group; set 2 or more"),
        ({"method": "grpo", "max_completion_length": 0}, "max_completion_length=0 is not above 0"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_errors_name_the_field_and_its_value(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        estimate_memory(tiny_config("llama"), **options)


def test_models_that_it_cannot_count():
    with pytest.raises(ValueError, match="model_type='clip' is no language model of transformers"):
        read_shape(AutoConfig.for_model("clip"))
    gpt2 = AutoConfig.for_model("gpt2", n_layer=1, n_embd=64, n_head=4, vocab_size=128)
    with pytest.raises(ValueError, match="model_type='gpt2' has no decoder layers of linear layers"):
        read_shape(gpt2)


def test_config_comes_from_a_folder_or_a_file(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path / "model")
    for name in (tmp_path / "model", tmp_path / "model" / "config.json"):
        assert read_config(str(name)).model_type == "qwen3"
    with pytest.raises(ValueError, match="has no config.json; pass the folder of a model"):
        read_config(str(tmp_path))
    with pytest.raises(ValueError, match="/nope' cannot be read .there is no such folder or file.; pass a folder"):
        read_config("/nope")
    with pytest.raises(ValueError, match="missing.*cannot be read .*pass a folder with a config.json"):
        read_config(str(tmp_path / "missing"))
