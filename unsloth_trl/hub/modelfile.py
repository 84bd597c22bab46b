"""An Ollama `Modelfile` from the tokenizer's own chat template.

The tokenizer's template is jinja, Ollama's are templates of Go. Rendering conversations whose messages are marks and
cutting at the marks gives the text before and after each kind of turn, which is what a Go template needs. Then several
conversations are rendered both ways; a template that is more than its turns (tools, or text that depends on what a
message says) comes out different, and is left out with a warning instead of being written wrong. The file's format:
https://github.com/ollama/ollama/blob/main/docs/modelfile.md.
"""

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..messages import first_line


Message = dict[str, str]

# Texts to compare, without white space at their ends, which templates may strip.
_TEXTS = ("What is 2 + 2?", "It is {4}.\nSure.", 'And {{ this }}, "quoted"?', "Yes: <b>&</b>", "Grüße!\n\n- a\n- b")


class InexpressibleTemplateError(ValueError):
    """A chat template that cannot be written as a template of Go; the message says why."""


@dataclass(frozen=True)
class Turns:
    """
    What a chat template puts around messages.

    Args:
        first_user (`str`): Before the first message of the user, if there is no system message.
        system (`tuple` of two `str`, *optional*): Before the system message, and between it and the user's first one;
            `None` if the template takes no system message.
        user (`str`): Before later messages of the user.
        after_user (`str`): After each of them.
        assistant (`str`): Before a message of the assistant.
        after_assistant (`str`): After it.
        generation (`str`): At the end, where the assistant is to answer.
    """

    first_user: str
    system: tuple[str, str] | None
    user: str
    after_user: str
    assistant: str
    after_assistant: str
    generation: str

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation that ends with the user, up to where the assistant answers."""
        system = next((message["content"] for message in messages if message["role"] == "system"), None)
        text, first = "", True
        for message in messages:
            if message["role"] == "user":
                before = self.user
                if first:
                    before = self.first_user if system is None else system.join(self.system)
                text += before + message["content"] + self.after_user
                first = False
            elif message["role"] == "assistant":
                text += self.assistant + message["content"] + self.after_assistant
        return text + self.generation

    def go_template(self) -> str:
        """The same as a template of Go, over Ollama's `.System` and `.Messages`."""
        first = go_literal(self.first_user)
        if self.system is not None:
            before, after = map(go_literal, self.system)
            first = f"{{{{ if $.System }}}}{before}{{{{ $.System }}}}{after}{{{{ else }}}}{first}{{{{ end }}}}"
        # an assistant's message that comes last is one to go on with
        return (
            "{{ $first := true }}{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"
            '{{ if eq .Role "user" }}'
            f"{{{{ if $first }}}}{{{{ $first = false }}}}{first}{{{{ else }}}}{go_literal(self.user)}{{{{ end }}}}"
            f"{{{{ .Content }}}}{go_literal(self.after_user)}"
            f"{{{{ if $last }}}}{go_literal(self.generation)}{{{{ end }}}}"
            '{{ else if eq .Role "assistant" }}'
            f"{go_literal(self.assistant)}{{{{ .Content }}}}"
            f"{{{{ if not $last }}}}{go_literal(self.after_assistant)}{{{{ end }}}}"
            "{{ end }}{{ end }}"
        )


def go_literal(text: str) -> str:
    """`text` for a template of Go inside of three quotes: braces and quotes become strings in its actions."""

    def quoted(match: re.Match) -> str:
        return '{{ "' + match[0].replace('"', "\\u0022") + '" }}'

    return re.sub(r'\{+|"+', quoted, text)


def cut_template(tokenizer: PreTrainedTokenizerBase, adds_bos: bool) -> Turns:
    """
    The turns of a tokenizer's chat template.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        adds_bos (`bool`): The runtime puts the bos token in front of a text by itself, so that it is cut off here.

    Raises:
        InexpressibleTemplateError: If there is no template, or if it is more than text around messages.
    """
    if not tokenizer.chat_template:
        raise InexpressibleTemplateError("the tokenizer has no chat template")
    bos = (tokenizer.bos_token or "") if adds_bos else ""

    def render(*messages: tuple[str, str], generation: bool = False) -> str:
        made = [{"role": role, "content": content} for role, content in messages]
        text = tokenizer.apply_chat_template(made, tokenize=False, add_generation_prompt=generation)
        return text.removeprefix(bos)

    system, user, answer = ("system", "marksystem0"), ("user", "markuser1"), ("assistant", "markanswer2")
    more = (("user", "markuser3"), ("assistant", "markanswer4"))
    try:
        first_user, to_generation = _cut(render(user, generation=True), user)
        _, after_user = _cut(render(user), user)
        again, to_answer, to_user, _, after_assistant = _cut(render(user, answer, *more), user, answer, *more)
    except InexpressibleTemplateError:
        raise
    except Exception as error:  # a template may raise anything, for a conversation that it does not like
        raise InexpressibleTemplateError(f"it does not render a conversation ({first_line(error)})") from error
    if again != first_user:
        raise InexpressibleTemplateError("what it puts before a message depends on what comes later")
    # what ends a turn, apart from what starts the next one; some templates end the whole text in another way
    if not to_generation.startswith(after_user) or not to_answer.startswith(after_user):
        after_user = ""
    if not to_user.startswith(after_assistant):
        after_assistant = to_user
    try:
        rendered = render(system, user, generation=True)
    except Exception:  # raised by templates that take no system message
        rendered = None
    around_system = None
    # a template that does not raise may leave the message out
    if rendered is not None and system[1] in rendered:
        *around_system, after = _cut(rendered, system, user)
        if after != to_generation:
            raise InexpressibleTemplateError("a system message changes more than what is before the user's first one")
    turns = Turns(
        first_user=first_user,
        system=None if around_system is None else tuple(around_system),
        user=to_user[len(after_assistant) :],
        after_user=after_user,
        assistant=to_answer[len(after_user) :],
        after_assistant=after_assistant,
        generation=to_generation[len(after_user) :],
    )
    _compare(turns, render)
    return turns


def _cut(text: str, *marks: tuple[str, str]) -> list[str]:
    """The pieces of `text` around the contents of messages, each of which is there once."""
    pieces = []
    for _, mark in marks:
        if text.count(mark) != 1:
            raise InexpressibleTemplateError(f"it renders a message {text.count(mark)} times")
        before, text = text.split(mark)
        pieces.append(before)
    return [*pieces, text]


def _compare(turns: Turns, render) -> None:
    """Raise unless conversations come out as the tokenizer renders them."""
    roles = ("user", "assistant", "user", "assistant", "user")
    dialogue = list(zip(roles, _TEXTS, strict=True))
    for length in (1, 3, 5):
        for system in ([], [("system", "Be brief.\nUse {braces}.")])[: 1 if turns.system is None else 2]:
            messages = system + dialogue[:length]
            try:
                expected = render(*messages, generation=True)
            except Exception as error:
                raise InexpressibleTemplateError(f"it does not render a dialogue ({first_line(error)})") from error
            if turns.render([{"role": role, "content": content} for role, content in messages]) != expected:
                raise InexpressibleTemplateError("a dialogue rendered in turns is not what the tokenizer renders")


def make_modelfile(tokenizer: PreTrainedTokenizerBase, gguf_file: str, adds_bos: bool | None = None) -> str:
    """
    The text of a `Modelfile` for `ollama create`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The model's; its `eos_token` is the stop token.
        gguf_file (`str`): Name of the GGUF file in the same folder.
        adds_bos (`bool`, *optional*): See `cut_template`; by default what the tokenizer does.

    Returns:
        `str`: Without a `TEMPLATE` where the chat template cannot be expressed; the file and a warning say so.
    """
    if adds_bos is None:
        adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    lines, stops = [f"FROM ./{gguf_file}"], []
    if tokenizer.eos_token is None:
        _note(lines, "The tokenizer has no eos token, so that no stop token is set here.")
    else:
        stops.append(tokenizer.eos_token)
    try:
        turns = cut_template(tokenizer, adds_bos)
    except InexpressibleTemplateError as error:
        _note(lines, f"There is no TEMPLATE here: {error}. Ollama takes one that it knows, or sends the bare prompt.")
    else:
        if turns.system is None:
            _note(lines, "The model's chat template takes no system message: Ollama's SYSTEM has no effect.")
        if "strftime_now" in str(tokenizer.chat_template):
            _note(lines, "The chat template has the date in it: the TEMPLATE below keeps the day of the export.")
        lines += ["# Tool calls and images are not part of this template.", f'TEMPLATE """{turns.go_template()}"""']
        stops += _turn_ends(tokenizer, turns.after_assistant)
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in dict.fromkeys(stops)]
    return "\n".join(lines) + "\n"


def write_modelfile(
    tokenizer: PreTrainedTokenizerBase, gguf_file: str, path: str | Path, adds_bos: bool | None = None
) -> Path:
    """Write what `make_modelfile` makes to `path`, which is returned."""
    path = Path(path)
    path.write_text(make_modelfile(tokenizer, gguf_file, adds_bos), encoding="utf-8", newline="\n")
    return path


def _note(lines: list[str], text: str) -> None:
    lines.append("# " + " ".join(text.split()))
    warnings.warn(f"Modelfile: {text}", stacklevel=4)


def _turn_ends(tokenizer: PreTrainedTokenizerBase, after_assistant: str) -> list[str]:
    """The special token that ends an answer, where it is another than eos."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    found = [(after_assistant.find(token), -len(token), token) for token in special if token in after_assistant]
    return [min(found)[2]] if found else []


def _quoted(text: str) -> str:
    return f'"""{text}"""' if '"' in text or "\n" in text else json.dumps(text, ensure_ascii=False)
