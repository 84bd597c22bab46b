"""Compiles Triton kernels for GPUs that are not here.

A test calls a launcher with tensors of the device `meta` and a `Recorder` in the place of the kernel, then compiles
the recorded launch for each target; so it is the launcher's own configuration that is compiled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch


ROOT = Path(__file__).parents[1]

_POINTERS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
}


class Target(NamedTuple):
    """A family of GPUs: Triton's backend, architecture and threads of a warp, and what its kernels have."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared: int  # bytes of shared memory that one program may take
    capability: tuple[int, int] | None  # None on AMD
    dtype: torch.dtype  # the 16-bit type that it computes in

    def __str__(self) -> str:
        return self.name


def _nvidia(arch: int, kib: int, dtype: torch.dtype = torch.bfloat16) -> Target:
    return Target(f"sm_{arch}", "cuda", arch, 32, kib * 1024, divmod(arch, 10), dtype)


TARGETS = (
    _nvidia(75, 64, torch.float16),
    _nvidia(80, 163),
    _nvidia(86, 99),
    _nvidia(89, 99),
    _nvidia(90, 227),
    _nvidia(100, 227),
    _nvidia(120, 99),
    Target("gfx942", "hip", "gfx942", 64, 64 * 1024, None, torch.bfloat16),
    Target("gfx1100", "hip", "gfx1100", 32, 64 * 1024, None, torch.bfloat16),
)


class Recorder:
    """Stands for a kernel: `kernel[grid](*args, **kwargs)` is kept in `launches` and not run."""

    def __init__(self):
        self.launches: list[tuple[Any, tuple, dict[str, Any]]] = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


def _type(value: Any) -> str:
    """How Triton specialises an argument of a launch; "constexpr" for what it compiles in."""
    if isinstance(value, torch.Tensor):
        return "*" + _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "constexpr" if value == 1 else "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if value is None:
        return "constexpr"
    if hasattr(value, "block_shape"):
        return f"tensordesc<{_POINTERS[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
    raise TypeError(f"no type for {value!r}")


def compile_for(target: Target, kernel: Any, *args: Any, num_warps: int = 4, num_stages: int = 3, **kwargs: Any):
    """
    Compile a launch.

    Args:
        target (`Target`): For this GPU.
        kernel (`triton.JITFunction`): The kernel, made without `TRITON_INTERPRET`.
        *args, **kwargs: Its arguments as a launcher passes them. Tensors count as aligned to 16 bytes.
        num_warps, num_stages (`int`, *optional*): Of the launch.

    Returns:
        `triton.compiler.CompiledKernel`: With `metadata.shared`, and the code of each stage in `asm`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert set(values) == set(kernel.arg_names), set(values) ^ set(kernel.arg_names)
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else _type(value)
        if parameter.do_not_specialize:
            signature[parameter.name] = "i32" if kind == "constexpr" else kind
            continue
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif parameter.do_not_specialize_on_alignment:
            continue
        elif kind.startswith("*") or (kind in ("i32", "i64") and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )


def shared_memory(target: Target, kernel: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes of shared memory that a launch takes on `target`; arguments as in `compile_for`."""
    return compile_for(target, kernel, *args, **kwargs).metadata.shared


def in_interpreter(module: str, function: str = "interpreted", timeout: int = 400) -> Any:
    """
    What a function of a test module returns in a process of its own, where Triton interprets its kernels on the CPU.

    Args:
        module (`str`): Its name.
        function (`str`, *optional*, defaults to `"interpreted"`): Takes nothing, and returns what JSON can hold.
        timeout (`int`, *optional*): Seconds.
    """
    code = f"import json; from {module} import {function}; print(json.dumps({function}()))"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def mend_interpreter() -> None:
    """
    Let loops of kernels end where a tensor says, in this process.

    Triton's interpreter keeps scalars as arrays of one element and makes loop bounds of them with `int(array)`, which
    NumPy 2.4 refuses. For processes with `TRITON_INTERPRET` that run nothing but kernels.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
