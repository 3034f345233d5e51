"""A 16-point short-time Fourier transform and its inverse as products with a fixed matrix.

At this size a matrix is as fast as an FFT, has no complex numbers, and takes rows of different
lengths: reflection and window envelope are each row's own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortTimeFourier(nn.Module):
    """Centred, reflect-padded, one-sided, periodic Hann window. No parameters."""

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        window = torch.hann_window(n_fft, periodic=True, dtype=torch.float64)
        bins, steps = torch.arange(n_fft // 2 + 1), torch.arange(n_fft)
        angles = 2 * math.pi * bins[:, None].double() * steps / n_fft
        forward = torch.cat([angles.cos(), -angles.sin()]) * window
        # The bins between 0 and Nyquist stand for their mirror images too.
        weights = torch.full((n_fft // 2 + 1, 1), 2.0, dtype=torch.float64)
        weights[0] = weights[-1] = 1.0
        inverse = torch.cat([weights * angles.cos(), -weights * angles.sin()]) * window / n_fft
        self.register_buffer("forward_matrix", forward.T.float().contiguous(), persistent=False)
        self.register_buffer("inverse_matrix", inverse.float().contiguous(), persistent=False)
        self.register_buffer("window_square", window.square().float(), persistent=False)

    def transform(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """Spectrum of x [B, n]: [B, n_fft + 2, n / hop + 1], real bins, then imaginary bins.

        ``ends`` int64 [B]: valid samples per row, x being zero beyond; each row is reflected at
        its own end. Frames beyond ``ends / hop`` are to be masked by the caller.
        """
        half = self.n_fft // 2
        if ends is None:
            padded = F.pad(x[:, None], (half, half), mode="reflect")[:, 0]
        else:
            padded = F.pad(x, (half, half))
            padded[:, :half] = x[:, 1 : half + 1].flip(1)
            steps = torch.arange(half, device=x.device)
            mirrored = x.gather(1, ends[:, None] - 2 - steps)
            padded.scatter_(1, ends[:, None] + half + steps, mirrored)
        return (padded.unfold(1, self.n_fft, self.hop) @ self.forward_matrix).transpose(1, 2)

    def inverse(self, spectrum: Tensor, valid: Tensor | None = None) -> Tensor:
        """Signal [B, hop * (frames - 1)] of a spectrum [B, n_fft + 2, frames].

        ``valid`` float [B, 1, frames]: 1 where a row has a frame; the spectrum is zero elsewhere.
        """
        frames = spectrum.transpose(1, 2) @ self.inverse_matrix
        present = frames.new_ones(1, frames.shape[1], 1) if valid is None else valid.transpose(1, 2)
        signal = self._overlap_add(frames)
        envelope = self._overlap_add(present * self.window_square)
        half = self.n_fft // 2
        return (signal / envelope.clamp(min=1e-11))[:, half:-half]

    def _overlap_add(self, frames: Tensor) -> Tensor:
        """[B, frames, n_fft] -> [B, hop * (frames - 1) + n_fft]."""
        batch, count, _ = frames.shape
        overlap = self.n_fft // self.hop
        parts = [
            F.pad(frames[:, :, j * self.hop : (j + 1) * self.hop], (0, 0, j, overlap - 1 - j))
            for j in range(overlap)
        ]
        return torch.stack(parts).sum(0).reshape(batch, (count + overlap - 1) * self.hop)
