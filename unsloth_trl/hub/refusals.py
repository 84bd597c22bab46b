"""When the Hub says no, and when we do."""

from typing import NoReturn

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError


def explain_refusal(error: HfHubHTTPError, repo_id: str, next_step: str | None = None) -> NoReturn | None:
    """
    Raise what to change where the Hub has refused a token; return for every other error.

    Args:
        error (`HfHubHTTPError`): What huggingface_hub raised.
        repo_id (`str`): What was to be written to.
        next_step (`str`, *optional*): What to do after that.

    Raises:
        PermissionError: If the answer was 401 or 403. The token is not in the message.
    """
    status = getattr(error.response, "status_code", None)
    then = f"; then: {next_step}" if next_step else ""
    if status == 401:
        raise PermissionError(
            f"the Hub does not know who writes to {repo_id} (401): log in with `hf auth login`, or pass a token that "
            f"is still valid and may write{then}"
        ) from error
    if status == 403:
        raise PermissionError(
            f"this account or token may not write to {repo_id} (403): use a token with write permission, and a "
            f"repository of your own or of an organization that you belong to{then}"
        ) from error
    return None


def refuse_public(repo_id: str, private: bool | None, token: str | None) -> None:
    """
    Args:
        repo_id (`str`): A repository that exists, maybe since long ago: making it again does not change who sees it.
        private (`bool`, *optional*): What was asked for.
        token (`str`, *optional*): Of the Hub.

    Raises:
        ValueError: If it was to be private and everyone sees it.
    """
    if private and not HfApi(token=token).repo_info(repo_id).private:
        raise ValueError(
            f"the repository {repo_id} exists and is public, and private=True cannot change that: make it private in "
            "its settings on the Hub, or push to another one"
        )
