"""What a model's parts take, counted on the meta device: parameters once, activations per token of a decoder layer.

The counts are of what autograd saves in this package's forward: bf16 compute under autocast, FlashAttention, adapters
without input casts, and norms of transformers, which work on an fp32 copy of their input.
"""

import copy
import math
import re
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from ..patches.attention.heads import BYTES as BYTES_OF_HEADS
from ..patches.attention.shared import MAX_QUERIES
from ..patches.checkpointing.patch import decoder_layers


HALF, FLOAT = 2, 4  # bytes of an element
NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256  # weights per absmax, and absmax per absmax of these
NF4_TABLES = FLOAT * (16 + 256 + 1)  # code books and offset of each weight
OPTIMIZER_BLOCK, SMALLEST_8BIT = 256, 4096  # bitsandbytes: elements per absmax; smaller tensors keep fp32 states
HEAD_ROWS, HEAD_COLUMNS = 4096, 32768  # a tile of logits in the head

_OUTPUT_NAMES = ("o_", "out", "down", "dense", "c_proj", "wo")
_HEAD_NORM = re.compile(r"(q|k|v|query|key|value)_(layer)?norm")


@dataclass(frozen=True)
class AttentionShape:
    """
    Widths of an attention, in elements per token.

    Args:
        heads (`int`): Query heads.
        query, key (`int`): What the kernel gets, heads padded to one size; values are as wide as keys.
        inputs (`tuple[int, ...]`): What its linear layers read, each tensor once; not the kernel's output.
        copies (`int`): What else it saves: its output again where heads are cropped, and queries and keys before their
            rotation where one product has them and the values.
        norms (`int`): fp32 elements that its norms save.
    """

    heads: int
    query: int
    key: int
    inputs: tuple[int, ...]
    copies: int
    norms: int


@dataclass(frozen=True)
class ExpertsShape:
    """
    A layer's experts, which are stacks of weights and no linear layers.

    Args:
        number (`int`): How many there are.
        chosen (`int`): How many a token is sent to.
        width (`int`): Of the intermediate activations of one.
        weights (`int`): Elements of all of them.
    """

    number: int
    chosen: int
    width: int
    weights: int


@dataclass(frozen=True)
class LayerShape:
    """
    Widths of a decoder layer, in elements per token.

    Args:
        hidden (`int`): The residual stream.
        norms (`tuple[int, ...]`): fp32 elements that each norm saves, those inside the attention not included.
        attention (`AttentionShape`, *optional*): Its attention.
        mlp_inputs (`tuple[int, ...]`): What linear layers outside the attention read, each tensor once.
        gates (`int`): What the activations of dense MLPs save: their input, and where they are gates also their output
            and what that is multiplied with.
        widest (`int`): The widest input of an MLP's last linear layer.
        experts (`ExpertsShape`, *optional*): Its experts.
        linears (`tuple[tuple[int, int], ...]`): In and out features of each linear layer.
    """

    hidden: int
    norms: tuple[int, ...]
    attention: AttentionShape | None
    mlp_inputs: tuple[int, ...]
    gates: int
    widest: int
    experts: ExpertsShape | None
    linears: tuple[tuple[int, int], ...]

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward, per token; without the attention's scores."""
        active = self.experts.weights * self.experts.chosen // self.experts.number if self.experts else 0
        return 2 * (sum(i * o for i, o in self.linears) + active)


@dataclass(frozen=True)
class ModelShape:
    """
    A model without weights.

    Args:
        config (`PreTrainedConfig`): What it was made from.
        sizes (`tuple[int, ...]`): Elements of each parameter, tied ones once.
        linears (`tuple[tuple[int, int], ...]`): In and out features of each linear layer but the head.
        layers (`tuple[LayerShape, ...]`): Decoder layers.
        hidden, vocab (`int`): Of the head.
        head_size (`int`): Head size of the rotary tables.
    """

    config: PreTrainedConfig
    sizes: tuple[int, ...]
    linears: tuple[tuple[int, int], ...]
    layers: tuple[LayerShape, ...]
    hidden: int
    vocab: int
    head_size: int

    @property
    def num_parameters(self) -> int:
        return sum(self.sizes)


def read_shape(config: PreTrainedConfig) -> ModelShape:
    """
    Build the model on the meta device and count it.

    Args:
        config (`PreTrainedConfig`): Of a causal or image-text model; a quantisation in it is ignored.

    Raises:
        ValueError: If transformers has no such model, or it has no decoder layers to checkpoint.
    """
    model = meta_model(config)
    text = model.config.get_text_config()
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    layers = tuple(_layer_shape(layer, text) for layer in decoder_layers(model))
    if not layers or not linears:
        raise ValueError(
            f"model_type={config.model_type!r} has no decoder layers of linear layers that transformers can "
            "checkpoint; the estimate needs a decoder-only language model"
        )
    attention = next((layer.attention for layer in layers if layer.attention), None)
    return ModelShape(
        config=config,
        sizes=tuple(p.numel() for p in model.parameters()),
        linears=tuple((m.in_features, m.out_features) for m in linears),
        layers=layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        head_size=attention.query // attention.heads if attention else 0,
    )


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The language model of a config, on the meta device: shapes and names, no weights."""
    config = copy.deepcopy(config)
    with init_empty_weights(include_buffers=True):  # else each weight is allocated, and then dropped
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        except ValueError as error:
            try:
                model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
            except ValueError:
                raise ValueError(
                    f"model_type={config.model_type!r} is no language model of transformers; pass the folder or the "
                    "config of one"
                ) from error
    return model


def _layer_shape(layer: nn.Module, text: PreTrainedConfig) -> LayerShape:
    hidden = text.hidden_size
    found = next((m for m in layer.children() if "Attention" in type(m).__name__ and _linears(m)), None)
    inside = set() if found is None else set(found.modules())
    others = [module for module in layer.modules() if module not in inside]
    norms = tuple(_norm_elements(module) for module in others if _is_norm(module))
    inputs: list[int] = []
    gates = widest = 0
    for module in others:
        linears = _linears(module)
        if not linears:
            continue
        output = _output(module, hidden) if len(linears) > 1 and module is not layer else None
        inputs += _inputs(module, output)
        if output is not None:
            width = output.in_features
            inputs.append(width)
            into = sum(linear.out_features for linear in linears if linear is not output)
            gates += width * (3 if into >= 2 * width else 1)
            widest = max(widest, width)
    if len(norms) == 1 and hidden in inputs:
        inputs.remove(hidden)  # attention and MLP side by side read the same tensor
    return LayerShape(
        hidden=hidden,
        norms=norms,
        attention=None if found is None else _attention_shape(found, text),
        mlp_inputs=tuple(inputs),
        gates=gates,
        widest=widest,
        experts=_experts_shape(others, text),
        linears=tuple((m.in_features, m.out_features) for m in layer.modules() if isinstance(m, nn.Linear)),
    )


def _attention_shape(attention: nn.Module, text: PreTrainedConfig) -> AttentionShape:
    output = _output(attention, text.hidden_size)
    heads = getattr(attention, "num_heads", None) or text.num_attention_heads
    groups = getattr(attention, "num_key_value_groups", None) or 1
    value_size = output.in_features // heads
    size = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None) or value_size
    padded = -(-max(size, value_size) // 8) * 8
    query, key = heads * padded, heads * padded // groups
    copies = output.in_features if padded != value_size else 0
    if any(linear.out_features == query + 2 * key for linear in _linears(attention)):
        copies += query + key
    norms = 0
    for name, norm in attention.named_modules():
        if _is_norm(norm):
            width = heads * size // (1 if name.startswith("q") else groups) if _HEAD_NORM.fullmatch(name) else None
            norms += _norm_elements(norm, width)
    owners = [module for module in attention.modules() if _linears(module)]
    inputs = tuple(width for owner in owners for width in _inputs(owner, output))
    return AttentionShape(heads, query, key, inputs, copies, norms)


def _experts_shape(modules: list[nn.Module], text: PreTrainedConfig) -> ExpertsShape | None:
    stacks = [p for m in modules if not isinstance(m, nn.Conv1d) for p in m.parameters(recurse=False) if p.ndim == 3]
    if not stacks:
        return None
    number, weights = stacks[0].shape[0], sum(p.numel() for p in stacks)
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk")
    chosen = next((n for n in (getattr(text, name, None) for name in names) if isinstance(n, int)), 1)
    return ExpertsShape(number, chosen, weights // (3 * number * text.hidden_size), weights)


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [child for child in module.children() if isinstance(child, nn.Linear)]


def _output(module: nn.Module, hidden: int) -> nn.Linear:
    """The linear layer that leads back to the residual stream."""
    named = {name: m for name, m in module.named_children() if isinstance(m, nn.Linear)}
    back = {name: m for name, m in named.items() if m.out_features == hidden} or named
    return next((m for name, m in back.items() if name.startswith(_OUTPUT_NAMES)), list(back.values())[-1])


def _inputs(module: nn.Module, output: nn.Linear | None) -> list[int]:
    """Widths of the tensors that a module's linear layers read; two of one width read the same one."""
    return sorted({m.in_features for m in _linears(module) if m is not output})


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _norm_elements(norm: nn.Module, width: int | None = None) -> int:
    """fp32 elements per token that a norm saves: a copy of its input, and another of the centred one if it centres."""
    if width is None:
        weight = getattr(norm, "weight", None)
        width = 0 if weight is None else weight.numel()
    return width * (1 if "RMS" in type(norm).__name__ else 2)


def nf4_bytes(numel: int) -> int:
    """Bytes of a weight of `numel` elements in bitsandbytes' NF4 with double quantisation."""
    blocks = math.ceil(numel / NF4_BLOCK)
    return math.ceil(numel / 2) + blocks + FLOAT * math.ceil(blocks / NF4_NESTED_BLOCK) + NF4_TABLES


def weight_bytes(shape: ModelShape, qlora: bool) -> int:
    """Bytes of the weights: bf16, or with `qlora` NF4 for linear layers and experts; embeddings and head stay bf16."""
    total = HALF * shape.num_parameters
    if qlora:
        packed = [i * o for i, o in shape.linears]
        for layer in shape.layers:
            if layer.experts:
                packed += [layer.experts.weights * 2 // 3, layer.experts.weights // 3]
        total += sum(nf4_bytes(numel) - HALF * numel for numel in packed)
    return total


def expert_scratch(shape: ModelShape) -> int:
    """Bytes of the buffers that experts in 4 bits are dequantised into, one for each of their two weights."""
    return HALF * max((layer.experts.weights for layer in shape.layers if layer.experts), default=0)


def adapter_sizes(shape: ModelShape, rank: int) -> list[int]:
    """Elements of each LoRA matrix of rank `rank` on all linear layers but the head."""
    return [rank * width for pair in shape.linears for width in pair]


def optimizer_bytes(sizes: list[int] | tuple[int, ...], element: int, optim: str) -> int:
    """Bytes of AdamW's two states for tensors of `sizes` elements, in `element` bytes each or in 8 bits."""
    if optim == "adamw":
        return 2 * element * sum(sizes)
    blocks = sum(n + FLOAT * math.ceil(n / OPTIMIZER_BLOCK) for n in sizes if n >= SMALLEST_8BIT)
    return 2 * (blocks + FLOAT * sum(n for n in sizes if n < SMALLEST_8BIT))


@dataclass(frozen=True)
class Training:
    """
    What is trained, and how a micro-batch looks.

    Args:
        tokens (`int`): Of the packed row.
        labels (`int`): Tokens with a log-probability.
        rank (`int`): Of the adapters; 0 trains all weights.
        qlora (`bool`): Whether linear layers are dequantised for each product.
        shared (`bool`): Whether completions attend to a shared prompt.
    """

    tokens: int
    labels: int
    rank: int
    qlora: bool = False
    shared: bool = False


def _attention_saved(layer: LayerShape, training: Training) -> int:
    """Bytes per token that the attention saves, its norm not included."""
    shape = layer.attention
    if shape is None:
        return 0
    kernel = HALF * (2 * shape.query + 2 * shape.key + shape.copies) + FLOAT * shape.heads
    return kernel + HALF * sum(shape.inputs) + _norm_bytes(training) * shape.norms


def _mlp_saved(layer: LayerShape, training: Training) -> int:
    """Bytes per token that MLPs, experts and adapters save, norms not included."""
    dense = HALF * (sum(layer.mlp_inputs) + layer.gates + len(layer.linears) * training.rank)
    if (experts := layer.experts) is None:
        return dense
    # what the activation reads, scores, and the indices that sort tokens and back; trained weights read tokens
    rows = experts.chosen * 2 * experts.width + (0 if training.rank else layer.hidden)
    return dense + HALF * rows + FLOAT * experts.number + (3 * 8 + FLOAT) * experts.chosen


def _norm_bytes(training: Training) -> int:
    """Per element of a norm: its input in fp32, and its output where its weight is trained."""
    return FLOAT if training.rank else FLOAT + HALF


def saved_per_token(layer: LayerShape, training: Training) -> int:
    """Bytes per token that a layer saves when it keeps its activations."""
    norms = _norm_bytes(training) * sum(layer.norms) + FLOAT * len(layer.norms)
    return norms + _attention_saved(layer, training) + _mlp_saved(layer, training)


def layer_input(layer: LayerShape, tokens: int) -> int:
    """Bytes of a layer's input."""
    return HALF * layer.hidden * tokens


def backward_extra(layer: LayerShape, training: Training) -> int:
    """Bytes of gradients that the backward of a layer's MLP holds while everything that the layer saved is there."""
    # the gradient of the last linear layer's input comes in two parts, from the weight and from the adapter
    dense = 2 * HALF * layer.widest
    experts = 0
    if layer.experts:
        # first the gradients of outputs, of the activation, of its input, and the activation again; then the tokens
        # and their gradients, sorted
        width, hidden = layer.experts.width, layer.hidden
        experts = HALF * layer.experts.chosen * max(hidden + 4 * width, 2 * hidden + 2 * width)
    return training.tokens * (HALF * layer.hidden + max(dense, experts)) + _scratch_weight(layer, training)


def working_set(layer: LayerShape, training: Training, tile: int) -> int:
    """
    Bytes that the recomputation and the backward of one layer hold, its input not included.

    Args:
        layer (`LayerShape`): The layer.
        training (`Training`): The micro-batch.
        tile (`int`): Tokens per tile of its MLP and norms, 0 for none.
    """
    tokens = training.tokens
    if not tile:
        mlp = tokens * saved_per_token(layer, training) + backward_extra(layer, training)
        return max(mlp, tokens * FLOAT * layer.hidden + _attention_backward(layer, training))
    hidden = HALF * layer.hidden
    # what a tiled part saves is its input; the first norm's is the layer's own
    whole = _attention_saved(layer, training) + hidden * max(0, len(layer.norms) - 1)
    if layer.experts:
        # a router looks at all tokens: experts are not tiled
        mlp = tokens * (whole + _mlp_saved(layer, training)) + backward_extra(layer, training)
    else:
        in_tile = _mlp_saved(layer, training) + 2 * HALF * layer.widest + 2 * hidden
        # besides: the MLP's input, and the gradients of its output and of its input
        mlp = tokens * (whole + 3 * hidden) + tile * in_tile + _scratch_weight(layer, training)
    return max(mlp, _attention_backward(layer, training))


def _scratch_weight(layer: LayerShape, training: Training) -> int:
    """Bytes of the largest weight once more: dequantised, or its gradient before it is added to earlier ones."""
    weights = [i * o for i, o in layer.linears]
    if training.rank:
        return HALF * max(weights, default=0) if training.qlora else 0
    return HALF * max(*weights, layer.experts.weights * 2 // 3 if layer.experts else 0)


def _attention_backward(layer: LayerShape, training: Training) -> int:
    """Bytes in the backward of the attention: what it saved, gradients in and out, and the kernel's scratch memory."""
    shape, tokens = layer.attention, training.tokens
    if shape is None:
        return 0
    queries, group = HALF * shape.query * tokens, shape.query // shape.key
    # a few heads at a time in long rows, at least those that share their keys
    part = min(queries, max(BYTES_OF_HEADS, queries * group // shape.heads))
    # the gradient of the queries in fp32, and where heads share keys, those of keys and values once per query head
    scratch = 2 * part + (2 * part if group > 1 else 0)
    if part < queries:
        scratch += 3 * part  # output and its gradient, copied, and the queries' gradient before it is put in place
    gradients = tokens * HALF * (layer.hidden + 2 * shape.query + 2 * shape.key)
    if training.shared:
        # calls between completions and their prompt, whose gradients of keys and values are summed in fp32
        scratch = max(scratch, 3 * HALF * shape.query * min(tokens, MAX_QUERIES))
        gradients += 2 * FLOAT * shape.key * max(0, tokens - training.labels)
    return tokens * _attention_saved(layer, training) + gradients + scratch


def head_bytes(shape: ModelShape, training: Training, tile: int) -> int:
    """
    Bytes of the final norm and the head: hidden states of the labelled tokens, their gradient in fp32 and in bf16, and
    one tile of logits. With all weights trained also the head's gradient in fp32.
    """
    norm = (HALF if tile else _norm_bytes(training)) * shape.hidden * training.tokens
    labelled = training.labels * shape.hidden * (HALF + FLOAT + HALF)
    tile_of_logits = HALF * min(training.labels, HEAD_ROWS) * HEAD_COLUMNS
    weight = 0 if training.rank else FLOAT * shape.vocab * shape.hidden
    return norm + labelled + tile_of_logits + weight


def cache_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of the keys and values that transformers caches while it generates `tokens` tokens in all."""
    return HALF * tokens * sum(2 * layer.attention.key for layer in shape.layers if layer.attention)
