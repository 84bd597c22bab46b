"""`train_on_responses_only`: labels on what the assistant says and nowhere else, in rows that are tokenised already.

Where a response begins and ends is looked up in the text that a sample's tokens stand for. Tokens are then chosen by
their place in this text, so it does not matter how a tokenizer cuts the markers, or whether it joins a marker with its
surroundings into one token.
"""

import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import trl
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from .accounting import count_tokens
from .chat_parts import ChatParts, find_parts, first_tokens
from .collators import IGNORE


logger = get_logger(__name__)

_COUNTS = ("_without_response", "_repeated")  # columns, for the time of counting
_LOOKED_AT = 32  # rows of a stream
_LEAST_HALF = 3  # characters of a part that are not taken for a response's own
_SHOWN = 300  # characters of a row in an error


class ResponseCount(NamedTuple):
    """
    What `train_on_responses_only` did to one dataset.

    Attributes:
        rows (`int`): Rows that are left.
        dropped_rows (`int`): Rows without any label, which are left out.
        tokens (`int`): Tokens in the rows that are left.
        labels_before (`int`): Tokens that were learned before, in all rows.
        labels (`int`): Tokens that are learned now.
        without_response (`int`): Samples in which no response was found.
        repeated (`int`): Samples with two BOS at the start or two EOS at the end, of which one was taken out.
    """

    rows: int
    dropped_rows: int
    tokens: int
    labels_before: int
    labels: int
    without_response: int
    repeated: int

    @property
    def share(self) -> float:
        """Learned tokens of all tokens."""
        return self.labels / self.tokens if self.tokens else 0.0


def train_on_responses_only(
    trainer: trl.SFTTrainer,
    instruction_part: str | None = None,
    response_part: str | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_proc: int | None = None,
) -> trl.SFTTrainer:
    """
    Mask the labels of everything but the assistant's responses, in the trainer's train and eval datasets.

    A response is the text from a response part to the next part of any kind or to the end of its sample: the token
    that ends the turn is learned, always. Labels that were masked already stay masked. Works on rows of one sample and
    on packed rows, after `SFTTrainer` has prepared them. Rows that have no label then are dropped, as TRL drops those
    that truncation has left without. Of a doubled BOS or EOS, which come from texts that were rendered with a chat
    template and then tokenised, one is taken out.

    Args:
        trainer (`trl.SFTTrainer`): This package's or TRL's. `trainer.response_counts` then has a `ResponseCount` for
            each dataset by its name.
        instruction_part (`str`, *optional*): The text in front of a user's turn. By default it is found in the chat
            template.
        response_part (`str`, *optional*): The text in front of a response; likewise. With neither of them and a
            trainer made with `assistant_only_loss=True`, TRL's assistant masks are the labels and stay; only the
            tokens that end the turns are added to them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): By default the trainer's.
        num_proc (`int`, *optional*): Processes to work in; by default the `dataset_num_proc` of the trainer's config.

    Returns:
        `trl.SFTTrainer`: The trainer itself.

    Raises:
        TypeError: If it is no `SFTTrainer`.
        ValueError: If nothing would be learned, naming the parts and showing the start of a row; if a dataset has no
            `input_ids`; if the parts cannot be found in the chat template; or if the trainer's collator makes labels
            of its own.
    """
    if not isinstance(trainer, trl.SFTTrainer):
        raise TypeError(f"train_on_responses_only is for SFTTrainer; {type(trainer).__name__} has no labels to mask")
    if isinstance(trainer.data_collator, DataCollatorForLanguageModeling):
        raise ValueError(
            "data_collator=DataCollatorForLanguageModeling of transformers makes labels of all tokens, whatever is "
            "masked here: leave data_collator out, or take DataCollatorForSeq2Seq"
        )
    if tokenizer is None:
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    eos = getattr(getattr(trainer.model, "generation_config", None), "eos_token_id", None)
    stop = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    own_masks = trainer.args.assistant_only_loss and instruction_part is None and response_part is None
    parts = None if own_masks else _parts(tokenizer, instruction_part, response_part)
    if parts is not None:
        stop |= first_tokens(tokenizer, parts.end)
    mask = ResponseMask(tokenizer, parts, stop)
    num_proc = trainer.args.dataset_num_proc if num_proc is None else num_proc
    datasets = {"train": trainer.train_dataset}
    several = isinstance(trainer.eval_dataset, dict)
    if several:
        datasets |= {f"eval/{name}": dataset for name, dataset in trainer.eval_dataset.items()}
    elif trainer.eval_dataset is not None:
        datasets["eval"] = trainer.eval_dataset
    # all of them before any is put in its place, so that an error leaves the trainer as it was
    done = {name: _masked(dataset, mask, name, num_proc) for name, dataset in datasets.items() if dataset is not None}
    trainer.response_counts = {name: count for name, (_, count) in done.items() if count is not None}
    if "train" in done:
        trainer.train_dataset = done["train"][0]
    if several:
        # the container may be a DatasetDict, which others look for
        trainer.eval_dataset = type(trainer.eval_dataset)(
            {name: done[f"eval/{name}"][0] for name in trainer.eval_dataset}
        )
    elif "eval" in done:
        trainer.eval_dataset = done["eval"][0]
    for name, count in trainer.response_counts.items():
        logger.warning(_describe(name, count))
    return trainer


def _parts(tokenizer: PreTrainedTokenizerBase, instruction: str | None, response: str | None) -> ChatParts:
    for name, part in (("instruction_part", instruction), ("response_part", response)):
        if part is not None and not part.strip():
            raise ValueError(f"{name}={part!r} is empty; pass the text in front of such a turn")
    try:
        found = find_parts(tokenizer)
    except ValueError:
        if instruction is None or response is None:
            raise
        found = ChatParts(instruction, response)
    instruction, response = instruction or found.instruction, response or found.response
    if instruction == response:
        raise ValueError(
            f"instruction_part and response_part are the same text, {response!r}; pass what tells them apart"
        )
    others = tuple(other for other in found.others if other not in (instruction, response))
    return ChatParts(instruction, response, others, found.end)


class ResponseMask:
    """
    Masks the labels of tokenised rows; a function for `Dataset.map(..., batched=True)`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The one that the rows were tokenised with.
        parts (`ChatParts`, *optional*): What tells turns apart. Without, the labels stay and only the ends of turns
            are added.
        stop (`set[int]`): Ids of tokens that end a turn.
        counted (`bool`, *optional*, defaults to `True`): Whether to return counts as columns too.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, parts: ChatParts | None, stop: set[int], counted: bool = True
    ):
        self.tokenizer, self.parts, self.stop, self.counted = tokenizer, parts, stop, counted

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """
        Args:
            batch (`dict[str, list]`): Columns `input_ids`, `labels`, and `seq_lengths` if rows hold several samples.

        Returns:
            `dict[str, list]`: The same columns, and one column for each name in `_COUNTS`.
        """
        packed = "seq_lengths" in batch
        result = {name: [] for name in ("input_ids", "labels", *(["seq_lengths"] if packed else []), *_COUNTS)}
        for row, input_ids in enumerate(batch["input_ids"]):
            labels = batch["labels"][row] if "labels" in batch else input_ids
            lengths = batch["seq_lengths"][row] if packed else [len(input_ids)]
            ids_out, labels_out, lengths_out, counts, start = [], [], [], [0, 0], 0
            for length in lengths:
                ids = list(map(int, input_ids[start : start + length]))
                first, last = self._without_repeats(ids)
                counts[1] += last - first < len(ids)
                masked, found = self.mask(ids[first:last], list(map(int, labels[start + first : start + last])))
                counts[0] += not found
                ids_out += ids[first:last]
                labels_out += masked
                lengths_out.append(last - first)
                start += length
            values = [ids_out, labels_out, *([lengths_out] if packed else []), *counts]
            for name, value in zip(result, values, strict=True):
                result[name].append(value)
        return result if self.counted else {name: result[name] for name in result if name not in _COUNTS}

    def _without_repeats(self, ids: list[int]) -> tuple[int, int]:
        """Where a sample begins and ends without the second of two BOS or EOS."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        first, last = 0, len(ids)
        if bos is not None and bos != eos and ids[:2] == [bos, bos]:
            first = 1
        if eos is not None and bos != eos and last - first > 2 and ids[-1] == eos:
            # TRL appends EOS to a text that does not end with it, be it that only a line feed follows
            before = last - 2
            while before > first and ids[before] != eos and not self.tokenizer.decode([ids[before]]).strip():
                before -= 1
            if ids[before] == eos and before > first:
                last = before + 1
        return first, last

    def mask(self, ids: list[int], labels: list[int]) -> tuple[list[int], bool]:
        """
        One sample.

        Args:
            ids (`list[int]`): Its tokens.
            labels (`list[int]`): Its labels; -100 is ignored.

        Returns:
            The labels, -100 outside of responses, and whether there is a response in it.
        """
        if self.parts is None:
            found = any(label != IGNORE for label in labels)
        else:
            spans = self._responses(ids)
            kept = [IGNORE] * len(ids)
            for start, stop in spans:
                kept[start:stop] = labels[start:stop]
            labels, found = kept, bool(spans)
        # a mask that leaves out the end of a turn teaches a model that does not stop
        for i in range(1, len(ids)):
            ends_here = labels[i] == IGNORE and ids[i] in self.stop
            if ends_here and labels[i - 1] != IGNORE and ids[i - 1] not in self.stop:
                labels[i] = ids[i]
        return labels, found

    def _responses(self, ids: list[int]) -> list[tuple[int, int]]:
        """First and last token (excluded) of each response."""
        text = self.text(ids)
        exact = (self.parts.response, self.parts.instruction, *self.parts.others)
        # some tokenizers do not give back the whitespace around special tokens
        for strip in (False, True):
            response, *others = [part.strip() for part in exact] if strip else exact
            if response in text:
                break
        else:
            return []
        # the longest first, where several begin at the same place
        parts = sorted({response, *others}, key=len, reverse=True)
        found = list(re.finditer("|".join(map(re.escape, parts)), text))
        ends = [*(match.start() for match in found[1:]), _without_half_a_part(text, parts)]
        places = [
            (match.end(), end)
            for match, end in zip(found, ends, strict=True)
            if match[0] == response and match.end() < end
        ]
        token_spans = self._token_spans(ids, text) if places else None
        spans = [token_spans(start, end) for start, end in places]
        return [(start, self._end_of_turn(ids, start, stop)) for start, stop in spans if start < stop]

    def _end_of_turn(self, ids: list[int], start: int, stop: int) -> int:
        """`stop`, without whitespace that a template writes behind the token on which a model stops."""
        last = stop
        while last > start and ids[last - 1] not in self.stop and not self.tokenizer.decode([ids[last - 1]]).strip():
            last -= 1
        return last if last > start and ids[last - 1] in self.stop else stop

    def text(self, ids: list[int]) -> str:
        """What the tokens stand for, special ones too."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _token_spans(self, ids: list[int], text: str) -> Callable[[int, int], tuple[int, int]]:
        """What turns a place in the text into the tokens that have a part in it."""
        ends: Any = None
        if self.tokenizer.is_fast:
            again = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            if again["input_ids"] == ids:
                ends = list(accumulate((end for _, end in again["offset_mapping"]), max))
        if ends is None:
            # cut by hand, truncated within a character, or a tokenizer without offsets: by the length of what comes
            # before, asked for a few tokens only
            ends = _PrefixEnds(self.text, ids)

        def span(start: int, end: int) -> tuple[int, int]:
            if end == len(text):
                return bisect_right(ends, start), len(ids)
            stop = bisect_right(ends, end)
            if stop < len(ids) and (ends[stop - 1] if stop else 0) < len(text[:end].rstrip()):
                stop += 1  # a token that has the end of the response in it, and the beginning of what follows
            return bisect_right(ends, start), stop

        return span


def _without_half_a_part(text: str, parts: list[str]) -> int:
    """Where a text ends, without the first characters of a part that truncation has left there."""
    longest = min(max(map(len, parts)) - 1, len(text))
    for length in range(longest, _LEAST_HALF - 1, -1):
        if any(part.startswith(text[-length:]) for part in parts):
            return len(text) - length
    return len(text)


class _PrefixEnds:
    """For each token, where its text ends: a sequence that works out what it is asked for."""

    def __init__(self, decode: Callable[[list[int]], str], ids: list[int]):
        self.decode, self.ids = decode, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> int:
        # a character that is not complete yet is shown as U+FFFD
        return len(self.decode(self.ids[: index + 1]).rstrip("\ufffd"))


def _masked(dataset: Any, mask: ResponseMask, name: str, num_proc: int | None) -> tuple[Any, ResponseCount | None]:
    """The dataset with its labels masked, and what was done; a stream is not counted."""
    if isinstance(dataset, IterableDataset):
        rows = list(dataset.take(_LOOKED_AT))
        if rows:
            _require_columns(rows[0], name)
            batch = {
                key: [row[key] for row in rows] for key in rows[0] if key in ("input_ids", "labels", "seq_lengths")
            }
            labels = mask(batch)["labels"]
            if all(label == IGNORE for row in labels for label in row[1:]):
                raise ValueError(_nothing(mask, name, rows[0]["input_ids"], f"the first {len(rows)} rows of "))
        uncounted = ResponseMask(mask.tokenizer, mask.parts, mask.stop, counted=False)
        masked = dataset.map(uncounted, batched=True, batch_size=_LOOKED_AT)
        return masked.filter(_has_label, input_columns="labels"), None
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"the {name} dataset is a {type(dataset).__name__}; use a datasets.Dataset or IterableDataset"
        )
    _require_columns(dataset.column_names, name)
    before = count_tokens(dataset if "labels" in dataset.column_names else _with_labels(dataset))
    masked = dataset.map(mask, batched=True, num_proc=num_proc, desc=f"Masking {name} labels")
    without_response, repeated = (sum(masked[column]) for column in _COUNTS)
    masked = masked.remove_columns(list(_COUNTS))
    after = count_tokens(masked)
    if not after.labels:
        raise ValueError(_nothing(mask, name, dataset[0]["input_ids"] if len(dataset) else [], ""))
    if after.unlabelled_rows:
        masked = masked.filter(
            _has_label, input_columns="labels", num_proc=num_proc, desc="Dropping rows without label"
        )
        after = count_tokens(masked)
    count = ResponseCount(
        rows=after.rows,
        dropped_rows=before.rows - after.rows,
        tokens=after.tokens,
        labels_before=before.labels,
        labels=after.labels,
        without_response=without_response,
        repeated=repeated,
    )
    return masked, count


def _has_label(labels: list[int]) -> bool:
    return any(label != IGNORE for label in labels[1:])


def _with_labels(dataset: Dataset) -> Dataset:
    return dataset.map(lambda batch: {"labels": batch["input_ids"]}, batched=True)


def _require_columns(columns: Any, name: str) -> None:
    if "input_ids" not in columns:
        raise ValueError(
            f"the {name} dataset has no input_ids but {', '.join(columns)}: call train_on_responses_only after "
            "SFTTrainer has tokenised it, and for images set assistant_only_loss=True instead"
        )


def _nothing(mask: ResponseMask, name: str, ids: list[int], which: str) -> str:
    shown = mask.text(list(map(int, ids)))[:_SHOWN]
    if mask.parts is None:
        how = (
            "TRL's assistant masks (assistant_only_loss=True) are empty; check the generation markers of the template"
        )
    else:
        how = (
            f"instruction_part={mask.parts.instruction!r} and response_part={mask.parts.response!r} leave no label. "
            "Pass both as they stand in the text, or raise max_length if the responses were cut off"
        )
    return f"nothing would be learned from {which}the {name} dataset: {how}. Its first row begins {shown!r}"


def _describe(name: str, count: ResponseCount) -> str:
    line = (
        f"{name} dataset: {count.labels:,} of {count.tokens:,} tokens ({count.share:.1%}) are responses and are "
        f"learned, {count.labels_before:,} were before"
    )
    if count.dropped_rows:
        line += f"; {count.dropped_rows:,} rows without a response are dropped"
    if count.without_response:
        line += (
            f"; no response was found in {count.without_response:,} samples: those that max_length "
            "cuts off before it, for one, or whose beginning packing_strategy 'bfd_split' or 'wrapped' puts elsewhere"
        )
    if count.repeated:
        line += f"; a second BOS or EOS was taken out of {count.repeated:,} samples"
    return line
