"""The tools of a llama.cpp that is on the machine: found, run, never downloaded or built.

llama.cpp has renamed its programs more than once and its builds put them in different folders, so that each is looked
for under all of its names in all of these places.
"""

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from huggingface_hub.utils import tqdm


QUANTIZERS = ("llama-quantize", "quantize")
CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf.py")
# of a source tree, with Unix makefiles or Ninja, with Visual Studio, and of an installed or released one
FOLDERS = (".", "build/bin", "build/bin/Release", "build", "bin", "bin/Release")

# What llama-quantize makes without an importance matrix, with about how many bits a weight takes at most.
QUANTIZED_BITS = {
    "q2_k": 3.6,
    "q3_k_s": 3.9,
    "q3_k_m": 4.2,
    "q3_k_l": 4.6,
    "q4_0": 5.0,
    "q4_1": 5.5,
    "q4_k_s": 5.0,
    "q4_k_m": 5.3,
    "q5_0": 6.0,
    "q5_1": 6.5,
    "q5_k_s": 6.0,
    "q5_k_m": 6.2,
    "q6_k": 7.0,
    "iq4_nl": 5.0,
    "iq4_xs": 4.8,
}

_STEP = re.compile(r"\[\s*(\d+)\s*/\s*(\d+)\]")


class LlamaCppNotFoundError(RuntimeError):
    """A method needs a program of llama.cpp that is not on this machine; the message says what to install."""


def find_quantizer(llama_cpp_path: str | Path | None = None, needed_for: str = "quantization_method") -> Path:
    """
    llama.cpp's `llama-quantize`.

    Args:
        llama_cpp_path (`str` or `Path`, *optional*): A folder of llama.cpp (its source tree, its build, or where its
            programs are), or the program itself. By default `PATH`, then `llama.cpp` in the working directory.
        needed_for (`str`, *optional*): What asks for it, for the message.

    Returns:
        `Path` of a program that can be run.

    Raises:
        LlamaCppNotFoundError: If it is not there, or is not executable.
    """
    if found := _find(llama_cpp_path, QUANTIZERS):
        if os.access(found, os.X_OK):
            return found.resolve()
        raise LlamaCppNotFoundError(f"{needed_for} needs {found}, which is not executable: chmod +x {found}")
    where = "on PATH or in ./llama.cpp" if llama_cpp_path is None else f"in llama_cpp_path={str(llama_cpp_path)!r}"
    raise LlamaCppNotFoundError(
        f"{needed_for} needs llama.cpp's program llama-quantize, which is not {where}: install llama.cpp (brew "
        "install llama.cpp, or conda install -c conda-forge llama.cpp) or set llama_cpp_path to the folder of a "
        "build; 'q8_0', 'f16', 'bf16' and 'f32' need no llama.cpp"
    )


def find_converter(llama_cpp_path: str | Path | None = None) -> Path | None:
    """llama.cpp's script that converts a model folder, looked for like the quantizer; `None` if it is not there."""
    return _find(llama_cpp_path, CONVERTERS)


def _find(llama_cpp_path: str | Path | None, names: tuple[str, ...]) -> Path | None:
    if llama_cpp_path is not None:
        root = Path(llama_cpp_path).expanduser()
        if root.is_file():
            return root if root.name in _spellings(names) else None
    else:
        # a program called `quantize` on PATH may be anyone's; the newer name is llama.cpp's own
        if on_path := shutil.which(names[0]):
            return Path(on_path)
        root = Path("llama.cpp")
    candidates = [root / folder / name for folder in FOLDERS for name in _spellings(names)]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _spellings(names: tuple[str, ...]) -> list[str]:
    return [spelling for name in names for spelling in (name, f"{name}.exe") if not name.endswith(".py")] + [
        name for name in names if name.endswith(".py")
    ]


def run_quantizer(quantizer: Path, source: Path, target: Path, method: str) -> None:
    """
    Quantise a GGUF file, with a progress bar.

    Args:
        quantizer (`Path`): From `find_quantizer`.
        source (`Path`): A file in 16 or 32 bits.
        target (`Path`): Where to write; does not exist yet.
        method (`str`): One of `QUANTIZED_BITS`.

    Raises:
        RuntimeError: If the program fails, or if what it wrote is not a whole GGUF file.
    """
    command = [str(quantizer), str(source), str(target), method.upper()]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            with tqdm(desc=f"llama-quantize {method}", unit="tensor", file=sys.stderr) as bar:
                for line in process.stdout:
                    lines = [*lines[-19:], line.rstrip()]
                    if match := _STEP.search(line):
                        bar.total = int(match[2])
                        bar.update(int(match[1]) - bar.n)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise RuntimeError(f"{' '.join(command)} failed with status {process.returncode} and said: {said}")
    if not target.is_file() or num_tensors(target) != num_tensors(source):
        raise RuntimeError(f"{' '.join(command)} ended without an error, but wrote no whole GGUF file to {target}")


def num_tensors(path: Path) -> int | None:
    """How many tensors a GGUF file says it has; `None` if it is not a GGUF file."""
    with open(path, "rb") as file:
        header = file.read(24)
    if len(header) < 24 or header[:4] != b"GGUF":
        return None
    return struct.unpack("<IQQ", header[4:])[1]
