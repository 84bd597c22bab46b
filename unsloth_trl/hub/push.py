"""Merged weights and GGUF files to the Hub: a repository first, then the files, then one upload."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import CHAT_TEMPLATE_DIR

from .card import BaseModel, base_of, mend_base, warn_of_local_base, write_export_card
from .checkpoints import is_another_process
from .kinds import FILES, MERGED_FOLDER, kinds_among, refuse_other_kinds_on_hub
from .refusals import explain_refusal, refuse_public


logger = logging.getLogger(__name__)  # accelerate's would need a process state

# of how many files the weights were cut into: an earlier push may have left more of them
_STALE = ("model-*-of-*.safetensors", "model.safetensors", "model.safetensors.index.json")


def push_to_hub_merged(
    model: nn.Module,
    repo_id: str,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    save_method: str = "merged_16bit",
    token: str | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    *,
    tags: Sequence[str] = (),
    **merge_options: Any,
) -> CommitInfo | None:
    """
    Merge a model's adapter and push the result, or push the adapter alone.

    The repository is made before anything is uploaded, with the visibility that was asked for. If the upload fails,
    the files stay on disk and the error says where.

    Args:
        model (`nn.Module`): A PEFT model, or a model without adapters.
        repo_id (`str`): `"owner/name"`, or a name of your own account.
        tokenizer (`PreTrainedTokenizerBase` or `ProcessorMixin`, *optional*): Goes with the weights.
        save_method (`str`, *optional*, defaults to `"merged_16bit"`): Or `"lora"`; see `save_pretrained_merged`.
        token (`str`, *optional*): Of the Hub; by default the one of `hf auth login`. It is not written to any file.
        private (`bool`, *optional*): Visibility of a new repository; by default what the account has set. A repository
            that exists keeps its own, which may not be public with `True`.
        commit_message (`str`, *optional*): Of the upload.
        tags (`Sequence[str]`, *optional*): For the card, beside `"unsloth_trl"`.
        merge_options: Passed on to `save_pretrained_merged`.

    Returns:
        `CommitInfo`: Of the Hub; `None` in the other processes of a run, of which the main one pushes.

    Raises:
        PermissionError: If the Hub refuses the token.
        ValueError: If the repository holds an adapter and is to get weights, or the other way round, or if it exists,
            is public, and `private=True`.
        OSError: If the upload fails; what was uploaded by then is not uploaded again by the next try.
    """
    kind = "adapter" if save_method == "lora" else "merged"

    def save(folder: Path) -> None:
        from .merge import save_pretrained_merged

        save_pretrained_merged(model, folder, tokenizer, save_method=save_method, **merge_options)
        if kind == "adapter":
            save_generation_config(model, folder)

    return _push(
        model,
        repo_id,
        kind,
        save,
        token=token,
        private=private,
        commit_message=commit_message or f"Upload {'adapter' if kind == 'adapter' else 'merged weights'}",
        tags=tags,
    )


def push_to_hub_gguf(
    model: nn.Module,
    repo_id: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization_method: str | Sequence[str] = "q8_0",
    token: str | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    *,
    tags: Sequence[str] = (),
    **gguf_options: Any,
) -> CommitInfo | None:
    """
    Merge a model's adapter, write GGUF files and push them, with the tokenizer's own files.

    Args:
        model (`nn.Module`): A PEFT model, or a model without adapters.
        repo_id (`str`): `"owner/name"`, or a name of your own account.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        quantization_method (`str` or sequence of `str`, *optional*, defaults to `"q8_0"`): See `save_pretrained_gguf`.
        token, private, commit_message, tags: As in `push_to_hub_merged`.
        gguf_options: Passed on to `save_pretrained_gguf`.

    Returns:
        `CommitInfo`: As in `push_to_hub_merged`.

    Raises:
        PermissionError, ValueError, OSError: As in `push_to_hub_merged`.
        LlamaCppNotFoundError: If llama.cpp is needed and not found; nothing is uploaded.
    """
    gguf_options.setdefault("name", repo_id.rsplit("/", 1)[-1])

    def save(folder: Path) -> None:
        from .gguf import save_pretrained_gguf

        save_pretrained_gguf(model, folder, tokenizer, quantization_method=quantization_method, **gguf_options)
        lay_out_gguf(folder)

    return _push(
        model,
        repo_id,
        "gguf",
        save,
        token=token,
        private=private,
        commit_message=commit_message or "Upload GGUF files",
        tags=tags,
    )


def _push(
    model: nn.Module,
    repo_id: str,
    kind: str,
    save: Callable[[Path], None],
    *,
    token: str | None,
    private: bool | None,
    commit_message: str,
    tags: Sequence[str],
) -> CommitInfo | None:
    if is_another_process():
        return None
    repo_id = prepare_repository(repo_id, kind, token=token, private=private)
    base = base_of(model)
    scratch = Path(tempfile.mkdtemp(prefix="unsloth_trl-push-"))
    folder = scratch / repo_id.rsplit("/", 1)[-1]
    try:
        save(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    try:
        made = upload_model(
            folder,
            repo_id,
            kind,
            base,
            token=token,
            commit_message=commit_message,
            tags=[*_trainer_tags(model), *tags],
        )
    except OSError:
        raise  # the message says where the files are
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    return made


def prepare_repository(repo_id: str, kind: str, *, token: str | None = None, private: bool | None = None) -> str:
    """
    Make a repository, with the visibility that is asked for, before there is anything to upload.

    Args:
        repo_id (`str`): `"owner/name"`, or a name of your own account.
        kind (`str`): What is going to be pushed: "adapter", "merged" or "gguf".
        token, private: As in `push_to_hub_merged`.

    Returns:
        `str`: The repository as `"owner/name"`.

    Raises:
        PermissionError: If the Hub refuses the token.
        ValueError: If the repository holds another kind, or is public already and is to be private.
    """
    try:
        repo_id = HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
        refuse_public(repo_id, private, token)
        refuse_other_kinds_on_hub(repo_id, kind, token)
    except HfHubHTTPError as error:
        explain_refusal(error, repo_id)
        raise
    return repo_id


def save_generation_config(model: nn.Module, folder: str | Path) -> None:
    """Save the generation config beside an adapter: PEFT saves none, and whoever loads it would stop elsewhere."""
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    try:
        generation.save_pretrained(folder)
    except ValueError as error:  # settings that contradict each other
        logger.warning(f"generation_config.json was not saved: {str(error).splitlines()[0]}")


def lay_out_gguf(folder: Path, merged: Path | None = None) -> None:
    """
    Put the files of the merged model that go with GGUF files, such as the tokenizer's, beside these.

    Args:
        folder (`Path`): Where the GGUF files are.
        merged (`Path`, *optional*): The merged model; by default where `save_pretrained_gguf` leaves it.
    """
    merged = folder / MERGED_FOLDER if merged is None else merged
    weights = {name for found in kinds_among(path.name for path in merged.iterdir()).values() for name in found}
    for path in merged.iterdir():
        if path.is_file() and path.name not in weights | {"config.json", "README.md"}:
            shutil.copy(path, folder / path.name)
    if (more := merged / CHAT_TEMPLATE_DIR).is_dir():
        shutil.copytree(more, folder / CHAT_TEMPLATE_DIR, dirs_exist_ok=True)


def upload_model(
    folder: Path,
    repo_id: str,
    kind: str,
    base: BaseModel,
    *,
    token: str | None = None,
    commit_message: str,
    tags: Sequence[str] = (),
) -> CommitInfo:
    """
    Write the card of a saved model and upload its folder, without what GGUF files were made from and checkpoints.

    Args:
        folder (`Path`): As `save_pretrained_merged` or `save_pretrained_gguf` leaves it.
        repo_id (`str`): As `prepare_repository` gives it.
        kind (`str`): "adapter", "merged" or "gguf".
        base (`BaseModel`): What it was made from.
        token, commit_message, tags: As in `push_to_hub_merged`.

    Raises:
        PermissionError: If the Hub refuses the token.
        ValueError: If the folder holds nothing of that kind, or another kind too.
        OSError: If the upload fails. The message says how it goes on.
    """
    found = kinds_among(path.name for path in folder.iterdir())
    if list(found) != [kind]:
        raise ValueError(
            f"{folder} is to hold {kind} files ({', '.join(FILES[kind])}) only, and has {found or 'none'}"
        )
    if not (folder / "tokenizer_config.json").is_file():
        logger.warning(f"{repo_id} gets no tokenizer, and will not load without one: pass tokenizer=")
    warn_of_local_base(base, repo_id, kind == "adapter")
    mend_base(folder, base)
    tags = [*tags, "gguf"] if kind == "gguf" else tags
    write_export_card(folder, repo_id, base, kind=kind, tags=tags, files=found[kind])
    try:
        return HfApi(token=token).upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            ignore_patterns=[f"{MERGED_FOLDER}/*", "checkpoint-*/*"],
            delete_patterns=list(_STALE) if kind == "merged" else None,
        )
    except Exception as error:
        next_step = _what_next(folder, repo_id)
        if isinstance(error, HfHubHTTPError):
            explain_refusal(error, repo_id, next_step)
        raise OSError(f"the upload to {repo_id} was not finished: {_one_line(error)}; {next_step}") from error


def _trainer_tags(model: nn.Module) -> list[str]:
    """What a trainer has put on the model: `trl` and its method."""
    return [tag for tag in getattr(model, "model_tags", None) or [] if tag != "unsloth_trl"]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _what_next(folder: Path, repo_id: str) -> str:
    return f"the files are in {folder}: `hf upload {repo_id} {folder} .` goes on where it stopped"
