"""The switches of the patches: what can be turned on or off, and the checks on their values."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args


CheckpointPolicy = Literal["auto", "keep", "recompute", "offload"]
MoeBackend = Literal["auto", "grouped_mm", "triton", "native_torch"]
CompileLayers = Literal["auto", "on", "off"]
CudaGraphs = Literal["auto", "on", "off"]
AttentionBackend = Literal["auto", "flash_attention_2", "flash_attention_4", "triton", "sdpa", "eager"]


@dataclass(frozen=True)
class PatchConfig:
    """
    What `apply_patches` puts into a model.

    Args:
        attention_backend (`str`, *optional*, defaults to `"auto"`):
            Kernel for packed rows. `"triton"` is this package's, for everything that a row can be; `"auto"` takes it
            on sm_90, where it was measured to be faster, and else `"flash_attention_2"` (torch's own, CUDA from sm_80,
            fp16 and bf16) where that can do the job, then `"triton"` on the same cards, then `"sdpa"` over segments,
            then `"eager"` (soft-capping, attention sinks). `"flash_attention_4"` is the package `flash-attn-4` (CUDA
            from sm_90), for segments without parents; where it is installed, `"auto"` tries it first, on sm_90 for
            heads of 128 and on later cards, outside of compiled layers and CUDA graphs. A backend named here is used
            or the forward raises.
        packed_metadata (`bool`, *optional*, defaults to `True`):
            Compute boundaries and labelled positions once per batch on the CPU. `False` derives them in every layer,
            as without this package: for ablations.
        lean_lora (`bool`, *optional*, defaults to `True`):
            Plain LoRA layers leave out input casts that autocast undoes, and scale and add in one pass; in compiled
            layers one op adds both products into one output, and both gradients of the input into one.
        frozen_head (`bool`, *optional*, defaults to `True`):
            The gradient of a head that is not trained is worked out in the forward, while the logits are there, so
            that the backward needs no logits. `False`, or an entropy in the loss, leaves such a head to TRL's kernel.
        moe_backend (`str`, *optional*):
            What multiplies tokens with stacked experts: `"grouped_mm"` (torch's), `"triton"` (this package's, any CUDA
            card), `"native_torch"` (a loop over the experts) or `"auto"`, which chooses by card and dtype. `None`
            takes the environment variable `UNSLOTH_MOE_BACKEND`, else `"auto"`.
        split_lora (`bool`, *optional*, defaults to `True`):
            LoRA on stacked experts as two thin products beside the weight. `False` leaves it to PEFT, which adds the
            product of the factors to all experts' weights in every forward.
        checkpoint_policy (`str`, *optional*, defaults to `"auto"`):
            What becomes of a decoder layer's activations where `gradient_checkpointing` is on. `"keep"` keeps them,
            `"recompute"` computes them again from the layer's input, `"offload"` does that from an input that waits in
            host memory. `"auto"` starts with `"recompute"`, measures the first step, and keeps as many layers as the
            free device memory allows (which resets torch's statistics of peak memory); outside of this package's
            trainers, and on a CPU, it stays with `"recompute"`.
        max_pinned_gb (`float`, *optional*):
            GiB of host memory that this process may page-lock for offloaded inputs. By default half of what is
            available, shared by the processes of a machine.
        staging_buffers (`int`, *optional*, defaults to 2):
            Offloaded inputs that the backward has on the device at once: 2 copies one while another is used, 1 saves
            the memory of one input and waits for each copy.
        compile_layers (`str`, *optional*, defaults to `"auto"`):
            Whether decoder layers are compiled, each class of them once. `"auto"` turns it on after three steps where
            ten minutes of training are left, on CUDA cards from sm_80 with a C compiler; not with FSDP or DeepSpeed.
            Outside of this package's trainers, which know how long a run is, it is `"off"`.
        cuda_graphs (`str`, *optional*, defaults to `"auto"`):
            Whether the decoder's training forward and backward are captured in CUDA graphs. They need batches of few
            shapes, as the collator of `SFTTrainer` makes them. `"auto"` turns them on, in that trainer and with one
            process, where the device was found waiting for the host and a minute of training is left.
    """

    attention_backend: AttentionBackend = "auto"
    packed_metadata: bool = True
    lean_lora: bool = True
    frozen_head: bool = True
    moe_backend: MoeBackend | None = None
    split_lora: bool = True
    checkpoint_policy: CheckpointPolicy = "auto"
    max_pinned_gb: float | None = None
    staging_buffers: int = 2
    compile_layers: CompileLayers = "auto"
    cuda_graphs: CudaGraphs = "auto"

    def __post_init__(self):
        for name, choices in (
            ("attention_backend", get_args(AttentionBackend)),
            ("moe_backend", (*get_args(MoeBackend), None)),
            ("checkpoint_policy", get_args(CheckpointPolicy)),
            ("compile_layers", get_args(CompileLayers)),
            ("cuda_graphs", get_args(CudaGraphs)),
        ):
            if getattr(self, name) not in choices:
                value = getattr(self, name)
                raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(map(repr, choices))}")
        if self.max_pinned_gb is not None and not self.max_pinned_gb > 0:
            raise ValueError(
                f"max_pinned_gb={self.max_pinned_gb} is not above 0; set checkpoint_policy='recompute' to use no host "
                "memory, or None for the default"
            )
        if self.staging_buffers not in (1, 2, 3):
            raise ValueError(f"staging_buffers={self.staging_buffers!r} is not 1, 2 or 3")

    @classmethod
    def from_args(cls, args: Any) -> "PatchConfig":
        """The switches that `args` (any object) carries as attributes; the defaults for the others."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})
