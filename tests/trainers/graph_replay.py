"""A stand-in for CUDA graphs on the CPU: the ops of a run are recorded and run again on the same memory, no Python."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny import tiny_model
from unsloth_trl.patches.attention import dispatch
from unsloth_trl.patches.attention import patch as attention
from unsloth_trl.patches.compilation import graphs
from unsloth_trl.patches.compilation import patch as compilation
from unsloth_trl.patches.config import PatchConfig
from unsloth_trl.patches.layout import PackedLayout
from unsloth_trl.patches.registry import apply_patches, base_model


class Recorder(TorchDispatchMode):
    """Keeps each op with its inputs and outputs; `replay` runs it again and writes to the same outputs."""

    def __init__(self):
        super().__init__()
        self.ops: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {_storage(t) for t in _tensors((args, kwargs))}
        outputs = _tensors(out)
        fresh = [_storage(t) not in given for t in outputs]
        if func._schema.is_mutable or any(fresh):  # not for views
            self.ops.append((func, args, kwargs, outputs, fresh))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs, fresh in self.ops:
            for output, new, is_fresh in zip(outputs, _tensors(func(*args, **kwargs)), fresh, strict=True):
                if is_fresh:
                    output.detach().copy_(new)


def _tensors(tree) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Captures:
    """
    Stands in for `torch.cuda.make_graphed_callables`: outputs and gradients are static memory, as they are there.

    Attributes:
        number, replays (`int`): Graphs that were captured, and forwards from one.
        gradients (`list[set[int]]`): Where each graph leaves the gradients of weights.
        error (`Exception`, *optional*): Raised instead of capturing.
    """

    def __init__(self):
        self.number = self.replays = 0
        self.gradients: list[set[int]] = []
        self.error: Exception | None = None

    def __call__(self, module, sample, allow_unused_input, pool):
        assert allow_unused_input
        if self.error is not None:
            raise self.error
        parameters = tuple(module.parameters())
        forward, backward = Recorder(), Recorder()
        module.forward(*sample)
        with forward:
            outputs = module.forward(*sample)
        needed = [output for output in outputs if output.requires_grad]
        grads_out = [torch.zeros_like(output) for output in needed]
        grads = [None] * len(parameters)
        if needed:
            with backward:
                grads = torch.autograd.grad(needed, parameters, grads_out, allow_unused=True)
        self.gradients.append({grad.data_ptr() for grad in grads if grad is not None})
        kinds = [output.requires_grad for output in outputs]
        outputs = [output.detach() for output in outputs]
        self.number += 1

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                for static, new in zip(sample, inputs, strict=False):
                    static.copy_(new)
                forward.replay()
                found = tuple(output.detach() for output in outputs)
                ctx.mark_non_differentiable(*(o for o, needs in zip(found, kinds, strict=True) if not needs))
                return found

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, *given):
                for static, new in zip(grads_out, (g for g, n in zip(given, kinds, strict=True) if n), strict=True):
                    static.copy_(new)
                backward.replay()
                return (*[None] * len(sample), *(None if grad is None else grad.detach() for grad in grads))

        def replay(*inputs):
            self.replays += 1
            return Graphed.apply(*inputs, *parameters)

        return replay


@pytest.fixture(name="captures")
def replayed(monkeypatch):
    """Graphs of this file in the place of CUDA's, for models on the CPU."""
    found = Captures()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", found)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(compilation, "why_no_graphs", lambda decoder: None)
    # FlashAttention's op, whose stand-in on the CPU reads `cu_seqlens` as the kernel does
    refusal = dispatch.flash_refusal

    def on_any_device(query, *rest):
        half = SimpleNamespace(device=query.device, dtype=torch.float16, shape=query.shape)
        return refusal(half, *rest) if rest[-2] is not None or rest[-3] is not None else None

    monkeypatch.setattr(dispatch, "flash_refusal", on_any_device)
    return found


def graphed(model) -> graphs.GraphedDecoder:
    return attention.text_decoder(base_model(model)).__dict__["forward"]


def patched(model_type="llama", **config):
    model = tiny_model(model_type).train()
    apply_patches(model, PatchConfig(cuda_graphs="on", **config))
    return model


def batch(*seqlens, seed=0):
    layout = PackedLayout(seqlens, cu_seqlens_size=8, max_seqlen_multiple=16)
    ids = torch.randint(9, 30, (1, layout.num_tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "packed_layout": layout, "position_ids": layout.position_ids}


def hidden(model, inputs):
    return attention.text_decoder(model)(**inputs).last_hidden_state


def train(model, seeds):
    """A micro-batch for each seed, each after the gradients of the one before are gone."""
    for seed in seeds:
        model.zero_grad()
        hidden(model, batch(5, 7, seed=seed)).sum().backward()
