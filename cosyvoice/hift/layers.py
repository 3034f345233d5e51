"""Blocks of the vocoder over [B, C, n], with masks that keep padding at zero.

A convolution pads with zeros at a row's end when the row stands alone. In a padded batch its
bias makes the padding non-zero, and the next convolution would read that. So every output is
multiplied by the row mask; the activations used here map 0 to 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x * mask, or x itself when nothing is padded (mask None)."""
    return x if mask is None else x * mask


class Snake(nn.Module):
    """``x + sin(alpha x)^2 / alpha`` per channel (Ziyin et al. 2020, arXiv:2006.08195)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.alpha[:, None]
        wave = torch.sin(x * alpha)
        return torch.addcmul(x, wave * wave, 1.0 / (alpha + 1e-9))


class ResBlock(nn.Module):
    """Residual pairs of snake and convolution, the first of each pair dilated."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()

        def conv(dilation: int) -> nn.Conv1d:
            return nn.Conv1d(
                channels, channels, kernel, dilation=dilation, padding=(kernel - 1) * dilation // 2
            )

        self.convs1 = nn.ModuleList([conv(dilation) for dilation in dilations])
        self.convs2 = nn.ModuleList([conv(1) for _ in dilations])
        self.activations1 = nn.ModuleList([Snake(channels) for _ in dilations])
        self.activations2 = nn.ModuleList([Snake(channels) for _ in dilations])

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for conv1, conv2, snake1, snake2 in zip(
            self.convs1, self.convs2, self.activations1, self.activations2, strict=True
        ):
            y = masked(conv1(snake1(x)), mask)
            x = x + masked(conv2(snake2(y)), mask)
        return x


class F0Predictor(nn.Module):
    """Mel [B, bins, T] to fundamental frequency [B, T] in Hz; 0 on padding.

    Phases add f0 up over thousands of turns, so its rounding is heard of: in float32 the same mel
    gives waves 1e-3 apart in batches of another shape. ``.double()`` on this module ends that for
    1 % of the vocoder's work; inputs and outputs stay float32.
    """

    def __init__(self, bins: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (bins, channels, channels, channels, channels):
            layers += [nn.Conv1d(inputs, channels, 3, padding=1), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel: Tensor, mask: Tensor | None) -> Tensor:
        x = mel.to(self.classifier.weight.dtype)
        for layer in self.condnet:
            x = layer(x)
            if isinstance(layer, nn.Conv1d):
                x = masked(x, mask)
        f0 = self.classifier(x.transpose(1, 2)).squeeze(2).abs().float()
        return f0 if mask is None else f0 * mask[:, 0]
