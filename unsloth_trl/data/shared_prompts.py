"""Rows of a GRPO batch without padding, in which completions of one prompt share it.

TRL hands over rows `[prompt, left-padded | completion, right-padded]`. Here they become one row of segments, level by
level: all prompts without their last token, then for each completion `[last token of its prompt, completion without
its last token]`, whose parent is its prompt. So every labelled token has exactly one predecessor that predicts it, the
prompt's tokens go through the model once, and positions continue as in a row of their own. Without sharing a row is
one segment, and so is a completion that is alone with its prompt.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..patches.layout import NO_PARENT, PackedLayout


IGNORE = -100


class Row(NamedTuple):
    """One completion: the prompt's ids as bytes (what makes a group), and both lengths, without padding or mask."""

    prompt: bytes
    prompt_length: int
    completion_length: int


class SharedRows(NamedTuple):
    """
    One row of `num_tokens` tokens that replaces some rows of a padded batch of shape `(batch, width)`.

    Attributes:
        layout (`PackedLayout`): Its segments.
        index (`torch.Tensor` of shape `(num_tokens + 3 * num_labels,)`, int64): In one buffer, where each token stands
            in the flattened batch; the position in this row of each token that predicts a label; where that label
            stands in the flattened batch; where its score belongs in the flattened `(batch, logits_to_keep)` result.
        weights (`torch.Tensor` of shape `(1, num_tokens)`, fp32, or `None`): In how many rows of the padded batch each
            token stands, for a loss over tokens such as the load-balancing one.
    """

    layout: PackedLayout
    index: torch.Tensor
    weights: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    def to(self, device: torch.device) -> "SharedRows":
        """On `device`, without waiting for it."""
        if device.type != "cuda":
            return SharedRows(*(None if x is None else x.to(device) for x in self))
        return SharedRows(*(None if x is None else x.pin_memory().to(device, non_blocking=True) for x in self))

    def split(self) -> tuple[torch.Tensor, ...]:
        """The four parts of `index`."""
        num_labels = (self.index.numel() - self.num_tokens) // 3
        return self.index.split([self.num_tokens, num_labels, num_labels, num_labels])


def describe_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> list[Row] | str:
    """
    Lengths and prompts of a padded batch; one copy from the device.

    Args:
        input_ids (`torch.Tensor` of shape `(batch, width)`, int64): Prompts on the left, completions on the right.
        attention_mask (`torch.Tensor`, same shape, integer): 0 for padding and for completions that are masked.
        logits_to_keep (`int`): Width of the completions.

    Returns:
        `list[Row]`: In the order of the batch; or, as `str`, why these rows cannot be packed.
    """
    both = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu().numpy()
    ids, mask = both[0], both[1] != 0
    width = ids.shape[1] - logits_to_keep
    prompt_mask, completion_mask = mask[:, :width], mask[:, width:]
    prompt_lengths, completion_lengths = prompt_mask.sum(1), completion_mask.sum(1)
    if (prompt_mask[:, 1:] < prompt_mask[:, :-1]).any() or (completion_mask[:, 1:] > completion_mask[:, :-1]).any():
        return "the mask of a row has holes"
    if not prompt_lengths.all():
        return "a prompt has no token"
    return [
        Row(row[width - prompt : width].tobytes(), int(prompt), int(completion))
        for row, prompt, completion in zip(ids, prompt_lengths, completion_lengths, strict=True)
    ]


def find_groups(rows: Sequence[Row], share: bool = True) -> list[list[int]]:
    """Indices of rows with equal prompts, in the order in which the prompts appear; each row alone without `share`."""
    if not share:
        return [[i] for i in range(len(rows))]
    groups: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.prompt, []).append(i)
    return list(groups.values())


def count_tokens(rows: Sequence[Row], members: Sequence[int]) -> int:
    """Tokens of a packed row that holds `members`, all of one prompt."""
    completions = sum(rows[i].completion_length for i in members)
    return rows[members[0]].prompt_length - 1 + completions if completions else 0


def cut_by_tokens(rows: Sequence[Row], groups: Sequence[Sequence[int]], max_tokens: int) -> list[list[list[int]]]:
    """
    Passes of at most `max_tokens` tokens, or of one completion where that alone has more. A group stays together if it
    fits into a pass; completions without tokens are left out.

    Args:
        rows (`Sequence[Row]`): The batch.
        groups (`Sequence[Sequence[int]]`): Indices into `rows`, those of a group with one prompt.
        max_tokens (`int`): Budget of a pass.

    Returns:
        `list[list[list[int]]]`: For each pass its groups or parts of groups.
    """
    passes: list[list[list[int]]] = []
    room: list[int] = []
    for members in groups:
        parts: list[list[int]] = []
        for i in members:
            if not rows[i].completion_length:
                continue
            if not parts or count_tokens(rows, [*parts[-1], i]) > max_tokens:
                parts.append([])
            parts[-1].append(i)
        for part in parts:
            size = count_tokens(rows, part)
            place = next((p for p, free in enumerate(room) if size <= free), None)
            if place is None:
                place = len(passes)
                passes.append([])
                room.append(max_tokens)
            passes[place].append(part)
            room[place] -= size
    return passes


def build_shared_rows(
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    width: int,
    logits_to_keep: int,
    *,
    all_tokens: bool = False,
) -> SharedRows:
    """
    The packed row of some rows of a padded batch.

    Args:
        rows (`Sequence[Row]`): The batch.
        groups (`Sequence[Sequence[int]]`): Which rows of it to take; those of one inner list have one prompt.
        width (`int`): Columns of the padded batch.
        logits_to_keep (`int`): How many of these are the completions'.
        all_tokens (`bool`, *optional*, defaults to `False`): Include tokens that predict no label, and completions
            without tokens, and count in how many padded rows each token stands.

    Returns:
        `SharedRows`: On the CPU. Without any completion to score it holds one token and no label.
    """
    roots: list[tuple[int, int, int, int]] = []  # row, first column, tokens, first completion column's position or -1
    children: list[tuple[int, int, int, int]] = []
    parents, root_weights, child_weights = [], [], []
    prompt_width = width - logits_to_keep
    extra = 1 if all_tokens else 0
    for members in groups:
        scored = [i for i in members if all_tokens or rows[i].completion_length]
        if not scored:
            continue
        prompt_length = rows[scored[0]].prompt_length
        start = prompt_width - prompt_length
        if len(scored) == 1 or prompt_length == 1:
            for i in scored:
                roots.append((i, start, prompt_length - 1 + max(rows[i].completion_length + extra, 1), prompt_length))
                root_weights.append(1.0)
            continue
        parent = len(roots)
        roots.append((scored[0], start, prompt_length - 1, 0))
        root_weights.append(float(len(scored)))
        for i in scored:
            children.append((i, prompt_width - 1, max(rows[i].completion_length + extra, 1), 1))
            parents.append(parent)
            child_weights.append(1.0)
    if not roots:
        first = next(members[0] for members in groups if members)
        roots, root_weights = [(first, prompt_width - 1, 1, 0)], [1.0]
    source, position, label, target, offset = [], [], [], [], 0
    for i, column, length, prompt_tokens in (*roots, *children):
        first = i * width + column
        source.append(np.arange(first, first + length))
        labels = rows[i].completion_length if prompt_tokens else 0
        if labels:
            predictor = offset + prompt_tokens - 1
            position.append(np.arange(predictor, predictor + labels))
            label.append(np.arange(i * width + prompt_width, i * width + prompt_width + labels))
            target.append(np.arange(i * logits_to_keep, i * logits_to_keep + labels))
        offset += length
    lengths = [length for _, _, length, _ in (*roots, *children)]
    weights = None
    if all_tokens:
        weights = torch.from_numpy(np.repeat(np.array([*root_weights, *child_weights], np.float32), lengths))[None]
    return SharedRows(
        layout=PackedLayout(lengths, [NO_PARENT] * len(roots) + parents),
        index=torch.from_numpy(np.concatenate([*source, *position, *label, *target]).astype(np.int64)),
        weights=weights,
    )


def order_rows(
    rows: Sequence[Row],
    groups: Sequence[Sequence[int]],
    rows_per_batch: int,
    batches_per_window: int,
    balance: bool = True,
) -> list[int]:
    """
    Rows in a new order, in which a cut every `rows_per_batch` rows keeps groups together where they fit.

    Groups are dealt to windows (the micro-batches of one optimizer step) in the order given, which should be random.
    Within a window, with `balance`, groups go to micro-batches by tokens, the largest first, each to the one with the
    fewest so far that has room (Graham's longest-processing-time rule).

    Args:
        rows (`Sequence[Row]`): A number of rows that `rows_per_batch` divides.
        groups (`Sequence[Sequence[int]]`): Indices into `rows`, each once.
        rows_per_batch (`int`): Rows of a micro-batch.
        batches_per_window (`int`): Micro-batches between two optimizer steps.
        balance (`bool`, *optional*, defaults to `True`): Balance the tokens of the micro-batches of a window.

    Returns:
        `list[int]`: A permutation of the indices of `rows`.
    """
    per_window = rows_per_batch * batches_per_window
    windows: list[list[list[int]]] = [[] for _ in range(-(-len(rows) // per_window))]
    place = 0
    for members in groups:
        members = list(members)
        while members:
            window, used = divmod(place, per_window)
            part, members = members[: per_window - used], members[per_window - used :]
            windows[window].append(part)
            place += len(part)
    order: list[int] = []
    for window in windows:
        if not balance:
            order += [i for part in window for i in part]
            continue
        batches: list[list[int]] = [[] for _ in range(-(-sum(map(len, window)) // rows_per_batch))]
        tokens = [0] * len(batches)
        # largest first; of equal ones the first dealt
        heap = [
            (-count_tokens(rows, part), turn, part) for turn, part in enumerate(_pieces(rows, window, rows_per_batch))
        ]
        heapq.heapify(heap)
        while heap:
            size, turn, part = heapq.heappop(heap)
            fits = [b for b, batch in enumerate(batches) if len(batch) + len(part) <= rows_per_batch]
            if fits:
                place = min(fits, key=tokens.__getitem__)
            else:
                place = min(range(len(batches)), key=lambda b: len(batches[b]))
                room = rows_per_batch - len(batches[place])
                part, rest = part[:room], part[room:]
                size = -count_tokens(rows, part)
                heapq.heappush(heap, (-count_tokens(rows, rest), turn, rest))
            batches[place] += part
            tokens[place] -= size
        order += [i for batch in batches for i in batch]
    return order


def _pieces(rows: Sequence[Row], groups: Sequence[list[int]], rows_per_batch: int) -> list[list[int]]:
    return [piece for members in groups for piece in _deal(rows, members, rows_per_batch)]


def _deal(rows: Sequence[Row], members: list[int], rows_per_batch: int) -> list[list[int]]:
    """A group in parts of at most `rows_per_batch` rows with about the same number of tokens."""
    count = -(-len(members) // rows_per_batch)
    if count == 1:
        return [members]
    by_length = sorted(members, key=lambda i: rows[i].completion_length, reverse=True)
    parts: list[list[int]] = [[] for _ in range(count)]
    for turn, i in enumerate(by_length):
        lap, step = divmod(turn, count)
        parts[step if lap % 2 == 0 else count - 1 - step].append(i)
    return parts
