"""Rules about the sources: nothing is rewritten at run time, other libraries are left alone, files are short."""

import ast
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
LIBRARY = sorted({*(ROOT / "unsloth_trl").rglob("*.py"), *(ROOT / "patches").rglob("*.py")})
EVERYTHING = sorted({*LIBRARY, *(ROOT / "tests").rglob("*.py")})
BANNED_CALLS = {
    "compile": "builtin",
    "eval": "builtin",
    "exec": "builtin",
    "execfile": "builtin",
    "getsource": "any",
    "getsourcelines": "any",
    "reload": "any",
}
BANNED_NAMES = {"utils.py", "common.py", "misc.py", "helpers.py"}


def file_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def root_name(node: ast.expr) -> str | None:
    """`a` of `a.b.c[d]`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def foreign_names(tree: ast.AST) -> set[str]:
    """Names that an import of another library binds, at any depth."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] != "unsloth_trl"}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] != "unsloth_trl":
            names |= {a.asname or a.name for a in node.names}
    return names


def violations(source: str) -> list[str]:
    """What in `source` rewrites code or changes another library, each with its line."""
    tree = ast.parse(source)
    foreign = foreign_names(tree)
    found = []
    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in ("setattr", "delattr") and node.args:
                if root_name(node.args[0]) in foreign:
                    found.append(f"line {node.lineno}: {ast.unparse(node)} changes another library")
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
            if BANNED_CALLS.get(name) == "any" or (isinstance(called, ast.Name) and name in BANNED_CALLS):
                found.append(f"line {node.lineno}: {name}()")
        flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in flat:
            if isinstance(target, (ast.Attribute, ast.Subscript)) and root_name(target) in foreign:
                found.append(f"line {target.lineno}: {ast.unparse(target)} belongs to another library")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import transformers\ntransformers.Trainer.train = None",
        "from transformers import Trainer as T\nT.train = None",
        "import torch.nn.functional as F\nF.linear, x = None, 1",
        "import torch\ndel torch.nn.Linear.forward",
        "import os\nos.environ['X'] = '1'",
        "import sys\nsys.modules['trl'] = None",
        "def f():\n    from peft import LoraModel\n    setattr(LoraModel, 'forward', None)",
        "import inspect\ninspect.getsource(print)",
        "exec('1')",
        "from importlib import reload\nreload(1)",
    ],
)
def test_violations_are_seen(source):
    assert len(violations(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.zeros(1)\nx[0] = 1\nx.y = 2",
        "import re\nre.compile('a')",
        "from .patches import registry\nregistry.x = 1",
        "def f(model):\n    model.forward = None",
    ],
)
def test_ordinary_code_is_not(source):
    assert violations(source) == []


@pytest.mark.parametrize("path", LIBRARY, ids=file_id)
def test_rewrites_nothing(path):
    assert violations(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", sorted((ROOT / "patches").rglob("*.py")), ids=file_id)
def test_patches_import_only_patches_of_ours(path):
    depth = len(path.relative_to(ROOT / "patches").parts)  # dots that lead to the folder itself
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level <= depth, f"line {node.lineno} leaves patches/"
            assert node.level or node.module.split(".")[0] not in ("unsloth_trl", "patches"), f"line {node.lineno}"
        elif isinstance(node, ast.Import):
            assert not {a.name.split(".")[0] for a in node.names} & {"unsloth_trl", "patches"}, f"line {node.lineno}"


def test_files_are_short_and_have_telling_names():
    assert len(LIBRARY) > 20
    for path in EVERYTHING:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        assert num_lines <= 700, f"{file_id(path)} has {num_lines} lines; split it by what its parts do"
        assert path.name not in BANNED_NAMES, f"{file_id(path)}: name it after what it does"


def test_each_module_has_a_docstring():
    for path in LIBRARY:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{file_id(path)} has no docstring"
