"""CUDA graphs and compiled layers on a GPU: the numbers of the plain run, batch after batch."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import unsloth_trl
from tests.numerics import masked_rows, run_sft
from tests.patches.test_moe import experts_lora
from tests.tiny import tiny_model
from unsloth_trl.patches.attention.patch import text_decoder
from unsloth_trl.patches.compilation.graphs import GraphedDecoder
from unsloth_trl.patches.compilation.layers import CompiledForward
from unsloth_trl.patches.config import PatchConfig
from unsloth_trl.patches.layout import PackedLayout
from unsloth_trl.patches.quantization.experts import quantize_experts_
from unsloth_trl.patches.registry import apply_patches, base_model
from unsloth_trl.trainers import compiling


pytestmark = pytest.mark.gpu

LENGTHS = [(100, 60, 96), (30, 200, 26), (90, 90, 76), (256,), (1, 254, 1), (128, 128)]


def make(model_type, four_bits=False, sizes=None, **config):
    sizes = ({"moe_intermediate_size": 32} if model_type == "qwen3_moe" else {}) | (sizes or {})
    model = tiny_model(model_type, **sizes).to("cuda", torch.bfloat16)
    if four_bits:
        quantize_experts_(model)
    plain = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj"])
    lora = experts_lora(r=8) if model_type == "qwen3_moe" else plain
    torch.manual_seed(0)  # PEFT draws its first factors on the device
    model = get_peft_model(model, lora).train()
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    model.gradient_checkpointing_enable()
    apply_patches(model, PatchConfig(checkpoint_policy="recompute", **config))
    return model


def batch(lengths, seed):
    layout = PackedLayout(lengths, cu_seqlens_size=8, max_seqlen_multiple=256).to("cuda")
    ids = torch.randint(9, 60, (1, layout.num_tokens), generator=torch.Generator().manual_seed(seed)).cuda()
    return {"input_ids": ids, "packed_layout": layout, "position_ids": layout.position_ids}


def run(model, lengths, seed, autocast=True):
    """Hidden states and gradients of one micro-batch."""
    for parameter in model.parameters():
        parameter.grad = None
    inputs = batch(lengths, seed)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        hidden = text_decoder(base_model(model))(**inputs).last_hidden_state
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed)).to(hidden)
    hidden.backward(weight)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach().clone(), grads


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)).item()


def compare(found, expected, tolerance):
    assert distance(found[0], expected[0]) <= tolerance
    assert found[1].keys() == expected[1].keys()
    worst = max((distance(grad, expected[1][name]), name) for name, grad in found[1].items())
    assert worst[0] <= tolerance, worst


CASES = [
    ("llama", False),
    ("glm4", False),
    ("gemma2", False),
    ("gemma3_text", False),
    ("gpt_oss", False),
    ("qwen3_moe", False),
    ("qwen3_moe", True),
]


@pytest.mark.parametrize("compile_layers", ["off", "on"])
@pytest.mark.parametrize("model_type, four_bits", CASES)
def test_replays_are_the_plain_run(model_type, four_bits, compile_layers):
    if four_bits:
        pytest.importorskip("bitsandbytes")
    torch._dynamo.reset()
    plain = make(model_type, four_bits, compile_layers=compile_layers)
    graphed = make(model_type, four_bits, cuda_graphs="on", compile_layers=compile_layers)
    for seed, lengths in enumerate(LENGTHS):
        expected, found = run(plain, lengths, seed), run(graphed, lengths, seed)
        compare(found, expected, 5e-3)  # a row's dq is summed by atomics
        assert torch.equal(found[0], expected[0]), "the forward has other bits"
    decoder = text_decoder(base_model(graphed)).__dict__["forward"]
    assert isinstance(decoder, GraphedDecoder) and decoder.failure is None, decoder.failure
    assert decoder.replays == len(LENGTHS) - 2 and decoder.num_graphs == 1


def test_an_optimizer_between_replays():
    runs = {}
    for cuda_graphs in ("off", "on"):
        model = make("qwen3_moe", cuda_graphs=cuda_graphs)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for seed, lengths in enumerate(LENGTHS):
            run(model, lengths, seed)
            optimizer.step()
        runs[cuda_graphs] = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    start = {n: p.detach() for n, p in make("qwen3_moe").named_parameters() if p.requires_grad}
    for name, expected in runs["off"].items():
        moved = expected - start[name]
        assert moved.norm() > 0 and distance(runs["on"][name] - start[name], moved) < 1e-2, name


def test_memory_stays():
    model = make("llama", cuda_graphs="on")
    for seed in range(4):
        run(model, LENGTHS[seed % 3], seed)
    before = torch.cuda.memory_reserved()
    for seed in range(20):
        run(model, LENGTHS[seed % 3], seed)
    assert torch.cuda.memory_reserved() == before
    buffers = text_decoder(base_model(model)).__dict__["forward"].gradients._buffers
    lent = [p.grad.data_ptr() == buffers[p].data_ptr() for p in model.parameters() if p.grad is not None]
    assert lent and all(lent)


def test_a_replay_asks_the_device_for_nothing():
    model = make("qwen3_moe", cuda_graphs="on")
    for seed in range(4):
        run(model, LENGTHS[seed % 3], seed)
    inputs = batch(LENGTHS[0], 9)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            text_decoder(base_model(model))(**inputs).last_hidden_state.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiler_of(model):
    decoder = text_decoder(base_model(model))
    return next(
        m.forward.compiler for m in decoder.modules() if isinstance(m.__dict__.get("forward"), CompiledForward)
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_compiled_layers_are_as_exact(model_type):
    """The error against fp32, of the output and of all gradients, is at most 1.5 times that of the plain run."""
    torch._dynamo.reset()
    # every expert has every token: with fewer, a rounding sends a token elsewhere, and that is all of the error
    sizes = {"num_experts_per_tok": 4} if model_type == "qwen3_moe" else {}
    truth = make(model_type, sizes=sizes, attention_backend="sdpa").float()
    plain, compiled = (make(model_type, sizes=sizes, compile_layers=on) for on in ("off", "on"))
    for seed, lengths in enumerate(LENGTHS[:3]):
        expected = run(truth, lengths, seed, autocast=False)
        assert expected[0].dtype == torch.float32
        allowed, found = (errors(run(model, lengths, seed), expected) for model in (plain, compiled))
        assert all(0 < mine <= 1.5 * its for mine, its in zip(found, allowed, strict=True)), (found, allowed)
    compiler = compiler_of(compiled)
    assert compiler.failure is None
    if model_type in ("llama", "qwen3"):  # whole, with the checkpoint inside; the first layer's input is another graph
        assert not compiler.apart and compiler.num_graphs <= 2


def errors(found, expected):
    """Of the hidden states, and of all gradients together."""
    given = torch.cat([grad.double().flatten() for grad in found[1].values()])
    right = torch.cat([expected[1][name].double().flatten() for name in found[1]])
    return distance(found[0], expected[0]), distance(given, right)


@pytest.mark.parametrize("targets, four_bits", [("all-linear", False), (["q_proj", "v_proj"], True)], ids=str)
def test_compiled_layers_need_no_more_memory(targets, four_bits):
    """
    Of a model whose activations are large beside its weights, with one checkpointed layer's at a time; what PEFT has
    put no adapter beside included.
    """
    torch._dynamo.reset()
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    layout = PackedLayout([2048] * 8, max_seqlen_multiple=2048).to("cuda")
    ids = torch.randint(0, 512, (1, layout.num_tokens), device="cuda")
    inputs = {"input_ids": ids, "packed_layout": layout, "position_ids": layout.position_ids}
    peaks = {}
    for compile_layers in ("off", "on"):
        model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
        if four_bits:
            options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "dtype": torch.bfloat16}
            state = model.state_dict()
            model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, **options).to("cuda")
        lora = LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora).train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
        apply_patches(model, PatchConfig(checkpoint_policy="recompute", compile_layers=compile_layers))
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                hidden = text_decoder(base_model(model))(**inputs).last_hidden_state
            hidden.backward(torch.ones_like(hidden))
            peaks[compile_layers] = torch.cuda.max_memory_allocated() - before
            model.zero_grad()
            del hidden
    assert peaks["on"] <= 1.05 * peaks["off"], peaks


def test_auto_turns_both_on(monkeypatch):
    """Within a run that is worth it, and the run stays what it is without them."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "LEAST_TO_COMPILE", 0.0)
    monkeypatch.setattr(compiling, "LEAST_TO_CAPTURE", 0.0)
    monkeypatch.setattr(compiling, "LAUNCH_BOUND", 2.0)
    fields = {"rows": masked_rows(24, seed=5), "packing": True, "max_length": 64, "num_train_epochs": 12, "bf16": True}
    fields |= {
        "use_cpu": False,
        "gradient_checkpointing": True,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
    }
    auto = run_sft(unsloth_trl, "llama", lora=True, **fields)
    off = run_sft(unsloth_trl, "llama", lora=True, compile_layers="off", cuda_graphs="off", **fields)
    for name in ("compilation", "cuda_graphs"):
        assert f"is on since step {compiling.FIRST_MEASURED + compiling.MEASURED - 1}: " in str(
            auto.trainer.patch_report[name].detail
        )
    assert text_decoder(base_model(auto.trainer.model)).__dict__["forward"].replays > 0
    for a, b in zip(auto.logs, off.logs, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 2e-2 * abs(b["loss"])
