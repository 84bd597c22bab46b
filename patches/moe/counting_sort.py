"""`route` for CUDA in two launches: a stable counting sort that also writes the tiles."""

import torch

from ..kernels import has_triton
from .routing import Routing, max_tiles, route
from .rows import TILE_ROWS


def sort_rows(top_k_index: torch.Tensor, num_experts: int, wide: int = 0) -> Routing:
    """
    `route` in two launches, with the tiles that a layer needs made on the way.

    Args:
        top_k_index (`torch.Tensor` of shape `(num_tokens, top_k)`, integer): The experts of each token. All indices of
            `num_experts` and above count as one: their rows keep the order of the slots.
        num_experts (`int`): Experts of this process.
        wide (`int`, *optional*): Rows of a second kind of tiles, beside those of `TILE_ROWS`.

    Returns:
        `Routing`: The sorted rows; the same as `route`'s.
    """
    if not top_k_index.is_cuda or not has_triton() or not top_k_index.numel():
        return route(top_k_index, num_experts)
    return launch_sort_rows(top_k_index, num_experts, wide=wide)


def launch_sort_rows(top_k_index, num_experts, block=TILE_ROWS, wide=0):
    """`sort_rows` through the kernels, for at least one row."""
    from .counting_sort_kernels import count_kernel, place_kernel

    index = top_k_index.contiguous()
    num_rows, device = index.numel(), index.device
    experts = 1 << (num_experts - 1).bit_length()
    chunk = 128 if experts <= 256 else 64
    # at most 128 programs, each of which reads the counts of all
    num_chunks = -(-num_rows // (chunk * 128))
    num_blocks = -(-num_rows // (chunk * num_chunks))
    counts = torch.empty(num_blocks, experts, dtype=torch.int32, device=device)
    order, place = torch.empty(num_rows, dtype=torch.int64, device=device), torch.empty_like(index, dtype=torch.int64)
    offsets = torch.empty(num_experts, dtype=torch.int32, device=device)
    num_tiles = max_tiles(num_rows, num_experts, block)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=device)
    num_wide_tiles = max_tiles(num_rows, num_experts, wide) if wide else 0
    wide_tiles = torch.empty(num_wide_tiles, 3, dtype=torch.int32, device=device)
    sizes = {"CHUNK": chunk, "EXPERTS": experts, "num_warps": 8}
    with torch.cuda.device_of(index):
        count_kernel[(num_blocks,)](index, counts, num_rows, num_experts, num_chunks, **sizes)
        place_kernel[(num_blocks,)](
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
            TILE=block,
            WIDE_TILE=wide,
            BLOCKS=max(1, 8192 // experts),
            TILES=16,
            **sizes,
        )
    return Routing(order, place, offsets, {block: tiles} | ({wide: wide_tiles} if wide else {}))
