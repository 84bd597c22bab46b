"""Completions without tokens: TRL looks at the last token of each, so they get one that nothing learns from."""

from collections.abc import Callable, Sequence
from typing import Any


class EmptyCompletions:
    """
    A `rollout_func` that may return completions without tokens.

    Each gets one end-of-sequence token with `env_mask` 0: it is in no loss and in no length, and `restore` takes it
    away again for the reward functions.

    Args:
        rollout_func (`Callable`): The user's.
        eos_token_id (`int`): The token.
    """

    def __init__(self, rollout_func: Callable, eos_token_id: int):
        self.rollout_func = rollout_func
        self.eos_token_id = eos_token_id
        self._empty: list[int] = []

    def __call__(self, prompts: Sequence[Any], trainer) -> dict[str, Any]:
        """
        What the user's function returns, completed.

        Raises:
            ValueError: If a completion is empty and the trainer has tools, whose loop makes masks of its own.
        """
        output = self.rollout_func(prompts, trainer)
        completions = output.get("completion_ids")
        self._empty = [] if completions is None else [i for i, ids in enumerate(completions) if not len(ids)]
        if not self._empty:
            return output
        if trainer.tools:
            raise ValueError(
                f"rollout_func returned no tokens for completion {self._empty[0]}; with tools, return at least the "
                f"end-of-sequence token [{self.eos_token_id}]"
            )
        fill = {"completion_ids": [self.eos_token_id], "env_mask": [0], "logprobs": [0.0]}
        output = dict(output)
        if output.get("env_mask") is None:
            output["env_mask"] = [[1] * len(ids) for ids in completions]
        for key, value in fill.items():
            if output.get(key) is not None:
                output[key] = [value if i in self._empty else row for i, row in enumerate(output[key])]
        return output

    def restore(self, completion_ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """`completion_ids` of the last rollout, empty again where they were."""
        return [[] if i in self._empty else ids for i, ids in enumerate(completion_ids)]
