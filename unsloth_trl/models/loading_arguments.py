"""Arguments that `FastLanguageModel` does not take: each is refused by name, with what to do instead."""

import difflib
import inspect
import warnings
from collections.abc import Callable
from typing import Any


# Unsloth's arguments that have no counterpart here, and what does the same; false values ask for nothing
_ELSEWHERE = {
    "fast_inference": "vLLM belongs to the trainer: GRPOConfig(use_vllm=True, vllm_mode='colocate')",
    "float8_kv_cache": "vLLM belongs to the trainer: GRPOConfig(use_vllm=True)",
    "float32_mixed_precision": "set dtype=torch.float32",
    "load_in_fp8": "set load_in_4bit=True or load_in_8bit=True",
    "offload_embedding": "checkpoint_policy='offload' in the trainer's config frees more",
    "qat_scheme": "there is no quantisation-aware training",
    "unsloth_tiled_mlp": "long rows run in tiles by themselves; leave it out",
    "use_exact_model_name": None,  # names are always taken as they are
}
# they say how vLLM is to run, or seed it
_OF_VLLM = ("gpu_memory_utilization", "max_lora_rank", "disable_log_stats", "random_state")


def refuse_unknown(function: Callable, unknown: dict[str, Any]) -> None:
    """
    Look at the keywords that a function did not name.

    Args:
        function (`Callable`): The function; its parameters are what is known.
        unknown (`dict[str, Any]`): The other keywords, with their values.

    Raises:
        TypeError: For a keyword that nobody knows, with the closest one that is known.
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
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")
    if idle:
        warnings.warn(
            f"{function.__name__}: {', '.join(idle)} is for vLLM, which the trainer runs: set "
            "vllm_gpu_memory_utilization and the like in GRPOConfig. It has no effect here",
            stacklevel=3,
        )
