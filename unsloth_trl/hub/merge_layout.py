"""From the weights of a live model to the files of a checkpoint: names, layout and shards, one in memory.

transformers writes some models otherwise than it holds them, as the checkpoints that they came from: stacked experts
as one tensor per expert, for one. Its own conversion, run backwards, says how. Here it runs first on tensors without
data, to find out which weights belong together and what comes of them, and then on one such group after the other.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from .merge_layers import MergedWeight


@dataclass(frozen=True)
class Group:
    """
    Weights that are converted together.

    Args:
        weights (`tuple[MergedWeight, ...]`): Of the live model.
        outputs (`dict[str, torch.Tensor]`): What they are in the checkpoint, on the meta device.
    """

    weights: tuple[MergedWeight, ...]
    outputs: dict[str, torch.Tensor]


class Layout:
    """
    What a checkpoint of a model looks like.

    Args:
        model (`PreTrainedModel`): A shallow copy of the live model, whose `_weight_conversions` may be set.
        weights (`list[MergedWeight]`): All that is to be saved.
        dtype (`torch.dtype`): Of the floating-point weights, but for those that transformers keeps in fp32.
        max_shard_size (`int` or `str`): Of a file; a tensor that is larger has a file of its own.
        quantized (`bool`): Whether a quantizer of transformers loaded the live model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: list[MergedWeight],
        dtype: torch.dtype,
        max_shard_size: int | str,
        quantized: bool,
    ):
        self.model = model
        self.dtype = dtype
        self._fp32 = _kept_in_fp32(model, dtype)
        self._set_conversions(quantized)
        self.groups = self._group(weights)
        tensors = {name: tensor for group in self.groups for name, tensor in group.outputs.items()}
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self.num_parameters = sum(tensor.numel() for tensor in tensors.values())
        self.shards = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)

    def dtype_of(self, weight: MergedWeight) -> torch.dtype:
        """The dtype in which a weight is saved."""
        if not weight.dtype.is_floating_point:
            return weight.dtype
        if weight.dtype == torch.float32 and any(pattern.search(weight.name) for pattern in self._fp32):
            return torch.float32
        return self.dtype

    def convert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights of the live model, all of a group, as they are in the checkpoint."""
        return revert_weight_conversion(self.model, tensors)

    def write(self, folder: Path, produce: Callable[[Group], dict[str, torch.Tensor]]) -> None:
        """
        Write the files and their index.

        Args:
            folder (`Path`): Where to.
            produce (`Callable`): The tensors of a group, by the names of its `outputs`.
        """
        where, files = self.shards.tensor_to_filename, self.shards.filename_to_tensors
        waiting: dict[str, dict[str, torch.Tensor]] = {file: {} for file in files}
        pointers: dict[str, set[int]] = {file: set() for file in files}
        progress = logging.tqdm(total=len(files), desc="Writing merged weights", unit="file", disable=len(files) == 1)
        with progress:
            for group in self.groups:
                tensors = produce(group)
                for name in group.outputs:
                    tensor = _to_cpu(tensors.pop(name))
                    # of two names for one live tensor, a file of safetensors takes neither
                    shared = tensor.data_ptr() in pointers[where[name]]
                    pointers[where[name]].add(tensor.data_ptr())
                    waiting[where[name]][name] = tensor.clone() if shared else tensor
                del tensors
                for file in {where[name]: None for name in group.outputs}:
                    if len(waiting[file]) == len(files[file]):
                        save_file(waiting.pop(file), folder / file, metadata={"format": "pt"})
                        progress.update()
        assert not waiting, f"not all tensors of {', '.join(waiting)} were produced"
        if self.shards.is_sharded:
            index = {
                "metadata": {"total_parameters": self.num_parameters, **self.shards.metadata},
                "weight_map": where,
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")

    def _set_conversions(self, quantized: bool) -> None:
        used = self.model.__dict__.get("_weight_conversions")
        if used is not None and not quantized:
            return
        # A model that was made from a config has none, and one that was quantised has those of the quantizer, which
        # cannot be run backwards. What adds or drops a prefix depends on the checkpoint that was read.
        prefixes = [c for c in used or () if type(c).__name__ == "PrefixChange"]
        others = get_model_conversion_mapping(self.model, add_legacy=False)
        self.model._weight_conversions = prefixes + [c for c in others if type(c).__name__ != "PrefixChange"]

    def _group(self, weights: list[MergedWeight]) -> list[Group]:
        by_name = {weight.name: weight for weight in weights}
        metas = {w.name: torch.empty(w.shape, dtype=self.dtype_of(w), device="meta") for w in weights}
        whole = self.convert(dict(metas))

        def attempt(names: tuple[str, ...]) -> Group | None:
            try:
                out = self.convert({name: metas[name] for name in names})
            except Exception:  # whatever an operation raises that misses a tensor which belongs to these
                return None
            same = all(n in whole and t.shape == whole[n].shape and t.dtype == whole[n].dtype for n, t in out.items())
            return Group(tuple(by_name[name] for name in names), out) if out and same else None

        if whole.keys() == metas.keys() and all(whole[name].shape == metas[name].shape for name in metas):
            return [Group((weight,), {weight.name: metas[weight.name]}) for weight in weights]
        groups: dict[tuple[str, ...], Group | None] = {(name,): attempt((name,)) for name in metas}
        for rest in (_layer, lambda name: ""):
            left: dict[str, list[str]] = {}
            for names in [names for names, group in groups.items() if group is None]:
                del groups[names]
                for name in names:
                    left.setdefault(rest(name), []).append(name)
            groups |= {tuple(names): attempt(tuple(names)) for names in left.values()}
        found = [group for group in groups.values() if group is not None]
        produced = [name for group in found for name in group.outputs]
        if len(found) < len(groups) or sorted(produced) != sorted(whole):
            # conversions that no cut of the weights leaves alone: all at once
            found = [Group(tuple(weights), whole)]
        return found


def _layer(name: str) -> str:
    """`model.layers.3.` of `model.layers.3.mlp.gate.weight`; nothing outside of layers."""
    match = re.match(r"(.*?\.\d+\.)", name)
    return match.group(1) if match else ""


def _kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> list[re.Pattern]:
    names = set()
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return [re.compile(name.replace("*", ".*")) for name in sorted(names)]


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().to("cpu").contiguous()
    # one expert of a stack would keep all of the stack until its file is full
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
