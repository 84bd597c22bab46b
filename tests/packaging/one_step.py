"""One tiny training step on packed rows, for tests that vary what was imported before it, and how."""

import sys

from datasets import Dataset


def one_step_loss(output_dir: str) -> float:
    """The loss of one step of a LoRA on a tiny Llama, always the same."""
    from tests.tiny import lora_config, tiny_model, tiny_rows, tiny_tokenizer
    from unsloth_trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=output_dir,
        max_steps=1,
        per_device_train_batch_size=2,
        packing=True,
        max_length=32,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        tiny_model("llama"),
        config,
        train_dataset=Dataset.from_list(tiny_rows(16, seed=0)),
        processing_class=tiny_tokenizer(),
        peft_config=lora_config("llama"),
    )
    trainer.train()
    assert trainer.patch_report["attention"].applied
    return next(log["loss"] for log in trainer.state.log_history if "loss" in log)


if __name__ == "__main__":
    print("loss", repr(one_step_loss(sys.argv[1])))
