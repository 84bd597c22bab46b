"""Sorts the tokens of a mixture by expert, without a number from the device.

A token goes to `top_k` experts; each of these is one routed row. Sorted by expert, the rows of an expert are
contiguous, and a product with all experts' weights is one grouped product. The sort is stable, so that everything that
follows is deterministic, and the way back is a gather, so that nothing is added atomically.
"""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Routing:
    """
    The rows of a mixture, sorted by expert; all tensors on the device of the indices.

    Args:
        order (`torch.Tensor` of shape `(num_rows,)`, int64): The slot `token * top_k + choice` of each sorted row.
        place (`torch.Tensor` of shape `(num_tokens, top_k)`, int64): The sorted row of each slot.
        offsets (`torch.Tensor` of shape `(num_experts,)`, int32): Where the rows of each expert end. Rows beyond the
            last belong to no expert of this process.
        known_tiles (`dict[int, torch.Tensor]`, *optional*): What `tiles` returned before, by block.
    """

    order: torch.Tensor
    place: torch.Tensor
    offsets: torch.Tensor
    known_tiles: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return self.order.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0]

    @property
    def top_k(self) -> int:
        return self.place.shape[1]

    @property
    def token(self) -> torch.Tensor:
        """The token of each sorted row, `(num_rows,)` int64."""
        return self.order // self.top_k

    @property
    def expert(self) -> torch.Tensor:
        """The expert of each sorted row, `(num_rows,)` int32; `num_experts` for rows of none."""
        row = torch.arange(self.num_rows, device=self.offsets.device, dtype=torch.int32)
        return torch.searchsorted(self.offsets, row, right=True, out_int32=True)

    def tiles(self, block: int) -> torch.Tensor:
        """
        The blocks of at most `block` rows, none of which spans two experts.

        Args:
            block (`int`): Rows of a block.

        Returns:
            `torch.Tensor` of shape `(num_tiles, 3)`, int32: Expert, first row and end row of each; as many as there
            can be, those that are left over empty (end row 0).
        """
        if block not in self.known_tiles:
            self.known_tiles[block] = _tiles(self.offsets, self.num_rows, block)
        return self.known_tiles[block]


def max_tiles(num_rows: int, num_experts: int, block: int) -> int:
    """The most blocks of `block` rows that `num_rows` rows of `num_experts` experts can need."""
    full = num_rows // block
    return full + min(num_experts, num_rows - full)


def _tiles(offsets: torch.Tensor, num_rows: int, block: int) -> torch.Tensor:
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    number = (offsets - starts + (block - 1)) // block
    ends = number.cumsum(0, dtype=torch.int32)
    tile = torch.arange(max_tiles(num_rows, offsets.shape[0], block), device=offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(ends, tile, right=True, out_int32=True)
    known = expert.clamp(max=offsets.shape[0] - 1)
    first = starts[known] + (tile - (ends - number)[known]) * block
    end = torch.minimum(first + block, offsets[known])
    live = expert < offsets.shape[0]
    return torch.stack([known, first * live, end * live], dim=1)


def route(top_k_index: torch.Tensor, num_experts: int) -> Routing:
    """
    Sort the routed rows by expert.

    Args:
        top_k_index (`torch.Tensor` of shape `(num_tokens, top_k)`, integer): The experts of each token. Indices of
            `num_experts` and above, which expert parallelism uses for those of other processes, come last.
        num_experts (`int`): Experts of this process.

    Returns:
        `Routing`: The sorted rows.
    """
    num_rows = top_k_index.numel()
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    experts = torch.arange(num_experts, device=expert.device, dtype=expert.dtype)
    offsets = torch.searchsorted(expert, experts, right=True, out_int32=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(num_rows, device=order.device)
    return Routing(order, place.view(top_k_index.shape), offsets)
