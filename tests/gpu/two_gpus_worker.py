"""One process of `test_two_gpus.py`: a run of SFT or GRPO, started by `accelerate launch`."""

import json
import os
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import unsloth_trl
from tests.numerics import masked_rows
from tests.tiny import EOS, tiny_model, tiny_tokenizer
from tests.trainers.grpo_runs import reward


SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}
STEPS = 6


class Rollouts:
    """Completions that follow from the prompt and the number of the call, in whatever process."""

    def __init__(self, calls: int):
        self.calls = calls  # earlier ones, of the run that is resumed

    def __call__(self, prompts, trainer):
        self.calls += 1
        output = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        for place, prompt in enumerate(prompts):
            own, rng = random.Random(prompt), random.Random(f"{self.calls} {prompt} {place % 4}")
            output["prompt_ids"].append([own.randrange(8, 60) for _ in range(own.randrange(2, 40))])
            completion = [rng.randrange(8, 60) for _ in range(rng.randrange(1, 24))]
            output["completion_ids"].append([*completion, EOS])
        return output


class StopAt(TrainerCallback):
    """End the run early, as a kill between two steps would; counts the steps that this process makes."""

    def __init__(self, step: int):
        self.step, self.made = step, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.made += 1
        control.should_training_stop = state.global_step >= self.step


def main(task: str, folder: str, until: int, resume: int) -> None:
    on_gpu = torch.cuda.is_available()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    fields = {
        "output_dir": str(Path(folder) / "run"),
        "gradient_accumulation_steps": 2 // processes,
        "max_steps": STEPS,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
    }
    model = tiny_model("llama", **SIZES).to(torch.bfloat16 if on_gpu else torch.float32)
    torch.manual_seed(0)
    given = {
        "processing_class": tiny_tokenizer(),
        "peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    }
    if task == "sft":
        fields |= {"packing": True, "max_length": 128, "per_device_train_batch_size": 2}
        data = Dataset.from_list(masked_rows(200, seed=3))
        trainer = unsloth_trl.SFTTrainer(model, unsloth_trl.SFTConfig(**fields), train_dataset=data, **given)
    else:
        fields |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24, "beta": 0.0}
        data = Dataset.from_dict({"prompt": [f"w{i + 9} w{i + 10}" for i in range(24)]})
        given |= {"rollout_func": Rollouts(3 if resume else 0), "reward_funcs": reward}
        trainer = unsloth_trl.GRPOTrainer(model, args=unsloth_trl.GRPOConfig(**fields), train_dataset=data, **given)
    stop = StopAt(until)
    trainer.add_callback(stop)
    trainer.train(resume_from_checkpoint=bool(resume) or None)
    if trainer.accelerator.is_main_process:
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        kind = str(trainer.accelerator.distributed_type)
        sharded = sum(isinstance(p, DTensor) for p in trainer.model.parameters())
        result = {
            "logs": logs,
            "made": stop.made,
            "kind": kind,
            "sharded": sharded,
            "report": str(trainer.patch_report),
        }
        (Path(folder) / "result.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
