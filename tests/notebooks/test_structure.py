"""The notebooks as files: order, badge, parameters, nothing stored, and what their text and code name exists."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import papermill
import pytest

import unsloth_trl
from tests.notebooks.notebook_runs import NOTEBOOKS, ROOT
from unsloth_trl.cli import build_parser


# in this order; what stands between them is the notebook's own
COMMON = ["Install", "Parameters", "Load", "Adapter", "Data", "Train", "Inference", "Save", "Measure"]
OWN = {"sft": [], "grpo": ["Rewards"], "moe": ["What it takes"], "long_context": ["What fits"]}
REPOSITORY = "unsloth-trl/unsloth_trl"
# of the Hub, GitHub, Weights & Biases, OpenAI and AWS
SECRET = re.compile(r"hf_\w{8,}|gh[pousr]_\w{8,}|github_pat_\w+|\b[0-9a-f]{40}\b|\bsk-\w{8,}|AKIA[0-9A-Z]{12,}")


@pytest.fixture(params=OWN)
def name(request):
    return request.param


@pytest.fixture
def notebook(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def code(notebook, skipped: bool = False):
    """The code cells, without the one that tests skip."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in cells if ("skip-execution" in cell.metadata.get("tags", [])) == skipped]


def test_there_are_these_four():
    assert {path.stem for path in NOTEBOOKS.iterdir() if path.suffix == ".ipynb"} == OWN.keys()


def test_is_valid_and_short(notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5) and 20 <= len(notebook.cells) <= 30
    assert notebook.metadata.kernelspec.name == "python3" and notebook.metadata.accelerator == "GPU"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_badge_opens_this_file_of_this_repository(name, notebook):
    first = notebook.cells[0]
    url = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{name}.ipynb"
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert re.findall(r"\[!\[Open In Colab\]\(\S+\)\]\((\S+)\)", first.source) == [url]
    (install,) = code(notebook, skipped=True)
    assert install.source.startswith("%pip install ") and f"https://github.com/{REPOSITORY}" in install.source


def test_order(name, notebook):
    headings = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings += re.findall(r"^##+ (.+)$", cell.source, re.M)
    assert [heading for heading in headings if heading in COMMON] == COMMON
    assert [heading for heading in headings if heading not in COMMON] == OWN[name]
    calls = ["from_pretrained(", "get_peft_model(", ".train()", ".generate(", 'save_method="lora"']
    calls += ['save_method="merged_16bit"', "save_pretrained_gguf(", "push_to_hub_merged(", "def measure("]
    source = "\n".join(cell.source for cell in code(notebook))
    places = [source.index(call) for call in calls]
    assert places == sorted(places)
    assert notebook.cells[-1].cell_type == "code" and "measured = {" in notebook.cells[-1].source


def test_parameters(name, notebook):
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1 and tagged[0] is code(notebook)[0]
    assigned = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(tagged[0].source).body}
    assert papermill.inspect_notebook(NOTEBOOKS / f"{name}.ipynb").keys() == assigned.keys()
    # a run as it stands uploads nothing
    assert assigned["push_to"] == "" and assigned["model_name"] and assigned["measure_steps"] > 0
    used = {
        node.id
        for cell in code(notebook)[1:]
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.Name)
    }
    assert assigned.keys() <= used, f"not used: {assigned.keys() - used}"


def test_uploads_are_asked_for(notebook):
    (cell,) = (cell for cell in code(notebook) if "push_to_hub" in cell.source)
    guarded = [node for node in ast.parse(cell.source).body if "push_to_hub" in ast.unparse(node)]
    assert len(guarded) == 3
    for node in guarded:
        assert isinstance(node, ast.If) and "push_to" in ast.unparse(node.test)
        assert "private=True" in ast.unparse(node.body)


def test_nothing_is_stored(name, notebook):
    for cell in notebook.cells:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
        assert cell.metadata.keys() <= {"tags"}
    assert notebook.metadata.keys() == {"accelerator", "colab", "kernelspec", "language_info"}
    assert not SECRET.search((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", ["token='hf_abcDEF123456'", "ghp_0123456789abcdef", "a" * 40, "sk-abcdefgh12"])
def test_a_secret_would_be_seen(text):
    assert SECRET.search(text)


def test_names_exist(notebook):
    imported = set()
    for cell in code(notebook):
        assert not re.search(r"^\s*[%!]", cell.source, re.M), "only the cell that tests skip has commands"
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and node.module == "unsloth_trl":
                imported |= {alias.name for alias in node.names}
    assert "FastLanguageModel" in imported <= set(unsloth_trl.__all__)


def test_commands_in_the_text_parse():
    found = []
    for name in OWN:
        for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
            if cell.cell_type == "markdown":
                found += [" ".join(command.split()) for command in re.findall(r"`unsloth-trl ([^`]+)`", cell.source)]
    assert len(found) == 2
    for command in found:
        assert build_parser().parse_args(command.split()).command == "estimate"


def test_style():
    ruff = shutil.which("ruff")
    if ruff is None:
        pytest.skip("the dev extra has ruff")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [ruff, *command, "--no-cache", "notebooks", "tests/notebooks"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not re.search("No Python files found", done.stdout + done.stderr)


def test_the_links_in_the_text_lead_somewhere(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (Path(NOTEBOOKS) / target).exists(), target
