"""The tables that the fused attention kernels walk by: blocks of rows, and the spans that each of them looks at."""

import itertools
from typing import NamedTuple

import torch

from ..layout import NO_PARENT, PackedLayout


WIDTHS = (6, 6, 3, 6, 3)


class Tables(NamedTuple):
    """
    Blocks and spans of a layout, all int32 on its device. A block is `(first row, end of its segment, start of the
    segment, position of the start, first span, end span)`, a span `(first row, end row, position of the first row)`.

    Args:
        q_tiles (`torch.Tensor` of shape `(num_q_tiles, 6)`): Blocks of queries, those with the most keys first.
        d_tiles (`torch.Tensor` of shape `(num_d_tiles, 6)`): The same for their gradients, in blocks of another size.
        q_spans (`torch.Tensor` of shape `(num_q_spans, 3)`): Keys that the queries of a segment see.
        k_tiles (`torch.Tensor` of shape `(num_k_tiles, 6)`): Blocks of keys, those with the most queries first.
        k_spans (`torch.Tensor` of shape `(num_k_spans, 3)`): Queries that see the keys of a segment.
    """

    q_tiles: torch.Tensor
    d_tiles: torch.Tensor
    q_spans: torch.Tensor
    k_tiles: torch.Tensor
    k_spans: torch.Tensor


def build_tables(layout: PackedLayout, q_rows: int, d_rows: int, k_rows: int) -> Tables:
    """
    Args:
        layout (`PackedLayout`): Segments, with parents or without, in any order.
        q_rows, d_rows, k_rows (`int`): Rows of a block of queries, of one of their gradients, and of one of keys.

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
    parts = [q_tiles, d_tiles, q_spans, *tiles(k_rows, seen_by)]
    flat = torch.tensor([number for part in parts for row in part for number in row], dtype=torch.int32)
    if layout.device.type == "cuda":
        flat = flat.pin_memory().to(layout.device, non_blocking=True)
    sizes = [len(part) * width for part, width in zip(parts, WIDTHS, strict=True)]
    return Tables(*(x.view(-1, width) for x, width in zip(flat.split(sizes), WIDTHS, strict=True)))
