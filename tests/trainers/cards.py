"""A machine that says it has a certain GPU, for the configs; nothing is put on it."""

from types import SimpleNamespace

import torch
from transformers import TrainingArguments, training_args


def pretend(monkeypatch, capability=(8, 0), emulates_bf16=True):
    """
    `torch.cuda` answers as on one card of this capability. From 2.4 on torch counts emulated bf16 as supported, so a
    T4 says yes unless asked not to.
    """
    properties = SimpleNamespace(name="Tesla T4", major=capability[0], minor=capability[1])

    def is_bf16_supported(including_emulation=True):
        return capability >= (8, 0) or (including_emulation and emulates_bf16)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: properties.name)
    # transformers remembers these answers for the rest of the process
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", is_bf16_supported)
    monkeypatch.setattr(training_args, "is_torch_cuda_available", lambda: True)
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: capability >= (8, 0))
    # would set the device for the rest of the process
    monkeypatch.setattr(TrainingArguments, "_setup_devices", torch.device("cuda", 0))


def pretend_none(monkeypatch):
    """No accelerator at all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr(training_args, "is_torch_cuda_available", lambda: False)
