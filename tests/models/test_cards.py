"""The table of cards, and the one of this machine."""

import math

import pytest
import torch

from unsloth_trl.models import cards
from unsloth_trl.models.cards import GIB, Card, card_of_size, find_card, local_card


@pytest.mark.parametrize("name", ["4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "rtx-4090", "rtx_4090"])
def test_a_card_has_many_names(name):
    card = find_card(name)
    assert card.name == "RTX 4090" and 22.5 < card.usable / GIB < 23.6
    assert (card.flops, card.bandwidth) == (165e12, 25e9)


def test_cards_that_are_not_found():
    assert find_card("A100 80").name == find_card("a100-80gb").name == "A100 80GB"
    with pytest.raises(
        ValueError, match="card='9090' is unknown; choose from T4, .*B200, or give its size with card_gb"
    ):
        find_card("9090")
    with pytest.raises(ValueError, match="card='A100' could be A100 40GB or A100 80GB; name one of them"):
        find_card("A100")
    with pytest.raises(ValueError, match="card='' is unknown"):
        find_card("")
    with pytest.raises(ValueError, match="card_gb=0.5 is no more than the driver's own 0.5 GiB"):
        card_of_size(0.5)
    with pytest.raises(ValueError, match="card_gb=nan"):
        card_of_size(math.nan)
    assert card_of_size(24).usable == 24 * GIB - cards.CONTEXT


def test_local_card_has_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_card() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert local_card() == Card("Tesla T4", 7 * GIB, 65e12, 12e9, bf16=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Other Card")
    assert local_card() == Card("Some Other Card", 7 * GIB, bf16=False)
