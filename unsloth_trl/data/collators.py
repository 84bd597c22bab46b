"""The collator: rows of tokens in, one batch with its `PackedLayout` and its labelled positions out."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..patches.layout import PackedLayout


IGNORE = -100


def label_positions(labels: torch.Tensor) -> torch.Tensor:
    """
    Where a labelled next token is predicted.

    Args:
        labels (`torch.Tensor` of shape `(batch, seq_len)`, int64): Labels, not shifted; -100 is ignored.

    Returns:
        `torch.Tensor` of shape `(num_labels,)`, int64: Flat indices into `(batch, seq_len)`; the label of index `i`
        stands at `i + 1`.
    """
    follows = torch.zeros(labels.shape, dtype=torch.bool)
    follows[:, :-1] = labels[:, 1:] != IGNORE
    return follows.flatten().nonzero().flatten()


@dataclass
class PackedDataCollator(DataCollatorForLanguageModeling):
    """
    TRL's language-modelling collator, with what the patches read added on the CPU.

    Rows are flattened into one when `padding_free` is set or the rows are packed by samples (they carry
    `seq_lengths`). A flattened batch has `input_ids` and `labels` of shape `(1, num_tokens)` and `packed_layout`;
    TRL's `position_ids` are the layout's and the trainer adds them on the device. Other batches are TRL's. Both get
    `label_positions`. The first token of each segment carries no label, padding becomes one closing segment.

    Args:
        cached (`bool`, *optional*, defaults to `True`):
            `PackedLayout.cached` of the layouts; `False` also leaves out `label_positions`. For ablations.
    """

    cached: bool = True

    @classmethod
    def from_trl(cls, collator: DataCollatorForLanguageModeling, cached: bool = True) -> "PackedDataCollator":
        """A collator with the settings of TRL's."""
        settings = {f.name: getattr(collator, f.name) for f in fields(DataCollatorForLanguageModeling)}
        return cls(**settings, cached=cached)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """
        Args:
            examples (`list[dict]`): Rows with `input_ids`, optionally `labels` (same length) and `seq_lengths`.

        Returns:
            `dict[str, Any]`: The batch.

        Raises:
            ValueError: If `labels` or `seq_lengths` of a row do not fit its `input_ids`, naming the row.
        """
        for row, example in enumerate(examples):
            labels = example.get("labels")
            if labels is not None and len(labels) != len(example["input_ids"]):
                raise ValueError(
                    f"row {row}: {len(labels)} labels for {len(example['input_ids'])} input_ids; they must match"
                )
        if self.padding_free or "seq_lengths" in examples[0]:
            batch = self._flatten(examples)
        else:
            batch = super().torch_call(examples)
        if self.cached:
            batch["label_positions"] = label_positions(batch["labels"])
        return batch

    def _flatten(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        row_lengths = [len(example["input_ids"]) for example in examples]
        seq_lengths = [
            [n] if (lengths := example.get("seq_lengths")) is None else list(lengths)
            for example, n in zip(examples, row_lengths, strict=True)
        ]
        num_tokens = sum(row_lengths)
        multiple = self.pad_to_multiple_of or 1
        pad_to = -(-num_tokens // multiple) * multiple
        layout = PackedLayout.from_rows(seq_lengths, row_lengths, pad_to=pad_to, cached=self.cached)
        input_ids = np.full((1, pad_to), self.pad_token_id, dtype=np.int64)
        labels = np.full((1, pad_to), IGNORE, dtype=np.int64)
        start = 0
        for example, n in zip(examples, row_lengths, strict=True):
            input_ids[0, start : start + n] = example["input_ids"]
            labels[0, start : start + n] = example.get("labels", example["input_ids"])
            start += n
        input_ids, labels = torch.from_numpy(input_ids), torch.from_numpy(labels)
        # the first token of a segment would be predicted from the segment before it
        labels[layout.position_ids == 0] = IGNORE
        return {"input_ids": input_ids, "labels": labels, "packed_layout": layout}
