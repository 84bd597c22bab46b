"""Two gloo processes on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


ROOT = Path(__file__).parents[2]


def leave() -> None:
    """
    End a script's process together with the other one's, whatever its threads still do.

    A thread of gloo lets go of what it gathered when it comes to it, for which it needs Python. A process group that
    goes with the last that holds it, as a trainer's does, waits for that thread and lets no one have Python: on a busy
    machine one of ten runs never ended.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_on_two_ranks(script: str, folder: Path, *arguments: str) -> list[Any]:
    """
    Run a script of this folder on two ranks, and return what each of them has saved.

    Args:
        script (`str`): Its name; it saves `rank0.pt` or `rank1.pt` to `folder`.
        folder (`Path`): For the results and the logs.
        arguments (`str`): Of the script.
    """
    command = [sys.executable, str(ROOT / "tests" / "trainers" / script), *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = []
    for rank in range(2):
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(folder / f"log{rank}", "w") as log:
            processes.append(subprocess.Popen(command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(2))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
