"""As much of text/template of Go as a Modelfile of ours uses: text, fields, variables, `if`, `range`, functions."""

import json
import re


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\(|\)|:=|=|,|[$.\w]+')


def render(template: str, system: str, messages: list[dict[str, str]]) -> str:
    """What Ollama makes of a template, up to where the model answers."""
    parts = re.split(r"\{\{(.*?)\}\}", template, flags=re.S)
    nodes = [("text" if i % 2 == 0 else "action", part.strip() if i % 2 else part) for i, part in enumerate(parts)]
    root = {"System": system, "Messages": messages}
    body, rest = _parse(nodes)
    assert not rest
    out: list[str] = []
    _run(body, root, {"$": root}, out)
    return "".join(out)


def _parse(nodes):
    """A list of nodes up to `end` or `else`, which is left at the head of what remains."""
    body = []
    while nodes:
        kind, value = nodes[0]
        word = value.split(" ")[0] if kind == "action" else ""
        if word in ("end", "else"):
            return body, nodes
        nodes = nodes[1:]
        if word not in ("if", "range"):
            body.append((kind, value))
            continue
        inner, nodes = _parse(nodes)
        other = []
        if nodes[0][1].startswith("else if "):
            nodes = [("action", nodes[0][1].removeprefix("else "))] + nodes[1:]
            # the chain shares one `end`: the nested `if` consumes it
            nested, nodes = _parse_one(nodes)
            body.append((word, value.removeprefix(word + " "), inner, [nested]))
            continue
        if nodes[0][1] == "else":
            other, nodes = _parse(nodes[1:])
        assert nodes[0][1] == "end"
        nodes = nodes[1:]
        body.append((word, value.removeprefix(word + " "), inner, other))
    return body, nodes


def _parse_one(nodes):
    expression = nodes[0][1].removeprefix("if ")
    inner, nodes = _parse(nodes[1:])
    other = []
    if nodes[0][1] == "else":
        other, nodes = _parse(nodes[1:])
    assert nodes[0][1] == "end"
    return ("if", expression, inner, other), nodes[1:]


def _run(body, dot, names, out):
    for node in body:
        if node[0] == "text":
            out.append(node[1])
        elif node[0] == "action":
            tokens = _TOKEN.findall(node[1])
            if len(tokens) > 1 and tokens[1] in (":=", "="):
                assert tokens[1] == ":=" or tokens[0] in names, f"undefined variable {tokens[0]}"
                names[tokens[0]] = _value(tokens[2:], dot, names)
            else:
                out.append(_value(tokens, dot, names))
        elif node[0] == "if":
            _run(node[2] if _value(_TOKEN.findall(node[1]), dot, names) else node[3], dot, names, out)
        else:
            match = re.fullmatch(r"(\$\w+), (\$\w+) := (.+)", node[1])
            for index, item in enumerate(_value(_TOKEN.findall(match[3]), dot, names)):
                names |= {match[1]: index, match[2]: item}
                _run(node[2], item, names, out)


def _value(tokens, dot, names):
    value, rest = _call(list(tokens), dot, names)
    assert not rest, rest
    return value


def _call(tokens, dot, names):
    """A function with its arguments up to a closing parenthesis, or one operand."""
    functions = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "not": lambda a: not a,
        "and": lambda a, b: a and b,
        "len": len,
        "slice": lambda items, start: items[start:],
    }
    arguments = []
    function = functions[tokens.pop(0)] if tokens[0] in functions else None
    while tokens and tokens[0] != ")":
        token = tokens.pop(0)
        if token == "(":
            value, tokens = _call(tokens, dot, names)
            assert tokens.pop(0) == ")"
        elif token.startswith('"'):
            value = json.loads(token)
        elif token in ("true", "false"):
            value = token == "true"
        elif token.isdigit():
            value = int(token)
        else:
            name, *fields = token.split(".")
            value = dot if not name else names[name]
            for field in fields:
                if field:
                    value = value[field] if field in value else value[field.lower()]
        arguments.append(value)
    if function is None:
        assert len(arguments) == 1
        return arguments[0], tokens
    return function(*arguments), tokens
