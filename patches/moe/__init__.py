"""Mixtures of experts: routing, grouped products, and LoRA on stacked experts without a merged weight."""
