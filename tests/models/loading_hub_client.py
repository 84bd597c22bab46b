"""What the tests of loading from the Hub run in a process of their own, which reads HF_ENDPOINT when it starts."""

import torch
from peft import PeftModel

from unsloth_trl import FastLanguageModel


IDS = torch.randint(6, 120, (2, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def load(name: str, **kwargs) -> dict:
    """Load a model and say what came: its logits, the tokens of a text, and whether an adapter is around it."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        name, **{"max_seq_length": 64, "load_in_4bit": False} | kwargs
    )
    return {
        "logits": model(input_ids=IDS, use_cache=False).logits.tolist(),
        "tokens": tokenizer("w10 w11")["input_ids"],
        "adapter": isinstance(model, PeftModel),
        "base": model.peft_config["default"].base_model_name_or_path if isinstance(model, PeftModel) else None,
        "name": model.get_base_model().name_or_path if isinstance(model, PeftModel) else model.name_or_path,
    }


def adapt(name: str, folder: str, **kwargs) -> None:
    """An adapter that changes the model, and its tokenizer, in a folder."""
    model, tokenizer = FastLanguageModel.from_pretrained(name, max_seq_length=64, load_in_4bit=False, **kwargs)
    model = FastLanguageModel.get_peft_model(model, r=4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
