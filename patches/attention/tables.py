"""The tables that the fused attention kernels walk by: blocks of rows, and the spans that each of them looks at."""

import itertools
import math
from typing import NamedTuple

import torch

from ..layout import NO_PARENT, PackedLayout


WIDTHS = (6, 6, 3, 9, 3, 4)
LEAST_WORK = 2048  # rows of queries of all heads: a block of keys with fewer is not divided


class Tables(NamedTuple):
    """
    Blocks and spans of a layout, all int32 on its device. A block is `(first row, end of its segment, start of the
    segment, position of the start, first span, end span)`, a span `(first row, end row, position of the first row)`.

    Args:
        q_tiles (`torch.Tensor` of shape `(num_q_tiles, 6)`): Blocks of queries, those with the most keys first.
        d_tiles (`torch.Tensor` of shape `(num_d_tiles, 6)`): The same for their gradients, in blocks of another size.
        q_spans (`torch.Tensor` of shape `(num_q_spans, 3)`): Keys that the queries of a segment see.
        k_tiles (`torch.Tensor` of shape `(num_k_tiles, 9)`): Blocks of keys, those with the most queries first, each
            with `(first unit, end unit, slot)` behind it. A unit is one span of one query head, all spans of a head
            before the next head's; a block that is divided has several tiles with a slot each, others one and -1.
        k_spans (`torch.Tensor` of shape `(num_k_spans, 3)`): Queries that see the keys of a segment.
        k_sums (`torch.Tensor` of shape `(num_divided, 4)`): Of each divided block `(first row, end of its segment,
            first slot, end slot)`.
        num_slots (`int`): Slots of all divided blocks.
    """

    q_tiles: torch.Tensor
    d_tiles: torch.Tensor
    q_spans: torch.Tensor
    k_tiles: torch.Tensor
    k_spans: torch.Tensor
    k_sums: torch.Tensor
    num_slots: int = 0


def build_tables(
    layout: PackedLayout,
    q_rows: int,
    d_rows: int,
    k_rows: int,
    *,
    group: int = 1,
    programs: int = 1,
    least_work: int = LEAST_WORK,
) -> Tables:
    """
    Args:
        layout (`PackedLayout`): Segments, with parents or without, in any order.
        q_rows, d_rows, k_rows (`int`): Rows of a block of queries, of one of their gradients, and of one of keys.
        group (`int`, *optional*): Query heads of a key head.
        programs (`int`, *optional*): Tiles of keys, per key head, that the card wants to have for its balance. The
            keys of a prompt have the queries of all its completions; a block of them with more than its share of the
            work is divided.
        least_work (`int`, *optional*): No block with fewer rows of queries, those of all heads counted, is divided.

    Returns:
        `Tables`: Made on the host, in one copy.
    """
    lengths = layout.seqlens
    parents = layout.parents or (NO_PARENT,) * len(lengths)
    starts = list(itertools.accumulate(lengths, initial=0))
    positions: list[int] = []
    ancestors: list[tuple[int, ...]] = []  # from the root down, the segment itself last
    seen_by: list[list[int]] = []
    for i, parent in enumerate(parents):
        root = parent == NO_PARENT
        positions.append(0 if root else positions[parent] + lengths[parent])
        ancestors.append((i,) if root else (*ancestors[parent], i))
        seen_by.append([])
        for ancestor in ancestors[i]:
            seen_by[ancestor].append(i)

    def span(i: int) -> tuple[int, int, int]:
        return starts[i], starts[i + 1], positions[i]

    def tiles(block: int, others: list) -> tuple[list, list]:
        spans, found = [], []
        for i, n in enumerate(lengths):
            if not n:
                continue
            mine = [span(j) for j in others[i] if lengths[j]]
            work = sum(end - start for start, end, _ in mine)
            first_span, end_span = len(spans), len(spans) + len(mine)
            spans += mine
            for first in range(starts[i], starts[i + 1], block):
                found.append((-work, (first, starts[i + 1], starts[i], positions[i], first_span, end_span)))
        found.sort(key=lambda tile: tile[0])
        return [tile for _, tile in found], spans

    (q_tiles, q_spans), (d_tiles, _) = tiles(q_rows, ancestors), tiles(d_rows, ancestors)
    k_tiles, k_spans = tiles(k_rows, seen_by)
    k_tiles, k_sums = _divided(k_tiles, k_spans, group, programs, least_work)
    parts = [q_tiles, d_tiles, q_spans, k_tiles, k_spans, k_sums]
    flat = torch.tensor([number for part in parts for row in part for number in row], dtype=torch.int32)
    if layout.device.type == "cuda":
        flat = flat.pin_memory().to(layout.device, non_blocking=True)
    sizes = [len(part) * width for part, width in zip(parts, WIDTHS, strict=True)]
    tables = [x.view(-1, width) for x, width in zip(flat.split(sizes), WIDTHS, strict=True)]
    return Tables(*tables, num_slots=k_sums[-1][3] if k_sums else 0)


def _divided(tiles: list, spans: list, group: int, programs: int, least_work: int) -> tuple[list, list]:
    """Tiles of keys with their units and slots, those with the most work first, and the sums."""
    lengths = [end - start for start, end, _ in spans]
    work = [group * sum(lengths[tile[4] : tile[5]]) for tile in tiles]
    most = max(sum(work) / programs, least_work)
    found, sums, slots = [], [], 0
    for tile, whole in zip(tiles, work, strict=True):
        units = lengths[tile[4] : tile[5]] * group
        cuts = _cuts(units, math.ceil(whole / most))
        if len(cuts) == 2:
            found.append((-whole, (*tile, 0, len(units), -1)))
            continue
        sums.append((*tile[:2], slots, slots + len(cuts) - 1))
        for first, end in itertools.pairwise(cuts):
            found.append((-sum(units[first:end]), (*tile, first, end, slots)))
            slots += 1
    found.sort(key=lambda tile: tile[0])
    return [tile for _, tile in found], sums


def _cuts(units: list[int], pieces: int) -> list[int]:
    """Where to cut units, in their order, for at most so many pieces of about the same work."""
    cuts, reached, whole = [0], 0, sum(units)
    for i, unit in enumerate(units[:-1], 1):
        reached += unit
        if reached * pieces >= whole * len(cuts):
            cuts.append(i)
    return [*cuts, len(units)]
