"""A Modelfile's template renders what the tokenizer renders, by a small reading of Go's templates (once by Go itself).

The chat templates are those that TRL ships.
"""

from importlib.resources import files

import pytest

from tests.hub.gguf_models import byte_level_tokenizer, split_steps
from tests.hub.go_template import render
from unsloth_trl.hub.modelfile import (
    InexpressibleTemplateError,
    cut_template,
    go_literal,
    make_modelfile,
    write_modelfile,
)


LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set turns = messages %}{% set system = false %}{% endif %}{% for message in turns %}"
    "{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' "
    "+ message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|turn|>system\nYou are helpful.<|end|>\n{% endif %}"
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# B65: what str.format would trip over
BRACES = (
    "{% for m in messages %}{{ '{{ .' + m['role'] + ' }}{EOS}{' }}{{ m['content'] }}{{ '}\"\"\"{0}' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '{\"' }}{% endif %}"
)
OWN = {"llama-2": LLAMA_2, "default-system": DEFAULT_SYSTEM, "braces": BRACES}
SHIPPED = ("cohere", "deepseekv3", "gemma", "gemma3", "gptoss", "llama3", "llama3_2", "phi3", "qwen2_5", "qwen3")
NO_SYSTEM = ("gemma",)


@pytest.fixture
def tokenizer():
    return byte_level_tokenizer(split_steps(None))


def template_of(name):
    return OWN.get(name) or (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def go_part(modelfile):
    """The TEMPLATE of a Modelfile, as Ollama reads it."""
    before, template, after = modelfile.split('"""')
    assert before.endswith("\nTEMPLATE ") and after.startswith("\n")
    return template


@pytest.mark.filterwarnings("ignore:Modelfile")
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", [*OWN, *SHIPPED])
def test_renders_what_the_tokenizer_renders(name, adds_bos, tokenizer):
    tokenizer.chat_template = template_of(name)
    template = go_part(make_modelfile(tokenizer, "model.gguf", adds_bos))
    contents = ["Hi {there}", 'So "this"?\n\n{{ .System }}', "Ja", "a: b {% x %}", "End"]
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, contents, strict=False)]
    for length in (1, 3, 5):
        for system in ("", "Be {{ brief }}.")[: 1 if name in NO_SYSTEM else 2]:
            messages = [{"role": "system", "content": system}] * bool(system) + turns[:length]
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert all(message["content"] in expected for message in messages[-3:])
            expected = expected.removeprefix("<bos>") if adds_bos else expected
            assert render(template, system, messages) == expected


def test_an_answer_to_go_on_with(tokenizer):
    tokenizer.chat_template = DEFAULT_SYSTEM
    template = go_part(make_modelfile(tokenizer, "model.gguf"))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    assert render(template, "S", messages).endswith("<|turn|>assistant\nOnce upon")


@pytest.mark.filterwarnings("ignore:Modelfile")
@pytest.mark.parametrize("name", [*OWN, "qwen3"])
def test_b65_the_stop_token_is_eos(name, tokenizer):
    tokenizer.chat_template = template_of(name)
    lines = make_modelfile(tokenizer, "model-Q8_0.gguf").splitlines()
    assert lines[0] == "FROM ./model-Q8_0.gguf"
    assert next(line for line in lines if line.startswith("PARAMETER")) == f'PARAMETER stop "{tokenizer.eos_token}"'


def test_b65_a_template_without_eos_and_a_tokenizer_without_one(tokenizer):
    tokenizer.chat_template = DEFAULT_SYSTEM
    stops = [line for line in make_modelfile(tokenizer, "m.gguf").splitlines() if line.startswith("PARAMETER")]
    assert stops == ['PARAMETER stop "<eos>"', 'PARAMETER stop "<|end|>"']
    tokenizer.eos_token = None
    with pytest.warns(UserWarning, match="The tokenizer has no eos token"):
        text = make_modelfile(tokenizer, "m.gguf")
    assert "\n# The tokenizer has no eos token" in text and 'PARAMETER stop "<|end|>"' in text


def test_an_eos_token_with_quotes(tokenizer):
    tokenizer.eos_token = '<"end\\">'
    tokenizer.chat_template = DEFAULT_SYSTEM
    assert 'PARAMETER stop """<"end\\">"""\n' in make_modelfile(tokenizer, "m.gguf")


@pytest.mark.parametrize(
    "template, reason",
    [
        (None, "the tokenizer has no chat template"),
        ("{{ raise_exception('no chat') }}", r"does not render a conversation \(no chat\)"),
        ("{{ messages | length }}", "renders a message 0 times"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "renders a message 2 times"),
        ("{{ messages | length }}{% for m in messages %}[{{ m.content }}]{% endfor %}", "depends on what comes later"),
        (
            "{% for m in messages %}[{{ m.content | replace('{', '(') }}]{% endfor %}",
            "a dialogue rendered in turns is not what the tokenizer renders",
        ),
        (
            "{% for m in messages %}{% if m.role != 'system' %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}"
            "{% endfor %}{% if messages[0].role == 'system' %}!{% endif %}",
            "a system message changes more",
        ),
    ],
)
def test_templates_that_cannot_be_expressed(template, reason, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(InexpressibleTemplateError, match=reason):
        cut_template(tokenizer, adds_bos=False)
    with pytest.warns(UserWarning, match=f"There is no TEMPLATE here: .*{reason}"):
        text = make_modelfile(tokenizer, "m.gguf")
    assert "\nTEMPLATE" not in text and "\n# There is no TEMPLATE here" in text
    assert 'PARAMETER stop "<eos>"' in text


def test_no_system_message_is_said(tokenizer):
    tokenizer.chat_template = template_of("gemma")
    with pytest.warns(UserWarning, match="takes no system message: Ollama's SYSTEM has no effect"):
        text = make_modelfile(tokenizer, "m.gguf")
    assert "# The model's chat template takes no system message" in text and "System" not in go_part(text)


def test_a_date_is_said(tokenizer):
    tokenizer.chat_template = template_of("gptoss")
    with pytest.warns(UserWarning, match="keeps the day of the export"):
        make_modelfile(tokenizer, "m.gguf")


def test_literals():
    assert go_literal("a {b} {{c}}") == 'a {{ "{" }}b} {{ "{{" }}c}}'
    assert go_literal('"""') == '{{ "\\u0022\\u0022\\u0022" }}'
    assert render(go_literal('{"a": {{"b"}}}{'), "", []) == '{"a": {{"b"}}}{'


def test_is_written_as_it_is(tokenizer, tmp_path):
    tokenizer.chat_template = DEFAULT_SYSTEM
    path = write_modelfile(tokenizer, "m.gguf", tmp_path / "Modelfile")
    assert path.read_bytes() == make_modelfile(tokenizer, "m.gguf").encode()
