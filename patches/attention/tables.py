"""The tables that the fused attention kernels walk by: blocks of rows, and the spans that each of them looks at."""

import bisect
import itertools
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
    segments = _segments(layout)
    q_tiles, q_spans = segments.tiles(q_rows, segments.by_query)
    d_tiles, _ = segments.tiles(d_rows, segments.by_query)
    k_tiles, k_spans = segments.tiles(k_rows, segments.by_key)
    q_tiles, d_tiles = (_most_first(x, _num_keys(x, rows)) for x, rows in ((q_tiles, q_rows), (d_tiles, d_rows)))
    k_tiles, k_sums = _divided(k_tiles, k_spans, group, programs, least_work)
    parts = [q_tiles, d_tiles, q_spans, k_tiles, k_spans, k_sums]
    flat = torch.cat([part.flatten() for part in parts]).to(torch.int32)
    if layout.device.type == "cuda":
        flat = flat.pin_memory().to(layout.device, non_blocking=True)
    tables = [x.view(-1, width) for x, width in zip(flat.split([part.numel() for part in parts]), WIDTHS, strict=True)]
    return Tables(*tables, num_slots=int(k_sums[-1, 3]) if len(k_sums) else 0)


class _Segments(NamedTuple):
    """
    Segments on the host, all int64. Tables of long rows have thousands of numbers, too many for Python to touch each.

    Args:
        lengths (`torch.Tensor` of shape `(num_segments,)`): Tokens of each.
        bounds (`torch.Tensor` of shape `(num_segments, 3)`): As spans: first row, end row, position of the first row.
        by_query (`tuple`): Spans of each segment's ancestors, from the root to itself, as indices of segments, and how
            many these are. Those without tokens have none and are none.
        by_key (`tuple`): The same for itself and its descendants.
    """

    lengths: torch.Tensor
    bounds: torch.Tensor
    by_query: tuple[torch.Tensor, torch.Tensor]
    by_key: tuple[torch.Tensor, torch.Tensor]

    def tiles(self, rows: int, others: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks of so many rows, in their order, and their spans."""
        spans, counts = others
        blocks = (self.lengths + (rows - 1)) // rows
        segment = torch.repeat_interleave(blocks)
        within = torch.arange(len(segment)) - (blocks.cumsum(0) - blocks)[segment]
        start, end, position = self.bounds[segment].unbind(1)
        end_span = counts.cumsum(0)
        numbers = [start + within * rows, end, start, position, (end_span - counts)[segment], end_span[segment]]
        return torch.stack(numbers, dim=1), self.bounds[spans]


def _segments(layout: PackedLayout) -> _Segments:
    lengths, number = torch.tensor(layout.seqlens, dtype=torch.int64), layout.num_segments
    each = torch.arange(number)
    if layout.parents is None:
        above, below, positions = each, each, torch.zeros_like(each)
    else:
        ancestors: list[tuple[int, ...]] = []  # from the root down, the segment itself last
        for i, parent in enumerate(layout.parents):
            ancestors.append((i,) if parent == NO_PARENT else (*ancestors[parent], i))
        above = torch.tensor(list(itertools.chain.from_iterable(ancestors)))
        below = torch.repeat_interleave(torch.tensor([len(found) for found in ancestors]))
        positions = torch.zeros_like(each).index_add_(0, below, lengths[above]) - lengths
    ends = lengths.cumsum(0)
    live = (lengths[above] > 0) & (lengths[below] > 0)
    above, below = above[live], below[live]
    return _Segments(
        lengths,
        torch.stack([ends - lengths, ends, positions], dim=1),
        (above, below.bincount(minlength=number)),
        (below[above.argsort(stable=True)], above.bincount(minlength=number)),
    )


def _num_keys(tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """Keys that the last query of each block sees."""
    first, end, start, position, *_ = tiles.unbind(1)
    return torch.minimum(first + rows, end) - start + position


def _most_first(tiles: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    return tiles[work.argsort(descending=True, stable=True)]


class _Block(NamedTuple):
    """
    A block of keys, whose units are all spans of one query head, then all of the next.

    Args:
        through (`list[int]`): Queries in front of each span of the table, and of all.
        first, end (`int`): Its spans.
        missed (`int`): Queries of the first span, its own segment, that come before the block.
        group (`int`): Query heads.
    """

    through: list[int]
    first: int
    end: int
    missed: int
    group: int

    def work(self, unit: int) -> int:
        """Queries in the units in front of one."""
        head, span = divmod(unit, self.end - self.first)
        return head * self._before(self.end) + (self._before(self.first + span) if span else 0)

    def _before(self, span: int) -> int:
        return self.through[span] - self.through[self.first] - self.missed

    def cuts(self, pieces: int) -> list[int]:
        """Where to cut the units, in their order, for at most so many pieces of about the same work."""
        cuts, spans = [0], self.end - self.first
        number, whole = self.group * spans, self._before(self.end)
        for piece in range(1, pieces):
            head, rest = divmod(-(-self.group * whole * piece // pieces), whole)
            cut = head * spans
            if rest:
                below = rest + self.through[self.first] + self.missed
                cut += bisect.bisect_left(self.through, below, self.first + 1, self.end) - self.first
            cut = max(cut, cuts[-1] + 1)
            if cut >= number:
                break
            cuts.append(cut)
        return [*cuts, number]


def _divided(tiles, spans, group: int, programs: int, least_work: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of keys with their units and slots, those with the most work first, and the sums."""
    first, end, start, _, first_span, end_span = tiles.unbind(1)
    sizes = spans[:, 1] - spans[:, 0]
    through = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    work = (through[end_span] - through[first_span] - (first - start)) * group
    most = max(int(work.sum()) / programs, least_work)
    pieces = (work.double() / most).ceil().long()
    large = pieces.gt(1).nonzero().flatten()
    numbers = torch.stack([first, end, first_span, end_span, first - start, pieces], dim=1)[large].tolist()
    counts, sums, units, weights = torch.ones_like(work), [], [], []
    through = through.tolist() if numbers else []
    for i, (row, end_row, low, high, missed, number) in zip(large.tolist(), numbers, strict=True):
        block = _Block(through, low, high, missed, group)
        pairs = list(itertools.pairwise(block.cuts(number)))
        if len(pairs) > 1:
            counts[i] = len(pairs)
            sums.append((row, end_row, len(units), len(units) + len(pairs)))
            units += pairs
            weights += [block.work(b) - block.work(a) for a, b in pairs]
    tile = torch.repeat_interleave(counts)
    whole = torch.stack([torch.zeros_like(work), (end_span - first_span) * group, torch.full_like(work, -1)], dim=1)
    whole, work = whole[tile], work[tile]
    if sums:
        parted = (counts > 1)[tile]
        whole[parted] = torch.cat([torch.tensor(units), torch.arange(len(units))[:, None]], dim=1)
        work[parted] = torch.tensor(weights)
    found = _most_first(torch.cat([tiles[tile], whole], dim=1), work)
    return found, torch.tensor(sums, dtype=torch.int64).view(-1, WIDTHS[-1])


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
