"""Arguments of trainers and configs that TRL does not take: each is refused by name, with what to write instead."""

import difflib
import inspect
from collections.abc import Container, Iterable
from dataclasses import fields
from typing import Any

import trl
from transformers import TrainingArguments


# Names of Unsloth's notebooks and of earlier releases of TRL and transformers; what had a value has the same one now.
RENAMED = {
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "lora_config": "peft_config",
    "config": "args",
    "training_args": "args",
    "training_arguments": "args",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "evaluation_strategy": "eval_strategy",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "max_new_tokens": "max_completion_length",
    "no_cuda": "use_cpu",
    "num_return_sequences": "num_generations",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "random_state": "seed",
    "use_liger": "use_liger_kernel",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "warmup_ratio": "warmup_steps",
}

_NO_PROMPT_LENGTH = (
    "TRL's GRPO takes prompts whole: filter the long ones out of the dataset; max_completion_length=... limits "
    "completions, and vllm_max_model_length=... the context of vLLM"
)
_NO_CHUNKS = (
    "leave it out: the log-probabilities are computed in chunks by themselves; max_tokens_per_pass=... limits the "
    "passes without gradient"
)
_OF_THE_SERVER = (
    "TRL has no field for it: with vllm_mode='server' it is an option of `trl vllm-serve`, with vllm_mode='colocate' "
    "TRL chooses it"
)
_PACKED_BY_LENGTH = "leave it out: packing=True fills rows of max_length=... tokens"
_NO_APEX = "leave it out: mixed precision is PyTorch's; set fp16=True or bf16=True"

# What TRL takes in another form or not at all.
INSTEAD = {
    "adafactor": "set optim='adafactor'",
    "chars_per_token": _PACKED_BY_LENGTH,
    "dataset_batch_size": "leave it out: the datasets library chooses the size of its batches",
    "disable_log_stats": "leave it out: TRL decides what vLLM logs",
    "dispatch_batches": "set accelerator_config={'dispatch_batches': ...}",
    "fast_inference": "set use_vllm=True, vllm_mode='colocate'",
    "fp16_backend": _NO_APEX,
    "fp16_opt_level": _NO_APEX,
    "fsdp_min_num_params": "set fsdp_config={'min_num_params': ...}",
    "fsdp_transformer_layer_cls_to_wrap": "set fsdp_config={'transformer_layer_cls_to_wrap': ...}",
    "group_by_length": "set train_sampling_strategy='group_by_length'",
    "half_precision_backend": _NO_APEX,
    "include_inputs_for_metrics": "set include_for_metrics=['inputs']",
    "infinite": "set max_steps=... or num_train_epochs=...",
    "jit_mode_eval": "leave it out: torch_compile=True is what there is",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "model_init": "pass the model itself, or its name, as model=...",
    "num_of_sequences": _PACKED_BY_LENGTH,
    "overwrite_output_dir": "leave it out: a folder is written into; resume_from_checkpoint=... goes on from one",
    "past_index": "leave it out: it has no effect on these models",
    "push_to_hub_organization": "set hub_model_id='organization/name'",
    "ref_model": "leave it out: with beta=... above 0 the trainer makes the reference model from model=...",
    "save_safetensors": "leave it out: safetensors is the only format",
    "split_batches": "set accelerator_config={'split_batches': ...}",
    "tpu_num_cores": "set the environment variable TPU_NUM_CORES",
    "unsloth_grpo_mini_batch": _NO_CHUNKS,
    "unsloth_logit_chunk_multiplier": _NO_CHUNKS,
    "unsloth_num_chunks": _NO_CHUNKS,
    "use_gradient_checkpointing": (
        "set gradient_checkpointing=False, checkpoint_policy='recompute' (for True) or checkpoint_policy='offload' "
        "(for 'unsloth')"
    ),
    "use_ipex": "leave it out: PyTorch has its own kernels for CPUs",
    "use_mps_device": "leave it out: mps is used where there is one",
    "vllm_device": "set vllm_mode='colocate' to share the card, or vllm_mode='server' for `trl vllm-serve` elsewhere",
    "vllm_dtype": _OF_THE_SERVER,
    "vllm_enable_prefix_caching": _OF_THE_SERVER,
    "vllm_sampling_params": (
        "set temperature=..., top_p=..., top_k=..., min_p=... and repetition_penalty=...; other parameters, such as "
        "stop, are generation_kwargs={...}"
    ),
}
# The same where only one of the two tasks has an answer.
INSTEAD_GRPO = {
    "max_prompt_length": _NO_PROMPT_LENGTH,
    "max_length": _NO_PROMPT_LENGTH,
    "max_seq_length": _NO_PROMPT_LENGTH,
    "max_seq_len": _NO_PROMPT_LENGTH,
}
INSTEAD_SFT = {"max_prompt_length": "set max_length=..., which limits prompt and completion together"}


# What options of the command line have other names for than arguments.
OPTIONS = {
    "dataset": "dataset_name",
    "lora_rank": "lora_r",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "modules_to_save": "lora_modules_to_save",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "torch_dtype": "dtype",
}


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A question for the closest name that is known, or `None` if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else None


def check_arguments(trainer: Any, owner: type, config: type, args: Any, unnamed: dict[str, Any]) -> None:
    """
    Look at what a trainer was constructed with, before anything is done with it.

    Args:
        trainer (`transformers.Trainer`): The one that is being constructed, of `owner` or of a class made from it.
        owner (`type`): This package's trainer.
        config (`type`): This package's config for it.
        args: What was passed for `args`.
        unnamed (`dict[str, Any]`): The keywords that `owner` itself does not name, with their values.

    Raises:
        TypeError: For keywords that no constructor behind `owner` takes, and for `args` that are no config for it;
            TRL fails for both too.
    """
    taken = _taken(type(trainer), owner)
    if taken is not None and (unknown := {name: value for name, value in unnamed.items() if name not in taken}):
        known, in_config = taken | _parameters(owner), _names(config)
        moved, answers = [], {}
        for name, value in unknown.items():
            new = RENAMED.get(name, name)
            if new in in_config and new not in known:
                moved.append(_shown(new, value))
                answers[name] = f"a field of {config.__name__}, set {moved[-1]} there"
            else:
                given = unnamed.keys() | ({"args"} if args is not None else set())
                answers[name] = _answer(name, value, known, given, {}, config)
        advice = None
        if moved and isinstance(args, TrainingArguments) and not isinstance(args, _stock(config)):
            advice = (
                f"{type(args).__name__} has no such fields: pass args={config.__name__}({', '.join(moved)}, ...) with "
                "the arguments that it was given"
            )
        raise TypeError(_message(owner, unknown, answers, advice))
    if args is not None:
        _check_config(owner, config, args)


def check_fields(config: type, given: dict[str, Any]) -> None:
    """
    Look at the keywords that a config is made with.

    Args:
        config (`type`): This package's config, or a class made from it.
        given (`dict[str, Any]`): The keywords with their values.

    Raises:
        TypeError: For keywords that are no fields of it, as without this look.
    """
    if given.keys() <= (known := _names(config)):
        return
    parameters = inspect.signature(config.__init__).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return  # a constructor of its own, which may take anything
    known |= {p.name for p in parameters}
    if unknown := {name: value for name, value in given.items() if name not in known}:
        stock = trl.GRPOTrainer if issubclass(config, trl.GRPOConfig) else trl.SFTTrainer
        in_trainer = dict.fromkeys(_parameters(stock), stock.__name__)
        answers = {name: _answer(name, value, known, given, in_trainer, config) for name, value in unknown.items()}
        raise TypeError(_message(config, unknown, answers))


def option_instead(name: str, known: Container[str], prefix: str = "") -> str | None:
    """
    What to write instead of an option or a recipe's key that there is not, or `None` if nothing is known of it.

    Args:
        name (`str`): The option, without dashes.
        known (`Container[str]`): The options of the task.
        prefix (`str`): What stands in front of an option.
    """
    new = OPTIONS.get(name) or RENAMED.get(name)
    if new in known:
        return f"write {prefix}{new}"
    return _sentence(name, "num_generations" in known)


def _sentence(name: str, is_grpo: bool) -> str | None:
    return (INSTEAD_GRPO if is_grpo else INSTEAD_SFT).get(name) or INSTEAD.get(name)


def _check_config(owner: type, config: type, args: Any) -> None:
    made_of_any = _stock(config) is trl.SFTConfig  # TRL makes an SFTConfig of TrainingArguments, and no GRPOConfig
    if isinstance(args, _stock(config)) or (not made_of_any and hasattr(args, "num_generations")):
        return
    what = f"{owner.__name__}: args is {args.__name__ if isinstance(args, type) else 'a ' + type(args).__name__}"
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"{what}, which is no config; pass args={config.__name__}(...)")
    if not made_of_any:
        raise TypeError(
            f"{what}, which lacks the fields of {config.__name__}; pass args={config.__name__}(...) with the same "
            "arguments"
        )
    if lost := sorted(args.to_dict().keys() - _names(config)):
        some = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        raise TypeError(f"{what}, whose {some} {config.__name__} does not have; pass args={config.__name__}(...)")


def _answer(
    name: str, value: Any, known: set[str], given: Container[str], elsewhere: dict[str, str], config: type
) -> str:
    """
    What to write instead of a keyword.

    Args:
        name (`str`), value: The keyword.
        known (`set[str]`): Those that the trainer or the config takes.
        given (`Container[str]`): Those in the same call.
        elsewhere (`dict[str, str]`): For a config, those of its trainer, with the trainer's name.
        config (`type`): The config, or the trainer's.
    """
    is_grpo = issubclass(config, trl.GRPOConfig)
    new = RENAMED.get(name, name)
    if new in known:
        if new in given:
            return f"write {_shown(new, value)} alone; {new} is its name now and is given too"
        return f"write {_shown(new, value)}"
    if new in elsewhere:
        return f"pass {_shown(new, value)} to {elsewhere[new]}"
    sentence = _sentence(name, is_grpo)
    if sentence is not None:
        return "leave it out" if value is None or value is False else sentence
    other, other_trainer = (trl.SFTConfig, trl.SFTTrainer) if is_grpo else (trl.GRPOConfig, trl.GRPOTrainer)
    if new in _names(other):
        return f"leave it out: {new} is a field of {other.__name__}, for {other_trainer.__name__}"
    if new in _parameters(other_trainer):
        return f"leave it out: {new} is an argument of {other_trainer.__name__}"
    if question := did_you_mean(name, known):
        return question
    if question := did_you_mean(name, _names(config) | elsewhere.keys()):
        where = next((elsewhere[key] for key in elsewhere if repr(key) in question), config.__name__)
        return f"{question[:-1]} of {where}?"
    return f"see help({config.__name__})"


def _taken(trainer: type, owner: type) -> set[str] | None:
    """Keywords of the constructors behind `owner`'s, or `None` if they take any."""
    names = set()
    for cls in trainer.__mro__[trainer.__mro__.index(owner) + 1 :]:
        if "__init__" in vars(cls):
            names |= _parameters(cls)
            kinds = {p.kind for p in inspect.signature(cls.__init__).parameters.values()}
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                return names
    return None


def _parameters(cls: type) -> set[str]:
    """What the constructor of `cls` takes by name."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _names(config: type) -> set[str]:
    return {field.name for field in fields(config) if field.init}


def _stock(config: type) -> type:
    """TRL's config that `config` is made from."""
    return trl.GRPOConfig if issubclass(config, trl.GRPOConfig) else trl.SFTConfig


def _shown(name: str, value: Any) -> str:
    return f"{name}={_text(name, value) or '...'}"


def _text(name: str, value: Any) -> str | None:
    """A value as it was written, or `None` for objects, long strings and what could be a secret."""
    secret = name.endswith(("token", "key", "password")) and name not in ("eos_token", "pad_token")
    if secret or not (value is None or isinstance(value, (bool, int, float, str))):
        return None
    text = repr(value)
    return text if len(text) <= 60 else None


def _message(owner: type, unknown: dict[str, Any], answers: dict[str, str], advice: str | None = None) -> str:
    if len(answers) == 1:
        ((name, answer),) = answers.items()
        text = _text(name, unknown[name])
        value = "" if text is None else f" ({text})"
        message = f"{owner.__name__}() got an unexpected keyword argument {name!r}{value}: {answer}"
        return message if advice is None else f"{message}. {advice}"
    lines = [f"  {_shown(name, unknown[name])}: {answer}" for name, answer in answers.items()]
    lines.insert(0, f"{owner.__name__}() got {len(answers)} unexpected keyword arguments:")
    return "\n".join(lines if advice is None else [*lines, advice])
