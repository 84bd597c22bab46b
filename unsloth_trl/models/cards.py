"""GPUs to plan for: the memory, speed and copy bandwidth of well-known cards, and of the one in this machine."""

from dataclasses import dataclass, replace

import torch


GIB = 2**30
CONTEXT = GIB // 2  # of the card: the driver's context and the libraries' code


@dataclass(frozen=True)
class Card:
    """
    A GPU to plan for.

    Args:
        name (`str`): For people.
        usable (`int`): Bytes that tensors can take.
        flops (`float`): Dense bf16 (or fp16) operations per second, accumulated in fp32.
        bandwidth (`float`): Bytes per second of a copy to page-locked host memory.
        bf16 (`bool`): Whether it has bf16; without it the trainers take fp16 and, with QLoRA, fp32 adapters.
    """

    name: str
    usable: int
    flops: float = 60e12
    bandwidth: float = 12e9
    bf16: bool = True


# GiB as torch reports them, TFLOPS, and GB/s of 16 PCIe lanes
_CARDS = {
    "T4": (14.6, 65, 12),
    "V100": (15.8, 112, 12),
    "RTX 3060": (11.8, 25, 25),
    "RTX 3090": (23.7, 71, 25),
    "A6000": (47.5, 155, 25),
    "A100 40GB": (39.4, 312, 25),
    "A100 80GB": (79.2, 312, 25),
    "L4": (22.0, 121, 25),
    "L40S": (44.4, 362, 25),
    "RTX 4070": (11.7, 58, 25),
    "RTX 4080": (15.6, 97, 25),
    "RTX 4090": (23.6, 165, 25),
    "RTX 5090": (31.4, 209, 50),
    "RTX PRO 6000": (95.0, 500, 50),
    "H100 80GB": (79.1, 989, 50),
    "H200": (139.8, 989, 50),
    "B200": (178.4, 2250, 50),
}
_WITHOUT_BF16 = ("T4", "V100")


def _words(name: str) -> set[str]:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return {word.removesuffix("gb") for word in words} - {"nvidia", "geforce", "tesla"}


def find_card(name: str) -> Card:
    """
    A card of the table.

    Args:
        name (`str`): Its name or what tells it from others: "4090", "A100 80GB".

    Raises:
        ValueError: If the name is unknown, or that of more than one card.
    """
    words = _words(name)
    found = [card for card in _CARDS if words and words <= _words(card)]
    exact = [card for card in found if words == _words(card)]
    if len(found) > 1 and not exact:
        raise ValueError(f"card={name!r} could be {' or '.join(found)}; name one of them")
    if not found:
        raise ValueError(f"card={name!r} is unknown; choose from {', '.join(_CARDS)}, or give its size with card_gb")
    label = (exact or found)[0]
    gib, tflops, gigabytes = _CARDS[label]
    return Card(label, int(gib * GIB) - CONTEXT, tflops * 1e12, gigabytes * 1e9, label not in _WITHOUT_BF16)


def card_of_size(gib: float) -> Card:
    """
    A card of which only the memory is known; its speed is assumed to be modest.

    Raises:
        ValueError: If `gib` leaves nothing beside the driver's own memory.
    """
    if not gib * GIB > CONTEXT:
        raise ValueError(
            f"card_gb={gib:g} is no more than the driver's own {CONTEXT / GIB:g} GiB; give the card's GiB"
        )
    return Card(f"a card of {gib:g} GiB", int(gib * GIB) - CONTEXT)


def local_card() -> Card | None:
    """The first GPU of this machine, with what is free on it now, or `None`."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    free, _ = torch.cuda.mem_get_info(0)
    words = _words(name)
    known = next((find_card(card) for card in _CARDS if _words(card) <= words), Card(name, free))
    return replace(known, name=name, usable=free, bf16=torch.cuda.is_bf16_supported(including_emulation=False))
