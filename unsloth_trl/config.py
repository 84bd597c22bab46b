"""Configuration of the trainers: TRL's, plus the switches of this package."""

from dataclasses import dataclass, field, fields
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
        for switch in fields(PatchArguments):
            value = getattr(self, switch.name)
            if switch.type is bool and not isinstance(value, bool):
                raise ValueError(f"{switch.name}={value!r} is not a bool; set True or False")
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
        self._choose_precision()
        on_gpu = torch.cuda.is_available() and not self.use_cpu
        if self.accelerator_config is None and self.dataloader_pin_memory and on_gpu:
            self.accelerator_config = {"non_blocking": True}
        super().__post_init__()

    def _choose_precision(self) -> None:
        """TRL's default is bf16 everywhere; this is for machines that have none, where TRL emulates it or raises."""
        if self.use_cpu:
            return
        # torch counts emulated bf16 as supported: slow, and no kernel here has it
        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
            if self.bf16:
                raise ValueError(
                    f"bf16=True needs a GPU from Ampere (sm_80) on, this one is a {torch.cuda.get_device_name()}; "
                    "set fp16=True, or bf16=False for fp32"
                )
            if self.bf16 is None:
                self.bf16, self.fp16 = False, True
        elif self.bf16 is None and not torch.accelerator.is_available():
            self.bf16 = False
