"""The switches of the patches: what can be turned on or off, and the checks on their values."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args


AttentionBackend = Literal["auto", "flash_attention_2", "sdpa", "eager"]


@dataclass(frozen=True)
class PatchConfig:
    """
    What `apply_patches` puts into a model.

    Args:
        attention_backend (`str`, *optional*, defaults to `"auto"`):
            Kernel for packed rows. `"auto"` takes `"flash_attention_2"` (torch's own, CUDA from sm_80, fp16 and bf16)
            where it can do the job, then `"sdpa"` over segments, then `"eager"` (soft-capping, attention sinks). A
            backend named here is used or the forward raises.
        packed_metadata (`bool`, *optional*, defaults to `True`):
            Compute boundaries and labelled positions once per batch on the CPU. `False` derives them in every layer,
            as without this package: for ablations.
        lean_lora (`bool`, *optional*, defaults to `True`):
            Plain LoRA layers leave out input casts that autocast undoes, and scale and add in one pass.
    """

    attention_backend: AttentionBackend = "auto"
    packed_metadata: bool = True
    lean_lora: bool = True

    def __post_init__(self):
        if self.attention_backend not in get_args(AttentionBackend):
            raise ValueError(
                f"attention_backend={self.attention_backend!r} is unknown; choose from "
                f"{', '.join(map(repr, get_args(AttentionBackend)))}"
            )

    @classmethod
    def from_args(cls, args: Any) -> "PatchConfig":
        """The switches that `args` (any object) carries as attributes; the defaults for the others."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})
