"""Checkpoint policies against each other in one training run, step by step in turn, so that the host's speed cancels.

    python tests/benchmarks/checkpointing.py --model llama-8b --bs 2 --tokenizer DIR

The first steps run as `checkpoint_policy="auto"` and end with its plan. Then each step takes the next setting: auto's
plan, all layers recomputed, all offloaded with two staging buffers and with one. Prints one line `RESULT {json}` for
each: median, fastest and slowest step in seconds, tokens per second, peak GiB, GiB of host memory, and the median of
the ratios to the recomputed step of the same round.
"""

import argparse
import json
import random
import tempfile
import time

from training import be_quiet_and_offline, limit_memory, load_model, lora_config, packed_rows


ap = argparse.ArgumentParser()
ap.add_argument("--model", default="llama-8b")
ap.add_argument("--tokenizer", required=True)
ap.add_argument("--len", type=int, default=4096)
ap.add_argument("--bs", type=int, default=2)
ap.add_argument("--rounds", type=int, default=10)
ap.add_argument("--warm_up", type=int, default=3, help="steps under auto before the first round")
ap.add_argument("--skip", type=int, default=1, help="rounds left out of the medians")
ap.add_argument("--qlora", type=int, default=0)
ap.add_argument("--one_sample", type=int, default=0, help="rows are one sample each instead of packed ones")
ap.add_argument("--settings", nargs="*", default=["auto", "recompute", "offload", "offload, 1 buffer"])
ap.add_argument("--vram", type=float, default=0)
ap.add_argument("--tile", type=int, default=None, help="tokens per tile in all settings, instead of the plan's")
a = ap.parse_args()
be_quiet_and_offline()
import torch
from datasets import Dataset
from models import build
from record import provenance
from transformers import AutoTokenizer, TrainerCallback

from unsloth_trl import SFTConfig, SFTTrainer
from unsloth_trl.patches.checkpointing.settings import Notch


limit_memory(a.vram)
path = build(a.model, a.tokenizer)
rng = random.Random(0)
names = a.settings
steps = a.warm_up + a.rounds * len(names)
total = a.len * a.bs * (steps + 2)
if a.one_sample:
    rows = [[rng.randrange(10, 49000) for _ in range(a.len)] for _ in range(total // a.len)]
else:
    rows = packed_rows(int(total * 1.1), a.len, rng)
seconds: dict[str, list[float]] = {name: [] for name in names}
peaks: dict[str, list[int]] = {name: [] for name in names}
host: dict[str, int] = {}


class Turns(TrainerCallback):
    """Gives each step its setting and its time."""

    def on_step_begin(self, args, state, *_, **__):
        turn = state.global_step - a.warm_up
        self.name = None
        if turn == 0:
            plan = trainer._plan
            tile = plan.notch.tile if a.tile is None else a.tile
            self.settings = {
                "auto": plan.notch,
                "recompute": Notch(tile=tile),
                "offload": Notch(offload=True, tile=tile),
                "offload, 1 buffer": Notch(offload=True, staging=1, tile=tile),
            }
            plan.offloader.release = lambda: None  # the host memory stays between turns, as in a run of one setting
        if turn >= 0:
            turn, back = turn % len(names), turn // len(names) % 2
            self.name = names[len(names) - 1 - turn if back else turn]  # there and back: no setting is always first
            trainer._plan.use(self.settings[self.name])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.t = time.perf_counter()

    def on_step_end(self, args, state, *_, **__):
        torch.cuda.synchronize()
        if self.name is not None:
            seconds[self.name].append(time.perf_counter() - self.t)
            peaks[self.name].append(torch.cuda.max_memory_allocated())
            host[self.name] = trainer._plan.offloader.nbytes


turns = Turns()
trainer = SFTTrainer(
    model=load_model(path, "ours", None, bool(a.qlora)),
    args=SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_length=a.len,
        packing=not a.one_sample,
        padding_free=bool(a.one_sample),
        per_device_train_batch_size=a.bs,
        max_steps=steps,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        bf16=True,
        optim="adamw_torch_fused",
        disable_tqdm=True,
        seed=0,
    ),
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=AutoTokenizer.from_pretrained(path),
    peft_config=lora_config(a.model),
    callbacks=[turns],
)
trainer.train()
per_batch = a.bs * sum(len(row) for row in trainer.train_dataset["input_ids"]) / len(trainer.train_dataset)
for name in names:
    measured = seconds[name][a.skip :]
    ratios = sorted(s / r for s, r in zip(measured, seconds["recompute"][a.skip :], strict=True))
    s = sorted(measured)
    result = {
        "task": "checkpointing",
        "mode": "ours",
        "policy": name,
        "model": a.model,
        "qlora": a.qlora,
        "bs": a.bs,
        "len": a.len,
        "plan": turns.settings[name].describe(trainer._plan.num_layers),
        "median_s": round(s[len(s) // 2], 4),
        "min_s": round(s[0], 4),
        "max_s": round(s[-1], 4),
        "steps": len(s),
        "tok_s": round(per_batch / s[len(s) // 2]),
        "ratio_to_recompute": round(ratios[len(ratios) // 2], 4),
        "peak_gib": round(max(peaks[name][a.skip :]) / 2**30, 2),
        "host_gib": round(host[name] / 2**30, 2),
        "changes": trainer._plan.changes[:2],
        **provenance("ours", "checkpointing.py"),
    }
    print("RESULT", json.dumps(result), flush=True)
