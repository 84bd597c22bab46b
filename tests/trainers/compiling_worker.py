"""One rank of `test_compiling.py`: its layers are compiled within a run. Started by torchrun, not by pytest."""

import functools
import os
import sys
from pathlib import Path

import torch

import unsloth_trl
from tests.numerics import run_sft
from tests.trainers.ranks import leave
from unsloth_trl.patches.compilation import patch as compilation
from unsloth_trl.patches.registry import base_model
from unsloth_trl.trainers import compiling


def main(case_file: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    compilation.apply = functools.partial(compilation.apply, backend="aot_eager")
    compiling.LEAST_TO_COMPILE = 0.0
    real = compiling.AutoCompilation._worth
    # the second machine has no compiler, and would not find it worthwhile
    compilation.why_no_compiler = lambda device: "no C compiler was found" if rank else None
    compiling.AutoCompilation._worth = lambda *args: [] if rank else real(*args)
    results = {}
    for value in ("auto", "off"):
        case = torch.load(case_file, weights_only=False)
        output = str(Path(folder) / value)
        run = run_sft(
            unsloth_trl, "llama", lora=True, ddp_backend="gloo", output_dir=output, compile_layers=value, **case
        )
        layer = base_model(run.trainer.model).model.layers[0].__dict__.get("forward")
        details = {name: str(run.trainer.patch_report[name].detail) for name in ("compilation", "cuda_graphs")}
        number = 0 if layer is None else layer.compiler.num_graphs
        results[value] = {"logs": run.logs, "updates": run.updates, "details": details, "num_graphs": number}
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
