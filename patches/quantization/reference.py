"""The way back from bitsandbytes' 4-bit format, eager: the CPU path, and the truth that the kernel is tested with."""

import torch


# elements at a time: bounds the temporaries of a big weight, about 8 bytes each
CHUNK = 1 << 20


def dequantize_nf4_reference(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
    blocksize: int,
    nested_blocksize: int,
    start: int,
    out: torch.Tensor,
) -> None:
    """
    Elements `start` to `start + out.numel()` of a weight, which is quantised as one flat row of blocks.

    In fp32 an element is `code[digit] * scale`, where the scale of a block is `absmax` as it is, or with double
    quantisation `nested_code[absmax] * nested_absmax + offset`; each of the three operations rounds once.

    Args:
        packed (`torch.Tensor` of shape `((numel + 1) // 2,)`, uint8): Two digits a byte, the first in the high half.
        absmax (`torch.Tensor` of shape `(num_blocks,)`, fp32, or uint8 if quantised itself): Scales.
        code (`torch.Tensor` of shape `(16,)`, fp32): The value of each digit.
        nested_absmax (`torch.Tensor` of shape `(num_nested_blocks,)`, fp32, *optional*): Scales of the scales.
        nested_code (`torch.Tensor` of shape `(256,)`, fp32, *optional*): The value of each quantised scale.
        offset (`torch.Tensor` of shape `()`, fp32, *optional*): Mean of the scales.
        blocksize (`int`): Elements of a block.
        nested_blocksize (`int`): Scales of a block of scales.
        start (`int`): First element.
        out (`torch.Tensor`, contiguous): Written to, rounded from fp32 to its dtype.
    """
    flat, end = out.view(-1), start + out.numel()
    # both digits of a byte at once
    pairs = torch.stack([code.repeat_interleave(16), code.repeat(16)], dim=1)
    blocks = max(CHUNK // blocksize, 1)
    for first in range(start // blocksize, -(-end // blocksize), blocks):
        low = first * blocksize
        block = torch.arange(first, min(first + blocks, absmax.shape[0]), device=packed.device)
        scale = absmax[block]
        if nested_absmax is not None:
            scale = nested_code[scale.to(torch.int64)] * nested_absmax[block // nested_blocksize] + offset
        digits = packed[low // 2 : low // 2 + block.shape[0] * blocksize // 2]
        value = pairs[digits.to(torch.int64)].view(-1)
        whole = value.shape[0] // blocksize
        value[: whole * blocksize].view(whole, blocksize).mul_(scale[:whole, None])
        value[whole * blocksize :].mul_(scale[whole:])  # the last block of a weight may be short
        begin, stop = max(start, low), min(end, low + value.shape[0])
        flat[begin - start : stop - start] = value[begin - low : stop - low]
