"""Plugs packed attention into a transformers model: a registered attention function and one hook on its decoder.

The function is registered through `AttentionInterface`, with sdpa's mask function beside it: a call without a layout
(a padded batch, `generate`) gets its mask and runs as sdpa does. A call with a layout gets a placeholder instead of a
mask, so that no mask over all tokens is built and no boundary is looked for on the device.
"""

import contextlib
import functools
import weakref
from typing import Any, NamedTuple

import torch
from accelerate.hooks import ModelHook
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..config import PatchConfig
from ..layout import PackedLayout
from ..report import PatchEntry
from .compiled import flash_attn_by_layout, layout_of
from .dispatch import choose, fits_graph, prefers_fused, sdpa_refusal
from .flash_4 import flash_attn_4
from .fused import fused_attention
from .op import flash_attn_varlen
from .reference import causal_mask, eager_attention
from .segments import eager_attend, sdpa_attend, segment_attention
from .shared import flash_attn_shared


# transformers reads meaning into "flash", "sdpa", "flex" and "/" inside a name
NAMES = {
    "auto": "unsloth_trl",
    "flash_attention_2": "unsloth_trl_fa2",
    "flash_attention_4": "unsloth_trl_fa4",
    "triton": "unsloth_trl_fused",
    "sdpa": "unsloth_trl_segments",
    "eager": "unsloth_trl_eager",
}


def _common_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast some models leave rotary queries or keys in fp32; the kernels want one dtype."""
    device_type = tensors[0].device.type
    if tensors[0].dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    else:
        dtype = tensors[0].dtype
    return tuple(t.to(dtype) for t in tensors)


def _packed_attention(
    backend: str, query, key, value, layout: PackedLayout, *, scale, window, softcap, sinks, dropout, position_ids
) -> torch.Tensor:
    """Shapes as transformers passes them, `(batch, heads, seq_len, dim)`; returns `(batch, seq_len, heads, v_dim)`."""
    layout.reached.add("attention")
    if not layout.cached and layout.parents is None:
        layout = PackedLayout.from_position_ids(layout.position_ids if position_ids is None else position_ids)
    query, key, value = _common_dtype(query, key, value)
    batch, _, seq_len, _ = query.shape
    if key.shape[2] != seq_len:
        raise ValueError(
            f"packed_layout was given with {key.shape[2] - seq_len} cached keys; pass use_cache=False and no "
            "past_key_values for a packed batch"
        )
    layout.check(batch * seq_len)
    layout = layout.to(query.device)
    if window is not None and window >= layout.max_context:
        window = None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    match choose(backend, query, value, layout, window, softcap, sinks, dropout):
        case "flash_attention_2" if layout.parents is not None:
            out = flash_attn_shared(q, k, v, layout, scale=scale)
        case "flash_attention_2":
            out = flash_attn_varlen(q, k, v, layout, scale=scale, window=window)
        case "flash_attention_4":
            out = flash_attn_4(q, k, v, layout, scale=scale, window=window)
        case "triton":
            out = fused_attention(q, k, v, layout, scale=scale, window=window, softcap=softcap, sinks=sinks)
        case "sdpa":
            attend = functools.partial(sdpa_attend, scale=scale, window=window, dropout=dropout)
            out = segment_attention(q, k, v, layout, attend)
        case _:
            attend = functools.partial(
                eager_attend, scale=scale, window=window, softcap=softcap, sinks=sinks, dropout=dropout
            )
            out = segment_attention(q, k, v, layout, attend)
    return out.unflatten(0, (batch, seq_len))


def _attention_by_handle(backend: str, query, key, value, handle: torch.Tensor, **settings) -> torch.Tensor:
    """`_packed_attention` within a graph: an op of the graph where that can be one, else what interrupts the graph."""
    query, key, value = _common_dtype(query, key, value)
    obstacles = settings["softcap"], settings["sinks"], settings["dropout"]
    if fits_graph(backend, query, value, *obstacles):
        rest = (settings[name] for name in ("scale", "window", "softcap", "sinks"))
        return flash_attn_by_layout(query, key, value, handle, *rest, backend=backend)
    return _outside_of_graphs(backend, query, key, value, handle, **settings)


@torch.compiler.disable
def _outside_of_graphs(backend: str, query, key, value, handle: torch.Tensor, **settings) -> torch.Tensor:
    return _packed_attention(backend, query, key, value, layout_of(handle), **settings)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packed_layout: PackedLayout | None = None,
    is_causal: bool | None = None,
    *,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    The attention function that transformers calls in each layer.

    With `packed_layout`, attention stays within the segments and their ancestors. Without it the call runs as sdpa
    does, or as eager where sdpa cannot do soft-capping or sinks.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_layout is not None:
        # a compiled layer has a handle
        attend = _attention_by_handle if isinstance(packed_layout, torch.Tensor) else _packed_attention
        out = attend(
            backend,
            query,
            key,
            value,
            packed_layout,
            scale=scale,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            dropout=dropout,
            position_ids=kwargs.get("position_ids"),
        )
        return out, None
    num_queries, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None and 1 < num_queries != num_keys:
        # sdpa's own causal flag would align the first query with the first key; without a mask (see `aligned_mask`)
        # the queries are the last ones of a sequence whose keys are all here (Gemma 4 slices queries)
        attention_mask = causal_mask(num_queries, num_keys, None, query.device)
    if sdpa_refusal(softcap, s_aux) is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            sliding_window=sliding_window,
            **kwargs,
        )
    if attention_mask is None and num_queries > 1:
        attention_mask = causal_mask(num_queries, num_keys, sliding_window, query.device)
    out = eager_attention(
        query, key, value, scale=scale, mask=attention_mask, softcap=softcap, sinks=s_aux, dropout=dropout
    )
    return out.transpose(1, 2).contiguous(), None


def aligned_mask(**kwargs: Any) -> torch.Tensor | None:
    """
    `sdpa_mask`, left out only where there are as many keys as queries, or one query. transformers leaves it out for
    the prefill of a static cache too, which relies on sdpa aligning the first query with the first key; a layer that
    slices its queries (Gemma 4) needs the last ones aligned, and could not tell these two calls apart.
    """
    if 1 < kwargs["q_length"] != kwargs["kv_length"]:
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(**kwargs)


def register() -> None:
    """Register the attention functions and their mask function with transformers. Idempotent."""
    for backend, name in NAMES.items():
        if name not in AttentionInterface._global_mapping:
            AttentionInterface.register(name, functools.partial(attention_forward, backend=backend))
            AttentionMaskInterface.register(name, aligned_mask)


def prepare_packed_call(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """
    Arguments of a decoder's forward as a packed batch needs them: a placeholder for the mask, the layout's positions
    unless others are given, no cache. Without `packed_layout` they stay as they are.
    """
    layout = kwargs.get("packed_layout")
    if layout is None:
        return args, kwargs
    kwargs = dict(kwargs)
    placeholder = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=layout.device)
    if len(args) > 1:
        args = (args[0], placeholder, *args[2:])
    else:
        # a 4-D mask is passed on as it is, so nothing is built or looked for
        kwargs["attention_mask"] = placeholder
    if kwargs.get("position_ids") is None and len(args) < 3:
        kwargs["position_ids"] = layout.position_ids
    kwargs["use_cache"] = False
    layout.reached.clear()
    return args, kwargs


def check_packed_call(module: nn.Module, layout: PackedLayout | None) -> None:
    """
    Raises:
        ValueError: If the decoder `module` has run with `layout` and none of its attention layers has read it.
    """
    if layout is not None and "attention" not in layout.reached:
        raise ValueError(
            f"packed_layout did not reach the attention of {type(module).__name__}: its layers do not pass it on, "
            "so the samples of a row would mix. Set packing=False and padding_free=False"
        )


class _Hook:
    """A hook that registers what its model needs when it is unpickled, in a process that has patched nothing yet."""

    def __reduce__(self):
        return _revived, (type(self),)


def _revived(kind: type[_Hook]) -> _Hook:
    register()
    return kind()


class _DecoderPreHook(_Hook):
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return prepare_packed_call(args, kwargs)


class _DecoderHook(_Hook):
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        # layers that do not hand unknown keywords on, and models that compute their attention themselves, would train
        # on rows without boundaries
        check_packed_call(module, kwargs.get("packed_layout"))


class PackedLayoutHook(ModelHook):
    """
    The decoder's part of this patch as an accelerate hook: `add_hook_to_module(decoder, PackedLayoutHook(),
    append=True)`, beside `AlignDevicesHook` or any other, for models outside `apply_patches`. The model's attention
    implementation must be one of `NAMES` (call `register()`, then `model.set_attn_implementation(NAMES["auto"])`).
    """

    def pre_forward(self, module: nn.Module, *args, **kwargs):
        args, kwargs = prepare_packed_call(args, kwargs)
        self._layout = kwargs.get("packed_layout")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any):
        check_packed_call(module, self._layout)
        self._layout = None
        return output


_OWN: "weakref.WeakKeyDictionary[nn.Module, dict[str, str]]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def own_attention(model: PreTrainedModel):
    """Within this context a patched model runs with the attention it had before, packed rows excepted."""
    before = _OWN.get(model)
    if before is None:
        yield
        return
    ours = _implementations(model)
    model.set_attn_implementation(before)
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """The module whose forward builds the attention masks: the text decoder, also inside an image-text wrapper."""
    return model.get_decoder()


def _implementations(model: PreTrainedModel) -> dict[str, str]:
    """The text model's attention implementation, under the key that `set_attn_implementation` takes for it."""
    config, text = model.config, model.config.get_text_config()
    if text is config:
        return {"": config._attn_implementation}
    key = next(k for k in config.sub_configs if getattr(config, k, None) is text)
    return {key: text._attn_implementation}


def _expected_backend(model: PreTrainedModel, config: PatchConfig) -> str:
    """What the packed calls of this model will run on, in words."""
    if config.attention_backend != "auto":
        return config.attention_backend
    text, decoder = model.config.get_text_config(), text_decoder(model)
    device, dtype = next(((p.device, p.dtype) for p in decoder.parameters()), (None, None))
    parts = list(decoder.modules())
    obstacles = []
    if getattr(text, "attn_logit_softcapping", None) is not None:
        obstacles.append("soft-capping")
    if any(hasattr(m, "sinks") for m in parts):
        obstacles.append("attention sinks")
    if device is None:
        name = "eager" if obstacles else "sdpa"
        return _in_words(name, name, device, dtype, 0, obstacles)
    found: dict[str, list[int]] = {}
    for size, v_size in sorted(_head_sizes(parts)) or [(64, 64)]:
        call_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        heads = _Head(device, call_dtype, (size,)), _Head(device, call_dtype, (v_size,))
        softcap, sinks = (1.0 if "soft-capping" in obstacles else None), ("attention sinks" in obstacles) or None
        settings = None, softcap, sinks, 0.0
        name = choose("auto", *heads, PackedLayout([1]), *settings)
        others = choose("auto", *heads, PackedLayout([1, 1], [-1, 0]), *settings)
        found.setdefault(_in_words(name, others, device, dtype, size, obstacles), []).append(size)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{words} at head size {' and '.join(map(str, of))}" for words, of in found.items())


def _head_sizes(parts: list[nn.Module]) -> set[tuple[int, int]]:
    """Of queries and of values, which have names of their own in MLA."""
    sizes = set()
    for m in parts:
        size = getattr(m, "qk_head_dim", None) or getattr(m, "head_dim", None)
        if size is not None:
            sizes.add((size, getattr(m, "v_head_dim", None) or size))
    return sizes


class _Head(NamedTuple):
    """What the choice of a kernel looks at."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]


def _in_words(name: str, others: str, device, dtype: torch.dtype | None, size: int, obstacles: list[str]) -> str:
    """The name of a kernel, and why it is that one; weights in fp32 have it under autocast alone."""
    slow = f"eager over segments ({', '.join(obstacles)})" if obstacles else "sdpa over segments"
    if name in ("sdpa", "eager"):
        return slow if obstacles else f"{slow} (device {device})"
    if name == "flash_attention_4":
        name = f"{name} (shared prompts, compiled layers and CUDA graphs: {others})"
    if name == "triton":
        fastest = prefers_fused(device, torch.bfloat16, size) and "as measured to be the fastest on this card"
        name = f"triton ({'for ' + ', '.join(obstacles) if obstacles else fastest or f'for head size {size}'})"
    if dtype != torch.float32:
        return name
    return f"{name} under autocast, else {slow}{'' if obstacles else ' (fp32 weights)'}"


def apply(model: PreTrainedModel, config: PatchConfig) -> PatchEntry:
    """Give the text model of `model` packed attention; the entry's `undo` puts its own implementation back."""
    register()
    before = _implementations(model)
    model.set_attn_implementation(dict.fromkeys(before, NAMES[config.attention_backend]))
    _OWN[model] = before
    decoder = text_decoder(model)
    handles = [
        decoder.register_forward_pre_hook(_DecoderPreHook(), with_kwargs=True),
        decoder.register_forward_hook(_DecoderHook(), with_kwargs=True),
    ]

    def undo(model: PreTrainedModel) -> None:
        for handle in handles:
            handle.remove()
        _OWN.pop(model, None)
        model.set_attn_implementation(before)

    path = next((name for name, module in model.named_modules() if module is decoder), "")
    return PatchEntry(
        name="attention",
        modules=(path or type(model).__name__,),
        detail=f"packed rows: {_expected_backend(model, config)}; other calls: sdpa or eager "
        f"(was {', '.join(map(repr, before.values()))})",
        undo=undo,
    )
