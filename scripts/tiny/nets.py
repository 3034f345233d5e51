"""Small building blocks that the tiny tokenizer, judge and speaker network share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of [B, C, T]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class ConvBlock(nn.Module):
    """Residual block on [B, C, T]: convolution over time, then a position-wise feed-forward layer."""

    def __init__(self, channels: int, kernel: int, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(channels), ChannelNorm(channels)
        self.conv = nn.Conv1d(channels, channels, kernel, padding=kernel // 2)
        self.up = nn.Conv1d(channels, 2 * channels, 1)
        self.down = nn.Conv1d(2 * channels, channels, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` [B, 1, T] zeroes padding before the convolution, so that a batch equals one by one."""
        y = self.norm1(x)
        y = y if mask is None else y * mask
        x = x + self.dropout(nn.functional.gelu(self.conv(y)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


def pad_batch(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack [T_i, ...] into [B, T, ...] with zeros on the right; also the lengths [B]."""
    lengths = torch.tensor([len(p) for p in parts])
    return nn.utils.rnn.pad_sequence(parts, batch_first=True), lengths


def length_mask(lengths: Tensor, longest: int) -> Tensor:
    """[B, 1, T] of 1.0 on valid steps."""
    return (torch.arange(longest)[None, :] < lengths[:, None]).float()[:, None]


def greedy_ctc(log_probs: Tensor, length: int, blank: int = 0) -> list[int]:
    """Best-path labels of one utterance [T, V]."""
    best = log_probs[:length].argmax(-1)
    best = torch.unique_consecutive(best)
    return [int(i) for i in best if i != blank]


def edit_distance(reference: list, hypothesis: list) -> int:
    """Levenshtein distance of two sequences."""
    row = list(range(len(hypothesis) + 1))
    for i, r in enumerate(reference, 1):
        previous, row[0] = row[0], i
        for j, h in enumerate(hypothesis, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (r != h))
    return row[-1]


class Buckets:
    """Batches of utterances of about equal length, so that little of a batch is padding."""

    def __init__(self, lengths: list[int], batch: int, seed: int):
        self.order = np.argsort(np.asarray(lengths), kind="stable")
        self.batch, self.rng = batch, np.random.default_rng(seed)

    def draw(self) -> list[int]:
        """Indices of one batch: a random window of the utterances sorted by length, twice as wide as the batch."""
        wide = min(2 * self.batch, len(self.order))
        start = int(self.rng.integers(0, len(self.order) - wide + 1))
        return self.rng.choice(self.order[start : start + wide], self.batch, replace=False).tolist()
