"""From dataset rows to batches."""

from ..patches.layout import PackedLayout
from .collators import PackedDataCollator


__all__ = ["PackedDataCollator", "PackedLayout"]
