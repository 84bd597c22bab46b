"""`cuda_graphs="on"`: batches of few shapes, when a graph is used, and what goes the usual way.

There is no GPU here: a stand-in for `torch.cuda.make_graphed_callables` (`graph_replay.py`) repeats recorded ops on
the same memory, so that what a replay would not see (another layout, a changed adapter) shows as a wrong number.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import unsloth_trl
from tests.numerics import assert_logs_close, assert_runs_close, make_trainer, masked_rows, run_sft
from tests.tiny import tiny_model
from tests.trainers.graph_replay import batch, graphed, hidden, patched, replayed  # noqa: F401 (replayed: a fixture)
from unsloth_trl.data.collators import PackedDataCollator, static_seqlen, static_tokens
from unsloth_trl.patches.attention import patch as attention
from unsloth_trl.patches.compilation import graphs
from unsloth_trl.patches.compilation import patch as compilation
from unsloth_trl.patches.config import PatchConfig
from unsloth_trl.patches.layout import PackedLayout
from unsloth_trl.patches.registry import apply_patches, base_model


PACKED = {
    "packing": True,
    "max_length": 24,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "gradient_checkpointing": True,
    "checkpoint_policy": "recompute",
    "rows": masked_rows(24, seed=5),
}


def entry(trainer) -> str:
    return str(trainer.patch_report["cuda_graphs"].detail)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_training_is_the_same(model_type, lora, captures):
    on = run_sft(unsloth_trl, model_type, lora=lora, cuda_graphs="on", **PACKED)
    off = run_sft(unsloth_trl, model_type, lora=lora, cuda_graphs="off", **PACKED)
    assert captures.number >= 1 and captures.replays == graphed(on.trainer.model).replays >= 3
    assert_runs_close(on, off, 2e-5)


def test_accumulated_micro_batches(captures):
    fields = PACKED | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    on = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="on", **fields)
    off = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="off", **fields)
    assert captures.replays >= 4
    assert_runs_close(on, off, 2e-5)


def test_compiled_layers_in_a_graph(captures, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compilation.LayerCompiler, "_compile_graph", lambda self, graph, inputs: graph)
    on = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="on", compile_layers="on", **PACKED)
    off = run_sft(unsloth_trl, "llama", lora=True, **PACKED)
    torch._dynamo.reset()
    assert captures.replays >= 3
    assert_runs_close(on, off, 2e-5)


def test_batches_have_few_shapes():
    rows = masked_rows(40, seed=7)
    trainer = make_trainer(unsloth_trl, "llama", lora=True, **(PACKED | {"rows": rows, "max_length": 512}))
    collator = PackedDataCollator.from_trl(trainer.data_collator, static_length=512)
    examples = [{"input_ids": [9] * n, "seq_lengths": [n - 5, 5]} for n in (508, 510, 512, 400, 130)]
    layouts = [collator([example])["packed_layout"] for example in examples]
    assert [layout.num_tokens for layout in layouts] == [512, 512, 512, 512, 256]
    assert [layout.num_padding for layout in layouts] == [4, 2, 0, 112, 126]
    assert {layout.cu_seqlens.shape[0] for layout in layouts} == {4}
    assert {layout.max_seqlen for layout in layouts} == {512}  # no segment is longer than a row
    assert [static_seqlen(n, 6000) for n in (3, 1024, 1025, 4097, 7000)] == [1024, 1024, 4096, 6000, 7000]
    assert [layout.own_padding for layout in layouts] == [4, 2, 0, 112, 126]
    batch = collator([examples[0]])
    assert (batch["labels"][0, 508:] == -100).all() and (batch["label_positions"] < 508).all()


@pytest.mark.parametrize(
    "num_tokens, most, multiple, expected",
    [
        (4050, 4096, 1, 4096),
        (4010, 4096, 1, 4096),
        (3000, 4096, 1, 3072),
        (4050, 4096, 64, 4096),
        (5000, 4096, 1, 5120),
    ],
)
def test_static_tokens(num_tokens, most, multiple, expected):
    assert static_tokens(num_tokens, most, multiple) == expected


def test_each_replay_has_its_own_layout(captures):
    model, reference = patched(), patched().eval()
    for seed, lengths in enumerate([(5, 7), (5, 7), (5, 7), (3, 9), (4, 4, 4)]):
        inputs = batch(*lengths, seed=seed)
        found = hidden(model, inputs)
        torch.testing.assert_close(found, hidden(reference, inputs), rtol=1e-5, atol=1e-6)
        found.sum().backward()
        assert "attention" in inputs["packed_layout"].reached
    assert captures.number == 1 and captures.replays == 3


def test_a_second_forward_before_the_backward_goes_the_usual_way(captures):
    model = patched()
    for _ in range(3):
        hidden(model, batch(5, 7)).sum().backward()
    assert captures.replays == 1
    first, second = (hidden(model, batch(5, 7, seed=seed)) for seed in (1, 2))
    assert captures.replays == 2 and graphed(model).others == 3
    expected = [hidden(patched().eval(), batch(5, 7, seed=seed)) for seed in (1, 2)]
    torch.testing.assert_close([first, second], expected, rtol=1e-5, atol=1e-6)
    (first.sum() + second.sum()).backward()
    del first, second
    hidden(model, batch(5, 7))  # whose backward never comes
    hidden(model, batch(5, 7))
    assert captures.replays == 4


def test_two_shapes_share_memory(captures):
    model = patched()
    for _ in range(3):
        for lengths in ((5, 7), (6, 11)):
            hidden(model, batch(*lengths)).sum().backward()
    assert captures.number == 2 and captures.replays == 2
    first = hidden(model, batch(5, 7))
    second = hidden(model, batch(6, 11))  # another graph, but the first one's activations are still needed
    assert captures.replays == 3
    (first.sum() + second.sum()).backward()


def test_the_report_says_how_much_is_padding(captures):
    model = patched()
    for seed in range(4):
        inputs = batch(5, 7, 4, seed=seed)
        inputs["packed_layout"].own_padding = 4
        hidden(model, inputs).sum().backward()
    assert str(graphed(model)) == (
        "1 shapes captured; 2 of 4 training forwards so far, 25.0% of their tokens padding for the shape"
    )


def test_the_graph_used_least_goes_first(captures, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    model = patched()
    for lengths in ((5, 7), (6, 11), (5, 7), (8, 13), (5, 7)):
        for _ in range(3):
            hidden(model, batch(*lengths)).sum().backward()
    assert captures.number == 3 and captures.replays == 3 + 2 * 3 and graphed(model).num_graphs == 2


def test_a_model_goes_with_its_last_reference(captures):
    model = patched()
    for _ in range(3):
        hidden(model, batch(5, 7)).sum().backward()
    weight = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    graphed(model).release()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("change", ["scale", "hook", "buffer", "outputs"])
def test_other_things_that_python_decides(change, captures):
    trainer = make_trainer(unsloth_trl, "llama", lora=True, cuda_graphs="on", **PACKED)
    model = trainer.model.train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    decoder = attention.text_decoder(base_model(model))
    for _ in range(4):
        before = hidden(base_model(model), batch(5, 7))
        before.sum().backward()
    assert captures.replays == 2
    if change == "scale":
        for module in model.modules():
            if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                module.scaling["default"] *= 3
    if change == "hook":
        decoder.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)
    if change == "buffer":
        decoder.rotary_emb.inv_freq = decoder.rotary_emb.inv_freq * 2
    if change == "outputs":
        decoder.config.output_hidden_states = True
    found = decoder(**batch(5, 7))
    assert captures.replays == 2
    if change == "outputs":
        assert found.hidden_states is not None
    else:
        assert (found.last_hidden_state - before).abs().max() > 1e-3


def test_a_second_backward_raises(captures):
    model = patched()
    for _ in range(2):
        hidden(model, batch(5, 7)).sum().backward()
    kept = hidden(model, batch(5, 7)).sum()
    kept.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cuda_graphs='off'"):
        kept.backward()
    outputs = attention.text_decoder(model)(**batch(5, 7), output_hidden_states=True)  # another graph, of more outputs
    for _ in range(3):
        del outputs
        outputs = attention.text_decoder(model)(**batch(5, 7), output_hidden_states=True)
    outputs.last_hidden_state.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cuda_graphs='off'"):
        outputs.hidden_states[1].sum().backward()


def test_what_python_decides_on_is_captured_again(captures):
    trainer = make_trainer(unsloth_trl, "llama", lora=True, cuda_graphs="on", **PACKED)
    model = trainer.model.train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)

    def run():
        out = hidden(base_model(model), batch(5, 7))
        if out.requires_grad:
            out.sum().backward()
        return out.detach().clone()

    with_adapter = [run() for _ in range(4)][-1]
    assert captures.number == 1
    with model.disable_adapter():
        without = [run() for _ in range(4)]
    assert captures.number == 1  # nothing is trained
    assert all(torch.equal(without[0], other) for other in without)
    assert (without[0] - with_adapter).abs().max() > 1e-3
    assert torch.equal(run(), with_adapter) and captures.replays >= 2


def test_weights_that_move_are_captured_again(captures):
    model, reference = patched(), patched().eval()
    for _ in range(3):
        hidden(model, batch(5, 7)).sum().backward()
    assert captures.replays == 1

    def double(m):
        norm = m.model.layers[0].input_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.detach() * 2)

    for change in (
        double,
        lambda m: setattr(m.model.layers[1], "mlp", copy.deepcopy(m.model.layers[0].mlp)),
        lambda m: m.model.norm.weight.requires_grad_(False),
    ):
        before = captures.number
        for other in (model, reference):
            change(other)
        for _ in range(4):
            found = hidden(model, batch(5, 7))
            torch.testing.assert_close(found, hidden(reference, batch(5, 7)), rtol=1e-5, atol=1e-6)
            found.sum().backward()
        assert captures.number == before + 1


@pytest.mark.parametrize("change", ["tree", "eval", "no_grad", "mask", "positions", "tensor"])
def test_other_calls_go_the_usual_way(change, captures):
    model = patched()
    inputs = batch(5, 7)
    if change == "tree":
        inputs["packed_layout"] = layout = PackedLayout([5, 4, 3], [-1, 0, 0], cu_seqlens_size=8)
        inputs["position_ids"] = layout.position_ids
    if change == "eval":
        model.eval()
    if change == "mask":
        del inputs["packed_layout"]
    if change == "positions":
        inputs["position_ids"] = inputs["position_ids"].clone()
    if change == "tensor":
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    for _ in range(5):
        with torch.set_grad_enabled(change != "no_grad"):
            hidden(model, inputs)
    assert captures.number == 0


def test_what_cannot_be_captured_trains_uncaptured(captures, caplog):
    captures.error = RuntimeError("operation not permitted when stream is capturing\nmore")
    on = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="on", **PACKED)
    captures.error = None
    off = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="off", **PACKED)
    assert_runs_close(on, off, 2e-5)
    assert entry(on.trainer) == "given up (RuntimeError: operation not permitted when stream is capturing)"
    assert "cuda_graphs='off'" in caplog.text


def test_attention_that_knows_lengths_on_the_host_is_not_captured(captures):
    """Its numbers would be those of the batch that was captured."""
    on = run_sft(unsloth_trl, "gpt_oss", lora=True, cuda_graphs="on", **PACKED)
    off = run_sft(unsloth_trl, "gpt_oss", lora=True, cuda_graphs="off", **PACKED)
    assert captures.replays == 0 and "rules out attention sinks" in entry(on.trainer)
    assert_runs_close(on, off, 2e-5)
    named = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="on", attention_backend="sdpa", **PACKED)
    assert captures.replays == 0 and "rules out attention_backend='sdpa'" in entry(named.trainer)


def test_not_before_the_plan_is_made_and_not_with_offloaded_inputs(captures):
    model = patched(checkpoint_policy="offload")
    model.gradient_checkpointing_enable()
    for _ in range(4):
        hidden(model, batch(5, 7)).sum().backward()
    assert captures.number == 0


def test_removed_copied_and_pickled(captures):
    model = patched()
    for _ in range(3):
        hidden(model, batch(5, 7)).sum().backward()
    assert captures.number == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert graphed(other).owner is attention.text_decoder(other) and graphed(other).num_graphs == 0
        torch.testing.assert_close(hidden(other, batch(5, 7)), hidden(model, batch(5, 7)), rtol=1e-5, atol=1e-6)
    report = apply_patches(model, PatchConfig())
    assert not report["cuda_graphs"].applied and "forward" not in attention.text_decoder(model).__dict__


@pytest.mark.parametrize("config", [{"packing": False}, {"packed_metadata": False}], ids=str)
def test_batches_of_many_shapes_are_refused(config, captures):
    trainer = make_trainer(unsloth_trl, "llama", lora=True, cuda_graphs="on", **(PACKED | config))
    assert not trainer.patch_report["cuda_graphs"].applied and entry(trainer).startswith("batches of few shapes need")


def test_a_collator_around_ours(captures):
    trainer = make_trainer(unsloth_trl, "llama", lora=True, cuda_graphs="on", **PACKED)
    inner = trainer.data_collator
    trainer.data_collator = lambda examples: inner(examples)
    trainer.train()
    assert captures.replays >= 3


def test_without_a_gpu_it_says_so():
    trainer = make_trainer(unsloth_trl, "llama", lora=True, cuda_graphs="on", **PACKED)
    assert not trainer.patch_report["cuda_graphs"].applied and entry(trainer) == "no CUDA device"


def test_dropout_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = tiny_model("llama")
    assert graphs.why_no_graphs(model.model) is None
    model.config.attention_dropout = 0.1
    assert graphs.why_no_graphs(model.model).startswith("attention_dropout=0.1")
    mixtral = tiny_model("mixtral")
    mixtral.config.router_jitter_noise = 0.2
    assert graphs.why_no_graphs(mixtral.model).startswith("router_jitter_noise=0.2")


def test_num_tokens_leaves_the_padding_for_the_shape_out(captures):
    fields = PACKED | {"max_length": 30, "rows": masked_rows(9, seed=2)}
    on = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="on", **fields)
    off = run_sft(unsloth_trl, "llama", lora=True, cuda_graphs="off", **fields)
    assert on.trainer.data_collator.static_length == 30 and off.trainer.data_collator.static_length is None
    assert_logs_close(on.logs, off.logs, 1e-5)
