"""Model cards: what a run was, what it measured, and which base model it needs."""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from .. import __version__


logger = logging.getLogger(__name__)  # accelerate's would need a process state

TEMPLATES = Path(__file__).parent / "templates"
VERSIONS_HEADING = "### Framework versions"

_SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]?$")
_GGUF_FILE = re.compile(r"([^/]+/[^/]+)/.+\.gguf")  # as FastLanguageModel names a file on the Hub
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
# names of this machine and of this account, and what only says where a run writes
_PRIVATE = re.compile(
    r".*_(token|dir|path|url|host|port|hub_repo|init_kwargs)|hub_.*|push_to_hub|report_to|run_name|project|trackio_.*"
)
# computed from others, or objects without a form in YAML
_DERIVED = (
    "accelerator_config",
    "activation_checkpointing",
    "dataloader_pin_memory",
    "debug",
    "deepspeed",
    "disable_tqdm",
    "do_train",
    "fsdp_config",
    "generation_batch_size",
    "parallelism_config",
    "resume_from_checkpoint",
)


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """
    What is known of the model that was trained or adapted.

    Args:
        repo_id (`str`, *optional*): Its name on the Hub.
        path (`str`, *optional*): Its folder, where nothing else is known.
    """

    repo_id: str | None = None
    path: str | None = None


def is_local(name: str) -> bool:
    """Whether a model's or dataset's name leads to a place on this machine and not to the Hub."""
    return name.startswith(("/", ".", "~", "\\")) or _DRIVE.match(name) is not None or os.path.exists(name)


def _is_repository(name: str) -> bool:
    """Whether a card may name it: the Hub refuses cards whose base model is no repository."""
    return bool(name) and not is_local(name) and name.count("/") < 2 and not name.endswith(".gguf")


def base_of(model: Any) -> BaseModel:
    """
    Which base model a model, or a model with adapters, came from.

    The name in the adapter's own config counts first, then the model's. A folder of the Hub's cache has the name of
    its repository in its path.
    """
    configs = getattr(model, "peft_config", None) or {}
    names = [getattr(config, "base_model_name_or_path", None) for config in configs.values()]
    names.append(getattr(getattr(model, "config", None), "_name_or_path", None))
    names = [name for name in names if name]
    for name in names:
        if _is_repository(name):
            return BaseModel(repo_id=name)
        if not is_local(name) and (file := _GGUF_FILE.fullmatch(name)) is not None:
            return BaseModel(repo_id=file[1])
    for name in names:
        if (snapshot := _SNAPSHOT.search(name)) is not None:
            return BaseModel(repo_id=snapshot[1].replace("--", "/"))
    return BaseModel(path=names[0] if names else None)


def warn_of_local_base(base: BaseModel, repo_id: str | None, adapter: bool) -> None:
    """Say before a push that others will not find the base model."""
    if base.path is None:
        return
    if adapter:
        consequence = (
            "adapter_config.json will name that folder, and nobody else can load the adapter. Load the base model by "
            "its name on the Hub, or set model.peft_config['default'].base_model_name_or_path = 'owner/name' first"
        )
    else:
        consequence = "the card cannot name it. Load it by its name on the Hub first"
    logger.warning(
        f"Pushing to {repo_id}: the base model is known only as the folder {base.path!r}, so {consequence}."
    )


def mend_base(folder: str | Path, base: BaseModel) -> None:
    """
    Name the base model in what PEFT has saved by its repository, where PEFT has written a folder of this machine.

    The configs of the live adapters stay: PEFT looks there whether the vocabulary has grown.

    Args:
        folder (`str` or `Path`): As PEFT saves it, with adapters of other names in folders of theirs. In its card a
            path is taken out if no name is known; in `adapter_config.json` it then stays.
        base (`BaseModel`): What is known.
    """
    folder = Path(folder)
    others = [path for path in folder.glob("*/adapter_config.json") if not path.parent.name.startswith("checkpoint-")]
    for path in (folder / "adapter_config.json", *others):
        if base.repo_id is None or not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        named = config.get("base_model_name_or_path")
        if not named or is_local(named):
            config["base_model_name_or_path"] = base.repo_id
            path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    readme = folder / "README.md"
    if not readme.is_file():
        return
    card = ModelCard.load(readme)
    named = card.data.get("base_model")
    unnamed = not named and (folder / "adapter_config.json").is_file()
    if unnamed or (isinstance(named, str) and not _is_repository(named)):
        card.data.base_model = base.repo_id
    prefix = "base_model:adapter:"  # PEFT's tag has the path too
    tags = card.data.tags or []
    wrong = [tag for tag in tags if tag.startswith(prefix) and not _is_repository(tag.removeprefix(prefix))]
    if wrong:
        right = [] if base.repo_id is None else [prefix + base.repo_id]
        card.data.tags = list(dict.fromkeys([*(tag for tag in tags if tag not in wrong), *right]))
    card.save(readme)


def shown_config(args: Any) -> str:
    """
    The fields of a trainer's config that are not at their defaults, as YAML that the command line takes.

    Names of this machine or account are left out: folders, tokens, repositories, run names.
    """
    shown = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if not field.init or _PRIVATE.fullmatch(field.name) or field.name in _DERIVED or value is None:
            continue
        if isinstance(field.default_factory, type(dataclasses.MISSING)):
            default = field.default
        else:
            default = field.default_factory()
        value = getattr(value, "value", value)  # of an enum
        if value == getattr(default, "value", default) or not _is_plain(value):
            continue
        shown[field.name] = value
    return yaml.safe_dump(shown, sort_keys=True, allow_unicode=True).strip() if shown else ""


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return not (value.startswith(("/", "~")) or _DRIVE.match(value))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, (bool, int, float))


def describe_adapters(model: Any) -> list[str]:
    """One line for each adapter of a model."""
    lines = []
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        said = [f"{config.peft_type.value} `{name}`"]
        for field in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights"):
            if hasattr(config, field):
                said.append(f"{field}={getattr(config, field)}")
        for field in ("target_modules", "target_parameters", "modules_to_save"):
            value = getattr(config, field, None)
            if value:
                said.append(f"{field}: {value if isinstance(value, str) else ', '.join(sorted(value))}")
        lines.append("; ".join(said))
    return lines


def describe_quantization(model: Any) -> str | None:
    """How the weights under the adapters are quantised, or `None`."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        return None
    values = config if isinstance(config, dict) else config.to_dict()
    said = [str(getattr(values.get("quant_method"), "value", values.get("quant_method")))]
    said += [f"{key}={values[key]}" for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant") if key in values]
    return ", ".join(said)


def own_versions() -> list[str]:
    """`name: version` of this package and of those of its dependencies that TRL's card leaves out."""
    lines = [f"unsloth_trl: {__version__}"]
    for name in ("peft", "accelerate", "bitsandbytes"):
        try:
            lines.append(f"{name}: {version(name)}")
        except PackageNotFoundError:
            continue
    return lines


def write_run_card(
    readme: Path, base: BaseModel, *, repo_id: str | None, dataset_name: str | list[str] | None, **sections: Any
) -> None:
    """
    Add what this package knows of a run to the card that TRL has written.

    Args:
        readme (`Path`): TRL's card; it is replaced.
        base (`BaseModel`): What was trained.
        repo_id (`str`, *optional*): Where it is pushed to.
        dataset_name (`str` or `list[str]`, *optional*): As TRL got it; a place on this machine is not named as a
            dataset of the Hub.
        **sections: For `templates/run_card.md`.
    """
    card = ModelCard.load(readme)
    text = card.text.strip()
    folder = Path(base.path).name if base.path else None
    # TRL takes a folder that is there for no model, and one that is gone by now for a model of the Hub
    named = card.data.base_model
    if base.repo_id is not None:
        said = f"[{base.repo_id}](https://huggingface.co/{base.repo_id})"
    else:
        said = f"a model that is not on the Hub (the folder `{folder}`)" if folder else "a model that has no name"
    text = text.replace(f"[{named}](https://huggingface.co/{named})", said)
    card.data.base_model = base.repo_id
    if dataset_name:
        names = [dataset_name] if isinstance(dataset_name, str) else dataset_name
        link = "[{0}](https://huggingface.co/datasets/{0})"
        linked = [f"`{Path(name).name}`" if is_local(name) else link.format(name) for name in names]
        text = text.replace(link.format(dataset_name), ", ".join(linked))
        card.data.datasets = [name for name in names if not is_local(name)] or None
    if repo_id is None:  # not pushed yet
        text = text.replace('model="None"', f'model="{readme.resolve().parent.name}"')
    before, heading, after = text.partition(VERSIONS_HEADING)
    made = ModelCard.from_template(
        card.data,
        template_path=str(TEMPLATES / "run_card.md"),
        before=before.rstrip(),
        versions="\n".join(f"- {line}" for line in own_versions()),
        after=after.strip() if heading else "",
        base=base,
        base_folder=folder,
        **sections,
    )
    made.save(readme)


def write_export_card(
    folder: str | Path, repo_id: str, base: BaseModel, *, kind: str, tags: Iterable[str], files: Iterable[str]
) -> None:
    """
    Write the card of merged weights, of an adapter or of GGUF files that were pushed without a trainer.

    Args:
        folder (`str` or `Path`): Where README.md goes.
        repo_id (`str`): Where the folder will be pushed to.
        base (`BaseModel`): What the weights were made from.
        kind (`str`): "merged", "adapter" or "gguf".
        tags (`Iterable[str]`): Beside those that every card of this package has.
        files (`Iterable[str]`): Names of the weights, which the GGUF card's example loads.
    """
    data = ModelCardData(
        base_model=base.repo_id,
        base_model_relation={"merged": "finetune", "adapter": "adapter", "gguf": "quantized"}[kind]
        if base.repo_id
        else None,
        library_name={"merged": "transformers", "adapter": "peft", "gguf": "gguf"}[kind],
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*tags, "unsloth_trl"])),
    )
    versions = own_versions()
    versions += [f"{name}: {version(name)}" for name in ("transformers", "torch")]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATES / "export_card.md"),
        kind=kind,
        repo_id=repo_id,
        base=base,
        base_folder=Path(base.path).name if base.path else None,
        files=sorted(files),
        versions="\n".join(f"- {line}" for line in versions),
    )
    card.save(Path(folder) / "README.md")
