"""TRL's training metrics, kept on the device between two log lines."""

from typing import NamedTuple

import torch


class Row(NamedTuple):
    """The columns of one micro-batch, each summed over its tokens and over all processes."""

    entropy: float
    num_correct: float
    num_labels: float
    num_tokens: float
    aux_loss: float
    num_processes: float


class DeviceMetrics:
    """
    One small fp64 tensor per micro-batch, read by the host once per log line instead of several times a micro-batch.

    `add` takes sums over the local micro-batch and does no host synchronisation; `drain` reads all rows of a mode with
    one copy.
    """

    def __init__(self, accelerator):
        self._accelerator = accelerator
        self._rows: dict[str, list[torch.Tensor]] = {"train": [], "eval": []}

    def add(
        self,
        mode: str,
        entropy: torch.Tensor,
        num_correct: torch.Tensor,
        num_labels: int,
        num_tokens: torch.Tensor | int,
        aux_loss: torch.Tensor | None,
    ) -> None:
        """
        Args:
            mode (`str`): `"train"` or `"eval"`.
            entropy (`torch.Tensor`, scalar): Sum over the labelled tokens.
            num_correct (`torch.Tensor`, scalar): Labelled tokens that were the most likely ones.
            num_labels (`int`): Labelled tokens.
            num_tokens (`torch.Tensor`, scalar, or `int`): Tokens of the micro-batch, as TRL counts them.
            aux_loss (`torch.Tensor`, scalar, *optional*): Load-balancing loss.
        """
        values = (entropy, num_correct, num_labels, num_tokens, 0.0 if aux_loss is None else aux_loss, 1)
        # `new_full` fills on the device; assigning a python number into a device tensor would wait for it
        row = torch.stack(
            [
                v.detach().double() if isinstance(v, torch.Tensor) else entropy.new_full((), v, dtype=torch.float64)
                for v in values
            ]
        ).view(1, -1)
        # one row per process, so that the repeated samples of the last evaluation batch fall out as they do in TRL
        self._rows[mode].append(self._accelerator.gather_for_metrics(row).sum(0))

    def __copy__(self) -> "DeviceMetrics":
        other = DeviceMetrics(self._accelerator)
        other._rows = {mode: list(rows) for mode, rows in self._rows.items()}
        return other

    def drain(self, mode: str) -> list[Row]:
        """The rows added since the last call, in order."""
        rows, self._rows[mode] = self._rows[mode], []
        return [Row(*row) for row in torch.stack(rows).tolist()] if rows else []
