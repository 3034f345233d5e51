"""Harmonic-plus-noise excitation (neural source-filter, Wang et al. 2019, arXiv:1904.12088)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cosyvoice.hift.config import HiFTConfig


class SourceNoise:
    """Standard normal noise for the source, the same for every utterance.

    Every utterance reads the start of one table, so that what it sounds like depends on nothing
    but its mel and the seed: not on its neighbours, not on what was asked before, not on the
    device. The table is drawn on the CPU in blocks that have their own seeds, and grows.
    """

    BLOCK = 48000

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows, self.seed = rows, seed
        self._table = torch.empty(rows, 0)

    def __call__(self, samples: int, device: torch.device | str = "cpu") -> Tensor:
        """[1, rows, samples] float32."""
        blocks = [self._table]
        have = self._table.shape[1]
        while have < samples:
            generator = torch.Generator().manual_seed((self.seed << 20) + have // self.BLOCK)
            blocks.append(torch.randn(self.rows, self.BLOCK, generator=generator))
            have += self.BLOCK
        if len(blocks) > 1:
            self._table = torch.cat([block.to(device) for block in blocks], dim=1)
        elif self._table.device != torch.device(device):
            self._table = self._table.to(device)
        return self._table[None, :, :samples]


class HarmonicSource(nn.Module):
    """f0 per frame to one excitation signal per row."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)

    def sines(self, f0: Tensor) -> Tensor:
        """f0 [B, T] in Hz -> [B, harmonics, hop * T], amplitude alpha, all in phase at the start.

        The phase is the running sum of ``h f0 / rate`` (whole turns dropped) at the frame centres,
        and linear between them. Sums are float64 and reduced to one turn before they become
        float32, so that the error does not grow with the length.
        """
        config, hop = self.config, self.config.hop
        harmonics = torch.arange(1, config.nb_harmonics + 2, dtype=torch.float64, device=f0.device)
        turns = torch.frac(harmonics[:, None] * f0.double()[:, None, :] / config.sampling_rate) * hop
        start = torch.frac(turns.cumsum(2)).float()
        # Segments run from centre to centre: half a segment at rest comes before the first
        # centre and after the last, which is the clamp of the interpolation at the ends.
        start = torch.cat([start[:, :, :1], start], dim=2)
        slope = torch.cat([torch.zeros_like(turns[:, :, :1]), turns[:, :, 1:]], dim=2).float()
        slope = torch.cat([slope, torch.zeros_like(slope[:, :, :1])], dim=2)
        along = (torch.arange(hop, device=f0.device) + 0.5) / hop
        phase = torch.addcmul(start[..., None], slope[..., None], along)
        phase = phase.flatten(2)[:, :, hop // 2 : phase.shape[2] * hop - hop // 2]
        return config.nsf_alpha * torch.sin(2 * math.pi * phase)

    def forward(self, f0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Excitation of a batch.

        Args:
            f0: [B, T] in Hz, 0 on padding.
            noise: standard normal [1 or B, harmonics, hop * T].

        Returns:
            source [B, 1, hop * T] in (-1, 1), and what it is mixed from [B, harmonics, hop * T].
        """
        config = self.config
        voiced = (f0 > config.nsf_voiced_threshold).float()
        gain = config.nsf_sigma * voiced + config.nsf_alpha / 3 * (1 - voiced)
        voiced = voiced.repeat_interleave(config.hop, dim=1)[:, None]
        gain = gain.repeat_interleave(config.hop, dim=1)[:, None]
        waves = self.sines(f0) * voiced + gain * noise
        source = torch.matmul(self.l_linear.weight, waves) + self.l_linear.bias[:, None]
        return torch.tanh(source), waves
