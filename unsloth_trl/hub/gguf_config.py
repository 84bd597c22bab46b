"""Which architectures can be written as GGUF, and their hyperparameters under the names that llama.cpp reads.

The keys are those of the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). What a
runtime computes from the architecture's name alone, such as the scale of attention scores, is not in the file: a
config that asks for something else is refused here, before anything is written.
"""

import math
import warnings
from dataclasses import dataclass

import gguf
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class Architecture:
    """
    How the checkpoints of one `model_type` become GGUF.

    Args:
        name (`str`): The value of `general.architecture`.
        activation (`str`): What the config's `hidden_act` or `hidden_activation` has to be.
        interleaved_rope (`bool`): RoPE rotates neighbouring pairs there, halves of a head here: the rows of queries
            and keys are reordered.
        norm_shift (`bool`): Norms multiply by one plus their weight here, and by their weight there.
        biases (`tuple` of `str`): Fields of the config whose extra biases are read there too.
        swa_pattern (`int`, *optional*): Every how many layers one attends to everything; the others have a window.
            `None` if a window is not known there.
        needs_output (`bool`): The head has a tensor of its own even where it is tied to the embeddings.
    """

    name: str
    activation: str = "silu"
    interleaved_rope: bool = False
    norm_shift: bool = False
    biases: tuple[str, ...] = ()
    swa_pattern: int | None = None
    needs_output: bool = False


# Each was exported, read back and compared; tests/hub/test_gguf.py has them all.
ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture("gemma2", "gelu_pytorch_tanh", norm_shift=True, swa_pattern=2),
    "gemma3_text": Architecture("gemma3", "gelu_pytorch_tanh", norm_shift=True, swa_pattern=6),
    "gpt_oss": Architecture("gpt-oss", biases=("attention_bias",), swa_pattern=2, needs_output=True),
    "llama": Architecture("llama", interleaved_rope=True, biases=("attention_bias", "mlp_bias")),
    "mistral": Architecture("llama", interleaved_rope=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
}


def find_architecture(config: PretrainedConfig, converter: str = "convert_hf_to_gguf.py") -> Architecture:
    """
    The entry of `ARCHITECTURES` for a config that it can express.

    Args:
        config (`PretrainedConfig`): Of the model to export.
        converter (`str`): How to call llama.cpp's own converter, for the message.

    Raises:
        ValueError: If the `model_type` is not in the table, or if a field has a value that GGUF has no place for.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ValueError(
            f"model_type='{config.model_type}' is not among those that can be exported to GGUF here "
            f"({', '.join(sorted(ARCHITECTURES))}); save the model with save_method='merged_16bit' and run "
            f"llama.cpp's own converter on that folder: python {converter} FOLDER --outtype q8_0"
        )
    _check_fields(config, architecture)
    _check_rope(config, architecture)
    return architecture


def _check_fields(config: PretrainedConfig, architecture: Architecture) -> None:
    """Raise for what the runtime would compute differently."""

    def refuse(field: str, wanted: str) -> None:
        raise ValueError(
            f"{config.model_type} with {field}={getattr(config, field)!r} cannot be expressed in GGUF, whose runtimes "
            f"compute it with {wanted} only"
        )

    activation = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    if getattr(config, activation) != architecture.activation:
        refuse(activation, repr(architecture.activation))
    for field in ("attention_bias", "mlp_bias"):
        if getattr(config, field, False) and field not in architecture.biases:
            refuse(field, "False")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the checkpoint is quantised (quantization_config); save it with save_method='merged_16bit'")
    heads = config.num_attention_heads
    if config.model_type == "qwen2" and _head_dim(config) != config.hidden_size // heads:
        refuse("head_dim", f"hidden_size / num_attention_heads = {config.hidden_size // heads}")
    if config.model_type in ("gemma2", "gemma3_text"):
        # the 27B models, known by their number of layers there, scale by the width of a head in the residual stream
        large = config.num_hidden_layers == {"gemma2": 46, "gemma3_text": 62}[config.model_type]
        scalar = config.hidden_size // heads if large else _head_dim(config)
        if config.query_pre_attn_scalar != scalar:
            refuse("query_pre_attn_scalar", str(scalar))
        if getattr(config, "use_bidirectional_attention", None):
            refuse("use_bidirectional_attention", "False")
    if config.model_type == "gemma3_text" and config.attn_logit_softcapping is not None:
        refuse("attn_logit_softcapping", "None")
    if config.model_type in ("gemma2", "gpt_oss") and "sliding_attention" not in config.layer_types:
        refuse("layer_types", "windows in some of the layers")
    if config.model_type == "gpt_oss":
        for field, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
            if getattr(config, field, value) != value:
                refuse(field, str(value))
    if config.model_type == "qwen3_moe":
        for field, value in (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
            if (getattr(config, field) or type(value)()) != value:
                refuse(field, repr(value))
    if architecture.swa_pattern is None and (window := _ignored_window(config)):
        warnings.warn(
            f"{config.model_type} has sliding_window={window}, which GGUF runtimes ignore for this architecture: past "
            f"{window} tokens every layer attends to all of the text, and the output is no longer the model's",
            stacklevel=4,
        )


def _check_rope(config: PretrainedConfig, architecture: Architecture) -> None:
    rope = rope_parameters(config)
    known = ("default", "linear", "yarn") + (("llama3",) if architecture.name == "llama" else ())
    kind = rope.get("rope_type", "default")
    local = local_rope_parameters(config).get("rope_type", "default")
    if kind not in known or local != "default":
        raise ValueError(
            f"{config.model_type} with rope_type={kind if kind not in known else local!r} cannot be exported to GGUF "
            f"here; {', '.join(known)} can, and 'default' in layers with a window"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']} cannot be exported to GGUF here")
    if kind == "yarn" and rope.get("truncate") is False:
        warnings.warn(
            "RoPE with truncate=False: GGUF runtimes round the ends of YaRN's ramp to whole dimensions, so that "
            "logits differ a little from the model's",
            stacklevel=4,
        )
    # read by runtimes for other architectures only
    for field, value in (("beta_fast", 32), ("beta_slow", 1), ("mscale", 0), ("mscale_all_dim", 0)):
        if kind == "yarn" and (rope.get(field) or value) != value:
            wanted = f"the default of {value}" if value else "none"
            raise ValueError(
                f"RoPE with {field}={rope[field]} cannot be exported to GGUF, whose runtimes take {wanted}"
            )


def rope_parameters(config: PretrainedConfig) -> dict:
    """RoPE of the layers that attend to everything."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def local_rope_parameters(config: PretrainedConfig) -> dict:
    """RoPE of the layers with a window, where it is another one."""
    return config.rope_parameters.get("sliding_attention", {})


def rope_factors(config: PretrainedConfig) -> torch.Tensor | None:
    """
    What llama.cpp divides the RoPE frequencies by, as a tensor of the file.

    Returns:
        `torch.Tensor` of shape `(head_dim / 2,)` in fp32 for `rope_type="llama3"`, from transformers' own frequencies;
        `None` for any other.
    """
    rope = rope_parameters(config)
    if rope.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    head_dim = _head_dim(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / scaled.double()).float()


def add_hyperparameters(writer: gguf.GGUFWriter, config: PretrainedConfig, architecture: Architecture) -> None:
    """Write the model's shape and constants; `config` is one that `find_architecture` accepted."""
    head_dim = _head_dim(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    # the rotated width of a head, which is all of it in these architectures
    writer.add_rope_dimension_count(head_dim)
    _add_rope(writer, config)
    if architecture.swa_pattern is not None:
        _add_window(writer, config, architecture.swa_pattern)
    if config.model_type == "gemma2" and config.attn_logit_softcapping is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None) is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("qwen3_moe", "gpt_oss"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        width = config.moe_intermediate_size if config.model_type == "qwen3_moe" else config.intermediate_size
        writer.add_expert_feed_forward_length(width)


def _add_rope(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    rope, local = rope_parameters(config), local_rope_parameters(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        factor = rope["factor"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope.get("attention_factor"):
            # a factor on top of the one that every YaRN has there
            writer.add_rope_scaling_attn_factors(rope["attention_factor"] / (0.1 * math.log(factor) + 1.0))


def _add_window(writer: gguf.GGUFWriter, config: PretrainedConfig, every: int) -> None:
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    if not any(windowed):
        return  # Gemma 3 without windows; the others are refused
    writer.add_sliding_window(config.sliding_window)
    if windowed != [(layer + 1) % every != 0 for layer in range(config.num_hidden_layers)]:
        writer.add_sliding_window_pattern(windowed)


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _ignored_window(config: PretrainedConfig) -> int | None:
    """The window of a config whose runtime has none, if it is shorter than the context."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or (kinds is not None and "sliding_attention" not in kinds):
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return window if window < config.max_position_embeddings else None
