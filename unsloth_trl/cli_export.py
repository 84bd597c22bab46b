"""`unsloth-trl merge` and `export-gguf`: from an adapter to weights that others run."""

import argparse
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from .cli import CommandError
from .hub.card import BaseModel, base_of, is_local
from .hub.push import lay_out_gguf, prepare_repository, upload_model


def run_merge(options: argparse.Namespace) -> int:
    """`unsloth-trl merge`: load an adapter on its base model, save the merged weights, and push them if asked to."""
    from .hub.merge import save_pretrained_merged

    adapter = _adapter(options.model)
    if adapter is None:
        raise CommandError(f"{options.model} has no adapter_config.json, so there is nothing to merge")
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
    if folder.is_dir() and not (folder / "adapter_config.json").is_file():
        return None
    try:
        return PeftConfig.from_pretrained(name)
    except ValueError as error:
        if "adapter_config.json" in str(error) and not folder.is_dir():
            return None  # a whole model on the Hub; if there is none of that name, loading says so
        raise


def _load(options: argparse.Namespace, adapter: PeftConfig | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model with its adapter, or the whole model, and its tokenizer."""
    from .patches.quantization.loading import register_nf4_experts

    register_nf4_experts()  # the base may have been saved with experts in 4 bits
    whole = options.base or (options.model if adapter is None else adapter.base_model_name_or_path)
    if not whole:
        raise CommandError(f"{options.model} does not say which base model it is for: pass --base")
    if is_local(whole) and not Path(whole).is_dir():
        raise CommandError(f"the base model of {options.model} is the folder {whole}, which is not here: pass --base")
    how = {"trust_remote_code": options.trust_remote_code}
    revision = adapter.revision if adapter is not None and options.base is None else None
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=options.dtype, revision=revision or "main", **how)
    if adapter is None:
        return model, AutoTokenizer.from_pretrained(whole, **how)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model, **how)
    except (OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(whole, **how)  # an adapter that was saved without one
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))  # tokens were added before training, as PEFT's Auto classes do
    return PeftModel.from_pretrained(model, options.model), tokenizer


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
