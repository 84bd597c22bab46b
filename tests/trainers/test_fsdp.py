"""FSDP2 on two gloo processes: sharded layers have the same gradients under every policy, and in tiles."""

import pytest
import torch

from tests.trainers.ranks import run_on_two_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    return run_on_two_ranks("fsdp_worker.py", folder, str(folder))


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_same_bits(ranks, policy):
    for results in ranks:
        expected, actual = results["keep"], results[policy]
        assert actual.keys() == expected.keys() and all(gradient.norm() > 0 for gradient in expected.values())
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_tiles(ranks):
    for results in ranks:
        for name, expected in results["keep"].items():
            torch.testing.assert_close(results["tiles"][name], expected, rtol=1e-5, atol=1e-6)
