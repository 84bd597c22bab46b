"""Tokens and the rows of embeddings that belong to them: padding, new tokens, the vocabulary of an adapter."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


# entries of public vocabularies that stand for padding or for nothing, the most fitting first
PADDING = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|PAD_TOKEN|>",
    "<|padding|>",
    "<|finetune_right_pad_id|>",
    "<｜▁pad▁｜>",
    "<|vision_pad|>",
    "<|reserved_special_token_0|>",
    "<|dummy_0|>",
    "<|endoftext|>",
    "<unk>",
)


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Rows of the input embedding, which can be more than the tokenizer has entries."""
    return model.get_input_embeddings().weight.shape[0]


def set_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> str | None:
    """
    Give a tokenizer without a padding token one that is in its vocabulary, and not the one that ends a text.

    A padding token that the checkpoint names is left alone, EOS too: labels go by position here, so that EOS is
    learned all the same. The embedding never grows.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Changed in place.
        model (`PreTrainedModel`): Whose config and generation config get the id.

    Returns:
        `str` or `None`: The token that was chosen; `None` if there was one, or if only EOS was left to take.
    """
    chosen = None
    if tokenizer.pad_token is None:
        vocabulary, rows = tokenizer.get_vocab(), vocabulary_rows(model)
        ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, *_as_list(_generation_eos(model))}
        free = (t for t in PADDING if vocabulary.get(t, rows) < rows and vocabulary[t] not in ends)
        chosen = next(free, None)
        if chosen is None and tokenizer.eos_token is None:
            raise ValueError(
                f"{type(tokenizer).__name__} has neither a padding token nor EOS: set tokenizer.pad_token to a token "
                "of its vocabulary and save it, or add one with add_new_tokens"
            )
        tokenizer.pad_token = chosen or tokenizer.eos_token
    pad = tokenizer.pad_token_id
    if model.config.get_text_config().pad_token_id is None:
        model.config.get_text_config().pad_token_id = pad
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = pad
    return chosen


def _generation_eos(model: PreTrainedModel) -> Any:
    return None if model.generation_config is None else model.generation_config.eos_token_id


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def add_new_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    new_tokens: Sequence[str] = (),
    method: str = "mean",
    *,
    special_tokens: bool = False,
) -> int:
    """
    Add tokens to a tokenizer, and rows for them to a model, before `FastLanguageModel.get_peft_model`.

    A matrix that is padded to more rows than the tokenizer has entries keeps its size as long as there is room: it is
    never made smaller, and no row of an old token changes. Rows of new tokens are the mean of those in use, in the
    embedding and in a head that is not tied to it, so that the other tokens' probabilities hardly change (John Hewitt,
    "Initializing New Word Embeddings for Pretrained Language Models", 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html).

    Args:
        model (`PreTrainedModel`): The model, without an adapter.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        new_tokens (`Sequence[str]`): The tokens. Those that are there already are left out, with a warning.
        method (`str`, *optional*, defaults to `"mean"`): How new rows begin; there is no other way.
        special_tokens (`bool`, *optional*, defaults to `False`): Whether `skip_special_tokens` leaves them out when
            text is decoded.

    Returns:
        `int`: Tokens that were added. Their ids are in `model.added_token_ids`.

    Raises:
        ValueError: If the model has an adapter already, if its embedding or head cannot be changed, or if `new_tokens`
            or `method` is something else.
    """
    if isinstance(model, PeftModel):
        raise ValueError("add_new_tokens: the model has an adapter already; add tokens before get_peft_model")
    if isinstance(new_tokens, str) or not all(isinstance(token, str) and token for token in new_tokens):
        raise ValueError(f"new_tokens={new_tokens!r} is not a list of texts; pass for example ['<think>', '</think>']")
    if method != "mean":
        raise ValueError(f"method={method!r} is unknown; set method='mean'")
    vocabulary = tokenizer.get_vocab()
    fresh = [token for token in dict.fromkeys(new_tokens) if token not in vocabulary]
    if known := sorted(set(new_tokens) - set(fresh)):
        warnings.warn(
            f"new_tokens has {known}, which are in the vocabulary already and stay as they are", stacklevel=2
        )
    if not fresh:
        return 0
    _matrices(model)  # refuses before anything is changed
    rows, used = vocabulary_rows(model), min(len(tokenizer), vocabulary_rows(model))
    tokenizer.add_tokens(fresh, special_tokens=special_tokens)
    ids = tokenizer.convert_tokens_to_ids(fresh)
    if max(ids) >= rows:
        resize(model, max(ids) + 1)
    _fill(model, ids, used)
    model.added_token_ids = [*getattr(model, "added_token_ids", []), *ids]
    return len(fresh)


def resize(model: PreTrainedModel, rows: int) -> None:
    """Give embedding and head `rows` rows; new ones are the mean of the old ones. Frozen weights stay frozen."""
    before = vocabulary_rows(model)
    # transformers draws the new rows first; the random state stays as it was
    with torch.random.fork_rng(devices=sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)):
        model.resize_token_embeddings(rows, mean_resizing=False)
    if rows > before:
        _fill(model, list(range(before, rows)), before)


@torch.no_grad()
def _fill(model: PreTrainedModel, ids: list[int], used: int) -> None:
    """Make these rows the mean of the first `used` ones."""
    for module in _matrices(model):
        weight, bias = module.weight, getattr(module, "bias", None)
        weight[ids] = weight[:used].mean(dim=0, dtype=torch.float32).to(weight.dtype)
        if bias is not None:
            bias[ids] = bias[:used].mean(dtype=torch.float32).to(bias.dtype)


def _matrices(model: PreTrainedModel) -> list[nn.Module]:
    """The embedding, and the head if it has weights of its own."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found = [embedding]
    if head is not None and head.weight is not embedding.weight:
        found.append(head)
    for module in found:
        if not module.weight.is_floating_point() or module.weight.is_meta:
            raise ValueError(
                f"the {type(module).__name__} of {module.weight.shape[0]} rows is quantised or not in memory, so its "
                "rows cannot be set; load the model with load_in_4bit=False, or without offloading"
            )
    text = model.config.get_text_config()
    if getattr(text, "vocab_size_per_layer_input", None) and getattr(text, "hidden_size_per_layer_input", None):
        raise ValueError(
            f"model_type='{text.model_type}' has embeddings for each layer (vocab_size_per_layer_input), which have "
            "no rows for new tokens; use one of its unused tokens instead"
        )
    return found


def _entries(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def fit_to_adapter(
    model: PreTrainedModel,
    base_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase | None,
    adapter_rows: int | None,
    highest_id: int,
    name: str,
) -> None:
    """
    Give a base model the vocabulary that an adapter was trained with.

    Args:
        model (`PreTrainedModel`): The base, changed in place.
        base_tokenizer (`PreTrainedTokenizerBase`): That of the base.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): That of the adapter; `None` if it has none of its own.
        adapter_rows (`int`, *optional*): Rows of the embedding or head that is saved with the adapter, if any.
        highest_id (`int`): The highest token whose row the adapter trains by itself, or -1.
        name (`str`): The adapter's, for messages.

    Raises:
        ValueError: If the adapter has another number of rows and no tokenizer that explains them.
    """
    rows = vocabulary_rows(model)
    needed = adapter_rows
    if needed is None:
        entries = 0 if tokenizer is None else _entries(tokenizer)
        # a tokenizer with more entries than its model has rows may come from the base itself
        needed = max(rows, entries if entries > _entries(base_tokenizer) else 0, highest_id + 1)
    if needed == rows:
        return
    if tokenizer is None:
        raise ValueError(
            f"the adapter {name} was trained with {needed} rows of embeddings, its base has {rows}, and there are no "
            "tokenizer files beside the adapter that say which tokens were added: save the tokenizer into the same "
            "folder with tokenizer.save_pretrained(...)"
        )
    if needed < rows:
        warnings.warn(
            f"the adapter {name} has {needed} rows of embeddings and its base {rows}: the rows above are cut off, as "
            "they were when it was trained",
            stacklevel=5,
        )
    resize(model, needed)
