"""What the benchmark scripts share. Imports nothing heavy: Unsloth has to come before the libraries it changes."""

import os
from typing import Any


# parts that have no switch, with their names in tables
PIECES = {"joined_products": "joined LoRA products", "nf4_kernel": "the NF4 kernel"}


def be_quiet_and_offline() -> None:
    """Set the environment; before transformers is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        UNSLOTH_DISABLE_STATISTICS="1",
        TOKENIZERS_PARALLELISM="false",
        TRANSFORMERS_VERBOSITY="error",
        TRL_EXPERIMENTAL_SILENCE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
    )


def take_device() -> int:
    """Use the device of this process, of those that `accelerate launch` has started; how many there are."""
    import torch

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return int(os.environ.get("WORLD_SIZE", 1))


def take_off(pieces: list[str]) -> None:
    """Leave out, in mode ours, parts of compiled LoRA layers: one product for several `A`, and our NF4 kernel."""
    if pieces:
        from unsloth_trl.patches.lora import graph, op_4bit

        if "joined_products" in pieces:
            graph._join = lambda *_: None
        if "nf4_kernel" in pieces:
            op_4bit._is_ours = lambda *_: False


def limit_memory(gib: float) -> None:
    """Let this process use `gib` GiB of the device, to stand in for a smaller card; 0 for all of it."""
    import torch

    if gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)


def load_options(attn: str | None, qlora: bool, dtype: str = "bfloat16") -> dict[str, Any]:
    """Keyword arguments of `from_pretrained`."""
    import torch
    from transformers import BitsAndBytesConfig

    options = {"dtype": getattr(torch, dtype), "device_map": {"": torch.cuda.current_device()}}
    if attn:
        options["attn_implementation"] = attn
    if qlora:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=options["dtype"],
            bnb_4bit_use_double_quant=True,
        )
    return options


def load_model(path: str, mode: str, attn: str | None, qlora: bool, dtype: str = "bfloat16"):
    """The model of a run; with `qlora`, experts are in 4 bits too in mode ours, which no peer can do."""
    from transformers import AutoModelForCausalLM

    options = load_options(attn, qlora, dtype)
    if mode == "ours" and qlora and "a3b" in path:
        from unsloth_trl import load_in_4bit

        return load_in_4bit(path, **options)
    return AutoModelForCausalLM.from_pretrained(path, **options)


def build_in_memory(name: str, qlora: bool, attn: str | None = None):
    """A random-weight model on the device that is on no disk; with `qlora`, experts are in 4 bits in every mode."""
    import torch
    from models import config
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    options = load_options(attn, qlora)
    placed = {key: options.pop(key) for key in ("device_map", "quantization_config") if key in options}
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config(name), **options)
    if qlora and "a3b" in name:
        from unsloth_trl.patches.quantization.experts import quantize_experts_

        quantize_experts_(model)
    elif qlora:
        state = model.state_dict()
        model = type(model).from_pretrained(None, config=model.config, state_dict=state, **options, **placed)
        del state
    torch.cuda.empty_cache()
    return model


def lora_config(model: str):
    """LoRA of rank 16 on all linear layers, and on the experts of a mixture."""
    from models import EXPERTS, LINEARS
    from peft import LoraConfig

    moe = "a3b" in model
    options = {"target_modules": LINEARS[:4], "target_parameters": EXPERTS} if moe else {"target_modules": LINEARS}
    return LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", **options)


def packed_rows(tokens: int, longest: int, rng) -> list[list[int]]:
    """Samples of random tokens with log-normal lengths (mean about 450), `tokens` in all."""
    rows, n = [], 0
    while n < tokens:
        length = max(16, min(longest, int(rng.lognormvariate(5.8, 0.8))))
        rows.append([rng.randrange(10, 49000) for _ in range(length)])
        n += length
    return rows


def write_profile(profile, path: str) -> None:
    """Two tables: where the device's time goes, and the host's."""
    with open(path, "w") as f:
        for key in ("self_cuda_time_total", "self_cpu_time_total"):
            f.write(profile.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=90) + "\n")
