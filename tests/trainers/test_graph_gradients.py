"""Gradients from CUDA graphs (`patches/compilation/gradients.py`): lent and not copied, and nobody's are overwritten.

The graphs are those of `graph_replay.py`, which repeats recorded ops on the same memory.
"""

import pytest
import torch

from tests.trainers.graph_replay import batch, graphed, hidden, patched, replayed, train  # noqa: F401 (replayed: a fixture)


@pytest.mark.parametrize("view", [False, True])
def test_what_is_kept_is_not_overwritten(view, captures):
    model = patched()
    kept, grads = [], []
    for seed in range(9):
        for parameter in model.parameters():
            parameter.grad = None
        out = hidden(model, batch(5, 7, seed=seed))
        out.sum().backward()
        grad = model.model.layers[0].self_attn.q_proj.weight.grad
        found = [out.detach(), grad[1:] if view else grad]
        del grad
        kept.append(found)
        grads.append([t.clone() for t in found])
    assert captures.number == 2 and captures.replays == 1 + 3  # captured again after the first was held
    for mine, copies in zip(kept, grads, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, copies, strict=True))


def test_gradients_are_lent_and_not_copied(captures):
    model = patched()
    weight = model.model.layers[0].self_attn.q_proj.weight
    train(model, range(5))
    assert captures.replays == 3 and captures.number == 1
    buffer = graphed(model).gradients._buffers[weight]
    assert weight.grad.data_ptr() == buffer.data_ptr()
    first = weight.grad.clone()
    hidden(model, batch(5, 7, seed=9)).sum().backward()  # one more micro-batch of the same step
    assert captures.replays == 4 and weight.grad.data_ptr() != buffer.data_ptr()
    torch.testing.assert_close(weight.grad, first + buffer)
    model.zero_grad(set_to_none=False)
    hidden(model, batch(5, 7, seed=9)).sum().backward()
    assert captures.replays == 5 and torch.equal(weight.grad, buffer) and not torch.equal(first, buffer)


def test_other_ways_to_get_a_gradient(captures):
    """`torch.autograd.grad`, a hook on a weight, and a view that follows its gradient, next to gradients of before."""
    model = patched()
    weight = model.model.layers[0].self_attn.q_proj.weight
    train(model, range(4))
    kept = []
    weight.register_hook(lambda grad: kept.append((grad, grad.clone())))
    hidden(model, batch(5, 7, seed=4)).sum().backward()
    (grad,) = torch.autograd.grad(hidden(model, batch(5, 7, seed=5)).sum(), weight)
    kept.append((grad, grad.clone()))
    for seed in range(6, 12):
        hidden(model, batch(5, 7, seed=seed)).sum().backward()
    assert captures.replays > 3 and len(kept) > 7
    assert all(torch.equal(*pair) for pair in kept)


def test_a_view_follows_its_gradient(captures):
    model = patched()
    weight = model.model.layers[0].self_attn.q_proj.weight
    train(model, range(4))
    view = weight.grad.view(-1)
    before = view.clone()
    hidden(model, batch(5, 7, seed=4)).sum().backward()
    assert torch.equal(view, weight.grad.view(-1)) and not torch.equal(view, before)


def test_hooks_on_weights_run_once(captures):
    runs = []
    for model in (patched(), patched().eval()):  # the second is never captured
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight.register_hook(lambda grad: grad * 2)
        train(model, range(5))
        runs.append(weight.grad)
    assert captures.replays == 3
    torch.testing.assert_close(*runs)


def test_memory_of_weights_that_are_frozen_goes(captures):
    model = patched()
    for frozen in (False, True):
        model.model.layers.requires_grad_(not frozen)
        for seed in range(4):
            hidden(model, batch(5, 7, seed=seed)).sum().backward()
    trained = sum(p.requires_grad for p in model.model.parameters())
    assert captures.number == 2 and len(graphed(model).gradients._buffers) == trained


def test_gradients_of_all_shapes_are_left_in_one_place(captures):
    model = patched()
    for _ in range(3):
        for lengths in ((5, 7), (6, 11)):
            hidden(model, batch(*lengths)).sum().backward()
    buffers = {t.data_ptr() for t in graphed(model).gradients._buffers.values()}
    assert len(buffers) == sum(p.grad is not None for p in model.parameters())
    assert captures.number == 2 and {p for grads in captures.gradients for p in grads} == buffers
    assert not any(p._backward_hooks for p in model.parameters())
