"""How much device and host memory a training run will take, before any weight is loaded."""

import os
import warnings
from dataclasses import dataclass, replace
from typing import Literal, get_args

from transformers import AutoConfig, PreTrainedConfig

from ..patches.checkpointing.settings import Measured, Notch, choose, tile_of
from ..patches.config import CheckpointPolicy, PatchConfig
from .cards import GIB, Card
from .memory_terms import (
    FLOAT,
    HALF,
    ModelShape,
    Training,
    adapter_sizes,
    backward_extra,
    cache_bytes,
    expert_scratch,
    head_bytes,
    layer_input,
    optimizer_bytes,
    read_shape,
    saved_per_token,
    weight_bytes,
    working_set,
)
from .names import is_path
from .support import UnsupportedArchitectureWarning, check_sharing


Method = Literal["sft", "grpo"]
Optimizer = Literal["adamw", "adamw_8bit"]

WORKSPACE = 2**25  # what cuBLAS asks torch for
BATCH = 64  # bytes per token: ids, labels, positions, and their log-probabilities
REACHED = 0.5  # of a card's FLOPS


def read_config(name: str) -> PreTrainedConfig:
    """
    A model's config.

    Args:
        name (`str`): A model folder, a `config.json`, or a name on the Hub.

    Raises:
        ValueError: If there is none.
    """
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(f"{name} has no config.json; pass the folder of a model, not that of an adapter")
    advice = "pass a folder with a config.json"
    if is_path(name) and not os.path.exists(name):
        raise ValueError(f"the config of {name!r} cannot be read (there is no such folder or file); {advice}")
    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the config of {name!r} cannot be read ({reason}); {advice}") from error


@dataclass(frozen=True)
class MemoryEstimate:
    """
    What a run takes, in bytes: on the device, and `slab` in host memory.

    Args:
        weights (`int`): Of the model, frozen or not.
        adapter (`int`): LoRA matrices.
        gradients (`int`): Of what is trained.
        optimizer (`int`): Its states.
        layer_inputs (`int`): Inputs of checkpointed layers that stay on the device.
        kept (`int`): Saved activations of the layers that keep theirs.
        working_set (`int`): One layer recomputed, and its gradients; without recomputation the gradients alone.
        staging (`int`): Offloaded inputs that the backward has on the device at once.
        head (`int`): Final norm, head and log-probabilities; not at the same time as `working_set`.
        workspace (`int`): The batch, and libraries' scratch memory.
        slab (`int`): Offloaded layer inputs, page-locked in host memory.
        quantized (`bool`): Whether linear layers are in NF4.
        generation (`int`): Keys and values of the completions while transformers generates them; not in `peak`.
        tokens (`int`): Of the longest micro-batch.
        num_layers (`int`): Decoder layers.
        notch (`Notch`): The setting of the checkpoint plan.
        title (`str`): Model and run in words.
        notes (`tuple[str, ...]`): What the numbers do not say.
        card (`Card`, *optional*): What the plan was made for.
    """

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    layer_inputs: int
    kept: int
    working_set: int
    staging: int
    head: int
    workspace: int
    slab: int
    quantized: bool
    generation: int
    tokens: int
    num_layers: int
    notch: Notch
    title: str
    notes: tuple[str, ...] = ()
    card: Card | None = None

    @property
    def static(self) -> int:
        """Bytes between two micro-batches."""
        return self.weights + self.adapter + self.gradients + self.optimizer + self.workspace

    @property
    def peak(self) -> int:
        """The most bytes of tensors on the device at once, in scoring and update."""
        activations = self.layer_inputs + self.kept + self.staging + max(self.working_set, self.head)
        return self.static + activations

    @property
    def generation_peak(self) -> int:
        """Bytes on the device while transformers generates; 0 where nothing is generated."""
        return self.static - self.gradients + self.generation if self.generation else 0

    @property
    def fits(self) -> bool | None:
        """Whether it fits on the card; `None` without one."""
        return None if self.card is None else max(self.peak, self.generation_peak) <= self.card.usable

    def text(self) -> str:
        """A table of the terms in GiB, the plan, and what to change if it does not fit."""
        on_device = {
            "weights": self.weights,
            "adapter": self.adapter,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "layer inputs": self.layer_inputs,
            "kept layers": self.kept,
            "one layer's working set": self.working_set,
            "staging buffers": self.staging,
            "head and log-probs (at another time)": self.head,
            "batch and workspace": self.workspace,
        }
        lines = [self.title, "", f"{'VRAM':<40}{'GiB':>8}"]
        lines += [f"  {name:<38}{nbytes / GIB:>8.2f}" for name, nbytes in on_device.items()]
        lines += [f"  {'peak':<38}{self.peak / GIB:>8.2f}", "RAM"]
        lines += [f"  {'offload slab (page-locked)':<38}{self.slab / GIB:>8.2f}", ""]
        lines.append(f"plan: {self.notch.describe(self.num_layers)}")
        if self.generation:
            lines.append(
                f"generation with transformers: {self.generation_peak / GIB:.2f} GiB, of which keys and values "
                f"{self.generation / GIB:.2f}; none of it with vLLM on another device"
            )
        if self.card is not None:
            lines.append(self._verdict(self.card))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _verdict(self, card: Card) -> str:
        usable = f"{card.usable / GIB:.1f} GiB usable on {card.name}"
        if self.fits:
            return f"fits: {usable}"
        if self.peak <= card.usable:
            return f"does not fit while generating: {usable}; use fewer or shorter completions at once, or vLLM"
        changes = ["a smaller model, or a larger card"]
        if self.static < card.usable:
            changes.insert(0, "shorter rows, fewer at once (per_device_train_batch_size)")
        if not self.adapter:
            changes.insert(0, "LoRA instead of full training")
        elif not self.quantized:
            changes.insert(0, "the model in 4 bits (qlora)")
        return f"does not fit: {usable}; try {', '.join(changes)}"


def estimate_memory(
    config: PreTrainedConfig | ModelShape,
    *,
    method: Method = "sft",
    batch: int = 8,
    max_length: int = 1024,
    max_prompt_length: int = 512,
    max_completion_length: int = 512,
    num_generations: int = 8,
    qlora: bool = False,
    lora_r: int = 16,
    full: bool = False,
    optim: Optimizer = "adamw",
    policy: CheckpointPolicy | Notch = "recompute",
    staging_buffers: int = 2,
    card: Card | None = None,
) -> MemoryEstimate:
    """
    The memory of a run of this package's trainers, from the model's config alone.

    Weights are counted in bf16, compute is bf16 under autocast with FlashAttention, and every row has its full length.

    Args:
        config (`PreTrainedConfig` or `ModelShape`): The model; a shape that was read before saves a second.
        method (`str`): `"sft"` on packed rows, or `"grpo"` with shared prompts.
        batch (`int`): `per_device_train_batch_size`: rows, or completions of GRPO.
        max_length (`int`): Tokens of a row, for SFT.
        max_prompt_length, max_completion_length, num_generations (`int`): For GRPO.
        qlora (`bool`): Linear layers in NF4, and adapters in bf16 where the card has it; else adapters are in fp32.
        lora_r (`int`): Rank of the adapters on all linear layers but the head.
        full (`bool`): Train all weights instead.
        optim (`str`): `"adamw"` or `"adamw_8bit"`.
        policy (`str` or `Notch`): What becomes of the layers' activations; `"auto"` is what the planner chooses on
            `card` once it has measured a step.
        staging_buffers (`int`): Offloaded inputs on the device at once.
        card (`Card`, *optional*): What to plan for.

    Raises:
        ValueError: If a value is impossible, naming it.
    """
    lengths = {"max_length": max_length}
    if method == "grpo":
        lengths = {"max_prompt_length": max_prompt_length, "max_completion_length": max_completion_length}
    _check_choices(method, optim, policy, staging_buffers, card)
    _check_numbers(batch=batch, lora_r=lora_r, **lengths)
    if full and qlora:
        raise ValueError("full=True with qlora=True: weights in 4 bits cannot be trained; set one of them")
    if method == "grpo" and num_generations < 2:
        raise ValueError(f"num_generations={num_generations} makes no group; set 2 or more")

    shape = config if isinstance(config, ModelShape) else read_shape(config)
    notes = _notes(shape, sum(lengths.values()), full)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsupportedArchitectureWarning)
        refusal = check_sharing(shape.config, strict=False, allow_unverified=False)
    if refusal is not None:
        notes.append(f"{refusal}; all rows are counted at full length, without shared prompts")
    shared = method == "grpo" and refusal is None
    if method == "sft":
        tokens = labels = batch * max_length
        rows = f"rows of {max_length}, {batch} at once"
    else:
        prompts = -(-batch // num_generations) if shared else batch
        labels = batch * max_completion_length
        tokens = prompts * (max_prompt_length - 1) + labels
        rows = f"prompts of {max_prompt_length}, completions of {max_completion_length}, {batch} at once"
    training = Training(tokens, labels, 0 if full else lora_r, qlora, shared)

    sizes = list(shape.sizes) if full else adapter_sizes(shape, lora_r)
    element = HALF if full or (qlora and (card is None or card.bf16)) else FLOAT
    trained = element * sum(sizes)
    name = f"{shape.config.model_type}, {len(shape.layers)} layers, {shape.num_parameters / 1e9:.2f} B parameters"
    kind = "NF4 and bf16" if qlora else "bf16"
    what = "all weights" if full else f"LoRA r={lora_r} on {len(shape.linears)} linear layers"
    millions = sum(sizes) / 1e6
    scratch = expert_scratch(shape) if qlora else 0
    if scratch:
        notes.append(
            f"experts are in NF4, as unsloth_trl.load_in_4bit loads them; {scratch / GIB:.2f} GiB of the workspace "
            "are one layer's, dequantised"
        )
    static = {
        "weights": weight_bytes(shape, qlora),
        "adapter": 0 if full else trained,
        "gradients": trained,
        "optimizer": optimizer_bytes(sizes, element, optim),
        "workspace": WORKSPACE + scratch + tokens * (BATCH + 2 * HALF * shape.head_size),
        "quantized": qlora,
        "generation": cache_bytes(shape, batch * sum(lengths.values())) if method == "grpo" else 0,
        "tokens": tokens,
        "num_layers": len(shape.layers),
        "title": f"{name} in {kind}; {what} ({millions:.1f} M), {optim}\n{method}: {rows}, {tokens:,} tokens",
        "notes": tuple(notes),
        "card": card,
    }

    def with_plan(notch: Notch) -> MemoryEstimate:
        return MemoryEstimate(**static, **_activations(shape, training, notch, trained), notch=notch)

    if isinstance(policy, Notch):
        return with_plan(policy)
    tile = tile_of(tokens)
    if policy != "auto":
        return with_plan(Notch.of_policy(policy, len(shape.layers), staging_buffers, tile))
    recomputed = with_plan(Notch(tile=tile))
    notch = choose(_measured(recomputed, shape, training, card), len(shape.layers), card.usable, card.bandwidth, tile)
    return with_plan(replace(notch, staging=staging_buffers))


def _check_choices(method: str, optim: str, policy: str | Notch, staging_buffers: int, card: Card | None) -> None:
    choices = {"method": (method, Method), "optim": (optim, Optimizer)}
    if not isinstance(policy, Notch):
        choices["policy"] = (policy, CheckpointPolicy)
    for name, (value, allowed) in choices.items():
        if value not in get_args(allowed):
            raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(map(repr, get_args(allowed)))}")
    if policy == "auto" and card is None:
        raise ValueError("policy='auto' depends on the card: pass one, or policy 'keep', 'recompute' or 'offload'")
    PatchConfig(staging_buffers=staging_buffers)  # raises for a value it does not take


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value} is not above 0; set 1 or more")


def _activations(shape: ModelShape, training: Training, notch: Notch, trained: int) -> dict[str, int]:
    """The terms that depend on the plan, in bytes; `trained` bytes of adapters are cast to bf16 for each forward."""
    tokens, first_kept = training.tokens, len(shape.layers) - notch.keep
    checkpointed, keeping = shape.layers[:first_kept], shape.layers[first_kept:]
    num_offloaded = notch.actions(len(shape.layers)).count("offload")
    inputs = [layer_input(layer, tokens) for layer in checkpointed]
    kept = sum(saved_per_token(layer, training) for layer in keeping) * tokens
    if keeping and training.rank and not training.qlora:
        kept += trained // FLOAT * HALF * len(keeping) // len(shape.layers)
    working = max((working_set(layer, training, notch.tile) for layer in checkpointed), default=0)
    if keeping:
        # kept layers run backward first; what they saved has gone when the first of the others is recomputed
        working = max(max(backward_extra(layer, training) for layer in keeping), working - kept)
    staging = notch.staging * max(inputs) if num_offloaded else 0
    return {
        # those that stay are used up before all staging buffers are in use
        "layer_inputs": max(0, sum(inputs[num_offloaded:]) - staging),
        "kept": kept,
        "working_set": working,
        "staging": staging,
        "head": head_bytes(shape, training, notch.tile),
        "slab": sum(inputs[:num_offloaded]),
    }


def _measured(estimate: MemoryEstimate, shape: ModelShape, training: Training, card: Card) -> Measured:
    """What the planner would measure in a fully checkpointed step."""
    layer = max(shape.layers, key=lambda layer: saved_per_token(layer, training))
    return Measured(
        tokens=training.tokens,
        base=estimate.static,
        peak=estimate.peak,
        kept=saved_per_token(layer, training) * training.tokens,
        layer_input=layer_input(layer, training.tokens),
        inputs_on_device=True,
        layer_seconds=layer.flops * training.tokens / (card.flops * REACHED),
    )


def _notes(shape: ModelShape, longest: int, full: bool) -> list[str]:
    """What the numbers do not say."""
    config, text = shape.config, shape.config.get_text_config()
    notes = ["weights are counted in bf16; TRL loads a model given by name in fp32 unless a dtype is set"]
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        notes.append(f"rows of {longest} tokens are longer than the model's max_position_embeddings={limit}")
    if getattr(config, "quantization_config", None) is not None:
        notes.append("the checkpoint is quantised; it is counted as if its weights were bf16, or NF4 with qlora")
    if getattr(text, "attn_logit_softcapping", None) or config.model_type == "gpt_oss":
        notes.append("attention with soft-capping or sinks runs eagerly here: its scores are not counted")
    if any(layer.attention is None for layer in shape.layers):
        notes.append("layers without attention are counted by their linear layers only")
    # a rank-one adapter of an expert has the sides of both weights, gate and values together
    sides = [e.number * (2 * layer.hidden + 3 * e.width) for layer in shape.layers if (e := layer.experts)]
    if sides and not full:
        notes.append(f"experts are counted as frozen; LoRA on them has {sum(sides) / 1e6:.2f} M more weights per rank")
    return notes
