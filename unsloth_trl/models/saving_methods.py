"""The methods for saving that a loaded model has as attributes of its own; the work is in `unsloth_trl.hub`."""

import importlib
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..patches.owner import Owned


METHODS = {
    "save_pretrained_merged": "unsloth_trl.hub.merge",
    "push_to_hub_merged": "unsloth_trl.hub.push",
    "save_pretrained_gguf": "unsloth_trl.hub.gguf",
    "push_to_hub_gguf": "unsloth_trl.hub.push",
}


class SavingMethod(Owned[nn.Module]):
    """
    A function of `unsloth_trl.hub` with the model as its first argument, imported when it is called.

    A copy of the model, or an unpickled one, has a method for the copy.

    Args:
        owner (`nn.Module`): The model.
        name (`str`): One of `METHODS`.
    """

    def __init__(self, owner: nn.Module, name: str):
        super().__init__(owner)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            ValueError: If the owner is the model inside of an adapter, whose weights are then split in two.
            ReferenceError: If the model is gone, as in `from_pretrained(...)[0].save_pretrained_merged(...)`.
        """
        model = self.owner
        if model is None:
            raise ReferenceError(f"{self.name}: the model is gone; keep it in a variable until it is saved")
        if not isinstance(model, PeftModel) and any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise ValueError(
                f"{self.name}: PEFT has put an adapter around this model since it was loaded. Make it with "
                f"FastLanguageModel.get_peft_model, or call {METHODS[self.name]}.{self.name}(model, ...) with the "
                "PeftModel, such as trainer.model"
            )
        return getattr(importlib.import_module(METHODS[self.name]), self.name)(model, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<method {self.name} of {type(self.owner).__name__}, from {METHODS[self.name]}>"


def add_saving_methods(model: nn.Module) -> None:
    """Give this model object the methods of `METHODS`; its class stays what it is."""
    for name in METHODS:
        setattr(model, name, SavingMethod(model, name))
