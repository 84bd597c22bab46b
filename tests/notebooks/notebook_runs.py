"""Runs a notebook of `notebooks/` in a kernel of its own: on the CPU, offline, with parameters for a tiny size."""

import json
import random
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
import torch

from tests.hub.gguf_models import byte_level_tokenizer, model_folder, split_steps


ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"


def save_tiny(folder: Path, model_type: str, likely_eos: bool = False, **config: Any) -> str:
    """
    A random model with a tokenizer that GGUF can express and a chat template.

    Args:
        folder (`Path`): Where to save both.
        model_type (`str`): One of `tests.tiny.ARCHITECTURES`.
        likely_eos (`bool`): Make EOS likely after some tokens, so that completions have different lengths.
        config: Overrides.

    Returns:
        The folder.
    """
    tokenizer = byte_level_tokenizer(split_steps(None))
    model = model_folder(folder, model_type, tokenizer, max_position_embeddings=1024, **config)
    if likely_eos:
        with torch.no_grad():
            model.lm_head.weight[tokenizer.eos_token_id] *= 4
        model.save_pretrained(folder)
    return str(folder)


def save_conversations(folder: Path, num_rows: int = 24) -> str:
    """A folder that `load_dataset` reads, of conversations with different lengths."""
    rng = random.Random(0)
    words = "the quick brown fox jumps over lazy dogs it is done".split()
    rows = [
        {
            "messages": [
                {"role": role, "content": " ".join(rng.choices(words, k=rng.randint(3, 12)))}
                for role in ("user", "assistant") * rng.randint(1, 2)
            ]
        }
        for _ in range(num_rows)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def run_notebook(name: str, folder: Path, environment: dict[str, str] | None = None, **parameters: Any):
    """
    Execute a notebook; the install cell is skipped by its tag.

    Args:
        name (`str`): Of the file, without its ending.
        folder (`Path`): Where everything goes that the run writes.
        environment (`dict[str, str]`, *optional*): Further variables for the kernel.
        parameters: For the cell tagged `parameters`, each of which must be in it.

    Returns:
        The executed notebook.
    """
    source = NOTEBOOKS / f"{name}.ipynb"
    known = papermill.inspect_notebook(source)
    assert parameters.keys() <= known.keys(), sorted(parameters.keys() - known.keys())
    variables = {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "hf_home"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
    }
    working = folder / "working"
    working.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in (variables | (environment or {})).items():
            patch.setenv(variable, value)
        papermill.execute_notebook(
            source,
            folder / source.name,
            parameters | {"output_dir": str(folder / "output")},
            kernel_name="python3",
            cwd=working,
            progress_bar=False,
        )
    assert not list(working.iterdir()), "everything belongs into output_dir"
    return nbformat.read(folder / source.name, as_version=4)


def printed(notebook, part: str = "") -> str:
    """What the cells whose source has `part` printed or displayed, as plain text."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and part in cell.source:
            for output in cell.outputs:
                texts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(texts)
