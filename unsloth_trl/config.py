"""Configuration of the trainers: TRL's, plus the switches of this package."""

from dataclasses import dataclass, field
from typing import Literal

import torch
import trl

from .patches.config import AttentionBackend, PatchConfig


@dataclass
class PatchArguments:
    """
    Fields that every trainer config of this package has beside TRL's.

    Args:
        patches (`str`, *optional*, defaults to `"auto"`):
            `"auto"` applies what is verified for the model; `"none"` is plain TRL.
        attention_backend (`str`, *optional*, defaults to `"auto"`):
            See `PatchConfig`.
        packed_metadata (`bool`, *optional*, defaults to `True`):
            See `PatchConfig`.
        lean_lora (`bool`, *optional*, defaults to `True`):
            See `PatchConfig`.
        strict (`bool`, *optional*, defaults to `False`):
            Raise instead of warning when the model's architecture is not verified.
        allow_unverified (`bool`, *optional*, defaults to `False`):
            Pack on an architecture that is not verified, at your own risk.
    """

    patches: Literal["auto", "none"] = field(
        default="auto", metadata={"help": "'auto' applies what is verified for the model; 'none' is plain TRL."}
    )
    attention_backend: AttentionBackend = field(
        default="auto", metadata={"help": "Kernel for packed rows; 'auto' chooses by device and architecture."}
    )
    packed_metadata: bool = field(
        default=True, metadata={"help": "Compute boundaries and labelled positions once per batch on the CPU."}
    )
    lean_lora: bool = field(
        default=True, metadata={"help": "Plain LoRA layers leave out needless casts, and scale and add in one pass."}
    )
    strict: bool = field(
        default=False, metadata={"help": "Raise instead of warning when the architecture is not verified."}
    )
    allow_unverified: bool = field(
        default=False, metadata={"help": "Pack on an architecture that is not verified, at your own risk."}
    )

    def _check_patch_arguments(self) -> None:
        PatchConfig.from_args(self)  # raises for a value it does not know
        if self.patches not in ("auto", "none"):
            raise ValueError(f"patches={self.patches!r} is unknown; choose 'auto' or 'none'")
        if self.strict and self.allow_unverified:
            raise ValueError(
                "strict=True and allow_unverified=True contradict each other for an unverified architecture; set one"
            )


@dataclass
class SFTConfig(PatchArguments, trl.SFTConfig):
    """
    `trl.SFTConfig` with the fields of `PatchArguments`. The default `accelerator_config` copies batches to the device
    without waiting (`non_blocking=True`); pass your own to change that.
    """

    def __post_init__(self):
        self._check_patch_arguments()
        on_gpu = torch.cuda.is_available() and not self.use_cpu
        if self.accelerator_config is None and self.dataloader_pin_memory and on_gpu:
            self.accelerator_config = {"non_blocking": True}
        super().__post_init__()
