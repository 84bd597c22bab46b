"""What the estimate counts, beside what autograd saves and what PEFT and torch make."""

import pytest
import torch
import trl.kernels.chunked_logprob
from peft import LoraConfig, get_peft_model

from tests.tiny import ARCHITECTURES, tiny_config, tiny_model
from unsloth_trl import PackedLayout, apply_patches
from unsloth_trl.models import memory_terms
from unsloth_trl.models.memory import estimate_memory
from unsloth_trl.models.memory_terms import Training, adapter_sizes, read_shape, saved_per_token
from unsloth_trl.patches.attention import op as attention_op
from unsloth_trl.patches.checkpointing.patch import decoder_layers
from unsloth_trl.patches.lm_head.op import VOCAB_CHUNK
from unsloth_trl.patches.registry import base_model


def saved_in_layers(model, num_tokens: int) -> list[int]:
    """Bytes that autograd saves in each layer of a packed forward, but for parameters and what layers share."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    layout = PackedLayout([num_tokens // 2, num_tokens - num_tokens // 2])
    found = []

    def counted(layer):
        inner = type(layer).forward

        def forward(*args, **kwargs):
            rotary = kwargs.get("position_embeddings", ())
            shared = parameters | {x.untyped_storage().data_ptr() for x in rotary} | {layout_storage()}
            saved = {}

            def pack(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in shared:
                    saved[storage.data_ptr()] = (storage.nbytes(), tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = inner(layer, *args, **kwargs)
            found.append(sum(nbytes for nbytes, _ in saved.values()))
            return out

        return forward

    def layout_storage():
        return layout.cu_seqlens.untyped_storage().data_ptr()

    layers = decoder_layers(base_model(model))
    for layer in layers:
        layer.forward = counted(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=torch.arange(num_tokens)[None] % 100 + 3, packed_layout=layout, use_cache=False)
    for layer in layers:
        del layer.forward
    return found


@pytest.mark.parametrize(
    ("model_type", "rank", "overrides"),
    [
        ("llama", 4, {}),
        ("llama", 4, {"num_key_value_heads": 1}),
        ("qwen3", 4, {}),
        ("gemma3_text", 4, {}),
        ("olmo2", 4, {}),
        ("cohere", 4, {}),
        ("phi3", 4, {}),
        ("glm4", 4, {}),
        ("qwen3_moe", 4, {}),
        ("mixtral", 4, {}),
        ("llama", 0, {}),
        ("qwen3", 0, {}),
        ("qwen3_moe", 0, {}),
    ],
    ids=str,
)
def test_counts_what_autograd_saves(model_type, rank, overrides, monkeypatch):
    """Per token: the difference of two row lengths leaves casts of weights out."""
    monkeypatch.setattr(attention_op, "device_supports_flash", lambda device: True)  # the op has a kernel for the CPU
    model = tiny_model(model_type, **overrides).to(torch.bfloat16)
    model.enable_input_require_grads()
    if rank:
        head = model.get_output_embeddings()
        linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
        # by pattern: PEFT would find experts under the names of linear layers
        target = rf".*\.({'|'.join(sorted({name.rpartition('.')[2] for name in linears}))})"
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=target, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    apply_patches(model)
    short, long = saved_in_layers(model, 48), saved_in_layers(model, 96)
    counted = [(b - a) / 48 for a, b in zip(short, long, strict=True)]

    shape = read_shape(tiny_config(model_type, **overrides))
    training = Training(48, 48, rank)
    expected = [saved_per_token(layer, training) for layer in shape.layers]
    assert expected == pytest.approx(counted, rel=0.03)


def test_tiles_of_the_head_are_trls():
    assert memory_terms.HEAD_ROWS == trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE
    assert memory_terms.HEAD_COLUMNS == VOCAB_CHUNK


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_parameters_are_those_of_the_model(model_type):
    shape = read_shape(tiny_config(model_type))
    assert shape.num_parameters == sum(p.numel() for p in tiny_model(model_type).parameters())
    assert estimate_memory(shape, batch=1, max_length=64).weights == 2 * shape.num_parameters


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3"])
def test_adapter_and_its_optimizer_are_those_of_peft_and_torch(model_type):
    model = get_peft_model(tiny_model(model_type), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [s for state in optimizer.state.values() for name, s in state.items() if name != "step"]

    estimate = estimate_memory(tiny_config(model_type), batch=1, max_length=64, lora_r=4)
    assert sorted(adapter_sizes(read_shape(tiny_config(model_type)), 4)) == sorted(p.numel() for p in trained)
    assert estimate.adapter == estimate.gradients == sum(p.nbytes for p in trained) > 0
    assert estimate.optimizer == sum(s.nbytes for s in states)
