"""The order in which offloaded inputs come back, on a stand-in for a device whose copies are only noted down."""

import contextlib

import pytest
import torch

from unsloth_trl.patches.checkpointing import offload
from unsloth_trl.patches.checkpointing.offload import DeviceMover


class Noted(DeviceMover):
    """Stages as on a card, with copies that are done at once and remembered."""

    def __init__(self, staging_buffers):
        super().__init__(torch.device("cpu"), 2**20, staging_buffers)
        self.copies = []

    def _stage(self, saved):
        self.copies.append(int(saved.host[0, 0]))
        saved.staged = (saved.host.clone(), None)


@pytest.fixture
def as_on_a_card(monkeypatch):
    class Stream:
        def wait_event(self, event):
            pass

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())


def forward(mover, layers, inputs=1, held=0):
    """Each input has its layer's number times ten, and its own."""
    saved = []
    for layer in range(layers):
        mover.next_layer(first=layer == 0)
        tensors = [torch.full((2, 3), 10.0 * layer + i) for i in range(inputs)]
        keep = layer >= layers - held
        saved.append([mover.hold(t) if keep else mover.save(t) for t in tensors])
    return saved


def backward(mover, saved):
    mover.is_cuda = True
    events = []
    for layer in reversed(saved):
        for one in layer:
            mover.copies.clear()
            value = int(mover.load(one)[0, 0])
            events.append((value, list(mover.copies)))
    mover.is_cuda = False
    return events


def test_two_buffers_fetch_the_next_while_one_is_used(as_on_a_card):
    mover = Noted(2)
    assert backward(mover, forward(mover, 4)) == [(30, [30, 20]), (20, [10]), (10, [0]), (0, [])]


def test_one_buffer_fetches_what_is_asked_for(as_on_a_card):
    mover = Noted(1)
    assert backward(mover, forward(mover, 3)) == [(20, [20]), (10, [10]), (0, [0])]


def test_three_buffers(as_on_a_card):
    mover = Noted(3)
    assert backward(mover, forward(mover, 4)) == [(30, [30, 20, 10]), (20, [0]), (10, []), (0, [])]


def test_what_stays_on_the_device_starts_the_first_copy(as_on_a_card):
    mover = Noted(2)
    assert backward(mover, forward(mover, 4, held=2)) == [(30, []), (20, [10]), (10, [0]), (0, [])]


def test_a_layer_with_several_inputs(as_on_a_card):
    """As Gemma 4's, which takes its part of the per-layer embeddings: each copy is made once, in the order of need."""
    mover = Noted(2)
    events = backward(mover, forward(mover, 3, inputs=2))
    assert events == [(20, [20, 21, 10, 11]), (21, []), (10, [0, 1]), (11, []), (0, []), (1, [])]


def test_a_second_backward_fetches_again(as_on_a_card):
    mover = Noted(2)
    saved = forward(mover, 2)
    backward(mover, saved)
    assert backward(mover, saved) == [(10, [10]), (0, [0])]


def test_two_forwards_do_not_follow_each_other(as_on_a_card):
    mover = Noted(2)
    first, second = forward(mover, 2), forward(mover, 2)
    assert backward(mover, second) == [(10, [10, 0]), (0, [])]
    assert backward(mover, first) == [(10, [10, 0]), (0, [])]


def test_small_and_odd_tensors_stay(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 64)
    assert offload.can_leave(torch.zeros(16))
    assert not offload.can_leave(torch.zeros(15))
    assert not offload.can_leave(torch.zeros(64, dtype=torch.long))
    assert not offload.can_leave(torch.nn.Parameter(torch.zeros(64)))
    assert not offload.can_leave(torch.zeros(8, 8).to_sparse())
