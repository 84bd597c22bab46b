"""What other libraries' functions, classes and methods are, to see whether one of them was replaced."""

import importlib
import inspect


# What people use from these libraries, and what a package like this could be tempted to replace.
LIBRARIES = (
    "accelerate",
    "accelerate.hooks",
    "accelerate.utils",
    "peft",
    "peft.peft_model",
    "peft.tuners.lora.layer",
    "peft.tuners.lora.model",
    "peft.tuners.tuners_utils",
    "torch",
    "torch.autograd",
    "torch.cuda",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.modules.linear",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "transformers",
    "transformers.integrations.moe",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_flash_attention_utils",
    "transformers.modeling_utils",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.trainer",
    "transformers.training_args",
    "trl",
    "trl.data_utils",
    "trl.trainer.base_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.sft_config",
    "trl.trainer.sft_trainer",
    "trl.trainer.utils",
)
# Python keeps these for itself, and fills them when they are first asked for.
_CACHES = {"__annotations__", "_abc_impl", "__abstractmethods__", "__subclasshook__", "__weakref__", "__dict__"}
_OWNERS = ("accelerate", "peft", "torch", "transformers", "trl")


def snapshot() -> dict[tuple[str, str], object]:
    """Every public function and class of `LIBRARIES` and every member of those classes, under its name."""
    members = {}
    for name in LIBRARIES:
        module = importlib.import_module(name)
        for attribute, value in list(vars(module).items()):
            if not callable(value):
                continue
            members[name, attribute] = value
            if inspect.isclass(value) and value.__module__.split(".")[0] in _OWNERS:
                for member, defined in list(vars(value).items()):
                    # plain data (counters, caches) changes in normal use
                    if member not in _CACHES and (callable(defined) or hasattr(defined, "__get__")):
                        members[f"{value.__module__}.{value.__qualname__}", member] = defined
    return members


def changes(before: dict) -> list[str]:
    after = snapshot()
    changed = [
        f"{owner}.{name} changed" for (owner, name), value in before.items() if after.get((owner, name)) is not value
    ]
    # a module may load more of itself, as transformers does; a class does not grow
    classes = {owner for owner, _ in before} - set(LIBRARIES)
    return changed + [f"{o}.{n} is new" for o, n in after if o in classes and (o, n) not in before]
