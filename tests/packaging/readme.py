"""The tables of the README that are made from the sources. `python -m tests.packaging.readme` writes them again."""

import importlib.util
from pathlib import Path


ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def tables() -> dict[str, str]:
    """The name of each block of the README and what stands in it; a block without a source yet is left out."""
    from unsloth_trl.models.support import support_table

    made = {"support": support_table()}
    if importlib.util.find_spec("tests.benchmarks.table"):
        from tests.benchmarks.table import render

        made["results"] = render()
    return made


def read_block(text: str, name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- /name -->`, each of which must be there once."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"the README must have {start} and {end}, each once")
    return text.split(start)[1].split(end)[0].strip()


def write_block(text: str, name: str, table: str) -> str:
    """`text` with `table` in the block `name`."""
    read_block(text, name)
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, rest = text.split(start)
    return f"{head}{start}\n{table.strip()}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    for name, table in tables().items():
        text = write_block(text, name, table)
    README.write_text(text, encoding="utf-8")
