"""`FastLanguageModel`: a model and its tokenizer in one call, an adapter in another, as Unsloth's users know them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..patches.quantization.experts import find_experts
from ..patches.registry import base_model, current_report
from .base_state import BASE_STATE, bits_of, positions_of, quantization_of, read_base_state, set_positions
from .loading_adapters import (
    TARGETS,
    default_targets,
    is_tied,
    load_whole,
    match_dtypes,
    same_adapter,
    seeded,
    with_new_tokens,
)
from .loading_arguments import refuse_unknown
from .loading_sources import HUB, base_of, find_source, read_adapter
from .loading_weights import (
    Loading,
    choose_dtype,
    default_device_map,
    require_bitsandbytes,
    require_gguf,
)
from .rope import fit_positions
from .saving_methods import add_saving_methods
from .support import check_architecture
from .targets import expand_targets
from .vocabulary import resize, set_padding, vocabulary_rows


GradientCheckpointing = Literal["auto", "unsloth"] | bool
_CHECKPOINTING = ("auto", "unsloth", True, False)


class FastLanguageModel:
    """
    Loads models for this package's trainers, or for any other. All methods are static; no object is made.

    What the trainers take over from a model that was loaded here stands on it as plain attributes, and a value that
    their config is given wins: `max_seq_length` for `SFTConfig.max_length`, `use_gradient_checkpointing` for
    `gradient_checkpointing` and `checkpoint_policy`.
    """

    @staticmethod
    def from_pretrained(
        model_name: str | Path,
        max_seq_length: int = 2048,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool = True,
        load_in_8bit: bool = False,
        full_finetuning: bool = False,
        token: str | bool | None = None,
        device_map: Any = None,
        trust_remote_code: bool = False,
        strict: bool = False,
        *,
        load_in_16bit: bool = False,
        rope_scaling: dict[str, Any] | None = None,
        fix_tokenizer: bool = True,
        use_gradient_checkpointing: GradientCheckpointing = "auto",
        resize_model_vocab: int | None = None,
        gguf_file: str | None = None,
        quantization_config: Any = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        subfolder: str | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        **unknown: Any,
    ) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
        """
        Load a model and its tokenizer.

        Args:
            model_name (`str` or `Path`): A folder, a name on the Hub, a GGUF file (a path, or
                `"owner/model/file.gguf"`), a checkpoint that is quantised already, or a folder or repository with an
                adapter: then its base is loaded, gets the vocabulary that the adapter was trained with, and the
                adapter can be trained on.
            max_seq_length (`int`, *optional*, defaults to 2048): Tokens of the longest sample. `SFTTrainer` takes it
                for `max_length` unless its config is given one. More than the model was made for scales RoPE linearly,
                with a warning.
            dtype (`torch.dtype` or `str`, *optional*): By default bf16 where the card has it, fp16 on cards without
                (fp32 to train all weights), fp32 on a CPU.
            load_in_4bit (`bool`, *optional*, defaults to `True`): NF4 with double quantisation, stacked experts too,
                weight by weight as they are read. On a CPU it is right but slow.
            load_in_8bit (`bool`, *optional*, defaults to `False`): LLM.int8; set `load_in_4bit=False` with it.
            full_finetuning (`bool`, *optional*, defaults to `False`): Train all weights, without an adapter. They are
                then loaded in `dtype`; a warning says so where `load_in_4bit` or `load_in_8bit` is on.
            token (`str` or `bool`, *optional*): For the Hub.
            device_map (*optional*): As for `from_pretrained` of transformers; by default the card of this process.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Run code from the model's repository.
            strict (`bool`, *optional*, defaults to `False`): Anything that is not verified is an error.
            load_in_16bit (`bool`, *optional*, defaults to `False`): The opposite of `load_in_4bit`, which has to be
                `False` with it.
            rope_scaling (`dict`, *optional*): RoPE as in a config, such as `{"rope_type": "yarn", "factor": 4.0}`.
            fix_tokenizer (`bool`, *optional*, defaults to `True`): Choose a padding token where there is none.
            use_gradient_checkpointing (`str` or `bool`, *optional*, defaults to `"auto"`): For the trainers. `"auto"`
                leaves it to their config, `True` recomputes every layer, `"unsloth"` recomputes from inputs in host
                memory (`checkpoint_policy="offload"`), `False` keeps all activations.
            resize_model_vocab (`int`, *optional*): Rows to give embedding and head, at least as many as they have.
            gguf_file (`str`, *optional*): The GGUF file in the folder or repository.
            quantization_config (*optional*): As for `from_pretrained` of transformers, instead of `load_in_4bit`.
            attn_implementation (`str`, *optional*): As for transformers; packed rows use this package's attention.
            revision, cache_dir, subfolder, local_files_only, force_download (*optional*): As for transformers.

        Returns:
            The model, in evaluation mode, and its tokenizer. The model has `save_pretrained_merged`,
            `push_to_hub_merged`, `save_pretrained_gguf` and `push_to_hub_gguf` as methods of its own.

        Raises:
            TypeError: For an argument that is not known, with the closest one that is.
            ValueError: For arguments that contradict each other, and with `strict=True` for what is not verified;
                otherwise each gap is one `UnsupportedArchitectureWarning`.
            FileNotFoundError: If there is no such folder or file.
        """
        refuse_unknown(FastLanguageModel.from_pretrained, unknown)
        if full_finetuning:
            quantised, bits = _quantised_in_vain(load_in_4bit, load_in_8bit, quantization_config), 16
        else:
            quantised, bits = "", _bits(load_in_4bit, load_in_8bit, load_in_16bit, quantization_config)
        _check_choices(use_gradient_checkpointing, max_seq_length)
        values = (token, revision, cache_dir, subfolder, local_files_only, force_download)
        hub = {name: value for name, value in zip(HUB, values, strict=True) if value}
        if token is False:  # no token, even if there is one on this machine
            hub["token"] = False
        if not isinstance(model_name, (str, Path)):
            raise TypeError(f"model_name={model_name!r} is neither a name nor a folder; pass 'Qwen/Qwen3-8B', for one")
        source = find_source(str(model_name), gguf_file, **hub)
        adapter, adapter_source = read_adapter(source), source
        if adapter is not None:
            if full_finetuning:
                raise ValueError(
                    f"full_finetuning=True: {model_name} is an adapter, whose base stays frozen; merge it first "
                    "(save_pretrained_merged) and load the result"
                )
            if resize_model_vocab is not None:
                raise ValueError(
                    f"resize_model_vocab={resize_model_vocab}: {model_name} is an adapter, which has the vocabulary "
                    "that it was trained with; leave it out"
                )
            source = base_of(adapter, source)
        if source.gguf_file:
            require_gguf()
        try:
            config = AutoConfig.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.kwargs)
        except OSError as error:
            if adapter is None:
                raise
            raise OSError(
                f"the base of the adapter {model_name} is {adapter.base_model_name_or_path!r}, which is no folder in "
                f"{Path.cwd()} and cannot be loaded from the Hub: set base_model_name_or_path in its "
                f"adapter_config.json to where that model is ({str(error).splitlines()[0]})"
            ) from error
        own_code = trust_remote_code and bool(getattr(config, "auto_map", None))
        check_architecture(config, strict=strict, own_code=own_code)
        device_map = default_device_map() if device_map is None else device_map
        state = {} if adapter is None else read_base_state(adapter_source.file(BASE_STATE))
        positions = positions_of(config)
        if rope_scaling is None:
            set_positions(config, state)
        fit_positions(config, max_seq_length, rope_scaling)
        own = None if source.gguf_file else getattr(config, "quantization_config", None)  # of the checkpoint itself
        if bits_of(state) not in (None, bits) and own is None and quantization_config is None:
            warnings.warn(
                f"{model_name} was trained on its base in {bits_of(state)} bits and is loaded on it in {bits}, which "
                f"is another model; load_in_4bit={bits_of(state) == 4}, load_in_8bit={bits_of(state) == 8} is the one "
                "that was trained",
                stacklevel=2,
            )
        options = {"trust_remote_code": True} if trust_remote_code else {}
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        if full_finetuning and own is not None and quantization_config is None:
            raise ValueError(
                f"full_finetuning=True: {model_name} is saved in quantised weights, which cannot be trained; load its "
                "original weights, dequantise it with the quantization_config of its method if that has "
                "dequantize=True, or train an adapter with full_finetuning=False"
            )
        chosen = choose_dtype(dtype, device_map, full_finetuning)
        if quantised:
            warnings.warn(
                f"full_finetuning=True and {quantised}: quantised weights cannot be trained, so the model is loaded "
                f"in {chosen}, and all of its weights are. Set {quantised.replace('True', 'False')} with it, or "
                "full_finetuning=False to train an adapter on quantised weights",
                stacklevel=2,
            )
        as_trained = None if own or quantization_config or source.gguf_file else quantization_of(state)
        if as_trained is not None and bits == bits_of(state):
            require_bitsandbytes(bits)
            as_trained.bnb_4bit_compute_dtype = chosen
            quantization_config = as_trained
        loading = Loading(chosen, bits, device_map, quantization_config, options)
        model, tokenizer = load_whole(source, config, loading, trust_remote_code, adapter, adapter_source)
        base = base_model(model)
        if (scaled := positions_of(config)) != positions:
            base.scaled_positions = scaled
        if resize_model_vocab is not None:
            _resize_to(base, resize_model_vocab)
        if fix_tokenizer:
            set_padding(tokenizer, base)
        _check_rows(base, tokenizer)
        base.max_seq_length = max_seq_length
        base.use_gradient_checkpointing = use_gradient_checkpointing
        if full_finetuning:
            base.full_finetuning = True
        add_saving_methods(base)
        if model is not base:
            add_saving_methods(model)
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: PreTrainedModel,
        r: int = 16,
        target_modules: Sequence[str] | str = TARGETS,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        layers_to_transform: int | list[int] | None = None,
        layers_pattern: str | list[str] | None = None,
        use_gradient_checkpointing: GradientCheckpointing | None = None,
        random_state: int = 3407,
        max_seq_length: int | None = None,
        use_rslora: bool = False,
        modules_to_save: list[str] | None = None,
        init_lora_weights: bool | str = True,
        loftq_config: dict[str, Any] | None = None,
        *,
        target_parameters: list[str] | None = None,
        exclude_modules: list[str] | str | None = None,
        rank_pattern: dict[str, int] | None = None,
        alpha_pattern: dict[str, int] | None = None,
        use_dora: bool = False,
        trainable_token_indices: list[int] | dict[str, list[int]] | None = None,
        ensure_weight_tying: bool | None = None,
        **unknown: Any,
    ) -> PeftModel:
        """
        Put a LoRA around a model.

        Args:
            model (`PreTrainedModel`): From `from_pretrained`, or any other of transformers.
            r (`int`, *optional*, defaults to 16): The rank.
            target_modules (`Sequence[str]` or `str`, *optional*): Names of layers. `gate_proj`, `up_proj` and
                `down_proj` mean stacked experts too. By default the seven projections of attention and MLP; an
                architecture with other names gets a LoRA on all linear layers of its decoder, with a warning.
            lora_alpha (`int`, *optional*, defaults to 16): The scale is `lora_alpha / r`.
            lora_dropout (`float`, *optional*, defaults to 0.0): Not for experts.
            use_gradient_checkpointing (*optional*): As in `from_pretrained`; by default what it was given.
            random_state (`int`, *optional*, defaults to 3407): Seeds the adapter's weights. The random state of the
                process stays as it was.
            max_seq_length (`int`, *optional*): As in `from_pretrained`, up to what RoPE was set to there.
            use_rslora (`bool`, *optional*, defaults to `False`): The scale is `lora_alpha / sqrt(r)`.
            modules_to_save (`list[str]`, *optional*): Layers that are trained whole. After `add_new_tokens` the
                embedding and the head are, unless something else trains their rows.
            ensure_weight_tying (`bool`, *optional*): Whether an embedding in `modules_to_save` stays tied to the head;
                by default if it is tied.
            bias, layers_to_transform, layers_pattern, init_lora_weights, loftq_config, target_parameters,
            exclude_modules, rank_pattern, alpha_pattern, use_dora, trainable_token_indices (*optional*): As in PEFT's
                `LoraConfig`.

        Returns:
            `PeftModel`: With the adapter in fp32 on 16-bit weights, and the methods for saving.

        Raises:
            TypeError: For an argument that is not known, with the closest one that is.
            ValueError: If a target is not there, or if the model has another adapter or was loaded with
                `full_finetuning=True`.
        """
        refuse_unknown(FastLanguageModel.get_peft_model, unknown)
        base = base_model(model)
        if use_gradient_checkpointing is None:
            use_gradient_checkpointing = getattr(base, "use_gradient_checkpointing", "auto")
        _check_choices(use_gradient_checkpointing, max_seq_length)
        if getattr(base, "full_finetuning", False):
            raise ValueError(
                "get_peft_model: the model was loaded with full_finetuning=True; set it to False, or train it"
            )
        if isinstance(model, PeftModel):
            same = same_adapter(model, r, lora_alpha, use_rslora, target_modules)
            base.use_gradient_checkpointing = use_gradient_checkpointing
            warnings.warn(same, stacklevel=2)
            return model
        if max_seq_length is not None:
            limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
            if limit is not None and max_seq_length > limit:
                raise ValueError(
                    f"max_seq_length={max_seq_length} is more than the {limit} positions of the model; pass it to "
                    "from_pretrained, which scales RoPE"
                )
            base.max_seq_length = max_seq_length
        targets = default_targets(base) if target_modules is TARGETS else target_modules
        if targets == "all-linear" and next(find_experts(base), None) is not None:
            warnings.warn(
                "target_modules='all-linear' leaves out stacked experts, which are no linear layers; list gate_proj, "
                "up_proj and down_proj to train those too",
                stacklevel=2,
            )
        modules_to_save = with_new_tokens(base, targets, modules_to_save, trainable_token_indices)
        if ensure_weight_tying is None:
            ensure_weight_tying = bool(modules_to_save) and is_tied(base)
        config = LoraConfig(
            r=r,
            target_modules=targets if isinstance(targets, str) else list(targets),
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            bias=bias,
            layers_to_transform=layers_to_transform,
            layers_pattern=layers_pattern,
            use_rslora=use_rslora,
            modules_to_save=modules_to_save,
            init_lora_weights=init_lora_weights,
            loftq_config=loftq_config or {},
            target_parameters=target_parameters,
            exclude_modules=exclude_modules,
            rank_pattern=rank_pattern or {},
            alpha_pattern=alpha_pattern or {},
            use_dora=use_dora,
            trainable_token_indices=trainable_token_indices,
            ensure_weight_tying=ensure_weight_tying,
            task_type="CAUSAL_LM",
        )
        config = expand_targets(base, config)
        if (earlier := current_report(base)) is not None:
            earlier.remove()
        with seeded(base, random_state):
            wrapped = peft.get_peft_model(base, config)
        for parameter in wrapped.parameters():
            # the loss scaler of fp16 takes gradients in fp32 only
            if parameter.requires_grad and parameter.dtype == torch.float16:
                parameter.data = parameter.data.float()
        match_dtypes(wrapped)
        base.use_gradient_checkpointing = use_gradient_checkpointing
        add_saving_methods(wrapped)
        return wrapped

    @staticmethod
    def for_inference(model: nn.Module) -> nn.Module:
        """Set a model to generate: evaluation mode, with a cache. Returns the model itself."""
        _set_cache(model, True)
        return model.eval()

    @staticmethod
    def for_training(model: nn.Module, use_gradient_checkpointing: GradientCheckpointing | None = None) -> nn.Module:
        """
        Set a model to train: training mode, without a cache. Trainers do that themselves.

        Args:
            model (`nn.Module`): The model.
            use_gradient_checkpointing (*optional*): As in `from_pretrained`; by default it stays as it is.

        Returns:
            `nn.Module`: The model itself.
        """
        if use_gradient_checkpointing is not None:
            _check_choices(use_gradient_checkpointing, None)
            base_model(model).use_gradient_checkpointing = use_gradient_checkpointing
        _set_cache(model, False)
        return model.train()


def _bits(four: bool, eight: bool, sixteen: bool, quantization_config: Any) -> int:
    """Bits of the weights, from arguments of which at most one may be set."""
    asked = [
        name
        for name, value in (("load_in_4bit", four), ("load_in_8bit", eight), ("load_in_16bit", sixteen))
        if value and not (name == "load_in_4bit" and quantization_config is not None)
    ]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(f'{name}=True' for name in asked)}: set one of them, and load_in_4bit=False")
    return {"load_in_4bit": 4, "load_in_8bit": 8}.get(asked[0], 16) if asked else 16


def _quantised_in_vain(four: bool, eight: bool, quantization_config: Any) -> str:
    """What asks for quantised weights where all weights are trained; `load_in_4bit` may stand at its default."""
    if quantization_config is not None and not getattr(quantization_config, "dequantize", False):
        raise ValueError(
            "full_finetuning=True and quantization_config: quantised weights cannot be trained; leave "
            "quantization_config out"
        )
    asked = (("load_in_4bit", four and quantization_config is None), ("load_in_8bit", eight))
    return " and ".join(f"{name}=True" for name, value in asked if value)


def _check_choices(use_gradient_checkpointing: Any, max_seq_length: int | None) -> None:
    if not any(
        use_gradient_checkpointing is choice or use_gradient_checkpointing == choice and isinstance(choice, str)
        for choice in _CHECKPOINTING
    ):
        raise ValueError(
            f"use_gradient_checkpointing={use_gradient_checkpointing!r} is unknown; choose from "
            f"{', '.join(map(repr, _CHECKPOINTING))}"
        )
    if max_seq_length is not None and (not isinstance(max_seq_length, int) or max_seq_length < 1):
        raise ValueError(f"max_seq_length={max_seq_length!r} is not a number of tokens; set 2048, for example")


def _resize_to(model: PreTrainedModel, rows: int) -> None:
    before = vocabulary_rows(model)
    if rows < before:
        raise ValueError(
            f"resize_model_vocab={rows} is less than the {before} rows that the model has, which would be lost; leave "
            "it out"
        )
    if rows > before:
        resize(model, rows)


def _check_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Say which tokens have no row, instead of an index error in the first batch that has one."""
    rows = vocabulary_rows(model)
    beyond = sorted(token for token, index in tokenizer.get_vocab().items() if index >= rows)
    if beyond:
        warnings.warn(
            f"{len(beyond)} tokens of the tokenizer, such as {beyond[0]!r}, are beyond the {rows} rows of the "
            f"embedding; set resize_model_vocab={max(tokenizer.get_vocab().values()) + 1} to use them",
            stacklevel=3,
        )


def _set_cache(model: nn.Module, use_cache: bool) -> None:
    base = base_model(model)
    base.config.get_text_config().use_cache = use_cache
    if base.generation_config is not None:
        base.generation_config.use_cache = use_cache
