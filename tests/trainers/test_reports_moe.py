"""What users of other packages reported about experts: B37 to B46, B78 and B83; those about training are elsewhere."""

import glob

import pytest
import torch
from peft import get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

import unsloth_trl
from tests.numerics import EXPERTS, relative_error, run_sft
from tests.tiny import lora_config, tiny_config, tiny_model
from unsloth_trl import PatchConfig, apply_patches
from unsloth_trl.patches.lm_head.op import labelled_scores


IDS = torch.arange(5, 16).unsqueeze(0)


def on_disk(folder) -> dict[str, torch.Tensor]:
    files = glob.glob(f"{folder}/*.safetensors")
    assert len(files) >= 3, "not sharded"
    return {name: weight for file in files for name, weight in load_file(file).items()}


@pytest.mark.parametrize(
    "model_type, names",
    [
        ("qwen3_moe", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", ("w1", "w3", "w2")),  # B40: other names on disk than in memory
    ],
)
def test_b38_b40_every_expert_is_merged(model_type, names, tmp_path):
    trained = run_sft(unsloth_trl, model_type, **EXPERTS, packing=True).trainer.model
    base = tiny_model(model_type)
    base.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    with torch.no_grad():
        expected = trained.eval()(input_ids=IDS).logits
        deltas = {
            f"{module.parameter_name}.{layer}": module.get_delta_weight("default")
            for layer, block in enumerate(trained.get_base_model().model.layers)
            for module in block.modules()
            if isinstance(module, ParamWrapper)
        }
    trained.merge_and_unload().save_pretrained(tmp_path / "merged", max_shard_size="100KB")
    before, after = on_disk(tmp_path / "base"), on_disk(tmp_path / "merged")
    assert before.keys() == after.keys() and (tmp_path / "merged" / "generation_config.json").is_file()
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 4 * 2 * 3
    for name in experts:
        layer, expert = (int(part) for part in name.split(".") if part.isdigit())
        which = names.index(name.split(".")[-2])
        delta = deltas[f"{'down_proj' if which == 2 else 'gate_up_proj'}.{layer}"][expert]
        delta = delta if which == 2 else delta.chunk(2)[which]
        assert delta.abs().max() > 0
        torch.testing.assert_close(after[name], before[name] + delta, rtol=0, atol=1e-6, msg=name)
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=IDS).logits
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


def test_b38_a_delta_that_does_not_fit_is_an_error(monkeypatch):
    trained = run_sft(unsloth_trl, "qwen3_moe", **EXPERTS, packing=True, max_steps=1).trainer.model
    wrapper = next(m for m in trained.modules() if isinstance(m, ParamWrapper))
    monkeypatch.setattr(wrapper, "get_delta_weight", lambda name: torch.zeros(2, 3, 5))
    with pytest.raises(RuntimeError, match="must match the size"):
        trained.merge_and_unload()


def test_b41_values_go_to_the_odd_columns():
    model = get_peft_model(tiny_model("gpt_oss"), lora_config("gpt_oss", **EXPERTS["lora_kwargs"]))
    wrappers = [m for m in model.modules() if isinstance(m, ParamWrapper) and m.parameter_name == "gate_up_proj"]
    with torch.no_grad():
        for wrapper in wrappers:
            weight = wrapper.lora_B["default"].weight  # (columns, rank * experts)
            weight[1::2] = torch.randn(weight[1::2].shape, generator=torch.Generator().manual_seed(0))
    before = tiny_model("gpt_oss")
    apply_patches(model, PatchConfig())
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    for new, old in zip(merged.model.layers, before.model.layers, strict=True):
        change = new.mlp.experts.gate_up_proj - old.mlp.experts.gate_up_proj
        assert not change[..., ::2].any() and (change[..., 1::2].abs().amax((0, 1)) > 0).all()


def test_b42_routing_weights_are_the_scores_without_the_bias():
    config = tiny_config("deepseek_v3", n_routed_experts=4, n_group=1, topk_group=1, routed_scaling_factor=1.0)
    block = DeepseekV3MoE(config).to(torch.float64)
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2]], dtype=torch.float64)
    block.gate.e_score_correction_bias.data = torch.tensor([0, 0, 1.0, 0], dtype=torch.float64)
    hidden = torch.zeros(1, config.hidden_size, dtype=torch.float64)
    hidden[0, 0] = 1
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.weight[:, 0] = torch.logit(scores[0])
    taken = {}
    block.experts.forward = lambda x, index, weights: taken.update(index=index, weights=weights) or x
    block(hidden.unsqueeze(0))
    order = taken["index"][0].argsort()
    assert taken["index"][0][order].tolist() == [0, 2]
    torch.testing.assert_close(
        taken["weights"][0][order].double(), torch.tensor([0.9, 0.1]).double(), rtol=1e-6, atol=0
    )


def test_b44_the_balance_counts_no_padding():
    model = tiny_model("qwen3_moe", output_router_logits=True)
    apply_patches(model, PatchConfig())
    row = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([row, torch.zeros(1, 7, dtype=torch.long)], dim=1)
    mask = (torch.arange(16) < 9).long().unsqueeze(0)
    with torch.no_grad():
        alone = model(input_ids=row, attention_mask=torch.ones_like(row)).aux_loss
        beside = model(input_ids=padded, attention_mask=mask).aux_loss
        counted = model(input_ids=padded, attention_mask=torch.ones_like(padded)).aux_loss
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=0)
    assert (counted - alone).abs() > 1e-3


@pytest.mark.parametrize("vocab", [7, 32000, 65536, 65537, 102400, 151936, 262144])
def test_b83_heads_of_every_size(vocab):
    generator = torch.Generator().manual_seed(vocab)
    head = torch.nn.Linear(8, vocab, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden = torch.randn(1, 5, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocab, (1, 5), generator=generator)
    labels[0, 2] = -100
    positions = torch.tensor([0, 2, 3])  # which predict the labels 1, 3 and 4
    targets, text_config = labels[0, positions + 1], tiny_config("llama", vocab_size=vocab)
    scores = labelled_scores(hidden, head, targets, positions, text_config)
    logits = torch.nn.functional.linear(hidden.double(), head.weight.double())
    expected = logits.log_softmax(-1)[0, positions, labels[0, positions + 1]]
    torch.testing.assert_close(scores.log_probs.double(), expected, rtol=1e-4, atol=1e-4)
    (ours,) = torch.autograd.grad(scores.log_probs.sum(), hidden)
    (theirs,) = torch.autograd.grad(expected.sum(), hidden)
    single = torch.nn.functional.linear(hidden, head.weight).log_softmax(-1)[0, positions, labels[0, positions + 1]]
    (eager,) = torch.autograd.grad(single.sum(), hidden)
    assert relative_error(ours, theirs) < max(1e-5, 1.5 * relative_error(eager, theirs))
    assert not ours[0, 1].any() and not ours[0, 4].any()  # what predicts no label
    none = labelled_scores(hidden, head, targets[:0], positions[:0], text_config)
    assert none.log_probs.shape == (0,) and torch.isfinite(none.log_probs.sum())
