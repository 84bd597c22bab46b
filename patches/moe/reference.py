"""Grouped products as loops over the experts: the CPU path, and the truth that kernels are tested against."""

import torch


def grouped_mm_reference(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """
    Each row times the weight of its expert.

    Args:
        x (`torch.Tensor` of shape `(num_rows, in_features)`): Rows, sorted by expert.
        weight (`torch.Tensor` of shape `(num_experts, in_features, out_features)`, any strides): Weights.
        offsets (`torch.Tensor` of shape `(num_experts,)`, int32): Where the rows of each expert end.

    Returns:
        `torch.Tensor` of shape `(num_rows, out_features)`: In the dtype of `x`; zeros for rows beyond the last offset.
    """
    out = x.new_zeros(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    return out


def grouped_gram_reference(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """
    For each expert the product of its rows of `x`, transposed, and its rows of `y`: the gradient of a weight.

    Args:
        x (`torch.Tensor` of shape `(num_rows, in_features)`): Rows, sorted by expert.
        y (`torch.Tensor` of shape `(num_rows, out_features)`): Rows, in the same order.
        offsets (`torch.Tensor` of shape `(num_experts,)`, int32): Where the rows of each expert end.

    Returns:
        `torch.Tensor` of shape `(num_experts, in_features, out_features)`: Zeros for experts without rows.
    """
    out = x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end].t(), y[start:end], out=out[expert])
        start = end
    return out
