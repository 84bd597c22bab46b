"""`PackedLayout`: where the samples of a packed row begin and end, computed once per batch on the CPU.

Every attention, MoE and head op reads this one object, so that no layer asks the GPU for a number.
"""

import itertools
from collections.abc import Sequence

import torch


NO_PARENT = -1


class PackedLayout:
    """
    Segments of a batch whose rows are concatenated into `num_tokens` tokens.

    A segment is a run of tokens that attend to each other causally. With `parents`, a segment also attends to all of
    its ancestors, and its positions continue where its parent ends: a plain packed batch has no parents, a shared
    prompt with its responses has depth one, a multi-turn tree is deeper.

    All numbers on the host are python ints; what the device needs lies in one int64 buffer, so moving a layout is one
    copy. A layout is immutable. `to` and `pin_memory` return another object, and every layout owns its buffer, so a
    prefetched batch cannot overwrite the one in use.

    Attributes:
        seqlens (`tuple[int, ...]`):
            Tokens per segment, in row order; the closing padding segment, if any, is the last one.
        parents (`tuple[int, ...]` or `None`):
            For each segment the index of its parent, or -1. `None` when no segment has a parent.
        num_tokens (`int`):
            Total tokens, padding included.
        num_padding (`int`):
            Tokens of the closing padding segment.
        max_seqlen (`int`):
            Longest segment, rounded up to `max_seqlen_multiple`.
        max_context (`int`):
            Most tokens that a token may see: the longest segment together with its ancestors.
        mean_context (`float`):
            Tokens that a token may see, itself included, on average; 0 for a layout of any lengths.
        cu_seqlens (`torch.Tensor` of shape `(num_segments + 1,)` or longer, int32):
            Segment boundaries. A static size repeats the last value: zero-length segments.
        position_ids (`torch.Tensor` of shape `(1, num_tokens)`, int64):
            Position of each token within its segment and its ancestors.
        cached (`bool`):
            `False` makes every attention layer derive the boundaries from `position_ids` again, with a host
            synchronisation each, as transformers does without precomputed ones. For ablations only.
    """

    def __init__(
        self,
        seqlens: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        pad_to: int | None = None,
        cu_seqlens_size: int | None = None,
        max_seqlen_multiple: int = 1,
        cached: bool = True,
    ):
        """
        Args:
            seqlens (`Sequence[int]`): Tokens per segment, each at least 0.
            parents (`Sequence[int]`, *optional*): Parent of each segment, an earlier index or -1.
            pad_to (`int`, *optional*): Total tokens; what is missing becomes one closing segment.
            cu_seqlens_size (`int`, *optional*): Entries of `cu_seqlens`, at least the number of segments plus one.
            max_seqlen_multiple (`int`, *optional*, defaults to `1`): `max_seqlen` is rounded up to a multiple of it.
            cached (`bool`, *optional*, defaults to `True`): See the class.

        Raises:
            ValueError: If a length is negative, a parent is not an earlier segment, or a static size is too small.
        """
        seqlens = [int(n) for n in seqlens]
        for i, n in enumerate(seqlens):
            if n < 0:
                raise ValueError(f"segment {i} has length {n}; lengths must not be negative")
        if parents is not None:
            parents = [int(p) for p in parents]
            if len(parents) != len(seqlens):
                raise ValueError(f"{len(parents)} parents for {len(seqlens)} segments")
            for i, p in enumerate(parents):
                if not NO_PARENT <= p < i:
                    raise ValueError(f"segment {i} has parent {p}; a parent is an earlier segment or {NO_PARENT}")
        num_tokens = sum(seqlens)
        self.num_padding = 0
        if pad_to is not None:
            if pad_to < num_tokens:
                raise ValueError(f"pad_to={pad_to} is smaller than the {num_tokens} tokens of the batch")
            self.num_padding = pad_to - num_tokens
            if self.num_padding:
                seqlens.append(self.num_padding)
                if parents is not None:
                    parents.append(NO_PARENT)
        self.seqlens = tuple(seqlens)
        self.parents = tuple(parents) if parents is not None and any(p != NO_PARENT for p in parents) else None
        self.num_tokens = sum(seqlens)
        longest = max(seqlens, default=0)
        self.max_seqlen = -(-longest // max_seqlen_multiple) * max_seqlen_multiple
        self.cached = cached
        size = len(seqlens) + 1 if cu_seqlens_size is None else cu_seqlens_size
        if size < len(seqlens) + 1:
            raise ValueError(f"cu_seqlens_size={size} is smaller than the {len(seqlens) + 1} boundaries of the batch")
        self._cu_size = size
        self._buffer = self._build(size)
        self._by_device: dict[torch.device, PackedLayout] = {}
        self._derived: dict = {}
        self.any_lengths = False  # see `of_any_lengths`
        self.own_padding = 0  # tokens of the padding that a collator of this package added for the shape alone
        self.reached: set[str] = set()  # the ops that have read this layout, on whichever device

    def _build(self, size: int) -> torch.Tensor:
        starts = []  # position of each segment's first token
        for i, _ in enumerate(self.seqlens):
            parent = NO_PARENT if self.parents is None else self.parents[i]
            starts.append(0 if parent == NO_PARENT else starts[parent] + self.seqlens[parent])
        self.max_context = max((a + n for a, n in zip(starts, self.seqlens, strict=True)), default=0)
        pairs = sum(n * (a + (n + 1) / 2) for a, n in zip(starts, self.seqlens, strict=True))
        self.mean_context = pairs / self.num_tokens if self.num_tokens else 0.0
        buffer = torch.empty(self.num_tokens + (size + 1) // 2, dtype=torch.int64)
        lengths = torch.tensor(self.seqlens, dtype=torch.int64)
        ends = lengths.cumsum(0)
        offsets = torch.tensor(starts, dtype=torch.int64) - (ends - lengths)
        torch.add(
            torch.arange(self.num_tokens),
            torch.repeat_interleave(offsets, lengths, output_size=self.num_tokens),
            out=buffer[: self.num_tokens],
        )
        cu_seqlens = buffer[self.num_tokens :].view(torch.int32)
        cu_seqlens.fill_(self.num_tokens)
        cu_seqlens[0] = 0
        cu_seqlens[1 : len(self.seqlens) + 1] = ends
        return buffer

    @classmethod
    def from_rows(cls, seq_lengths: Sequence[Sequence[int]], row_lengths: Sequence[int], **kwargs) -> "PackedLayout":
        """
        Layout of rows that are concatenated in order.

        Args:
            seq_lengths (`Sequence[Sequence[int]]`): For each row the lengths of its samples.
            row_lengths (`Sequence[int]`): Tokens that each row really has.
            kwargs: Passed to the constructor.

        Raises:
            ValueError: If the lengths of a row do not add up to its tokens, naming the row.
        """
        if len(seq_lengths) != len(row_lengths):
            raise ValueError(f"seq_lengths describes {len(seq_lengths)} rows, the batch has {len(row_lengths)}")
        for row, (lengths, n) in enumerate(zip(seq_lengths, row_lengths, strict=True)):
            if any(length < 1 for length in lengths):
                raise ValueError(f"row {row}: seq_lengths {list(lengths)} has a sample without tokens")
            if sum(lengths) != n:
                raise ValueError(f"row {row}: seq_lengths add up to {sum(lengths)} but input_ids has {n} tokens")
        return cls(list(itertools.chain.from_iterable(seq_lengths)), **kwargs)

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor) -> "PackedLayout":
        """
        Layout of rows in which a position of 0 starts a sample, as transformers infers it. Synchronises with the
        device: a last resort for batches whose lengths are unknown.

        Args:
            position_ids (`torch.Tensor` of shape `(batch, seq_len)`, integer): Positions, each row starting at 0.

        Raises:
            ValueError: If the tensor is not 2-D (multi-axis rotary positions say nothing about boundaries), or a row
                does not start at 0.
        """
        if position_ids.dim() != 2:
            raise ValueError(
                f"position_ids of shape {tuple(position_ids.shape)}: boundaries can only be read from 2-D positions; "
                "build the layout from the sample lengths instead"
            )
        starts = position_ids == 0
        for row, first in enumerate(starts[:, 0].tolist() if position_ids.numel() else []):
            if not first:
                raise ValueError(f"row {row}: position_ids starts at {int(position_ids[row, 0])}, expected 0")
        edges = starts.reshape(-1).nonzero().flatten().tolist() + [position_ids.numel()]
        return cls([b - a for a, b in itertools.pairwise(edges)])

    @property
    def num_segments(self) -> int:
        return len(self.seqlens)

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return self._buffer[self.num_tokens :].view(torch.int32)[: self._cu_size]

    @property
    def position_ids(self) -> torch.Tensor:
        return self._buffer[: self.num_tokens].unsqueeze(0)

    def derived(self, key, build):
        """Tensors that an op derives from this layout once per batch, on its device: `build(self)` at first use."""
        if key not in self._derived:
            self._derived[key] = build(self)
        return self._derived[key]

    def check(self, num_tokens: int) -> None:
        """
        Raises:
            ValueError: If the tensors that a kernel is about to read do not have this layout's tokens.
        """
        if num_tokens != self.num_tokens:
            raise ValueError(
                f"packed_layout describes {self.num_tokens} tokens but the attention got {num_tokens}: pass the "
                "layout of this batch, and no prefix or virtual tokens with it"
            )

    def to(self, device: torch.device | str | int | None, non_blocking: bool = False) -> "PackedLayout":
        """This layout on `device`, one copy at most; asked again for the same device, the same object."""
        if device is None:  # accelerate's root hook passes it on to say "wherever it is", as tensors take it
            return self
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        if device not in self._by_device:
            self._by_device[device] = self._with_buffer(self._buffer.to(device, non_blocking=non_blocking))
        return self._by_device[device]

    def pin_memory(self, device: torch.device | str | None = None) -> "PackedLayout":
        """This layout in page-locked memory of its own; the data loader calls it."""
        return self._with_buffer(self._buffer.pin_memory())

    def _with_buffer(self, buffer: torch.Tensor) -> "PackedLayout":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._buffer = buffer
        other._by_device = {}
        other._derived = {}
        return other

    def of_any_lengths(self) -> "PackedLayout":
        """
        A copy with a buffer of its own, into which those of other layouts of the same sizes are written later: for
        kernels that read the boundaries from `cu_seqlens`. Its numbers on the host hold for all of them.
        """
        if self.parents is not None:
            raise ValueError("the tables of segments with parents are numbers on the host, which differ by layout")
        other = self._with_buffer(self._buffer.clone())
        other.seqlens, other.any_lengths = (), True
        other.max_context, other.mean_context = self.max_seqlen, 0.0
        return other

    def forget_derived(self) -> None:
        """Let ops derive their tensors again: after another layout's buffer was written into this one's."""
        self._derived.clear()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_by_device": {}, "_derived": {}}

    def __repr__(self) -> str:
        tree = "" if self.parents is None else f", parents={list(self.parents)}"
        return f"PackedLayout(seqlens={list(self.seqlens)}{tree}, device='{self.device}')"
