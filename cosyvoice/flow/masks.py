"""Attention masks of the flow, built once per call.

All masks here are additive (0 where a key may be seen, -inf elsewhere), because every
scaled-dot-product kernel takes them as they are. A mask that would hide nothing is ``None``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def valid_steps(lengths: Sequence[int], size: int, device: torch.device | str) -> Tensor | None:
    """Which steps of a right-padded batch hold data.

    Args:
        lengths: valid steps of each row (host numbers, so that nothing waits for the device).
        size: padded length.

    Returns:
        bool [B, size], or None when no row is padded.
    """
    if all(length == size for length in lengths):
        return None
    ends = torch.tensor(lengths, device=device)
    return torch.arange(size, device=device)[None, :] < ends[:, None]


def attention_bias(valid: Tensor | None, size: int, chunk: int, like: Tensor) -> Tensor | None:
    """Additive attention mask.

    Args:
        valid: bool [B, size] from :func:`valid_steps`, or None.
        size: number of steps.
        chunk: 0 for full attention; else query ``i`` sees keys below ``(i // chunk + 1) * chunk``.
        like: gives dtype and device.

    Returns:
        [B, 1, 1, size] or [B or 1, 1, size, size] of 0 and -inf, or None when every key is seen.
    """
    seen = None if valid is None else valid[:, None, None, :]
    if chunk and chunk < size:
        step = torch.arange(size, device=like.device)
        in_reach = step[None, :] < ((step // chunk + 1) * chunk)[:, None]
        seen = in_reach[None, None] if seen is None else seen & in_reach
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
