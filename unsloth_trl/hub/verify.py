"""Whether a saved model computes what the live one does: the same logits, but for rounding.

How much rounding moves the logits of a model is measured on that model and not guessed: the reloaded model runs again
with noise of half a unit in the last place on what its layers put out. A mixture can send a token to another expert
for it, so the numbers are medians over tokens, relative to the length of each token's logits.
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..patches.attention.patch import own_attention
from ..patches.checkpointing.ram import host_memory
from .merge_layers import MergedWeight


NUM_TOKENS = 64
# Over 200 tiny mixtures in fp32 and bf16, saved in bf16, the gap was 0.3 to 1.0 times the noise; in fp32 throughout,
# over 19 architectures, up to 1.5 times. A false alarm costs a user the model.
_FACTOR = 4.0
_FLOOR = 1e-5


@dataclass(frozen=True)
class Verification:
    """
    What comparing a saved model with the live one gave.

    Args:
        gap (`float`): Difference of the logits, relative, median over tokens.
        noise (`float`): The same of two runs of the saved model, one with rounding noise.
        quantized_gap (`float`, *optional*): The gap that the dequantised base would have given, where the original
            one was asked for.
    """

    gap: float
    noise: float
    quantized_gap: float | None = None

    @property
    def allowed(self) -> float:
        """The largest gap that rounding explains."""
        return _FACTOR * self.noise + _FLOOR

    @property
    def passed(self) -> bool:
        """Whether rounding explains the gap."""
        return self.gap <= self.allowed

    def __str__(self) -> str:
        text = f"logits differ from the live model's by {self.gap:.2g} (rounding alone: {self.noise:.2g})"
        if self.quantized_gap is not None:
            text += f"; with the dequantised base it would be {self.quantized_gap:.2g}"
        return text


def device_for(num_bytes: int, live: torch.device) -> torch.device | str:
    """
    Where a second model fits beside the live one.

    Args:
        num_bytes (`int`): Of its weights.
        live (`torch.device`): Of the live model.

    Returns:
        `torch.device`, or `str`: One line that says why it fits nowhere.
    """
    needed = int(1.2 * num_bytes) + 2**28
    if live.type == "cuda" and torch.cuda.mem_get_info(live)[0] > needed:
        return live
    free = host_memory().available
    if free > needed:
        return torch.device("cpu")
    return f"reloading takes {needed / 2**30:.1f} GiB beside the live model, and {free / 2**30:.1f} GiB are left"


def load_saved(model: PreTrainedModel, folder: Path, device: torch.device) -> PreTrainedModel:
    """
    Load a saved model by the class of the live one, from disk alone.

    Args:
        model (`PreTrainedModel`): The live model.
        folder (`Path`): Where it was saved.
        device (`torch.device`): Where to put it.

    Raises:
        RuntimeError: If tensors are missing, left over or of another shape.
    """
    with own_attention(model):
        attention = model.config.get_text_config()._attn_implementation
    # others need a card, and the same arithmetic on both sides is what tells a wrong weight from another kernel
    attention = attention if attention in ("eager", "sdpa") else "eager"
    with without_progress():
        loaded, info = type(model).from_pretrained(
            folder,
            dtype="auto",
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
            **({"device_map": {"": device}} if device.type == "cuda" else {}),  # past the memory of the host
        )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = {kind: sorted(map(str, info.get(kind) or ())) for kind in kinds}
    if any(wrong.values()):
        kind, names = next((kind, names) for kind, names in wrong.items() if names)
        raise RuntimeError(
            f"the saved model does not load as it was: {kind.replace('_', ' ')} {', '.join(names[:4])}. Nothing was "
            "kept; verify=False keeps it as it is"
        )
    return loaded.eval()


def compare(model: PreTrainedModel, saved: PreTrainedModel, weights: list[MergedWeight]) -> Verification:
    """
    Compare the logits of two models on a few tokens.

    Args:
        model (`PreTrainedModel`): The live model, with its adapters and patches; it is left as it was.
        saved (`PreTrainedModel`): The one that was saved, from `load_saved`.
        weights (`list[MergedWeight]`): Of the live model; tells how finely it computes.
    """
    ids = _some_ids(model)
    expected = live_logits(model, ids)
    got = _logits(saved, ids)
    epsilon = max(torch.finfo(kind).eps for kind in (_dtype(saved), _dtype(model), _compute_dtype(weights)))
    if any(type(p).__name__ == "Int8Params" for p in model.parameters()):
        epsilon = max(epsilon, 1 / 127)  # activations are rounded to 8 bits too
    noise = max(difference(_noisy_logits(saved, ids, epsilon, seed), got) for seed in range(2))
    return Verification(difference(got, expected), noise)


def live_logits(model: PreTrainedModel, ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    Logits of the live model in evaluation mode, without its packed attention and a trainer's autocast.

    Args:
        model (`PreTrainedModel`): The live model.
        ids (`torch.Tensor` of shape `(1, num_tokens)`, *optional*): The tokens of `compare` by default.

    Returns:
        `torch.Tensor` of shape `(num_tokens, vocab_size)`, fp32, on the CPU.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        for module in modes:
            # in evaluation bitsandbytes reorders 4-bit weights on some CPUs, and rounds their scales for good
            if type(module).__name__ == "Linear4bit":
                module.training = True
        with own_attention(model), _without_autocast(model):
            return _logits(model, _some_ids(model) if ids is None else ids)
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _without_autocast(model: PreTrainedModel) -> Iterator[None]:
    """Within this context the model computes in the dtype of its weights, as the saved one does."""
    wrapped, own = vars(model).get("forward"), vars(model).get("_original_forward")  # by `Accelerator.prepare`
    if wrapped is None or own is None:
        yield
        return
    model.forward = own
    try:
        yield
    finally:
        model.forward = wrapped


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative difference of logits `(num_tokens, vocab_size)`: the median over tokens."""
    found = ((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).median().item()
    return found if found == found else float("inf")  # not a number is no agreement


def _some_ids(model: PreTrainedModel) -> torch.Tensor:
    config, text = model.config, model.config.get_text_config()
    # tokens of an image without the image are an error
    special = {
        value
        for part in (config, text)
        for key, value in vars(part).items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    ids = torch.randperm(text.vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    number = min(NUM_TOKENS, getattr(text, "max_position_embeddings", None) or NUM_TOKENS)
    return torch.tensor([[i for i in ids if i not in special][:number]])


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.get_input_embeddings().weight.device)
    return model(input_ids=ids, use_cache=False).logits[0].float().cpu()


def _noisy_logits(model: PreTrainedModel, ids: torch.Tensor, epsilon: float, seed: int) -> torch.Tensor:
    """The logits with noise of half a unit in the last place on the output of every innermost module."""
    generators: dict[torch.device, torch.Generator] = {}

    def add_noise(module: nn.Module, args: tuple, output):
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(seed))
        noise = torch.empty_like(output, dtype=torch.float32).uniform_(-0.5, 0.5, generator=generator)
        return (output.float() * (1 + epsilon * noise)).to(output.dtype)

    innermost = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_hook(add_noise) for module in innermost]
    try:
        return _logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()


def _dtype(model: PreTrainedModel) -> torch.dtype:
    return model.get_input_embeddings().weight.dtype


def _compute_dtype(weights: list[MergedWeight]) -> torch.dtype:
    """The coarsest dtype among the weights of the live model."""
    kinds = {weight.dtype for weight in weights if weight.dtype.is_floating_point}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)


@contextlib.contextmanager
def without_progress() -> Iterator[None]:
    """Within this context transformers shows no progress bar."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def free(device: torch.device) -> None:
    """Give back the memory of a model that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
