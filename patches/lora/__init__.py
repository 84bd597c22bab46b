"""LoRA layers of PEFT."""
