"""The collator: rows of tokens in, one batch with its `PackedLayout` and its labelled positions out."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..patches.layout import PackedLayout


IGNORE = -100


STEP = 256  # tokens
TOKENS_PER_BOUNDARY = 256  # a shape has room for segments that are as short on average, or twice, four times as many
LEAST_SEQLEN = 1024  # a shape's longest segment has this many tokens, or four times as many, and so on
FULL = 0.96  # of a batch's tokens, from which on it is padded to all of them


def static_tokens(num_tokens: int, most: int, multiple: int) -> int:
    """
    Tokens that a batch is padded to, so that there are few shapes.

    Args:
        num_tokens (`int`): Its own tokens.
        most (`int`): Of a full batch.
        multiple (`int`): What the result is a multiple of.
    """
    target = most if FULL * most <= num_tokens <= most else -(-num_tokens // STEP) * STEP
    return -(-target // multiple) * multiple


def static_seqlen(longest: int, most: int) -> int:
    """
    What the longest segment of a batch is rounded up to, so that there are few shapes.

    Args:
        longest (`int`): Its tokens.
        most (`int`): Of a row.
    """
    rounded = LEAST_SEQLEN
    while rounded < longest:
        rounded *= 4
    return max(longest, min(rounded, most))


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
        static_length (`int`, *optional*):
            Flattened batches come in few shapes: full ones of as many rows as there are examples, `static_length`
            tokens each, others rounded up to a multiple of `STEP`; boundaries and the longest segment rounded up too.
        is_static (`torch.Tensor`, bool, a scalar, *optional*):
            Whether they do so now. It is in shared memory, so that it can be changed while the workers of a data
            loader have copies of the collator. By default `True`.
    """

    cached: bool = True
    static_length: int | None = None
    is_static: torch.Tensor = field(default_factory=lambda: torch.tensor(True).share_memory_())

    @classmethod
    def from_trl(cls, collator: DataCollatorForLanguageModeling, **own: Any) -> "PackedDataCollator":
        """A collator with the settings of TRL's, and `own` ones."""
        settings = {f.name: getattr(collator, f.name) for f in fields(DataCollatorForLanguageModeling)}
        return cls(**settings, **own)

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
        pad_to = asked = -(-num_tokens // multiple) * multiple
        static = {}
        if self.static_length is not None and self.is_static:
            pad_to = static_tokens(num_tokens, len(examples) * self.static_length, multiple)
            longest = int(max(pad_to - num_tokens, *map(max, seq_lengths)))
            static["max_seqlen_multiple"] = static_seqlen(longest, self.static_length)
            boundaries = sum(map(len, seq_lengths)) + 2
            room = max(boundaries, pad_to // TOKENS_PER_BOUNDARY + 2)
            static["cu_seqlens_size"] = 1 << (room - 1).bit_length()
        layout = PackedLayout.from_rows(seq_lengths, row_lengths, pad_to=pad_to, cached=self.cached, **static)
        layout.own_padding = pad_to - asked
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
