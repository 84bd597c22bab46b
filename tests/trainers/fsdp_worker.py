"""One rank of `test_fsdp.py`: the gradients of a sharded model under each policy. Not started by pytest."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.tiny import tiny_model
from tests.trainers.ranks import leave
from unsloth_trl import PatchConfig, apply_patches
from unsloth_trl.patches.checkpointing import offload, settings
from unsloth_trl.patches.checkpointing.patch import current_plan
from unsloth_trl.patches.checkpointing.settings import Notch


def gradients(policy_name: str, tile: int) -> dict[str, torch.Tensor]:
    model = tiny_model("llama")
    apply_patches(model, PatchConfig(checkpoint_policy=policy_name))
    model.gradient_checkpointing_enable()
    if tile:
        current_plan(model).use(Notch(offload=policy_name == "offload", tile=tile))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):  # two micro-batches
        ids = torch.randint(3, 60, (2, 12))
        model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def main(folder: str) -> None:
    offload.MIN_BYTES, settings.ON_DEVICE = 1, 0
    dist.init_process_group("gloo")
    results = {}
    for policy_name in ("keep", "recompute", "offload"):
        results[policy_name] = gradients(policy_name, 0)
    results["tiles"] = gradients("offload", 8)
    torch.save(results, Path(folder) / f"rank{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
