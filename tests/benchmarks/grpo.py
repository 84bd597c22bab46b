"""One GRPO run per process with synthetic rollouts, so that scoring and the policy's update are what is timed.

    python tests/benchmarks/grpo.py --mode trl|ours --model llama-8b --P 4096 --R 512 --G 8 --bs 8 --tokenizer DIR

Completions have random lengths from R/2 to R, or R with --fixed. Prints one line `RESULT {json}`: median, fastest and
slowest step in seconds, peak GiB, the first logs, and what was measured where. Same rollouts, rewards, seed and
optimiser in every mode; TRL runs with `flash_attention_2` (the flash-attn package, or a stand-in on PYTHONPATH that
calls the kernel in torch).
"""

import argparse
import json
import random
import tempfile
import time

from training import be_quiet_and_offline, limit_memory, load_model, lora_config, write_profile


ap = argparse.ArgumentParser()
ap.add_argument("--mode", choices=["trl", "ours"], required=True)
ap.add_argument("--model", default="llama-8b")
ap.add_argument("--tokenizer", required=True)
ap.add_argument("--P", type=int, default=4096, help="tokens of a prompt")
ap.add_argument("--R", type=int, default=512, help="most tokens of a completion")
ap.add_argument("--G", type=int, default=8, help="completions per prompt")
ap.add_argument("--bs", type=int, default=8)
ap.add_argument("--ga", type=int, default=1)
ap.add_argument("--beta", type=float, default=0.0)
ap.add_argument("--steps", type=int, default=7)
ap.add_argument("--skip", type=int, default=3, help="warm-up steps left out of the median")
ap.add_argument("--qlora", type=int, default=0)
ap.add_argument(
    "--vram", type=float, default=0, help="GiB of device memory this process may use, to stand in for a smaller card"
)
ap.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
ap.add_argument("--generate", action="store_true", help="let the model write the completions, in every step")
ap.add_argument("--attn", default=None)
ap.add_argument("--fixed", action="store_true", help="every completion has R tokens")
ap.add_argument(
    "--profile", default=None, help="write a table of the device and host time of one steady step to this file"
)
ap.add_argument("--set", nargs="*", default=[], help="extra config fields for mode ours, name=json")
a = ap.parse_args()
be_quiet_and_offline()
import torch
from datasets import Dataset
from models import build
from record import provenance
from transformers import AutoTokenizer, TrainerCallback


if a.mode == "ours":
    from unsloth_trl import GRPOConfig, GRPOTrainer
else:
    from trl import GRPOConfig, GRPOTrainer
limit_memory(a.vram)
path = build(a.model, a.tokenizer)
tok = AutoTokenizer.from_pretrained(path)
rng = random.Random(0)


def rollout(prompts, trainer):
    out = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
    for prompt in prompts:
        own = random.Random(prompt)
        length = a.R if a.fixed else rng.randint(a.R // 2, a.R)
        out["prompt_ids"].append([own.randrange(10, 49000) for _ in range(a.P)])
        out["completion_ids"].append([rng.randrange(10, 49000) for _ in range(length)])
    return out


def prompts():
    """The text of 64 prompts; with synthetic rollouts it only seeds them."""
    if not a.generate:
        return [f"q{i}" for i in range(64)]
    own = random.Random(0)
    return [tok.decode([own.randrange(10, 49000) for _ in range(a.P)]) for _ in range(64)]


def reward(completions, **_):
    return [rng.random() for _ in completions]


times = []


class Clock(TrainerCallback):
    def on_step_begin(self, args, state, *_, **__):
        torch.cuda.synchronize()
        if a.profile and state.global_step == a.steps - 1:
            self.profile = torch.profiler.profile()
            self.profile.start()
        self.t = time.perf_counter()

    def on_step_end(self, args, state, *_, **__):
        torch.cuda.synchronize()
        times.append(time.perf_counter() - self.t)
        if a.profile and state.global_step == a.steps:
            self.profile.stop()


attn = a.attn or ("flash_attention_2" if a.mode != "ours" else None)
kw = {
    "output_dir": tempfile.mkdtemp(),
    "per_device_train_batch_size": a.bs,
    "gradient_accumulation_steps": a.ga,
    "num_generations": a.G,
    "max_completion_length": a.R,
    "max_steps": a.steps,
    "report_to": "none",
    "save_strategy": "no",
    "beta": a.beta,
    "logging_steps": 1,
    "bf16": a.dtype == "bfloat16",
    "fp16": a.dtype == "float16",
    "learning_rate": 1e-5,
    "optim": "adamw_torch_fused",
    "disable_tqdm": True,
    "seed": 0,
}
kw.update({k: json.loads(v) for k, v in (s.split("=", 1) for s in a.set)})
clock = Clock()
trainer = GRPOTrainer(
    model=load_model(path, a.mode, attn, bool(a.qlora), a.dtype),
    args=GRPOConfig(**kw),
    reward_funcs=reward,
    train_dataset=Dataset.from_dict({"prompt": prompts()}),
    processing_class=tok,
    rollout_func=None if a.generate else rollout,
    peft_config=lora_config(a.model),
    callbacks=[clock],
)
torch.cuda.reset_peak_memory_stats()
trainer.train()
if a.profile:
    write_profile(clock.profile, a.profile)
    times = times[:-1]
s = sorted(times[a.skip :])
keys = ("loss", "grad_norm", "entropy", "kl")
result = {
    "task": "grpo",
    "mode": a.mode,
    "model": a.model,
    "P": a.P,
    "R": a.R,
    "G": a.G,
    "bs": a.bs,
    "ga": a.ga,
    "beta": a.beta,
    "qlora": a.qlora,
    "vram": a.vram,
    "dtype": a.dtype,
    "set": a.set,
    "fixed": a.fixed,
    "generate": a.generate,
    "timing": "per step",
    "median_s": round(s[len(s) // 2], 3),
    "min_s": round(s[0], 3),
    "max_s": round(s[-1], 3),
    "steps": len(s),
    "plan": trainer._plan.changes if getattr(trainer, "_plan", None) else None,
    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    "logs": [{k: log[k] for k in keys if k in log} for log in trainer.state.log_history[:2]],
    **({"tokens": vars(trainer.token_counts)} if a.mode == "ours" else {}),
    **provenance(a.mode, "grpo.py"),
}
print("RESULT", json.dumps(result), flush=True)
