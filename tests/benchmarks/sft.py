"""One SFT run per process: packed LoRA or QLoRA training of a random-weight model, timed step by step.

    python tests/benchmarks/sft.py --mode trl|trl_liger|unsloth|ours --model llama-8b --bs 2 --tokenizer DIR
    accelerate launch --multi_gpu --num_processes 2 tests/benchmarks/sft.py --in_memory 1 ...

Prints one line `RESULT {json}`: median, fastest and slowest step in seconds, trained tokens per second (of one GPU if
there are several), peak GiB, first and last loss, and what was measured where. Same rows, seed, optimiser and learning
rate in every mode. The peers run with `flash_attention_2`: the flash-attn package, or a stand-in on PYTHONPATH that
calls the kernel in torch.
"""

import argparse
import itertools
import json
import random
import tempfile
import time

from training import (
    PIECES,
    be_quiet_and_offline,
    build_in_memory,
    limit_memory,
    load_model,
    lora_config,
    packed_rows,
    take_device,
    take_off,
    write_profile,
)


ap = argparse.ArgumentParser()
ap.add_argument("--mode", required=True)
ap.add_argument("--model", default="qwen3-0.6b")
ap.add_argument("--tokenizer", required=True)
ap.add_argument("--len", type=int, default=4096)
ap.add_argument("--bs", type=int, default=4)
ap.add_argument("--steps", type=int, default=14)
ap.add_argument("--length", type=int, default=0, help="steps the trainer believes to make; it is ended after --steps")
ap.add_argument("--skip", type=int, default=5, help="warm-up steps left out of the median")
ap.add_argument("--qlora", type=int, default=0)
ap.add_argument("--attn", default=None)
ap.add_argument("--packing", type=int, default=1)
ap.add_argument("--one_sample", type=int, default=0, help="rows are one sample of --len tokens each")
ap.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
ap.add_argument("--gc", type=int, default=1)
ap.add_argument(
    "--timing",
    choices=["per step", "events", "window"],
    default="per step",
    help="synchronise at both ends of a step; or take events of the device, or the steps after --skip as one window, "
    "with nothing synchronised or logged in between",
)
ap.add_argument(
    "--vram", type=float, default=0, help="GiB of device memory this process may use, to stand in for a smaller card"
)
ap.add_argument(
    "--profile", default=None, help="write a table of the device and host time of two steady steps to this file"
)
ap.add_argument("--in_memory", type=int, default=0, help="build the model on the device and not on disk; not unsloth")
ap.add_argument("--set", nargs="*", default=[], help="extra config fields for mode ours, name=json")
ap.add_argument("--without", nargs="*", default=[], choices=PIECES, help="parts that have no switch, for ablations")
a = ap.parse_args()
be_quiet_and_offline()
if a.mode == "unsloth":
    import unsloth  # noqa: F401  (must be first)
    from unsloth import FastLanguageModel
import torch
from datasets import Dataset
from models import LINEARS, build
from record import provenance
from transformers import AutoTokenizer, TrainerCallback


if a.mode == "ours":
    from unsloth_trl import SFTConfig, SFTTrainer
else:
    from trl import SFTConfig, SFTTrainer
take_off(a.without)
gpus = take_device()
limit_memory(a.vram)
path = a.tokenizer if a.in_memory else build(a.model, a.tokenizer)
tok = AutoTokenizer.from_pretrained(path)
rng = random.Random(0)
if a.one_sample:
    rows = [[rng.randrange(10, 49000) for _ in range(a.len)] for _ in range(gpus * a.bs * (a.steps + 4))]
else:
    rows = packed_rows(int(gpus * a.len * a.bs * (a.steps + 4) * 1.3), a.len, rng)
kw = {
    "output_dir": tempfile.mkdtemp(),
    "max_length": a.len,
    "packing": bool(a.packing),
    "per_device_train_batch_size": a.bs,
    "gradient_accumulation_steps": 1,  # Unsloth's own default is 2
    "max_steps": a.length or a.steps,
    "logging_steps": 1 if a.timing == "per step" else 1000,
    "save_strategy": "no",
    "report_to": "none",
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "bf16": a.dtype == "bfloat16",
    "fp16": a.dtype == "float16",
    "optim": "adamw_torch_fused",
    "disable_tqdm": True,
    "seed": 0,
}
times, losses = [], []


class Clock(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_step_begin(self, args, state, *_, **__):
        if a.profile and state.global_step == a.steps - 2:
            self.profile = torch.profiler.profile()
            self.profile.start()
        if a.timing == "events":
            self.mark()
        elif a.timing == "per step" or state.global_step == a.skip:
            torch.cuda.synchronize()
            self.t = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        last = state.global_step == a.steps
        if a.timing == "per step":
            torch.cuda.synchronize()
            times.append(time.perf_counter() - self.t)
        elif last:
            if a.timing == "events":
                self.mark()
            torch.cuda.synchronize()
            if a.timing == "window":
                times.extend([0.0] * a.skip + [(time.perf_counter() - self.t) / (a.steps - a.skip)])
            times.extend(b.elapsed_time(e) / 1e3 for b, e in itertools.pairwise(self.events))
        control.should_training_stop = last
        if a.profile and last:
            torch.cuda.synchronize()
            self.profile.stop()

    def mark(self):
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            losses.append(float(logs["loss"]))


clock = Clock()
moe = "a3b" in a.model
data = Dataset.from_dict({"input_ids": rows})
if a.mode == "unsloth":
    model, _ = FastLanguageModel.from_pretrained(
        path, max_seq_length=a.len, dtype=torch.bfloat16, load_in_4bit=bool(a.qlora), load_in_16bit=not a.qlora
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        target_modules=LINEARS + (["gate_up_proj"] if moe else []),
        use_gradient_checkpointing="unsloth" if a.gc else False,
        random_state=0,
    )
    trainer = SFTTrainer(
        model=model, args=SFTConfig(**kw), train_dataset=data, processing_class=tok, callbacks=[clock]
    )
else:
    attn = a.attn or ("flash_attention_2" if a.mode != "ours" else None)
    if a.mode == "trl_liger":
        kw["use_liger_kernel"] = True
    if not a.gc:
        kw["gradient_checkpointing"] = False
    kw.update({k: json.loads(v) for k, v in (s.split("=", 1) for s in a.set)})
    trainer = SFTTrainer(
        model=build_in_memory(a.model, bool(a.qlora), attn)
        if a.in_memory
        else load_model(path, a.mode, attn, bool(a.qlora), a.dtype),
        args=SFTConfig(**kw),
        train_dataset=data,
        processing_class=tok,
        peft_config=lora_config(a.model),
        callbacks=[clock],
    )
accumulated = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
if accumulated != (a.bs, 1) or trainer.accelerator.num_processes != gpus:
    raise SystemExit(f"{accumulated} rows a micro-batch and micro-batches a step, not ({a.bs}, 1), or not {gpus} GPUs")
# what is left over when rows are packed is a short row, and its step no fast one
full = [i for i, row in enumerate(trainer.train_dataset["input_ids"]) if not a.packing or len(row) > 0.9 * a.len]
trainer.train_dataset = trainer.train_dataset.select(full)
row_tokens = [len(row) for row in trainer.train_dataset["input_ids"]]  # packed rows; every token counts, in every mode
torch.cuda.reset_peak_memory_stats()
trainer.train()
if a.profile:
    write_profile(clock.profile, a.profile)
s = sorted(times[a.skip : -2] if a.profile else times[a.skip :])
median = s[len(s) // 2]
per_batch = a.bs * sum(row_tokens) / len(row_tokens)

result = {
    "mode": a.mode,
    "model": a.model,
    "qlora": a.qlora,
    "in_memory": a.in_memory,
    "gpus": gpus,
    "sharded": str(trainer.accelerator.distributed_type) == "DistributedType.FSDP",
    "gc": a.gc,
    "bs": a.bs,
    "len": a.len,
    "one_sample": a.one_sample,
    "dtype": a.dtype,
    "vram": a.vram,
    "timing": a.timing,
    "set": a.set,
    "without": a.without,
    "median_s": round(median, 4),
    "min_s": round(s[0], 4),
    "max_s": round(s[-1], 4),
    "warm_up_s": round(sum(times[: a.skip]), 1),
    "length": a.length or a.steps,
    "steps": len(s),
    "tokens": round(per_batch),
    "tok_s": round(per_batch / median),
    "tok_s_fastest": round(per_batch / s[0]),
    "plan": trainer._plan.changes if getattr(trainer, "_plan", None) else None,
    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    "loss_first": losses[:1],
    "loss_last": losses[-1:],
    **provenance(a.mode, "sft.py"),
}
if trainer.accelerator.is_main_process:
    if a.mode == "ours":
        print(trainer.patch_report)
    print("RESULT", json.dumps(result), flush=True)
