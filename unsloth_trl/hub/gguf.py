"""GGUF files for llama.cpp, Ollama and LM Studio: from a merged 16-bit folder, or from a model with its adapter.

16-bit files and Q8_0 are written with the `gguf` package, one tensor in memory at a time; the smaller types are made
of those by llama.cpp's own `llama-quantize`, where it is on the machine. What cannot work is said before anything is
merged or written.
"""

import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.utils import tqdm
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from .llama_cpp import CONVERTERS, QUANTIZED_BITS, find_converter, find_quantizer, run_quantizer


try:
    import gguf
except ImportError as error:
    raise ImportError("GGUF files are written with the package gguf: pip install 'unsloth_trl[gguf]'") from error

if not hasattr(gguf.GGUFWriter, "add_rope_freq_base_swa"):
    raise ImportError("GGUF files are written with gguf>=0.18; the one here is older: pip install -U 'gguf>=0.18'")

from .gguf_config import Architecture, add_hyperparameters, find_architecture
from .gguf_tensors import Checkpoint, PlannedTensor, byte_shape, encode, plan_tensors
from .gguf_vocabulary import Vocabulary, load_tokenizer, read_vocabulary
from .kinds import MERGED_FOLDER
from .modelfile import write_modelfile


# GGML type of the weights, and what `general.file_type` says
NATIVE = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# the names that Unsloth has for them
ALIASES = {"not_quantized": "f16", "fast_quantized": "q8_0", "quantized": "q4_k_m"}
# what loses nothing of a checkpoint, by the dtype of its embeddings
_EXACT = {"BF16": "bf16", "F16": "f16"}


class GGUFExportError(RuntimeError):
    """The export failed after the model was merged; the message says where the merged 16-bit model is."""


@dataclass(frozen=True)
class Methods:
    """
    What is to be made, and with what.

    Args:
        names (`tuple` of `str`): Keys of `NATIVE` or of `QUANTIZED_BITS`, without repetition.
        quantizer (`Path`, *optional*): llama.cpp's program, if one of them needs it.
    """

    names: tuple[str, ...]
    quantizer: Path | None

    @property
    def native(self) -> list[str]:
        """Those that are written with the `gguf` package."""
        return [name for name in self.names if name in NATIVE]

    @property
    def quantized(self) -> list[str]:
        """Those that llama.cpp makes."""
        return [name for name in self.names if name not in NATIVE]


def resolve_methods(
    quantization_method: str | Sequence[str] = "q8_0", llama_cpp_path: str | Path | None = None
) -> Methods:
    """
    Check what was asked for, and find the programs that it needs.

    Args:
        quantization_method (`str` or sequence of `str`): `"f32"`, `"f16"`, `"bf16"`, `"q8_0"`, one of llama.cpp's
            types such as `"q4_k_m"`, or Unsloth's `"not_quantized"` (f16), `"fast_quantized"` (q8_0) and `"quantized"`
            (q4_k_m), in any case.
        llama_cpp_path (`str` or `Path`, *optional*): See `find_quantizer`.

    Raises:
        ValueError: If a name is not known.
        LlamaCppNotFoundError: If llama.cpp is needed and not found.
    """
    given = [quantization_method] if isinstance(quantization_method, str) else list(quantization_method)
    names = []
    for method in given:
        name = str(method).lower()
        name = ALIASES.get(name, name)
        if name not in NATIVE and name not in QUANTIZED_BITS:
            known = ", ".join([*NATIVE, *QUANTIZED_BITS, *ALIASES])
            raise ValueError(f"quantization_method={method!r} is not known; take one of {known}, or a list of these")
        names.append(name)
    if not names:
        raise ValueError("quantization_method is empty; take 'q8_0', for one")
    names = list(dict.fromkeys(names))
    needs = next((name for name in names if name not in NATIVE), None)
    quantizer = None if needs is None else find_quantizer(llama_cpp_path, f"quantization_method={needs!r}")
    return Methods(tuple(names), quantizer)


def export_gguf(
    folder: str | Path,
    output_directory: str | Path,
    quantization_method: str | Sequence[str] = "q8_0",
    *,
    name: str = "model",
    llama_cpp_path: str | Path | None = None,
) -> list[Path]:
    """
    Write GGUF files of a merged 16-bit model, and an Ollama `Modelfile` for the first of them.

    Every file appears whole or not at all; one of the same name is replaced. Vectors, biases and routers are stored in
    fp32, all other weights as the method says.

    Args:
        folder (`str` or `Path`): As `save_pretrained` writes it, with `config.json`, weights in safetensors and
            `tokenizer.json`.
        output_directory (`str` or `Path`): Where the files go; made if it is missing.
        quantization_method (`str` or sequence of `str`, *optional*, defaults to `"q8_0"`): See `resolve_methods`.
        name (`str`, *optional*, defaults to `"model"`): The files are called `{name}-{METHOD}.gguf`.
        llama_cpp_path (`str` or `Path`, *optional*): A folder of llama.cpp, for the types that it makes; see
            `find_quantizer`.

    Returns:
        `list` of `Path`: One per method, in their order.

    Raises:
        ValueError: If the architecture, its config, its weights or its tokenizer cannot be expressed in GGUF.
        LlamaCppNotFoundError: If llama.cpp is needed and not found.
        FileNotFoundError: If the folder is not that of a whole model.
        OSError: If the disk has less room than the files need (`ENOSPC`, before anything is written).
    """
    methods = resolve_methods(quantization_method, llama_cpp_path)
    folder, output = Path(folder).expanduser(), Path(output_directory).expanduser()
    _check_name(name)
    if not (folder / "config.json").is_file():
        found = "an adapter; merge it first" if (folder / "adapter_config.json").is_file() else "no config.json"
        raise FileNotFoundError(f"{folder} has {found}; give the folder of a merged 16-bit model")
    config = AutoConfig.from_pretrained(folder)
    architecture = find_architecture(config, _converter(llama_cpp_path))
    tokenizer = load_tokenizer(folder)
    vocabulary = read_vocabulary(folder, tokenizer, config)
    checkpoint = Checkpoint(folder)
    tensors = plan_tensors(checkpoint, config, architecture)
    exact = _EXACT.get(checkpoint.dtype("model.embed_tokens.weight"), "f32")
    for note in vocabulary.notes:
        warnings.warn(note, stacklevel=2)
    _warn_of_odd_rows(tensors, methods)

    files = {method: f"{name}-{method.upper()}.gguf" for method in methods.names}
    output.mkdir(parents=True, exist_ok=True)
    intermediate = _intermediate(methods, exact)
    _check_disk(output, tensors, methods, intermediate)
    with tempfile.TemporaryDirectory(dir=output, prefix=".gguf-") as scratch:
        made = Path(scratch)
        written = {}
        for method in dict.fromkeys([*methods.native, *([intermediate] if intermediate else [])]):
            written[method] = made / f"{method}.gguf"
            _write(written[method], name, tensors, config, architecture, vocabulary, method)
        for method in methods.quantized:
            written[method] = made / f"{method}.gguf"
            run_quantizer(methods.quantizer, written[intermediate], written[method], method)
        # all of them are whole before the first is put in place
        modelfile = write_modelfile(tokenizer, files[methods.names[0]], made / "Modelfile", vocabulary.add_bos)
        for method, file in files.items():
            os.replace(written[method], output / file)
        os.replace(modelfile, output / "Modelfile")
    return [output / file for file in files.values()]


def save_pretrained_gguf(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization_method: str | Sequence[str] = "q8_0",
    *,
    name: str = "model",
    llama_cpp_path: str | Path | None = None,
    **merge_options: Any,
) -> list[Path]:
    """
    Merge a model's adapter and write GGUF files of the result; see `export_gguf`.

    The merged 16-bit model stays in `save_directory/merged_16bit`, also when the export fails. The files hold the
    weights of that model: rounded to 16 bits first, and then to what the method says.

    Args:
        model (`nn.Module`): A PEFT model, or a model without adapters.
        save_directory (`str` or `Path`): Where the files go.
        tokenizer (`PreTrainedTokenizerBase`): The model's; a GGUF file holds its tokenizer.
        quantization_method (`str` or sequence of `str`, *optional*, defaults to `"q8_0"`): See `resolve_methods`.
        name (`str`, *optional*, defaults to `"model"`): The files are called `{name}-{METHOD}.gguf`.
        llama_cpp_path (`str` or `Path`, *optional*): A folder of llama.cpp, for the types that it makes.
        merge_options: Passed on to `save_pretrained_merged`.

    Returns:
        `list` of `Path`: One per method, in their order.

    Raises:
        ValueError: If there is no tokenizer, or if GGUF cannot express it or the architecture; before merging.
        LlamaCppNotFoundError: If llama.cpp is needed and not found; before merging.
        GGUFExportError: If the export fails after merging.
    """
    methods = resolve_methods(quantization_method, llama_cpp_path)
    _check_name(name)
    if tokenizer is None:
        raise ValueError("tokenizer=None: a GGUF file holds its tokenizer; pass the model's tokenizer")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer: a {type(tokenizer).__name__} has no tokenizer.json, which GGUF files are made of"
        )
    if "save_method" in merge_options:
        raise ValueError(
            f"save_method={merge_options['save_method']!r}: GGUF files are made of a 'merged_16bit' model"
        )
    _check_before_merging(model, tokenizer, _converter(llama_cpp_path))
    from .merge import save_pretrained_merged

    save_directory = Path(save_directory).expanduser()
    merged = save_directory / MERGED_FOLDER
    save_pretrained_merged(model, merged, tokenizer, save_method="merged_16bit", **merge_options)
    try:
        return export_gguf(merged, save_directory, methods.names, name=name, llama_cpp_path=llama_cpp_path)
    except Exception as error:
        raise GGUFExportError(
            f"{error}; the merged 16-bit model is in {merged}: export_gguf({str(merged)!r}, {str(save_directory)!r}, "
            f"{list(methods.names)!r}) goes on from there"
        ) from error


def _check_before_merging(model: nn.Module, tokenizer: PreTrainedTokenizerBase, converter: str) -> None:
    """Raise for what would be refused after merging: minutes and gigabytes earlier."""
    config = model.config
    if getattr(config, "quantization_config", None) is not None:
        # of the base in 4 bits; the merged model has none
        config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    find_architecture(config, converter)
    with tempfile.TemporaryDirectory(prefix="gguf-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        read_vocabulary(Path(folder), load_tokenizer(Path(folder)), config)


def _check_name(name: str) -> None:
    if not name or name in (".", "..") or "/" in name or os.sep in name:
        raise ValueError(f"name={name!r} is no name for a file; pass the folder apart from it")


def _converter(llama_cpp_path: str | Path | None) -> str:
    return str(find_converter(llama_cpp_path) or CONVERTERS[0])


def _intermediate(methods: Methods, exact: str) -> str | None:
    """The file that llama.cpp quantises: one that is made anyway if it loses nothing, else one of its own."""
    if not methods.quantized:
        return None
    return "f32" if "f32" in methods.names else exact


def _warn_of_odd_rows(tensors: list[PlannedTensor], methods: Methods) -> None:
    for method in methods.native:
        kind = NATIVE[method][0]
        odd = [tensor for tensor in tensors if tensor.encoding(kind) == gguf.GGMLQuantizationType.F16 != kind]
        if odd:
            warnings.warn(
                f"{len(odd)} tensors stay in fp16 in the {method} file, as their rows are no whole number of blocks: "
                f"{odd[0].name} has rows of {odd[0].shape[-1]}",
                stacklevel=3,
            )


def _check_disk(output: Path, tensors: list[PlannedTensor], methods: Methods, intermediate: str | None) -> None:
    needed = sum(_num_bytes(tensors, method) for method in methods.native)
    if intermediate is not None and intermediate not in methods.names:
        needed += _num_bytes(tensors, intermediate)
    weights = _num_bytes(tensors, "f32") / 4
    needed += sum(int(weights * QUANTIZED_BITS[method] / 8) for method in methods.quantized)
    # vocabularies and headers
    needed += 2**25 * len(methods.names)
    free = shutil.disk_usage(output).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"output_directory={str(output)!r} has {free / 2**30:.2f} GiB free, and {', '.join(methods.names)} need "
            f"{needed / 2**30:.2f} GiB; make room, take another folder, or ask for fewer methods at once",
        )


def _num_bytes(tensors: list[PlannedTensor], method: str) -> int:
    return sum(tensor.num_bytes(NATIVE[method][0]) for tensor in tensors)


def _write(
    path: Path,
    name: str,
    tensors: list[PlannedTensor],
    config: PretrainedConfig,
    architecture: Architecture,
    vocabulary: Vocabulary,
    method: str,
) -> None:
    """One file; what is half-written when it fails lies in the caller's scratch folder."""
    wanted, file_type = NATIVE[method]
    writer = gguf.GGUFWriter(path, architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_hyperparameters(writer, config, architecture)
    vocabulary.add_to(writer)
    for tensor in tensors:
        kind = tensor.encoding(wanted)
        shape = byte_shape(tensor.shape, kind)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.num_bytes(wanted), raw_dtype=kind)
    total = _num_bytes(tensors, method)
    with closing(writer), tqdm(desc=f"{method} GGUF", total=total, unit="B", unit_scale=True) as bar:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            loaded = tensor.load()
            if tuple(loaded.shape) != tensor.shape:
                raise ValueError(f"{tensor.name} has shape {tuple(loaded.shape)}, not {tensor.shape}")
            data = encode(tensor.name, loaded, tensor.encoding(wanted))
            del loaded  # or the next one would be read beside it
            writer.write_tensor_data(data)
            bar.update(data.nbytes)
