"""The planner: how many layers keep their activations, when inputs are offloaded, and the way down."""

import copy
import pickle

import pytest
import torch

from unsloth_trl.patches.checkpointing import settings
from unsloth_trl.patches.checkpointing.policy import Plan
from unsloth_trl.patches.checkpointing.settings import LEAST_RESERVE, RESERVE, Measured, Notch, choose


MIB = 2**20
GIB = 2**30


def measured(**kwargs):
    defaults = {
        "tokens": 1000,
        "base": 10 * GIB,
        "peak": 14 * GIB,
        "kept": 1000 * MIB,
        "layer_input": 50 * MIB,
        "inputs_on_device": True,
        "layer_seconds": 0.01,
    }
    return Measured(**defaults | kwargs)


def usable(nbytes):
    """Usable memory of which `nbytes` are left after the reserve."""
    return round(nbytes / (1 - RESERVE)) + 1 if nbytes * RESERVE > LEAST_RESERVE else nbytes + LEAST_RESERVE


FAST, SLOW = 10 * GIB, 10 * MIB  # 50 MiB take 5 ms, half of a layer's forward, or 5 s


def test_everything_fits():
    # 14 GiB with 20 inputs on the device; keeping a layer adds its activations and saves its input
    needed = 14 * GIB + 20 * (1000 - 50) * MIB
    assert choose(measured(), 20, usable(needed), FAST, 0) == Notch(keep=20)
    assert choose(measured(), 20, usable(needed - MIB), FAST, 0).keep < 20


def test_part_of_it_fits_and_inputs_are_offloaded_when_the_copy_hides():
    # 5 layers and 250 MiB; the 20 inputs, 1000 MiB, are room for one layer more
    room = 14 * GIB + (5 * 950 + 250) * MIB
    assert choose(measured(), 20, usable(room), FAST, 0) == Notch(keep=5 + 1, offload=True)
    assert choose(measured(), 20, usable(room), SLOW, 0) == Notch(keep=5)


def test_what_does_not_fit_on_the_device_is_offloaded_even_slowly():
    assert choose(measured(), 20, usable(14 * GIB - MIB), SLOW, 8192) == Notch(keep=0, offload=True, tile=8192)


def test_no_more_is_offloaded_than_host_memory_holds():
    room = usable(14 * GIB + 5 * 950 * MIB)
    assert choose(measured(), 20, room, FAST, 0, host=49 * MIB) == Notch(keep=5)
    # 4 of 15 inputs leave: 200 MiB are not a layer's activations
    assert choose(measured(), 20, room, FAST, 0, host=200 * MIB) == Notch(keep=5, offload=True)
    assert choose(measured(), 20, room + 800 * MIB, FAST, 0, host=200 * MIB) == Notch(keep=6, offload=True)


def test_a_measurement_with_offloaded_inputs():
    m = measured(inputs_on_device=False, peak=13 * GIB)
    assert choose(m, 20, usable(13 * GIB + 3 * 1000 * MIB), FAST, 0).keep == 3
    assert choose(m, 20, usable(13 * GIB + 20 * 1000 * MIB), FAST, 0) == Notch(keep=20)


def test_the_reserve_is_left_alone():
    needed = 14 * GIB + 20 * 950 * MIB
    assert choose(measured(), 20, needed + LEAST_RESERVE - MIB, FAST, 0).keep < 20
    assert choose(measured(), 20, round(needed * 1.04), FAST, 0).keep < 20


def test_longer_rows_in_proportion():
    m = measured().at(2000)
    assert (m.tokens, m.base, m.peak, m.kept, m.layer_input) == (2000, 10 * GIB, 18 * GIB, 2000 * MIB, 100 * MIB)
    assert m.layer_seconds == 0.02


class FakeProbe:
    """A card with `total` bytes on which a step of `tokens` needs what `measured()` says."""

    is_cuda = True

    def __init__(self, total):
        self.total = total
        self.now = 10 * GIB
        self.top = 14 * GIB
        self.state = 0  # what the first optimizer step adds

    def allocated(self):
        return self.now

    def peak(self):
        return self.top

    def reset_peak(self):
        pass

    def usable(self):
        return self.total

    def free(self):
        return self.total - self.now

    def mark(self):
        return object()

    def seconds(self, start, end):
        return 0.01

    def bandwidth(self):
        return FAST


def planned(probe):
    plan = Plan("auto", 8, probe=probe)
    plan.measures = True  # as a trainer says
    return plan


def run_step(plan, tokens, kept=1000 * MIB):
    """What a trainer's step does to the plan: each layer forward, each checkpointed one again, and the optimizer."""
    hidden = torch.zeros(1, tokens, 2)
    actions, second_runs = [], []
    for index in range(plan.num_layers):
        action = plan.layer(index, (hidden,))
        actions.append(action)
        if action != "keep":
            function = plan.watched(lambda: setattr(plan._probe, "now", plan._probe.now + plan.grows))
            plan.grows = 0
            function()
            second_runs.append(function)
    for function in reversed(second_runs):
        plan.grows = kept
        function()
        plan._probe.now = 10 * GIB
    plan.before_optimizer_step()
    plan._probe.now += plan._probe.state
    plan._probe.state = 0
    plan.after_optimizer_step()
    return actions


def test_auto_measures_a_step_and_keeps_what_fits():
    probe = FakeProbe(usable(14 * GIB + 4 * 1000 * MIB))
    plan = planned(probe)
    assert run_step(plan, 1000) == ["recompute"] * 8
    assert plan.measured.kept == 1000 * MIB and plan.measured.tokens == 1000
    # inputs of 8 kB are nothing: they stay, and 4 layers keep their activations
    assert run_step(plan, 1000) == ["recompute"] * 4 + ["keep"] * 4 or plan.notch.offload
    assert plan.notch.keep == 4
    assert len(plan.changes) == 2 and "4 of 8 layers keep their activations" in str(plan)
    # 14 GiB, and the activations of 4 layers
    assert "measured on 1000 tokens, expected peak 17.91 of " in plan.changes[1]


def test_the_optimizers_state_counts_and_its_step_does_not():
    probe = FakeProbe(usable(14 * GIB + 2000 * MIB + 4 * 1000 * MIB))
    probe.state = 2000 * MIB
    plan = planned(probe)
    run_step(plan, 1000)
    assert plan.measured.peak == 14 * GIB + 2000 * MIB and plan.measured.base == 10 * GIB + 2000 * MIB
    assert plan.notch.keep == 4


def test_without_a_trainer_nothing_is_measured():
    """Nobody says where a step ends: recompute, and no event is kept."""
    plan = Plan("auto", 8, probe=FakeProbe(11 * GIB))
    for _ in range(3):
        assert run_step(plan, 10**6) == ["recompute"] * 8
    assert plan.watch is None and plan.notch.offload is False


def test_a_second_run_starts_anew():
    plan = Plan("recompute", 4)
    plan.use(Notch(offload=True, staging=1))
    mover = plan.offloader.mover(torch.device("cpu"))
    mover.slab.reserve(1000, 4)
    assert mover.staging_buffers == 1
    plan.restart()
    assert plan.notch == Notch() and plan.offloader.nbytes == 0 and plan.changes == []
    assert plan.offloader.mover(torch.device("cpu")).staging_buffers == 2


def test_a_longer_batch_is_planned_for_before_it_runs():
    probe = FakeProbe(usable(14 * GIB + 8 * 1000 * MIB))
    plan = planned(probe)
    run_step(plan, 1000)
    assert plan.notch.keep == 8
    actions = run_step(plan, 1500)  # 16 GiB for the checkpointed step, 1500 MiB for each kept layer
    assert actions.count("keep") == (14 * GIB + 8 * 1000 * MIB - 16 * GIB) // (1500 * MIB) == 3
    before = list(plan.changes)
    run_step(plan, 1200)
    assert plan.changes[: len(before)] == before and plan.notch.keep >= 3


def test_large_inputs_are_offloaded_before_anything_is_known():
    probe = FakeProbe(10 * GIB + 100 * 2**10)
    plan = planned(probe)
    assert run_step(plan, 2000)[0] == "offload"  # 16 kB a layer, 128 kB in all, and 100 kB are free


def test_on_a_cpu_nothing_is_planned():
    plan = Plan("auto", 4)
    hidden = torch.zeros(1, 10, 2)
    for _ in range(2):
        for index in range(4):
            assert plan.layer(index, (hidden,)) == "recompute"
        plan.after_optimizer_step()
    assert plan.changes == ["Checkpoint plan (micro-batches of 10 tokens): 4 recompute from inputs on the device."]


def test_the_last_inputs_stay_on_the_device():
    assert Plan("offload", 5).actions == ["offload"] * 3 + ["recompute"] * 2
    plan = Plan("offload", 5)
    plan.use(Notch(keep=2, offload=True))
    assert plan.actions == ["offload"] * 3 + ["keep"] * 2
    plan.use(Notch(offload=True, tile=64))
    assert plan.actions == ["offload"] * 5


def test_the_way_down():
    plan = Plan("keep", 16)
    plan.planned_tokens = 2**16
    seen = []
    while plan.step_down():
        seen.append(plan.notch)
        assert len(seen) < 30
    assert [n.keep for n in seen[:8]] == [14, 12, 10, 8, 6, 4, 2, 0]
    assert seen[8] == Notch(offload=True)
    tiled = {"offload": True, "staging": 1, "projections": True}
    assert seen[9:] == [
        Notch(offload=True, tile=settings.TILE),
        Notch(offload=True, tile=settings.TILE // 2),
        Notch(offload=True, tile=settings.TILE // 2, staging=1),
        Notch(tile=settings.TILE // 2, **tiled),
        Notch(tile=settings.TILE // 4, **tiled),
        Notch(tile=settings.SMALLEST_TILE, **tiled),
    ]
    assert all("out of memory" in line for line in plan.changes)
    plan.restart()
    assert plan.notch == Notch(keep=16)


def test_short_rows_are_not_tiled_on_the_way_down():
    plan = Plan("offload", 16)
    plan.planned_tokens = 1500
    assert plan.step_down() and plan.notch == Notch(offload=True, staging=1)
    assert not plan.step_down()


def test_auto_stays_where_an_error_has_put_it():
    probe = FakeProbe(usable(14 * GIB + 8 * 1000 * MIB))
    plan = planned(probe)
    run_step(plan, 1000)
    plan.step_down()
    assert plan.notch.keep == 7
    run_step(plan, 1000)
    assert plan.notch.keep == 7


def test_refused_host_memory_is_said_once(caplog):
    plan = Plan("offload", 4)
    plan.refused(MemoryError("no more"))
    plan.refused(MemoryError("no more"))
    assert len([r for r in caplog.records if "no more" in r.getMessage()]) == 1


def test_a_copy_starts_anew():
    plan = Plan("offload", 4, max_pinned_gb=2.0, staging_buffers=1)
    plan.offloader.mover(torch.device("cpu"))
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other.policy == "offload" and other.max_pinned_gb == 2.0 and other.notch == plan.notch
        assert other.offloader is not plan.offloader and not other.offloader._movers


@pytest.mark.parametrize("where", ["layer", "projection", "outside"])
def test_tiles(where):
    plan = Plan("recompute", 4)
    plan.use(Notch(tile=8))
    assert plan.tile_for(8, where) == 0, "one tile is no tile"
    assert plan.tile_for(9, where) == (8 if where == "outside" else 0), "only inside a checkpointed layer"
    plan.tiles_now = True
    assert plan.tile_for(9, where) == (0 if where == "projection" else 8)
    with torch.no_grad():
        assert plan.tile_for(9, where) == 0
        assert plan.tile_for(settings.TILE_FROM, where) == settings.TILE
