"""The fixture that lends SmolLM2-135M-Instruct to tests; `tests/conftest.py` imports it."""

import pytest


OPTION = "--require-smollm2"


def smollm2_or_skip(config: pytest.Config):
    """The `ModelSource` of SmolLM2. Where it cannot be had: a skip with the reason, or a failure with the option."""
    from unsloth_trl.models.smollm2 import ModelUnavailableError, resolve_smollm2

    try:
        return resolve_smollm2()
    except ModelUnavailableError as error:
        reason = f"SmolLM2 cannot be had: {error}"
    if config.getoption(OPTION, default=False):
        pytest.fail(f"{OPTION} is given, and {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest):
    """SmolLM2 as a `ModelSource`; load it with `unsloth_trl.models.smollm2.load_model`."""
    return smollm2_or_skip(request.config)
