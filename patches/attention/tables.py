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
    Blocks of zeros, which those of static sizes end with, have no rows.

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
        `Tables`: Made on the host, in one copy; on the device for a layout of any lengths, whose tables have static
        sizes and no divided blocks.
    """
    if layout.any_lengths:
        return _static_tables(layout, q_rows, d_rows, k_rows, group)
    lengths = layout.seqlens
    parents = layout.parents or (NO_PARENT,) * len(lengths)
    starts = list(itertools.accumulate(lengths, initial=0))
    positions: list[int] = []
    ancestors: list[tuple[int, ...]] = []  # from the root down, the segment itself last
    seen_by: list[list[int]] = []  # itself first
    for i, parent in enumerate(parents):
        root = parent == NO_PARENT
        positions.append(0 if root else positions[parent] + lengths[parent])
        ancestors.append((i,) if root else (*ancestors[parent], i))
        seen_by.append([])
        for ancestor in ancestors[i]:
            seen_by[ancestor].append(i)

    def tiles(block: int, others: list) -> tuple[list, list]:
        spans, found = [], []
        for i, n in enumerate(lengths):
            if n:
                mine = [(starts[j], starts[j + 1], positions[j]) for j in others[i] if lengths[j]]
                numbers = (starts[i + 1], starts[i], positions[i], len(spans), len(spans) + len(mine))
                spans += mine
                found += [(first, *numbers) for first in range(starts[i], starts[i + 1], block)]
        return found, spans

    def queries(block: int) -> tuple[list, list]:
        found, spans = tiles(block, ancestors)
        found.sort(key=lambda tile: -sum(_keys(tile, block, spans)))
        return found, spans

    (q_tiles, q_spans), (d_tiles, _) = queries(q_rows), queries(d_rows)
    k_tiles, k_spans = tiles(k_rows, seen_by)
    k_tiles, k_sums = _divided(k_tiles, k_spans, group, programs, least_work)
    parts = [q_tiles, d_tiles, q_spans, k_tiles, k_spans, k_sums]
    flat = torch.tensor([number for part in parts for row in part for number in row], dtype=torch.int32)
    if layout.device.type == "cuda":
        flat = flat.pin_memory().to(layout.device, non_blocking=True)
    sizes = [len(part) * width for part, width in zip(parts, WIDTHS, strict=True)]
    tables = [x.view(-1, width) for x, width in zip(flat.split(sizes), WIDTHS, strict=True)]
    return Tables(*tables, num_slots=k_sums[-1][3] if k_sums else 0)


def _keys(tile: tuple, block: int, spans: list) -> list[int]:
    """Of each span of a block of queries, the keys that its last one sees."""
    first, end, start = tile[:3]
    last = min(first + block, end)
    return [(last if own == start else stop) - own for own, stop, _ in spans[slice(*tile[4:])]]


def _queries(tile: tuple, spans: list) -> list[int]:
    """Of each span of a block of keys, the queries that see its first one."""
    first, start = tile[0], tile[2]
    return [stop - (first if own == start else own) for own, stop, _ in spans[slice(*tile[4:])]]


def _divided(tiles: list, spans: list, group: int, programs: int, least_work: int) -> tuple[list, list]:
    """Tiles of keys with their units and slots, those with the most work first, and the sums."""
    work = [_queries(tile, spans) * group for tile in tiles]
    most = max(sum(map(sum, work)) / programs, least_work)
    found, sums, slots = [], [], 0
    for tile, units in zip(tiles, work, strict=True):
        cuts = _cuts(units, math.ceil(sum(units) / most))
        if len(cuts) == 2:
            found.append((-sum(units), (*tile, 0, len(units), -1)))
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


def _static_tables(layout: PackedLayout, q_rows: int, d_rows: int, k_rows: int, group: int) -> Tables:
    """Tables of segments without parents whose boundaries only the device knows."""
    cu_seqlens = layout.cu_seqlens
    number = cu_seqlens.shape[0] - 1
    spans = torch.stack([cu_seqlens[:-1], cu_seqlens[1:], torch.zeros_like(cu_seqlens[1:])], dim=1)
    lengths = cu_seqlens.diff()

    def tiles(rows: int, of_keys: bool) -> torch.Tensor:
        blocks = (lengths + (rows - 1)) // rows
        ends = blocks.cumsum(0, dtype=torch.int32)
        tile = torch.arange(layout.num_tokens // rows + number, dtype=torch.int32, device=cu_seqlens.device)
        segment = torch.searchsorted(ends, tile, right=True, out_int32=True)
        live = segment < number
        segment = segment.clamp(max=number - 1)
        start, end = cu_seqlens[segment], cu_seqlens[segment + 1]
        first = start + (tile - (ends - blocks)[segment]) * rows
        work = (end - first if of_keys else torch.minimum(first + rows, end) - start) * live
        numbers = [first, end, start, torch.zeros_like(start), segment, segment + 1]
        if of_keys:
            numbers += [torch.zeros_like(start), torch.full_like(start, group), torch.full_like(start, -1)]
        table = torch.stack(numbers, dim=1) * live[:, None]
        return table[work.argsort(descending=True, stable=True)]

    none = spans.new_empty(0, WIDTHS[-1])
    return Tables(tiles(q_rows, False), tiles(d_rows, False), spans, tiles(k_rows, True), spans, none)
