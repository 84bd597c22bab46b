"""Saving a trained model as an ordinary one: merged in 16 bits, or its adapter alone.

A merged checkpoint is written file by file, and only what one file holds is in memory. It is written beside its final
place, reloaded, compared with the live model, and only then put there.

An adapter that was trained over a quantised base saw `dequantize(W4)`, and not the `W` that was quantised. The merged
weights are `dequantize(W4) + delta` (`base="quantized"`, which `"auto"` is): what was trained. The delta on top of the
original weights (`base="original"`) is another model, as far from the trained one as quantisation moves the base.
"""

import copy
import json
import logging
import shutil
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from ..models.base_state import save_base_state
from ..patches.quantization.loading import load_in_4bit
from .checkpoints import (
    Checkpoint,
    check_disk,
    check_target,
    is_another_process,
    local_folder,
    replacing,
    weight_files,
)
from .merge_layers import MergedWeight, merged_weights, plain_model
from .merge_layout import Group, Layout
from .verify import Verification, compare, device_for, difference, free, live_logits, load_saved, without_progress


logger = logging.getLogger(__name__)

SAVE_METHODS = ("merged_16bit", "lora", "merged_4bit")


@dataclass(frozen=True)
class MergeReport:
    """
    What was saved.

    Args:
        path (`Path`): The folder.
        save_method (`str`): As asked for.
        dtype (`torch.dtype`, *optional*): Of the weights; `None` for an adapter alone.
        base (`str`): `"live"` if nothing of the base was quantised, else `"quantized"`, or the folder of the original.
        num_bytes (`int`): Of all weights.
        files (`tuple[str, ...]`): Those with weights.
        verification (`Verification`, *optional*): If there was one.
        not_verified (`str`, *optional*): Why there was none.
    """

    path: Path
    save_method: str
    dtype: torch.dtype | None
    base: str
    num_bytes: int
    files: tuple[str, ...]
    verification: Verification | None = None
    not_verified: str | None = None

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") if self.dtype else "adapter"
        base = "" if self.base == "live" else f", base {self.base}"
        checked = str(self.verification) if self.verification else f"not verified: {self.not_verified}"
        return f"{self.path}: {self.save_method}, {kind}{base}, {self.num_bytes / 2**30:.2f} GiB; {checked}"


def save_pretrained_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer=None,
    save_method: str = "merged_16bit",
    *,
    max_shard_size: int | str = "5GB",
    base: str = "auto",
    verify: bool = True,
    force: bool = False,
    dtype: torch.dtype | None = None,
) -> str:
    """
    Save a trained model so that `from_pretrained` loads it without PEFT or this package.

    Every weight is computed in fp32, from the live base, dequantised if it is in 4 or 8 bits, and all active adapters,
    and rounded once. The folder has the layout that transformers writes for the architecture, one tensor per expert
    included, with configuration, generation configuration, and tokenizer and chat template if one is given. The live
    model stays as it is. In a run of several processes the main one saves, and the others return at once.

    Args:
        model (`nn.Module`): A PEFT or transformers model, patched or not, with a fully trained one included.
        save_directory (`str` or `Path`): Folder. What it had of a whole model is replaced, all else in it stays.
        tokenizer (*optional*): Tokenizer or processor that is saved with it.
        save_method (`str`, *optional*, defaults to `"merged_16bit"`): Or `"lora"`: the active adapter alone, as PEFT
            saves it; several active ones in a folder each. `"merged_4bit"` rounds the merged weights to 4 bits again,
            which costs accuracy, and needs `force=True`.
        max_shard_size (`int` or `str`, *optional*, defaults to `"5GB"`): Of a file, which is about what this takes of
            memory.
        base (`str`, *optional*, defaults to `"auto"`): For a base in 4 or 8 bits, what the adapters are added to.
            `"quantized"`, also with `"auto"`: the dequantised weights that they were trained on. `"original"`: the
            weights that were quantised, from the local folder or cache that the model came from. Or the folder of
            those weights.
        verify (`bool`, *optional*, defaults to `True`): Reload the folder and compare logits with the live model
            before it is put in place. Left out, with one line in the log, where two models do not fit.
        force (`bool`, *optional*, defaults to `False`): Allow `"merged_4bit"`.
        dtype (`torch.dtype`, *optional*): Of the weights. By default that of the live base if it has 16 bits, else
            that of the checkpoint it came from, else bf16.

    Returns:
        `str`: The folder.

    Raises:
        ValueError: If an argument, the folder or an adapter cannot be served; nothing was written.
        OSError: If the disk is too full, with what is needed and what is free; nothing was written.
        RuntimeError: If the saved model does not compute what the live one does; nothing was kept.
    """
    if is_another_process():
        return str(Path(save_directory).expanduser().resolve())
    report = write_merged(
        model,
        save_directory,
        tokenizer,
        save_method,
        max_shard_size=max_shard_size,
        base=base,
        verify=verify,
        force=force,
        dtype=dtype,
    )
    return str(report.path)


def write_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer=None,
    save_method: str = "merged_16bit",
    *,
    max_shard_size: int | str = "5GB",
    base: str = "auto",
    verify: bool = True,
    force: bool = False,
    dtype: torch.dtype | None = None,
) -> MergeReport:
    """`save_pretrained_merged` in this process, whichever it is, with a report of what was done."""
    if save_method not in SAVE_METHODS:
        raise ValueError(f"save_method={save_method!r} is none of {', '.join(map(repr, SAVE_METHODS))}")
    if save_method == "merged_4bit" and not force:
        raise ValueError(
            "save_method='merged_4bit' rounds the merged weights to 4 bits again, which changes what the model says: "
            "use 'merged_16bit' and quantise that, or pass force=True"
        )
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ValueError(f"dtype={dtype!r} is no floating-point dtype: pass torch.bfloat16 or torch.float16")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(
            f"tokenizer={tokenizer!r} is no tokenizer or processor: pass that of the model, and what is to be saved "
            "as save_method="
        )
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    target = Path(save_directory).expanduser().resolve()
    if save_method == "lora":
        return _write_adapter(model, target, tokenizer)

    live = plain_model(model)
    check_target(target, _base_folders(model, live), save_method)
    merging = _Merging(model, live, base, dtype, max_shard_size)
    # the new files of 16 bits are there until those of 4 bits are complete
    check_disk(target, merging.layout.num_bytes * (2 if save_method == "merged_4bit" else 1))
    if tokenizer is None:
        logger.warning(f"No tokenizer was given, so none is saved in {target}.")
    with replacing(target) as folder:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if save_method == "merged_4bit":
            return merging.write_4bit(folder, target, verify, max_shard_size)
        merging.write(folder)
        verification, why = merging.verify(folder) if verify else (None, "verify=False")
    files = tuple(merging.layout.shards.filename_to_tensors)
    report = MergeReport(
        target, save_method, merging.dtype, merging.base, merging.layout.num_bytes, files, verification, why
    )
    logger.info(str(report))
    return report


def _write_adapter(model: nn.Module, target: Path, tokenizer) -> MergeReport:
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"save_method='lora' saves an adapter, and this {type(model).__name__} has none: use 'merged_16bit'"
        )
    check_target(target, _base_folders(model, model.get_base_model()), "lora")
    tensors = [
        tensor
        for name in model.active_adapters
        for tensor in get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False).values()
    ]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    check_disk(target, num_bytes)
    with replacing(target) as folder:
        if (target / "README.md").is_file():  # PEFT adds to a card that is there
            shutil.copy2(target / "README.md", folder)
        model.save_pretrained(str(folder), selected_adapters=list(model.active_adapters))
        if len(model.active_adapters) == 1:
            _lift(folder / model.active_adapters[0], folder)
        save_base_state(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("adapter_model*")))
    return MergeReport(target, "lora", None, "live", num_bytes, files, not_verified="an adapter is PEFT's to save")


def _lift(inner: Path, folder: Path) -> None:
    """PEFT puts an adapter that has a name into a folder of that name, where loaders that get the path do not look."""
    if inner.is_dir():
        for path in inner.iterdir():
            path.rename(folder / path.name)
        inner.rmdir()


def _base_folders(model: nn.Module, live: PreTrainedModel) -> list[Path]:
    """Where the base model lies on this machine, as far as it says."""
    names = [live.name_or_path, getattr(live.config, "_name_or_path", None)]
    if isinstance(model, PeftModel):
        names += [config.base_model_name_or_path for config in model.peft_config.values()]
    folders = [local_folder(name) for name in dict.fromkeys(names)]
    return [folder for folder in folders if folder is not None]


class _Merging:
    """One model on its way to a folder: what is read from where, and how it is written."""

    def __init__(
        self,
        model: nn.Module,
        live: PreTrainedModel,
        base: str,
        dtype: torch.dtype | None,
        max_shard_size: int | str,
    ):
        self.live = live
        bases = _base_folders(model, live)
        weights = merged_weights(live)
        self.dtype = dtype or _default_dtype(weights, bases)
        # a copy of the object only: it has the weights and modules of the live model, and a configuration of its own
        self.plain = copy.copy(live)
        self.plain.config = copy.deepcopy(live.config)
        self.plain.hf_quantizer, self.plain._hf_peft_config_loaded = None, False
        if hasattr(self.plain.config, "quantization_config"):
            del self.plain.config.quantization_config
        quantized = getattr(live, "hf_quantizer", None) is not None
        self.weights = self._without_ties(weights)
        self.layout = Layout(self.plain, self.weights, self.dtype, max_shard_size, quantized)
        self.original = self._original(base, bases)
        self.base = "live"
        if any(weight.quantized for weight in weights):
            self.base = str(self.original.folder) if self.original else "quantized"

    def _without_ties(self, weights: list[MergedWeight]) -> list[MergedWeight]:
        """Tied weights once; all of them, and a configuration that says so, where adapters made them differ."""
        by_name = {weight.name: weight for weight in weights}
        tied = getattr(self.live, "all_tied_weights_keys", None) or {}
        pairs = [(by_name[a], by_name[b]) for a, b in tied.items() if a in by_name and b in by_name]
        differ = [(a, b) for a, b in pairs if not self._same(a, b)]
        if not differ:
            gone = {a.name for a, _ in pairs}
            return [weight for weight in weights if weight.name not in gone]
        first, second = differ[0]
        warnings.warn(
            f"{first.name} and {second.name} were one tensor, and training made them two: both are saved, with "
            "tie_word_embeddings=False"
        )
        for config in (self.plain.config, *_sub_configs(self.plain.config)):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
        return weights

    def _same(self, a: MergedWeight, b: MergedWeight) -> bool:
        if a.stored is not None and b.stored is not None and a.stored.data_ptr() == b.stored.data_ptr():
            return True
        return a.shape == b.shape and torch.equal(a.read(self.dtype), b.read(self.dtype))

    def _original(self, base: str, bases: list[Path]) -> Checkpoint | None:
        if base in ("auto", "quantized") or not any(weight.quantized for weight in self.weights):
            return None
        folder = Path(base).expanduser()
        if base == "original":
            if not bases:
                raise ValueError(
                    "base='original' needs the weights that were quantised, and no folder or cache of this machine "
                    f"has them under {self.live.name_or_path!r}: pass their folder as base, or base='quantized'"
                )
            folder = bases[0]
        elif not folder.is_dir():
            raise ValueError(f"base={base!r} is none of 'auto', 'quantized', 'original' and no folder either")
        original = Checkpoint(folder)
        for group in self.layout.groups:
            if not any(weight.quantized for weight in group.weights):
                continue
            if kind := next((w for w in group.weights if w.not_additive), None):
                raise ValueError(
                    f"base={base!r} cannot be used with {kind.not_additive} on {kind.name}, whose effect depends on "
                    "the weights that it was trained on: use base='quantized'"
                )
            if missing := [name for name in group.outputs if name not in original]:
                raise ValueError(
                    f"base={base!r}: {folder} has no {missing[0]} in the layout that transformers saves; pass the "
                    "folder of the 16-bit weights, or base='quantized'"
                )
        return original

    def write(self, folder: Path) -> None:
        """Write configuration and weights."""
        # whatever is wrong with the small files shows before the large ones
        with without_progress():
            self.plain.save_pretrained(folder, state_dict={})
        for name in weight_files(folder):  # an empty one would be read before the shards
            (folder / name).unlink()
        config = self.plain.config
        for part in (config, *_sub_configs(config)):
            if part is config or getattr(part, "dtype", None) is not None:
                part.dtype = self.dtype
        config.save_pretrained(folder)
        self.layout.write(folder, self._produce)

    @torch.no_grad()
    def _produce(self, group: Group) -> dict[str, torch.Tensor]:
        if self.original is not None and any(weight.quantized for weight in group.weights):
            tensors = self._from_original(group)
        else:
            tensors = self.layout.convert({w.name: w.read(self.layout.dtype_of(w)) for w in group.weights})
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(
                    f"{name} has values that are not finite in {str(self.dtype).removeprefix('torch.')}: "
                    + (
                        "fp16 ends at 65504, pass dtype=torch.bfloat16"
                        if self.dtype == torch.float16
                        else "the model or its adapter is broken, take an earlier checkpoint"
                    )
                )
        return tensors

    def _from_original(self, group: Group) -> dict[str, torch.Tensor]:
        if any(not weight.quantized for weight in group.weights):
            mixed = ", ".join(weight.name for weight in group.weights[:4])
            raise ValueError(f"{mixed} are saved together and only some of them are quantised: use base='quantized'")
        tensors = {name: self.original.read(name) for name in group.outputs}
        for name, tensor in tensors.items():
            if tensor.shape != group.outputs[name].shape or not tensor.is_floating_point() or tensor.itemsize < 2:
                raise ValueError(
                    f"{name} in {self.original.folder} is {tensor.dtype} of shape {tuple(tensor.shape)}, not 16-bit "
                    f"weights of shape {tuple(group.outputs[name].shape)}: pass the folder of those as base"
                )
        deltas = {w.name: w.delta() for w in group.weights if w.delta is not None}
        if deltas:
            # the conversion only moves numbers around, so that it may be applied to what is added
            device = next(iter(deltas.values())).device
            zeros = {w.name: torch.zeros(w.shape, device=device) for w in group.weights if w.delta is None}
            for name, delta in self.layout.convert({w.name: (deltas | zeros)[w.name] for w in group.weights}).items():
                tensors[name] = tensors[name].to(device, torch.float32) + delta
        return {name: tensor.to(group.outputs[name].dtype) for name, tensor in tensors.items()}

    def verify(self, folder: Path) -> tuple[Verification | None, str | None]:
        """Reload and compare; the second is why that was not done."""
        if self.live.config.is_encoder_decoder:
            why = "the comparison is for decoders, and this is an encoder-decoder"
            logger.warning(f"The saved model is not verified: {why}.")
            return None, why
        device = device_for(self.layout.num_bytes, self.live.get_input_embeddings().weight.device)
        if isinstance(device, str):
            logger.warning(f"The saved model is not verified: {device}.")
            return None, device
        saved = load_saved(self.live, folder, device)
        try:
            found = compare(self.live, saved, self.weights)
            if self.original is not None:
                found = self._compare_bases(saved, found)
        finally:
            del saved
            free(device)
        if self.original is None and not found.passed:
            raise RuntimeError(
                f"the saved model does not compute what the live one does: {found}, where {found.allowed:.2g} would "
                "be allowed. Nothing was kept. verify=False keeps the folder; please report this"
            )
        return found, None

    @torch.no_grad()
    def _compare_bases(self, saved: PreTrainedModel, found: Verification) -> Verification:
        """What the other choice of base would have given: its weights, put into the reloaded model."""
        for weight in self.weights:
            if weight.quantized:
                saved.get_parameter(weight.name).copy_(weight.read(self.dtype))
        expected, device = live_logits(self.live), saved.get_input_embeddings().weight.device
        found = Verification(found.gap, found.noise, difference(live_logits(saved), expected))
        if found.gap > 10 * found.quantized_gap:
            warnings.warn(
                f"base={str(self.original.folder)!r}: {found}. The adapter was trained on the dequantised weights, "
                "and base='quantized' keeps what was trained"
            )
        free(device)
        return found

    def write_4bit(self, folder: Path, target: Path, verify: bool, max_shard_size: int | str) -> MergeReport:
        """Write the merged weights, and from them those in 4 bits."""
        merged = folder / "merged"
        merged.mkdir()
        self.write(merged)
        config = getattr(self.live.config, "quantization_config", None)
        stacked = any(weight.quantized and len(weight.shape) == 3 for weight in self.weights)
        if not getattr(config, "load_in_4bit", False):
            config = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=self.dtype,
            )
        options = {"quantization_config": copy.deepcopy(config), "local_files_only": True, "dtype": self.dtype}
        with without_progress():
            if stacked:
                saved = load_in_4bit(str(merged), auto_class=type(self.live), **options)
            else:
                saved = type(self.live).from_pretrained(merged, **options)
            saved.save_pretrained(folder, max_shard_size=max_shard_size)
        shutil.rmtree(merged)
        found = compare(self.live, saved, self.weights) if verify else None
        if found is not None:
            warnings.warn(f"merged_4bit: the merged weights were rounded to 4 bits again, and {found}")
        files = tuple(sorted(path.name for path in folder.glob("model*.safetensors")))
        num_bytes = sum((folder / name).stat().st_size for name in files)
        why = None if verify else "verify=False"
        return MergeReport(target, "merged_4bit", self.dtype, self.base, num_bytes, files, found, why)


def _sub_configs(config) -> list:
    return [part for key in config.sub_configs if (part := getattr(config, key, None)) is not None]


def _default_dtype(weights: list[MergedWeight], bases: list[Path]) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for weight in weights:
        # 8-bit weights do not say what they were
        if weight.dtype.is_floating_point and not (weight.quantized and weight.dtype == torch.float32):
            sizes[weight.dtype] += torch.Size(weight.shape).numel()
    halves = (torch.bfloat16, torch.float16)
    if sizes and (most := sizes.most_common(1)[0][0]) in halves:
        return most
    for folder in bases:
        config = folder / "config.json"
        if config.is_file():
            saved = json.loads(config.read_text(encoding="utf-8"))
            name = saved.get("dtype") or saved.get("torch_dtype")
            if (found := getattr(torch, str(name), None)) in halves:
                return found
    return torch.bfloat16
