"""The README says what is true: its commands are the ones CI runs, its tables come from the sources."""

import ast
import json
import re
from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest
import torch
import trl

from tests.benchmarks import table
from tests.packaging.readme import README, ROOT, read_block, tables, write_block
from tests.tiny import tiny_model, tiny_rows
from unsloth_trl.config import GRPOConfig, PatchArguments


TEXT = README.read_text(encoding="utf-8")
DEMO_COMMAND = 'pip install -e ".[demo]" && unsloth-trl demo'
TEST_COMMAND = 'pip install -e ".[test]" && pytest'


def test_commands_stand_as_they_are_run():
    lines = TEXT.splitlines()
    assert lines.count(DEMO_COMMAND) == lines.count(TEST_COMMAND) == 1
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert TEST_COMMAND in [line.strip() for line in ci.splitlines()]
    assert re.search(r"^unsloth-trl demo ", ci, re.M)


def test_ci_script_can_be_executed():
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("name", ["support", "results"])
def test_table_is_made_from_the_sources(name):
    made = tables()
    if name not in made:
        pytest.skip("tests/benchmarks/table.py is not there yet")
    assert read_block(TEXT, name) == made[name].strip(), "run: python -m tests.packaging.readme"


def test_rows_that_were_found_wrong_are_not_shown():
    lines = (ROOT / "tests" / "benchmarks" / "results" / "h200.jsonl").read_text(encoding="utf-8").splitlines()
    void = [row for row in map(json.loads, lines) if row.get("void")]
    assert len(void) == 5
    for row in void:
        assert f"| {row['tok_s']:,} " not in TEXT


def test_runs_of_several_gpus_stand_apart():
    """A switch is compared on as many GPUs, and split in the same way."""
    rows = [row for row in table.load() if row["call"] == "2026-11-30-28" and "task" not in row]
    (alone,) = table._switches(rows)
    several = [row | {"gpus": 2, "sharded": sharded} for sharded in (False, True) for row in rows]
    made = table._switches(rows + several)
    assert made[0] == alone and len(made) == 3
    for text, kind in zip(made[1:], ("DDP", "FSDP2"), strict=True):
        assert text.replace(f" on each of 2 GPUs ({kind})", "") == alone != text


def test_blocks_are_written_where_they_are_read():
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"
    new = write_block(text, "a", "| x |\n")
    assert new == "before\n<!-- a -->\n| x |\n<!-- /a -->\nafter\n"
    assert read_block(new, "a") == "| x |"
    with pytest.raises(ValueError, match="<!-- b -->"):
        write_block(text, "b", "")


def test_every_switch_is_in_the_table_with_its_default_and_values():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|", TEXT, re.M)
    listed = {name: (default.strip("`"), values) for name, default, values in rows}
    own = [field for field in fields(GRPOConfig) if field.name not in {f.name for f in fields(trl.GRPOConfig)}]
    assert {field.name for field in fields(PatchArguments)} < {field.name for field in own}
    for field in own:
        assert field.name in listed, f"{field.name} is missing from the README's table of switches"
        default, values = listed[field.name]
        assert default == (f'"{field.default}"' if isinstance(field.default, str) else str(field.default))
        if get_origin(field.type) is Literal:
            assert re.findall(r"`\"(\w+)\"`", values) == list(get_args(field.type))


def test_python_in_it_parses_and_names_what_exists():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    assert blocks
    import unsloth_trl

    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "unsloth_trl":
                assert {alias.name for alias in node.names} <= set(unsloth_trl.__all__)


def test_loop_without_our_trainers_runs():
    """The README's accelerate loop, as it stands there; packed losses are those of the samples one by one."""
    loop = next(block for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S) if "apply_patches" in block)
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [[row["input_ids"] for row in tiny_rows(n, seed=n)] for n in (3, 1)]
    names = {"model": model, "optimizer": optimizer, "batches": batches}
    exec(loop, names)
    assert names["report"].removed and names["report"]["attention"].applied
    (last,) = batches[-1]
    sample = torch.tensor([last])
    alone = model(input_ids=sample, labels=sample).loss
    assert names["loss"].item() == pytest.approx(alone.item(), rel=1e-5)

    exec(loop.replace("for samples in batches:", "for samples in batches[:1]:"), names)
    samples = [torch.tensor([ids]) for ids in batches[0]]
    total = sum(model(input_ids=ids, labels=ids).loss.item() * (ids.numel() - 1) for ids in samples)
    assert names["loss"].item() == pytest.approx(total / sum(ids.numel() - 1 for ids in samples), rel=1e-5)


def test_links_lead_somewhere():
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / target).exists(), f"{document} links to {target}"
