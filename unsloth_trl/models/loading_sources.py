"""What a model's name leads to: a folder, a repository, a GGUF file, or an adapter and its base."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import PeftConfig
from peft.utils import load_peft_weights
from safetensors import safe_open
from transformers.utils import cached_file

from ..hub.checkpoints import ADAPTER_CONFIG, weight_files
from .names import is_path


# what says where a file is on the Hub
HUB = ("token", "revision", "cache_dir", "subfolder", "local_files_only", "force_download")


@dataclass(frozen=True)
class Source:
    """
    Where a model, its config and its tokenizer come from.

    Args:
        name (`str`): Folder, or name on the Hub.
        hub (`Mapping[str, Any]`, *optional*): Keywords of `from_pretrained` that say where it is on the Hub.
        gguf_file (`str`, *optional*): The GGUF file in it.
    """

    name: str
    hub: Mapping[str, Any] = field(default_factory=dict)
    gguf_file: str | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """For `from_pretrained` of configs, tokenizers and models."""
        return dict(self.hub) | ({"gguf_file": self.gguf_file} if self.gguf_file else {})

    @property
    def label(self) -> str:
        """What an adapter should name as its base, so that `find_source` finds it again."""
        return f"{self.name.rstrip('/')}/{self.gguf_file}" if self.gguf_file else self.name

    def file(self, name: str) -> str | None:
        """The path of one of its files, downloaded if need be; `None` if there is none."""
        return cached_file(
            self.name,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **self.hub,
        )


def find_source(model_name: str, gguf_file: str | None = None, **hub: Any) -> Source:
    """
    Read a model's name.

    Args:
        model_name (`str`): A folder, a name on the Hub (`"owner/model"`), a GGUF file, or one on the Hub
            (`"owner/model/file.gguf"`).
        gguf_file (`str`, *optional*): The GGUF file in the folder or repository.
        **hub: See `Source`.

    Raises:
        FileNotFoundError: If it is meant as a path and there is nothing.
        ValueError: If the folder has no model, or both a model and an adapter.
    """
    path = Path(model_name).expanduser()
    if gguf_file is None and model_name.endswith(".gguf"):
        if path.is_file():
            return Source(str(path.parent), hub, path.name)
        owner, _, rest = model_name.partition("/")
        name, _, file = rest.partition("/")
        if path.is_absolute() or model_name.startswith(".") or not file:
            raise FileNotFoundError(f"model_name={model_name!r}: there is no such GGUF file")
        return Source(f"{owner}/{name}", hub, file)
    if not path.is_dir():
        if path.is_file():
            raise ValueError(f"model_name={model_name!r} is a file; pass the folder that it is in, or a .gguf file")
        if is_path(model_name):
            raise FileNotFoundError(f"model_name={model_name!r}: there is no such folder")
        return Source(model_name, hub, gguf_file)
    folder = path / hub.get("subfolder", "")
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise FileNotFoundError(f"gguf_file={gguf_file!r}: there is no such file in {folder}")
        return Source(str(path), hub, gguf_file)
    has_config, has_adapter = (folder / "config.json").is_file(), (folder / ADAPTER_CONFIG).is_file()
    if has_config and has_adapter:
        weights = weight_files(folder)
        raise ValueError(
            f"{folder} has a model (config.json{''.join(f', {name}' for name in weights)}) and an adapter "
            f"({ADAPTER_CONFIG}): remove config.json{' and the weights' if weights else ''} to load the adapter, or "
            f"{ADAPTER_CONFIG} to load the model"
        )
    if not has_config and not has_adapter:
        files = sorted(file.name for file in folder.glob("*.gguf"))
        checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
        hint = f"set gguf_file={files[0]!r}" if files else "pass the folder that save_pretrained wrote"
        if checkpoints and not files:
            hint = f"pass one of its checkpoints, such as {str(folder / checkpoints[-1])!r}"
        raise ValueError(f"{folder} has neither config.json nor {ADAPTER_CONFIG}; {hint}")
    return Source(str(path), hub)


def read_adapter(source: Source) -> PeftConfig | None:
    """
    The adapter config at a source, if it is an adapter.

    Raises:
        ValueError: If the adapter does not say what its base is.
    """
    if source.gguf_file or source.file(ADAPTER_CONFIG) is None:
        return None
    adapter = PeftConfig.from_pretrained(source.name, **source.hub)
    if not adapter.base_model_name_or_path:
        raise ValueError(
            f"{ADAPTER_CONFIG} of {source.name} names no base model: set base_model_name_or_path in it to the folder "
            "or the name of the model that it was trained on"
        )
    return adapter


def base_of(adapter: PeftConfig, source: Source) -> Source:
    """
    The base of an adapter.

    Raises:
        FileNotFoundError: If its base is a folder that is not there, naming both.
    """
    shared = {key: value for key, value in source.hub.items() if key not in ("revision", "subfolder")}
    if adapter.revision:
        shared["revision"] = adapter.revision
    try:
        return find_source(adapter.base_model_name_or_path, **shared)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the base of the adapter {source.name} is {adapter.base_model_name_or_path!r}, which is not there: set "
            f"base_model_name_or_path in its {ADAPTER_CONFIG} to where that model is"
        ) from error


def adapter_vocabulary(adapter: PeftConfig, source: Source, embeddings: tuple[str, ...]) -> tuple[int | None, int]:
    """
    What an adapter says about the vocabulary that it was trained with.

    Args:
        adapter (`PeftConfig`): Its config.
        source (`Source`): Where it is.
        embeddings (`tuple[str, ...]`): Names of the base's embedding and head, such as `"embed_tokens"`.

    Returns:
        Rows of the embedding or head that is saved with it, or `None`; and the highest id whose row it trains, or -1.
    """
    rows = [
        shape[1] if ".lora_embedding_A" in name else shape[0]
        for name, shape in _shapes(source)
        if any(name.endswith(f".{part}.weight") or f".{part}.lora_embedding_A" in name for part in embeddings)
        or any(name.endswith(f".{part}.lora_B.weight") for part in embeddings)
    ]
    indices = getattr(adapter, "trainable_token_indices", None) or []
    listed = indices.values() if isinstance(indices, dict) else [indices]
    return max(rows, default=None), max((i for ids in listed for i in ids), default=-1)


def _shapes(source: Source) -> list[tuple[str, tuple[int, ...]]]:
    path = source.file("adapter_model.safetensors")
    if path is None:  # the old format
        return [(name, tuple(w.shape)) for name, w in load_peft_weights(source.name, "cpu", **source.hub).items()]
    with safe_open(path, framework="pt") as file:
        return [(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]
