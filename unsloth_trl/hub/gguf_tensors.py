"""From the tensors of a checkpoint in safetensors to those of a GGUF file: names, layout, encoding, one at a time."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from .gguf_config import Architecture, rope_factors


# What is quantised by 16 and 8 bit methods is read in pieces of this many values, so that a stack of experts does not
# need several times its size in fp32.
CHUNK = 2**25

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_STACK = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


class Checkpoint:
    """
    The tensors of a folder as `save_pretrained` writes it, read one at a time.

    Args:
        folder (`Path`): With `model.safetensors`, or with `model.safetensors.index.json` and its shards.

    Raises:
        FileNotFoundError: If there are no weights in safetensors, or if one of the shards is missing.
    """

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        else:
            weight_map, files = None, ["model.safetensors"]
        if missing := [file for file in files if not (folder / file).is_file()]:
            raise FileNotFoundError(f"{folder} has no {', '.join(missing)}; give the folder of a merged 16-bit model")
        self._open = {file: safe_open(folder / file, framework="pt") for file in files}
        self._file = weight_map or dict.fromkeys(self._open[files[0]].keys(), files[0])

    def names(self) -> list[str]:
        """All names, in no particular order."""
        return list(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor as safetensors writes it, such as `"BF16"`."""
        return self._slice(name).get_dtype()

    def load(self, name: str) -> torch.Tensor:
        """A tensor, as it is on disk."""
        return self._open[self._file[name]].get_tensor(name)

    def _slice(self, name: str):
        return self._open[self._file[name]].get_slice(name)


@dataclass(frozen=True)
class PlannedTensor:
    """
    A tensor that the file will have.

    Args:
        name (`str`): Its name there.
        shape (`tuple` of `int`): Its shape as a torch tensor, which GGUF lists in reverse.
        load (`Callable`): Reads it, in the layout of the file and in the checkpoint's dtype (norms of Gemma in fp32).
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    def encoding(self, wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
        """
        How it is stored in a file of `wanted`.

        Vectors, biases, norms and routers are in fp32, as runtimes expect; rows that are no whole number of blocks
        in fp16, as llama.cpp does it.
        """
        kinds = gguf.GGMLQuantizationType
        if len(self.shape) == 1 or self.name.endswith((".bias", "_norm.weight", "ffn_gate_inp.weight")):
            return kinds.F32
        block = gguf.GGML_QUANT_SIZES[wanted][0]
        return wanted if self.shape[-1] % block == 0 else kinds.F16

    def num_bytes(self, wanted: gguf.GGMLQuantizationType) -> int:
        """Its bytes in a file of `wanted`."""
        return int(np.prod(byte_shape(self.shape, self.encoding(wanted)), dtype=np.int64))


def byte_shape(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> tuple[int, ...]:
    """The shape of a tensor of `shape` as bytes, encoded as `kind`."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // block * size)


def encode(name: str, tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """
    The bytes of a tensor.

    Args:
        name (`str`): For messages.
        tensor (`torch.Tensor`): Of any floating dtype.
        kind (`gguf.GGMLQuantizationType`): `F32`, `F16`, `BF16`, or one that `gguf.quants` has.

    Returns:
        `np.ndarray` of dtype `uint8` and shape `byte_shape(tensor.shape, kind)`.

    Raises:
        ValueError: If a value is not finite, or too large for fp16.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    step = max(1, CHUNK // rows.shape[1])
    out = np.empty(byte_shape(tuple(rows.shape), kind), dtype=np.uint8)
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step]
        if not torch.isfinite(piece).all():
            raise ValueError(f"{name} has values that are not finite; the model is damaged and was not exported")
        out[start : start + step] = _encode(name, piece, kind)
    return out.reshape(byte_shape(tuple(tensor.shape), kind))


def _encode(name: str, piece: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    kinds = gguf.GGMLQuantizationType
    if kind == kinds.F16:
        half = piece.half()
        if not torch.isfinite(half).all():
            largest = piece.abs().max().item()
            raise ValueError(f"{name} has a value of size {largest:.6g}, too large for fp16; take 'bf16' or 'f32'")
        return half.contiguous().numpy().view(np.uint8)
    if kind == kinds.BF16:
        # numpy has no bf16: the same bits as integers
        return piece.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint8)
    values = piece.float().contiguous().numpy()
    return values.view(np.uint8) if kind == kinds.F32 else gguf.quants.quantize(values, kind)


def plan_tensors(checkpoint: Checkpoint, config: PretrainedConfig, architecture: Architecture) -> list[PlannedTensor]:
    """
    All tensors of the file, in its order.

    Args:
        checkpoint (`Checkpoint`): Of a causal language model.
        config (`PretrainedConfig`): Its config.
        architecture (`Architecture`): Of the file.

    Raises:
        ValueError: If a tensor has no name in GGUF, is missing, or does not have the shape that the config says.
    """
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    planned: list[PlannedTensor] = []
    experts: dict[tuple[str, str], dict[int, str]] = {}
    head = "lm_head.weight"
    for source in checkpoint.names():
        if source == head and config.tie_word_embeddings and not architecture.needs_output:
            continue
        if match := _EXPERT.fullmatch(source):
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = source
        elif match := _STACK.fullmatch(source):
            planned += _split_stack(checkpoint, names, source, match)
        else:
            planned.append(_plain(checkpoint, names, source, config, architecture))
    for (prefix, projection), sources in experts.items():
        planned.append(_stacked(checkpoint, names, prefix, projection, sources))
    if config.tie_word_embeddings and architecture.needs_output and head not in checkpoint.names():
        embeddings = next(tensor for tensor in planned if tensor.name == "token_embd.weight")
        planned.append(PlannedTensor("output.weight", embeddings.shape, embeddings.load))
    if (factors := rope_factors(config)) is not None:
        planned.append(PlannedTensor("rope_freqs.weight", tuple(factors.shape), lambda: factors))
    _check_complete(planned, config, architecture)
    return sorted(planned, key=_order)


def _plain(
    checkpoint: Checkpoint,
    names: gguf.TensorNameMap,
    source: str,
    config: PretrainedConfig,
    architecture: Architecture,
) -> PlannedTensor:
    """A tensor of the checkpoint that is one of the file."""
    name = _target(names, source)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    permuted = next((count for key, count in heads.items() if f".{key}." in source), None)

    def load() -> torch.Tensor:
        tensor = checkpoint.load(source)
        if architecture.norm_shift and source.endswith("norm.weight"):
            return tensor.float() + 1.0
        if architecture.interleaved_rope and permuted is not None:
            return interleave_heads(tensor, permuted)
        return tensor

    return PlannedTensor(name, checkpoint.shape(source), load)


def interleave_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """
    Reorder the rows of a query or key projection for RoPE on neighbouring pairs.

    Args:
        tensor (`torch.Tensor` of shape `(num_heads * head_dim, ...)`): Weight or bias; row `i` of a head is rotated
            together with row `i + head_dim / 2`.
        num_heads (`int`): Heads in `tensor`.

    Returns:
        `torch.Tensor` of the same shape; row `2 * i` of a head is rotated together with row `2 * i + 1`.
    """
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _split_stack(
    checkpoint: Checkpoint, names: gguf.TensorNameMap, source: str, match: re.Match
) -> list[PlannedTensor]:
    """
    The tensors that a stack of experts becomes.

    gpt-oss keeps its weights as `(experts, in, out)`, with gate and up in turn; all others as `(experts, out, in)`,
    gate before up. A bias next to the weights tells the first kind.
    """
    prefix, parameter, is_bias = match[1], match[2], bool(match[3])
    in_turn = is_bias or f"{source}_bias" in checkpoint.names()
    shape = checkpoint.shape(source)
    if in_turn and not is_bias:
        shape = (shape[0], shape[2], shape[1])
    suffix = "bias" if is_bias else "weight"

    def reader(part: slice | None) -> Callable[[], torch.Tensor]:
        def load() -> torch.Tensor:
            tensor = checkpoint.load(source)
            if in_turn and not is_bias:
                tensor = tensor.transpose(1, 2)
            return tensor if part is None else tensor[:, part]

        return load

    if parameter == "down_proj":
        return [PlannedTensor(_target(names, f"{prefix}.down_proj.{suffix}"), shape, reader(None))]
    width = shape[1] // 2
    gate, up = (slice(0, None, 2), slice(1, None, 2)) if in_turn else (slice(0, width), slice(width, None))
    half = (shape[0], width, *shape[2:])
    return [
        PlannedTensor(_target(names, f"{prefix}.gate_proj.{suffix}"), half, reader(gate)),
        PlannedTensor(_target(names, f"{prefix}.up_proj.{suffix}"), half, reader(up)),
    ]


def _stacked(
    checkpoint: Checkpoint, names: gguf.TensorNameMap, prefix: str, projection: str, sources: dict[int, str]
) -> PlannedTensor:
    """One tensor of the file for the weights of a layer's experts."""
    shapes = {checkpoint.shape(source) for source in sources.values()}
    if sorted(sources) != list(range(len(sources))) or len(shapes) != 1:
        raise ValueError(f"the {projection} of {prefix} are not {len(sources)} experts of one shape")

    def load() -> torch.Tensor:
        return torch.stack([checkpoint.load(sources[expert]) for expert in range(len(sources))])

    name = _target(names, f"{prefix}.{projection}.weight")
    return PlannedTensor(name, (len(sources), *shapes.pop()), load)


def _target(names: gguf.TensorNameMap, source: str) -> str:
    # sinks are the one parameter without the name of a weight
    source = source + ".weight" if source.endswith(".sinks") else source
    name = names.get_name(source, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise ValueError(f"the checkpoint's tensor {source} has no name in this architecture of GGUF")
    return name


def _check_complete(planned: list[PlannedTensor], config: PretrainedConfig, architecture: Architecture) -> None:
    """Raise if a layer lacks what another has, or if embeddings, head or experts do not fit the config."""
    shapes = {tensor.name: tensor.shape for tensor in planned}
    layers: dict[int, set[str]] = {layer: set() for layer in range(config.num_hidden_layers)}
    for name in shapes:
        if match := _BLOCK.fullmatch(name):
            layers[int(match[1])].add(match[2])
    every = set().union(*layers.values())
    wanted = {"token_embd.weight", "output_norm.weight"}
    if not config.tie_word_embeddings or architecture.needs_output:
        wanted.add("output.weight")
    missing = sorted(wanted - shapes.keys())
    missing += [f"blk.{layer}.{rest}" for layer, found in layers.items() for rest in sorted(every - found)]
    if missing or not every:
        raise ValueError(f"the checkpoint is not complete: {', '.join(missing[:5]) or 'its layers'} would be missing")
    for name in ("token_embd.weight", "output.weight"):
        if name in shapes and shapes[name] != (config.vocab_size, config.hidden_size):
            wanted_shape = (config.vocab_size, config.hidden_size)
            raise ValueError(f"{name} has shape {shapes[name]}, where vocab_size and hidden_size say {wanted_shape}")


def _order(tensor: PlannedTensor) -> tuple[int, str]:
    match = _BLOCK.fullmatch(tensor.name)
    return (int(match[1]), tensor.name) if match else (-1, tensor.name)
