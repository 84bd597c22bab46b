"""What to do when the Hub says no."""

from typing import NoReturn

from huggingface_hub.errors import HfHubHTTPError


def explain_refusal(error: HfHubHTTPError, repo_id: str) -> NoReturn | None:
    """
    Raise what to change where the Hub has refused a token; return for every other error.

    Args:
        error (`HfHubHTTPError`): What huggingface_hub raised.
        repo_id (`str`): What was to be written to.

    Raises:
        PermissionError: If the answer was 401 or 403. The token is not in the message.
    """
    status = getattr(error.response, "status_code", None)
    if status == 401:
        raise PermissionError(
            f"the Hub does not know who writes to {repo_id} (401): log in with `hf auth login`, or pass a token that "
            "is still valid and may write"
        ) from error
    if status == 403:
        raise PermissionError(
            f"this account or token may not write to {repo_id} (403): use a token with write permission, and a "
            "repository of your own or of an organization that you belong to"
        ) from error
    return None
