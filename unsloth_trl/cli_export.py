"""`unsloth-trl merge` and `export-gguf`: from an adapter to weights that others run."""

import argparse
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from peft import PeftConfig
from transformers import AutoConfig, PreTrainedTokenizerBase

from .cli import CommandError
from .hub.card import BaseModel, base_of, is_local
from .hub.checkpoints import check_one_kind
from .hub.push import lay_out_gguf, prepare_repository, upload_model
from .messages import first_line


def run_merge(options: argparse.Namespace) -> int:
    """`unsloth-trl merge`: load an adapter on its base model, save the merged weights, and push them if asked to."""
    from .hub.merge import save_pretrained_merged

    adapter = _adapter(options.model)
    if adapter is None:
        if not Path(options.model).is_dir():
            raise CommandError(
                f"{options.model} is no folder here, and no adapter of that name can be had from the Hub"
            )
        found = sorted(path.name for path in Path(options.model).glob("checkpoint-*"))
        hint = f"; it has checkpoints: pass {Path(options.model) / found[-1]}, for one" if found else ""
        raise CommandError(f"{options.model} has no adapter_config.json, so there is nothing to merge{hint}")
    repo_id = _repository(options, "merged")
    model, tokenizer = _load(options, adapter)
    try:
        save_pretrained_merged(model, options.output, tokenizer, save_method="merged_16bit")
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    print(f"merged weights are in {options.output}")
    _push(options, repo_id, "merged", base_of(model))
    return 0


def run_export(options: argparse.Namespace) -> int:
    """`unsloth-trl export-gguf`: GGUF files of a merged folder as it is, or of an adapter that is merged first."""
    from .hub.gguf import export_gguf, resolve_methods, save_pretrained_gguf

    adapter, folder = _adapter(options.model), Path(options.model)
    name = (folder.resolve().name if folder.is_dir() else options.model.rsplit("/", 1)[-1]) or "model"
    how = {"name": name, "llama_cpp_path": options.llama_cpp_path}
    try:
        # a type that is not known, or whose program is not there, before anything is made or loaded
        resolve_methods(options.quantization_method, options.llama_cpp_path)
        repo_id = _repository(options, "gguf")
        if adapter is None and folder.is_dir():
            base = _base_of_folder(folder)
            files = export_gguf(folder, options.output, options.quantization_method, **how)
        else:
            model, tokenizer = _load(options, adapter)
            base = base_of(model)
            files = save_pretrained_gguf(model, options.output, tokenizer, options.quantization_method, **how)
            folder = None
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    for file in files:
        print(f"wrote {file}")
    if repo_id is not None:
        lay_out_gguf(Path(options.output), merged=folder)
    _push(options, repo_id, "gguf", base)
    return 0


def _adapter(name: str) -> PeftConfig | None:
    """The adapter's config if the folder or repository has one."""
    folder = Path(name)
    if is_local(name) and not folder.is_dir():
        raise CommandError(f"{name}: there is no such folder")
    if folder.is_dir():
        check_one_kind(folder)
        if not (folder / "adapter_config.json").is_file():
            return None
    try:
        return PeftConfig.from_pretrained(name)
    except ValueError as error:
        if "adapter_config.json" in str(error) and not folder.is_dir():
            return None  # a whole model on the Hub; if there is none of that name, loading says so
        raise


def _load(options: argparse.Namespace, adapter: PeftConfig | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model with its adapter, or the whole model, and its tokenizer; as `FastLanguageModel` loads them."""
    from .models.base_state import BASE_STATE, bits_of, dtype_of, quantization_of, read_base_state, set_positions
    from .models.loading_adapters import load_whole
    from .models.loading_sources import find_source
    from .models.loading_weights import Loading, require_bitsandbytes, require_gguf

    whole = options.base or (options.model if adapter is None else adapter.base_model_name_or_path)
    if not whole:
        raise CommandError(f"{options.model} does not say which base model it is for: pass --base")
    if is_local(whole) and not Path(whole).exists():
        raise CommandError(f"the base model of {options.model} is the folder {whole}, which is not here: pass --base")
    revision = adapter.revision if adapter is not None and options.base is None else None
    source, own_code = find_source(whole, **({"revision": revision} if revision else {})), options.trust_remote_code
    if source.gguf_file:
        require_gguf()
    dtype = getattr(torch, options.dtype, options.dtype)
    if source.gguf_file and dtype == "auto":
        dtype = torch.float32  # the file's own types are no dtypes, and merged weights are rounded afterwards
    try:
        config = AutoConfig.from_pretrained(source.name, trust_remote_code=own_code, **source.kwargs)
    except OSError as error:
        first = first_line(error)
        if adapter is None:
            raise CommandError(f"{whole} is no folder here with a model, and from the Hub: {first}") from error
        raise CommandError(
            f"the base model of {options.model} is {whole}, which is neither a folder here nor can be had from the "
            f"Hub: pass --base ({first})"
        ) from error
    adapter_source = None if adapter is None else find_source(options.model)
    state = {} if adapter is None else read_base_state(adapter_source.file(BASE_STATE))
    set_positions(config, state)
    bits, quantization = 16, None
    own = None if source.gguf_file else getattr(config, "quantization_config", None)  # of the checkpoint itself
    if own is None and not options.original_weights and (found := quantization_of(state)) is not None:
        bits, quantization = bits_of(state), None if source.gguf_file else found
        require_bitsandbytes(bits)
        dtype = dtype_of(state) if dtype == "auto" else dtype
        print(f"{options.model} was trained on its base in {bits} bits, and is merged with what these {bits} bits are")
    model_options = {"trust_remote_code": True} if own_code else {}
    loading = Loading(dtype, bits, None, quantization, model_options)
    return load_whole(source, config, loading, own_code, adapter, adapter_source)


def _repository(options: argparse.Namespace, kind: str) -> str | None:
    if options.push_to_hub is None:
        return None
    return prepare_repository(options.push_to_hub, kind, private=options.private)


def _base_of_folder(folder: Path) -> BaseModel:
    """What a merged folder's own card names."""
    readme = folder / "README.md"
    named = ModelCard.load(readme).data.get("base_model") if readme.is_file() else None
    return BaseModel(repo_id=named) if isinstance(named, str) and not is_local(named) else BaseModel()


def _push(options: argparse.Namespace, repo_id: str | None, kind: str, base: BaseModel) -> None:
    if repo_id is None:
        return
    message = "Upload GGUF files" if kind == "gguf" else "Upload merged weights"
    made = upload_model(Path(options.output), repo_id, kind, base, commit_message=message)
    print(f"pushed to {made.commit_url}")
