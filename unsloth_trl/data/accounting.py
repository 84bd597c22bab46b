"""Counting tokens and labels before and after packing or truncation, so that nothing is lost silently."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from tqdm.auto import tqdm

from .collators import IGNORE


class TokenCount(NamedTuple):
    """Totals of a tokenised dataset."""

    rows: int
    tokens: int
    labels: int
    unlabelled_rows: int


def count_tokens(dataset: Dataset, batch_size: int = 10_000) -> TokenCount:
    """
    Args:
        dataset (`Dataset`): Rows with `input_ids` and `labels`, lists of ints of equal length.
        batch_size (`int`, *optional*, defaults to `10_000`): Rows read at a time.

    Returns:
        `TokenCount`: A label is a token that is trained: not -100, and not the first of its row, which nothing
        predicts.
    """
    tokens = labels = unlabelled = 0
    table = dataset.select_columns(["input_ids", "labels"]).with_format("arrow")
    batches = table.iter(batch_size=batch_size)
    total = -(-len(dataset) // batch_size)
    for batch in tqdm(batches, total=total, desc="Counting labels", disable=total < 10, leave=False):
        tokens += pc.sum(pc.list_value_length(batch["input_ids"])).as_py() or 0
        per_row = _labels_per_row(batch["labels"].combine_chunks())
        labels += int(per_row.sum())
        unlabelled += int((per_row == 0).sum())
    return TokenCount(len(dataset), tokens, labels, unlabelled)


def _labels_per_row(column: pa.Array) -> np.ndarray:
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    trained = column.flatten().to_numpy(zero_copy_only=False) != IGNORE
    ends = np.cumsum(lengths)
    starts = ends - lengths
    trained[starts[lengths > 0]] = False
    totals = np.concatenate([[0], np.cumsum(trained)])
    return totals[ends] - totals[starts]


def describe_losses(before: TokenCount, after: TokenCount, args, packing: bool, name: str) -> list[str]:
    """
    What preparing a dataset took away, in sentences for the log.

    Args:
        before (`TokenCount`): The tokenised samples.
        after (`TokenCount`): The rows that are trained on.
        args (`trl.SFTConfig`): Its `max_length` and `packing_strategy` are named.
        packing (`bool`): Whether the rows are packed.
        name (`str`): The dataset's name.

    Raises:
        ValueError: If no label is left, saying what to change.
    """
    if after.labels == 0:
        raise ValueError(_nothing_left(before, args, packing, name))
    lines = []
    lost = before.tokens - after.tokens
    if lost:
        how = f"packing with packing_strategy={args.packing_strategy!r}" if packing else "truncation"
        dropped = "" if packing else f"; {before.rows - after.rows:,} samples have no label left and are dropped"
        lines.append(
            f"{name} dataset: {how} at max_length={args.max_length} drops {lost:,} of {before.tokens:,} tokens "
            f"({lost / before.tokens:.1%}){dropped}"
        )
    if packing and before.unlabelled_rows:
        lines.append(
            f"{name} dataset: {before.unlabelled_rows:,} of {before.rows:,} samples "
            f"({before.unlabelled_rows / before.rows:.1%}) have no label; packing keeps them, as TRL does"
        )
    return lines


def _nothing_left(before: TokenCount, args, packing: bool, name: str) -> str:
    if before.rows == 0:
        return f"the {name} dataset is empty"
    if before.labels == 0:
        return (
            f"no label is left in the {name} dataset: all {before.tokens:,} tokens of its {before.rows:,} samples are "
            "masked (-100). Check completion_only_loss, assistant_only_loss and the chat template"
        )
    return (
        f"no label is left in the {name} dataset after cutting at max_length={args.max_length}: the prompts alone "
        f"fill it. Raise max_length{'' if packing else ' or set truncation_mode=' + repr('keep_end')}"
    )
