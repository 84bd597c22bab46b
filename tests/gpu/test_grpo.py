"""GRPO on a GPU: bf16 log-probs of shared-prompt rows against TRL's."""

import pytest


pytestmark = pytest.mark.gpu


def test_bf16_log_probs_differ_from_trls_no_more_than_trls_own_batch_shapes_do():
    pytest.importorskip("flash_attn", reason="TRL's padded rows run on flash_attention_2 here")
    from tests.benchmarks.logprobs import measure

    found = measure()
    own, shared = found["TRL row by row - TRL padded"], found["shared - TRL row by row"]
    assert own["mean"] > 0, "both batch shapes of TRL gave the same bits: nothing to compare with"
    for statistic in ("mean", "p50", "p99"):
        assert shared[statistic] <= own[statistic], (statistic, found)
        # errors of a model that amplifies rounding: their statistics differ by a few percent
        assert found["error of shared"][statistic] <= 1.05 * found["error of padded"][statistic], (statistic, found)
    assert found["tokens"]["shared"] < 0.5 * found["tokens"]["unshared"]
