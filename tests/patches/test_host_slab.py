"""Host memory for offloaded inputs: slots, growth, limits, page-locking that fails, and what a container allows."""

import gc
import itertools
import random

import pytest
import torch

from unsloth_trl.patches.checkpointing import ram, slab
from unsloth_trl.patches.checkpointing.slab import ALIGNMENT, HostMemoryError, HostSlab


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(slab, "STEP", 4096)


def test_slots_do_not_overlap_and_are_reused():
    rng = random.Random(0)
    host = HostSlab(limit=2**20)
    held: dict[int, tuple] = {}
    for i in range(2000):
        if held and (len(held) > 12 or rng.random() < 0.5):
            key = rng.choice(list(held))
            slot, value = held.pop(key)
            assert slot.buffer.eq(value).all(), "another slot wrote here"
            host.give(slot)
        else:
            slot = host.take(rng.randrange(1, 9000))
            value = i % 251
            slot.buffer.fill_(value)
            held[i] = slot, value
        assert host.used == sum(-(-s.buffer.numel() // ALIGNMENT) * ALIGNMENT for s, _ in held.values())
    for slot, _ in held.values():
        host.give(slot)
    assert host.used == 0 and all(piece.is_free for piece in host._pieces)


def test_same_sizes_take_no_new_memory():
    host = HostSlab(limit=2**20)
    for _ in range(3):
        slots = [host.take(5000) for _ in range(10)]
        held = host.nbytes
        for slot in slots:
            host.give(slot)
    assert host.nbytes == held == sum(piece.buffer.numel() for piece in host._pieces)


def test_slots_hold_any_dtype():
    host = HostSlab(limit=2**20)
    host.take(3)
    slot = host.take(24)
    assert slot.buffer.view(torch.float64).numel() == 3


def test_the_limit_and_room_for_longer_rows():
    host = HostSlab(limit=20_000)
    slots = [host.take(4000) for _ in range(4)]
    with pytest.raises(HostMemoryError, match="0.00 GiB are allowed"):
        host.take(8000)
    assert host.used == 4 * 4096
    for slot in slots:
        host.give(slot)
    # none of the pieces is long enough, and together they leave no room: they go
    assert host.take(18_000).buffer.numel() == 18_000
    assert host.nbytes <= 20_000


def test_reserved_slots():
    host = HostSlab(limit=2**20)
    host.reserve(9_000, 10)
    assert len(host._pieces) == 1 and host.nbytes == 10 * 9216
    slots = [host.take(9_000) for _ in range(10)]
    assert host.used == host.nbytes == 10 * 9216
    for slot in slots:
        host.give(slot)
    host.reserve(8_000, 10)
    assert host.nbytes == 10 * 9216, "there was enough"
    host.reserve(9_300, 10)
    assert host.nbytes == 10 * 11_520, "a quarter more, and the old piece is gone"
    host.reserve(90_000, 20)
    assert host.nbytes == 11 * 90_112 <= host.limit, "as many as the limit has"


@pytest.mark.parametrize("failing", [1, 5])
def test_page_locking_that_fails_leaves_pageable_memory_and_one_warning(failing, caplog):
    calls = []

    def lock(buffer):
        calls.append(buffer.numel())
        if len(calls) == failing:
            raise RuntimeError("CUDA error: out of memory")

    host = HostSlab(limit=2**20, lock=lock)
    slots = [host.take(4096) for _ in range(8)]
    assert len(calls) == failing, "it tried again after it had failed"
    assert host.is_pageable and len(slots) == 8
    warnings = [r for r in caplog.records if "pageable" in r.getMessage()]
    assert len(warnings) == 1 and "CUDA error: out of memory" in warnings[0].getMessage()


def test_memory_that_cannot_be_had(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(HostMemoryError, match="can't allocate memory"):
        HostSlab(limit=2**40).take(100)


def cgroup_v2(folder, limit, used, inactive):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_a_container_limits_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(ram, "CGROUP", tmp_path)
    monkeypatch.setattr(ram, "MEMBERSHIP", tmp_path / "none")
    cgroup_v2(tmp_path, 10 * 2**20, 6 * 2**20, 2**20)
    memory = ram.host_memory()
    assert memory.container and memory.total == 10 * 2**20
    assert memory.available == 5 * 2**20
    assert ram.pinned_limit(None) == 5 * 2**20 * ram.SHARE
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ram.pinned_limit(None) == 5 * 2**20 * ram.SHARE // 4
    assert ram.pinned_limit(1.5) == 1.5 * 2**30


def test_no_limit_of_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(ram, "CGROUP", tmp_path)
    monkeypatch.setattr(ram, "MEMBERSHIP", tmp_path / "none")
    cgroup_v2(tmp_path, "max", 6, 1)
    memory = ram.host_memory()
    assert not memory.container and memory.total > 2**30


def test_the_older_kind_of_container(tmp_path, monkeypatch):
    monkeypatch.setattr(ram, "CGROUP", tmp_path)
    monkeypatch.setattr(ram, "MEMBERSHIP", tmp_path / "none")
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("4096")
    (folder / "memory.usage_in_bytes").write_text("1096")
    (folder / "memory.stat").write_text("total_inactive_file 96\n")
    assert ram.cgroup_memory() == (4096, 1000)


def test_the_limit_of_a_group_above(tmp_path, monkeypatch):
    """As under SLURM or systemd-run: the root has no limit, the job has one, the step in it has a wider one."""
    monkeypatch.setattr(ram, "CGROUP", tmp_path / "fs")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    monkeypatch.setattr(ram, "MEMBERSHIP", membership)
    step = tmp_path / "fs" / "job" / "step"
    step.mkdir(parents=True)
    cgroup_v2(step.parent, 9000, 2000, 500)
    cgroup_v2(step, 20_000, 1000, 0)
    assert ram.cgroup_memory() == (9000, 1500)
    cgroup_v2(step, 5000, 1000, 0)
    assert ram.cgroup_memory() == (5000, 1000)


def test_slots_that_come_back_during_a_garbage_collection():
    """A slot that is dropped while another is being taken: both end where they belong."""
    host = HostSlab(limit=2**20)
    cycle = []

    class Holder:
        def __init__(self, slot):
            self.slot, self.me = slot, self

        def __del__(self):
            host.give(self.slot)

    held = [host.take(1000) for _ in range(20)]
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(1)
        for i in range(400):
            cycle.append(Holder(held.pop(0)))
            cycle.clear()  # collected at any allocation from here on
            slot = host.take(900 + i % 200)
            assert not any(slot.buffer.data_ptr() == other.buffer.data_ptr() for other in held)
            held.append(slot)
    finally:
        gc.set_threshold(*threshold)
    starts = sorted((s.buffer.data_ptr(), s.buffer.numel()) for s in held)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(starts))
