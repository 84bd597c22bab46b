"""Arguments that `FastLanguageModel` does not take: each is refused by name, with what to do instead."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from ..unknown_arguments import did_you_mean


# Unsloth's arguments that have no counterpart here, and what does the same; false values ask for nothing
_ELSEWHERE = {
    "fast_inference": "vLLM belongs to the trainer: GRPOConfig(use_vllm=True, vllm_mode='colocate')",
    "float8_kv_cache": "vLLM belongs to the trainer: GRPOConfig(use_vllm=True)",
    "float32_mixed_precision": "set dtype=torch.float32",
    "load_in_fp8": "set load_in_4bit=True or load_in_8bit=True",
    "offload_embedding": "checkpoint_policy='offload' in the trainer's config frees more",
    "qat_scheme": "there is no quantisation-aware training",
    "unsloth_tiled_mlp": "long rows run in tiles by themselves; leave it out",
    "unsloth_vllm_standby": "vLLM belongs to the trainer: GRPOConfig(use_vllm=True, vllm_enable_sleep_mode=True)",
    "fullgraph": "layers are compiled by the trainer: compile_layers='on' in its config",
    "num_labels": "load classifiers with transformers",
    "return_logits": "leave it out: compute_metrics of the trainer gets logits",
    "finetune_vision_layers": "only the layers of the language model are trained",
    "use_exact_model_name": None,  # names are always taken as they are
}
_TARGETS = (
    "list the layers to train in target_modules; by default those are q_proj, k_proj, v_proj, o_proj, gate_proj, "
    "up_proj and down_proj"
)
# of which no value has a counterpart here
_NOT_AT_ALL = {
    "auto_model": "models that generate text are all that is loaded",
    "finetune_attention_modules": _TARGETS,
    "finetune_language_layers": _TARGETS,
    "finetune_mlp_modules": _TARGETS,
    "low_cpu_mem_usage": "leave it out: weights are always read one by one",
    "task_type": "leave it out: it is always 'CAUSAL_LM'",
    "temporary_location": "leave it out: nothing is written",
    "text_only": "leave it out: only the text of a model is trained",
    "use_cache": "leave it out, and call FastLanguageModel.for_inference(model) before generating",
}
# other names of what is taken
_RENAMED = {
    "lora_r": "r",
    "rank": "r",
    "max_length": "max_seq_length",
    "torch_dtype": "dtype",
    "seed": "random_state",
    "attn_impl": "attn_implementation",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "use_auth_token": "token",
    "hf_token": "token",
}
# they say how vLLM is to run, or seed it
_OF_VLLM = ("gpu_memory_utilization", "max_lora_rank", "disable_log_stats", "enforce_eager", "random_state")


def refuse_unknown(function: Callable, unknown: dict[str, Any]) -> None:
    """
    Look at the keywords that a function did not name.

    Args:
        function (`Callable`): The function; its parameters are what is known.
        unknown (`dict[str, Any]`): The other keywords, with their values.

    Raises:
        TypeError: For a keyword that is not known, with the closest one that is, or with what to write instead.
        ValueError: For one of Unsloth's that asks for what is done in another way here.
    """
    known = [name for name, p in inspect.signature(function).parameters.items() if p.kind != p.VAR_KEYWORD]
    idle = []
    for name, value in unknown.items():
        if name in _ELSEWHERE:
            if value and _ELSEWHERE[name] is not None:
                raise ValueError(f"{function.__name__}: {name}={value!r} is not done here: {_ELSEWHERE[name]}")
        elif name in _OF_VLLM and "model_name" in known:
            idle.append(name)
        else:
            if name in _NOT_AT_ALL:
                hint = _NOT_AT_ALL[name]
            elif name in _OF_VLLM:
                hint = "it is for vLLM, which the trainer runs: GRPOConfig(use_vllm=True)"
            elif _RENAMED.get(name) in known:
                hint = f"write {_RENAMED[name]}"
            else:
                hint = did_you_mean(name, known) or f"it takes {', '.join(known)}"
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")
    if idle:
        warnings.warn(
            f"{function.__name__}: {', '.join(idle)} is for vLLM, which the trainer runs: set "
            "vllm_gpu_memory_utilization and the like in GRPOConfig. It has no effect here",
            stacklevel=3,
        )
