"""Adapters of PEFT that look at a whole row, so that several samples in one row would change what they do."""

from typing import Any

from peft import PeftModel


def needs_whole_rows(model: Any) -> str | None:
    """
    What an adapter on `model` does once per row, as the rest of a sentence, or `None`.

    Args:
        model: A model, with or without PEFT around it.
    """
    if not isinstance(model, PeftModel):
        return None
    for config in model.peft_config.values():
        kind = config.peft_type.value
        if config.is_prompt_learning:
            return f"{kind} puts virtual tokens in front of a row"
        if getattr(config, "alora_invocation_tokens", None):
            return f"{kind} with alora_invocation_tokens looks for them once per row"
        if kind == "XLORA":
            return f"{kind} mixes its adapters by the whole row"
    return None
