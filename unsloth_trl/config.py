"""Configuration of the trainers: TRL's, plus the switches of this package."""

import copy
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import trl

from .patches.config import AttentionBackend, CheckpointPolicy, CompileLayers, CudaGraphs, MoeBackend, PatchConfig
from .unknown_arguments import check_fields


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
        frozen_head (`bool`, *optional*, defaults to `True`):
            See `PatchConfig`.
        moe_backend (`str`, *optional*):
            See `PatchConfig`.
        split_lora (`bool`, *optional*, defaults to `True`):
            See `PatchConfig`.
        checkpoint_policy (`str`, *optional*, defaults to `"auto"`):
            See `PatchConfig`.
        max_pinned_gb (`float`, *optional*):
            See `PatchConfig`.
        staging_buffers (`int`, *optional*, defaults to 2):
            See `PatchConfig`.
        compile_layers (`str`, *optional*, defaults to `"auto"`):
            See `PatchConfig`.
        cuda_graphs (`str`, *optional*, defaults to `"auto"`):
            See `PatchConfig`.
        strict (`bool`, *optional*, defaults to `False`):
            Raise instead of warning when the model's architecture is not verified.
        allow_unverified (`bool`, *optional*, defaults to `False`):
            Pack on an architecture that is not verified, at your own risk.
        save_on_interrupt (`bool`, *optional*, defaults to `False`):
            The first Ctrl-C (SIGINT) finishes the step and saves a checkpoint, and `train` then raises
            `KeyboardInterrupt` with its name. The second one stops at once.
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
    frozen_head: bool = field(
        default=True, metadata={"help": "The gradient of a head that is not trained is worked out in the forward."}
    )
    moe_backend: MoeBackend | None = field(
        default=None,
        metadata={"help": "Products with stacked experts; unset takes UNSLOTH_MOE_BACKEND, else chooses by card."},
    )
    split_lora: bool = field(
        default=True, metadata={"help": "LoRA on stacked experts beside the weight; False leaves it to PEFT."}
    )
    checkpoint_policy: CheckpointPolicy = field(
        default="auto",
        metadata={"help": "Keep, recompute or offload the activations of layers; 'auto' plans by the free memory."},
    )
    max_pinned_gb: float | None = field(
        default=None, metadata={"help": "GiB of host memory that offloaded layer inputs may page-lock."}
    )
    staging_buffers: int = field(
        default=2, metadata={"help": "Offloaded layer inputs that the backward has on the device at once."}
    )
    compile_layers: CompileLayers = field(
        default="auto", metadata={"help": "Compile decoder layers; 'auto' where the run is long enough to pay for it."}
    )
    cuda_graphs: CudaGraphs = field(
        default="auto", metadata={"help": "Run the decoder's training forward and backward from CUDA graphs."}
    )
    strict: bool = field(
        default=False, metadata={"help": "Raise instead of warning when the architecture is not verified."}
    )
    allow_unverified: bool = field(
        default=False, metadata={"help": "Pack on an architecture that is not verified, at your own risk."}
    )
    save_on_interrupt: bool = field(
        default=False, metadata={"help": "The first Ctrl-C finishes the step and saves; the second stops at once."}
    )

    # A trainer writes its config into training_args.bin, and that file is pushed: the token stays out of pickles.
    # Copies inside of this process keep it.
    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"hub_token": None}
        if isinstance(self.model_init_kwargs, dict):
            state["model_init_kwargs"] = {
                key: value for key, value in self.model_init_kwargs.items() if key != "token"
            }
        return state

    def __copy__(self):
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict):
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def __repr__(self) -> str:
        return str(self)  # the Trainer's, which hides tokens where dataclass's own shows them

    def __new__(cls, *args, **kwargs):
        check_fields(cls, kwargs)
        # a value that was given wins over one that the model brings along, a default does not
        self = super().__new__(cls)
        by_place = [field.name for field in fields(cls) if field.init][: len(args)]
        self._given = (*by_place, *kwargs)
        return self

    def _check_patch_arguments(self) -> None:
        PatchConfig.from_args(self)  # raises for a value it does not know
        self._require_bool(*(switch.name for switch in fields(PatchArguments) if switch.type is bool))
        if self.patches not in ("auto", "none"):
            raise ValueError(f"patches={self.patches!r} is unknown; choose 'auto' or 'none'")
        if self.strict and self.allow_unverified:
            raise ValueError(
                "strict=True and allow_unverified=True contradict each other for an unverified architecture; set one"
            )
        if self.save_on_interrupt and self.save_only_model:
            raise ValueError(
                "save_on_interrupt=True with save_only_model=True would save no optimizer to go on with; set "
                "save_only_model=False"
            )

    def _require_bool(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a bool; set True or False")

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


@dataclass(repr=False)
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


@dataclass(repr=False)
class GRPOConfig(PatchArguments, trl.GRPOConfig):
    """
    `trl.GRPOConfig` with the fields of `PatchArguments` and these.

    Args:
        share_prompts (`bool`, *optional*, defaults to `True`):
            Process the prompt of a group once. `False` still leaves out padding: each completion with a prompt of its
            own.
        balance_tokens (`bool`, *optional*, defaults to `True`):
            Choose which groups go into one micro-batch so that all have about the same number of tokens. `False` keeps
            groups together in random order.
        max_tokens_per_pass (`int`, *optional*):
            Tokens that the old and reference log-probability passes process at once. By default what TRL's passes
            would, padding included.
    """

    share_prompts: bool = field(default=True, metadata={"help": "Process the prompt of a group once."})
    balance_tokens: bool = field(
        default=True, metadata={"help": "Choose micro-batches with about the same number of tokens."}
    )
    max_tokens_per_pass: int | None = field(
        default=None, metadata={"help": "Tokens per old or reference pass; by default as many as TRL's with padding."}
    )

    def __post_init__(self):
        self._check_patch_arguments()
        self._require_bool("share_prompts", "balance_tokens")
        if self.max_tokens_per_pass is not None and self.max_tokens_per_pass < 1:
            raise ValueError(
                f"max_tokens_per_pass={self.max_tokens_per_pass} is less than 1; set None for the default"
            )
        if not self.packed_metadata:
            raise ValueError("packed_metadata=False is an ablation of SFTTrainer; GRPOTrainer always computes it")
        self._choose_precision()
        super().__post_init__()
