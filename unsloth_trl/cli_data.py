"""The datasets of `unsloth-trl sft` and `grpo`: from the Hub or from this machine, and what is wrong with them."""

from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, DatasetDict, IterableDataset, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from trl import DatasetMixtureConfig, ScriptArguments, get_dataset

from .cli import CommandError
from .hub.card import is_local
from .messages import first_line


logger = get_logger(__name__)

# builders of `datasets` for a single file, by its ending
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_LOOKED_AT = 1000  # rows


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Any:
    """
    Train and test rows: a mixture as TRL makes it, a dataset of the Hub, or files and folders of this machine.

    Raises:
        CommandError: If there is no such dataset, or if it cannot be read.
    """
    name = script.dataset_name
    if mixture.datasets:
        if name:
            logger.warning(f"`datasets` of the recipe are used, and dataset_name={name!r} is not.")
        return get_dataset(mixture)
    if not name:
        raise CommandError("pass --dataset_name (a name on the Hub, a folder or a file), or `datasets` in the recipe")
    path = Path(name).expanduser()
    if (is_local(name) or path.suffix.lower() in _BUILDERS) and not path.exists():
        raise CommandError(f"--dataset_name {name}: there is no such file or folder")
    if path.is_file():
        builder = _BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise CommandError(f"--dataset_name {name}: the ending is none of {', '.join(_BUILDERS)}")
        try:
            return load_dataset(builder, data_files=str(path), streaming=script.dataset_streaming)
        except (StopIteration, ValueError) as error:  # what datasets makes of files with nothing in them
            raise CommandError(
                f"--dataset_name {name}: no rows in it ({str(error) or 'the file is empty'})"
            ) from error
        except DatasetsError as error:
            raise _unreadable(name, error) from error
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = load_from_disk(str(path))
        return DatasetDict({script.dataset_train_split: loaded}) if isinstance(loaded, Dataset) else loaded
    source = str(path) if path.is_dir() else name
    try:
        return load_dataset(source, name=script.dataset_config, streaming=script.dataset_streaming)
    except ConnectionError as error:
        said = first_line(error).rstrip(".")
        raise CommandError(
            f"--dataset_name {name}: there is no such file or folder here, and from the Hub: {said}"
        ) from error
    except DatasetsError as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: DatasetsError) -> CommandError:
    """What is wrong in a file stands in the first error of the chain."""
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    return CommandError(f"--dataset_name {name} cannot be read: {first_line(first).rstrip('.')}")


def take_split(dataset: Any, split: str, field: str) -> Dataset | IterableDataset:
    """The rows of a split; `field` is the option that names it, for the `CommandError` if there is none."""
    if split not in dataset:
        raise CommandError(f"the dataset has no split {split!r}, but {', '.join(map(repr, dataset))}: set --{field}")
    return dataset[split]


def check_columns(command: str, rows: Dataset | IterableDataset, text: str | None) -> None:
    """
    Say which columns a trainer can start from, if it finds none of them.

    Args:
        command (`str`): "sft" or "grpo".
        rows (`Dataset` or `IterableDataset`): The rows.
        text (`str`, *optional*): The name of the column of plain text, for "sft".

    Raises:
        CommandError: If none is there, or one is of a wrong kind.
    """
    names = rows.column_names
    for name in ("prompt", "completion"):
        if (wrong := _wrong_kind(rows, name)) is not None:
            raise CommandError(
                f"the column {name!r} of the dataset {wrong}; it has to be text, or messages, in all rows"
            )
    if names is None:  # streamed, and not known before the first row
        return
    if command == "grpo":
        if "prompt" not in names:
            raise CommandError(f"the dataset has the columns {', '.join(names)}; grpo needs 'prompt': rename yours")
        return
    starts = ({text}, {"messages"}, {"conversations"}, {"prompt", "completion"}, {"input_ids"})
    if not any(start <= set(names) for start in starts):
        raise CommandError(
            f"the dataset has the columns {', '.join(names)}; sft needs 'messages', 'prompt' and 'completion', or "
            f"'{text}', whose name is set by --dataset_text_field"
        )


def _wrong_kind(rows: Dataset | IterableDataset, name: str) -> str | None:
    """What else than text or messages is in a column, as the rest of a sentence, or `None`."""
    feature = (rows.features or {}).get(name)
    if isinstance(feature, Value) and feature.dtype not in ("string", "large_string", "null"):
        return f"is {feature.dtype}"
    if type(feature).__name__ == "Json" and isinstance(rows, Dataset):  # what datasets makes of rows that differ
        kinds = {type(value).__name__ for value in rows[:_LOOKED_AT][name]}
        if len(kinds) > 1 or not kinds <= {"str", "list"}:
            return f"has rows of the kinds {', '.join(sorted(kinds))}"
    return None


def dataset_names(script: ScriptArguments, mixture: DatasetMixtureConfig) -> str | list[str] | None:
    """What the model card names as data: datasets of the Hub, or else the name of a file or folder."""
    if mixture.datasets:
        paths = [entry.path for entry in mixture.datasets]
        return [path for path in paths if not Path(path).exists() and path not in _BUILDERS.values()] or None
    return script.dataset_name
