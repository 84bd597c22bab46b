"""Triton kernels of a stable counting sort by expert: every number is a sum in a fixed order, nothing is atomic."""

import triton
import triton.language as tl


@triton.jit
def _load_keys(index, at, num_rows, num_experts, EXPERTS: tl.constexpr):
    """Experts of slots; `EXPERTS` for those of other processes and for slots that there are not."""
    key = tl.load(index + at, mask=at < num_rows, other=num_experts)
    return tl.where(key < num_experts, key, EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def count_kernel(index, counts, num_rows, num_experts, num_chunks, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """How many of the `num_chunks * CHUNK` slots of a program go to each expert, `counts` `(num_blocks, EXPERTS)`."""
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for chunk in range(num_chunks):
        at = (tl.program_id(0) * num_chunks + chunk) * CHUNK + tl.arange(0, CHUNK)
        key = _load_keys(index, at, num_rows, num_experts, EXPERTS)
        total += tl.sum((key[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * EXPERTS + experts, total)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_chunks", "num_tiles", "num_wide_tiles"])
def place_kernel(
    index,
    counts,
    order,
    place,
    offsets,
    tiles,
    wide_tiles,
    num_rows,
    num_experts,
    num_blocks,
    num_chunks,
    num_tiles,
    num_wide_tiles,
    TILE: tl.constexpr,
    WIDE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
):
    """
    Moves the slots of `count_kernel`'s program to their place, and writes a share of the tiles.

    A place is the number of slots with a smaller expert, plus that of earlier slots with the same: in earlier programs
    (both from the counts, which every program sums up itself), earlier chunks, and the own chunk.
    """
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        found = tl.load(
            counts + blocks[:, None] * EXPERTS + experts[None, :], mask=(blocks < num_blocks)[:, None], other=0
        )
        total += tl.sum(found, axis=0)
        before += tl.sum(tl.where((blocks < block)[:, None], found, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if block == 0:
        tl.store(offsets + experts, ends, mask=experts < num_experts)

    free = ends - total + before
    free_beyond = tl.sum(total, axis=0) + block * num_chunks * CHUNK - tl.sum(before, axis=0)
    lane = tl.arange(0, CHUNK)
    for chunk in range(num_chunks):
        at = (block * num_chunks + chunk) * CHUNK + lane
        key = _load_keys(index, at, num_rows, num_experts, EXPERTS)
        same = (key[:, None] == key[None, :]) & (lane[None, :] < lane[:, None])
        row = tl.where(key < EXPERTS, tl.gather(free, tl.minimum(key, EXPERTS - 1), 0), free_beyond)
        row += tl.sum(same.to(tl.int32), axis=1)
        exists = at < num_rows
        tl.store(order + row, at.to(tl.int64), mask=exists)
        tl.store(place + at, row.to(tl.int64), mask=exists)
        found = tl.sum((key[:, None] == experts[None, :]).to(tl.int32), axis=0)
        free += found
        free_beyond += CHUNK - tl.sum(found, axis=0)

    _write_tiles(tiles, total, ends, experts, num_experts, num_blocks, num_tiles, TILE, TILES)
    if WIDE_TILE:
        _write_tiles(wide_tiles, total, ends, experts, num_experts, num_blocks, num_wide_tiles, WIDE_TILE, TILES)


@triton.jit
def _write_tiles(
    tiles, total, ends, experts, num_experts, num_blocks, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr
):
    """This program's share of the tiles of `TILE` rows, from the rows of each expert and their ends."""
    number = (total + TILE - 1) // TILE
    tile_ends = tl.cumsum(number, axis=0)
    for first in range(tl.program_id(0) * TILES, num_tiles, num_blocks * TILES):
        tile = first + tl.arange(0, TILES)
        passed = (tile_ends[None, :] <= tile[:, None]) & (experts < num_experts)[None, :]
        owner = tl.sum(passed.to(tl.int32), axis=1)
        known = tl.minimum(owner, num_experts - 1)
        start = tl.gather(ends - total, known, 0) + (tile - tl.gather(tile_ends - number, known, 0)) * TILE
        end = tl.minimum(start + TILE, tl.gather(ends, known, 0))
        live = (owner < num_experts).to(tl.int32)
        tl.store(tiles + tile * 3, known, mask=tile < num_tiles)
        tl.store(tiles + tile * 3 + 1, start * live, mask=tile < num_tiles)
        tl.store(tiles + tile * 3 + 2, end * live, mask=tile < num_tiles)
