"""What a chat template writes in front of each role's turns, found by rendering a conversation and looking."""

from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase


# words that no template looks for in a message, and no template writes itself
_USER = ("Uzquestion1", "Uzquestion2")
_ASSISTANT = ("Azanswer1", "Azanswer2")
_OTHER = "Ozinserted"


@dataclass(frozen=True)
class ChatParts:
    """
    Where turns begin in the text of a conversation.

    Args:
        instruction (`str`): What stands in front of a user's turn, such as `"<|im_start|>user\\n"`.
        response (`str`): What stands in front of an assistant's turn.
        others (`tuple[str, ...]`): The same for turns of tools, and of a system in the middle, where a template has
            them and they do not begin as a user's.
        end (`str`): What stands behind an assistant's turn, such as `"<|im_end|>\\n"`; empty if the template writes
            nothing there before the next turn begins.
    """

    instruction: str
    response: str
    others: tuple[str, ...] = ()
    end: str = ""


def find_parts(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> ChatParts:
    """
    The parts of a chat template.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Whose template is rendered.
        chat_template (`str`, *optional*): Another template than its own.

    Returns:
        `ChatParts`: The parts.

    Raises:
        ValueError: If there is no template, if it does not render a conversation of two questions and two answers in
            their order, or if it writes nothing between them.
    """
    if not (chat_template or tokenizer.chat_template):
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat template to find the parts in; pass instruction_part and "
            "response_part, the texts in front of a user's turn and in front of an answer"
        )

    def render(*turns: tuple[str, str], **kwargs: Any) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return tokenizer.apply_chat_template(messages, tokenize=False, chat_template=chat_template, **kwargs)

    first, second = ("user", _USER[0]), ("user", _USER[1])
    answers = ("assistant", _ASSISTANT[0]), ("assistant", _ASSISTANT[1])
    words = (_USER[0], _ASSISTANT[0], _USER[1], _ASSISTANT[1])
    try:
        text = render(first, answers[0], second, answers[1])
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"{_TOO_SPECIAL}: {type(error).__name__}: {error}. {_INSTEAD}") from error
    gaps = _between(text, words)
    if gaps is None:
        raise ValueError(f"{_TOO_SPECIAL}; it made {text!r}. {_INSTEAD}")
    _, to_answer, to_question, to_last, after = gaps
    added = [token for token in tokenizer.get_added_vocab() if token.strip()]

    def shared(*texts: str) -> str:
        return _whole_tokens(commonprefix(texts), texts, added)

    alone = _quietly(render, first)
    closing = shared(alone.partition(_USER[0])[2], to_answer, to_last) if alone else ""
    # the last turn may end in another way than those before; then as a question ends
    end = shared(to_question, after) or shared(to_question, closing)
    instruction = to_question[len(end) :]
    if not instruction.strip():
        end, instruction = "", to_question
    response = shared(to_answer[len(closing) :], to_last[len(closing) :])
    if not response.strip():
        # nothing but the end of the question tells that an answer begins
        response = shared(to_answer, to_last)
    prompted = _quietly(render, first, add_generation_prompt=True)
    if alone and prompted and prompted.startswith(alone):
        # what the model is given before it answers; a thought that a template then adds is the model's own
        opening = shared(response, prompted[len(alone) :])
        response = opening if opening.strip() else response
    if not response.strip() or not instruction.strip() or instruction == response:
        raise ValueError(f"{_TOO_SPECIAL}; it made {text!r}. {_INSTEAD}")
    others = []
    for role, rest in (("tool", (answers[1],)), ("system", (second, answers[1]))):
        text = _quietly(render, first, answers[0], (role, _OTHER), *rest)
        gaps = _between(text, (_USER[0], _ASSISTANT[0], _OTHER, _ASSISTANT[1])) if text else None
        if gaps is None:
            continue  # the template has no such turn, or puts it elsewhere
        begin = gaps[2].removeprefix(end).rstrip("'\"")  # some write a tool's answer in quotes
        if begin.strip() and not begin.startswith((instruction, response)):
            others.append(begin)
    return ChatParts(instruction, response, tuple(others), end)


_TOO_SPECIAL = "the chat template does not render two questions with an answer each one after the other"
_INSTEAD = "Pass instruction_part and response_part, the texts in front of a user's turn and in front of an answer"


def _between(text: str, words: tuple[str, ...]) -> list[str] | None:
    """The texts before, between and after `words`; `None` unless each is there once, in this order."""
    gaps = []
    for word in words:
        if text.count(word) != 1:
            return None
        before, _, text = text.partition(word)
        gaps.append(before)
    return [*gaps, text]


def _whole_tokens(prefix: str, texts: tuple[str, ...], added: list[str]) -> str:
    """`prefix`, shortened where it ends within a special token: "<|user|>" and "<|endoftext|>" share "<|"."""
    cut = len(prefix)
    for text in texts:
        for token in added:
            start = text.find(token, max(0, len(prefix) - len(token) + 1))
            if 0 <= start < len(prefix) < start + len(token):
                cut = min(cut, start)
    return prefix[:cut]


def _quietly(render: Any, *turns: tuple[str, str], **kwargs: Any) -> str | None:
    try:
        return render(*turns, **kwargs)
    except Exception:  # a template raises what it likes; here it may
        return None


def first_tokens(tokenizer: PreTrainedTokenizerBase, end: str) -> set[int]:
    """
    The special token that a turn's end begins with, and that an answer has to end with.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        end (`str`): See `ChatParts`.

    Returns:
        `set[int]`: Its id, or nothing if the end begins with ordinary text.
    """
    ids = tokenizer(end, add_special_tokens=False)["input_ids"] if end.strip() else []
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return {next((i for i in ids if i in special), -1)} - {-1} if ids else set()
