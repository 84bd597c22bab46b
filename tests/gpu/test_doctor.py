"""`unsloth-trl doctor` on a machine with a GPU."""

import pytest
import torch

from unsloth_trl.doctor import findings, page_lock_and_copy
from unsloth_trl.patches.checkpointing.memory import Probe


pytestmark = pytest.mark.gpu


def test_copies_are_timed():
    copies = page_lock_and_copy(64 * 2**20)
    assert copies.to_host > 1e8 and copies.to_device > 1e8
    bandwidth = Probe(torch.device("cuda", 0)).bandwidth()
    assert 0.2 < bandwidth / copies.to_host < 5


def test_nothing_blocks():
    found = findings()
    assert {"driver", "GPU", "VRAM", "bf16", "RAM", "pinned memory"} <= {finding.subject for finding in found}
    assert not any(finding.level == "blocks" for finding in found), found
