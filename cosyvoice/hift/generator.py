"""HiFT: mel to waveform through f0, a harmonic source and an upsampling network that ends in an inverse STFT.

After HiFTNet (Li et al. 2023, arXiv:2309.09493).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice.hift.config import HiFTConfig
from cosyvoice.hift.layers import F0Predictor, ResBlock, masked
from cosyvoice.hift.source import HarmonicSource
from cosyvoice.hift.stft import ShortTimeFourier


class RowMasks:
    """Row masks at each resolution of the network, for a batch padded to ``frames``.

    ``mel`` [B, 1, T]; ``stages`` at 8T, 40T and 120T + 1 steps; ``spectrum`` is the last of these;
    ``samples`` int64 [B] are the rows' lengths in samples. All None when no row is padded.
    """

    def __init__(self, config: HiFTConfig, lengths: Sequence[int] | None, frames: int, like: Tensor) -> None:
        rates = config.upsample_rates
        self.mel = self.spectrum = self.samples = None
        self.stages: list[Tensor | None] = [None] * len(rates)
        if lengths is None or all(length == frames for length in lengths):
            return
        ends = torch.tensor(lengths, device=like.device)[:, None]
        rate = 1

        def mask(extra: int) -> Tensor:
            steps = torch.arange(rate * frames + extra, device=like.device)
            return (steps < rate * ends + extra).to(like.dtype)[:, None]

        self.mel = mask(0)
        for stage, factor in enumerate(rates):
            rate *= factor
            self.stages[stage] = mask(1 if stage == len(rates) - 1 else 0)
        self.spectrum = self.stages[-1]
        self.samples = ends[:, 0] * config.hop


class HiFTGenerator(nn.Module):
    """All of ``hift.pt``, under its names with weight norm folded. Differentiable throughout."""

    def __init__(self, config: HiFTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or HiFTConfig()
        spectrum = config.n_fft + 2
        base, stages = config.base_channels, len(config.upsample_rates)
        widths = [base // 2 ** (i + 1) for i in range(stages)]
        self.f0_predictor = F0Predictor(config.in_channels, config.f0_channels)
        self.m_source = HarmonicSource(config)
        self.stft = ShortTimeFourier(config.n_fft, config.hop_len)
        self.conv_pre = nn.Conv1d(config.in_channels, base, 7, padding=3)
        self.ups = nn.ModuleList()
        self.source_downs = nn.ModuleList()
        self.source_resblocks = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for i, (rate, kernel) in enumerate(
            zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True)
        ):
            width = widths[i]
            inputs = base if i == 0 else widths[i - 1]
            self.ups.append(
                nn.ConvTranspose1d(inputs, width, kernel, stride=rate, padding=(kernel - rate) // 2)
            )
            down = 1
            for later in config.upsample_rates[i + 1 :]:
                down *= later
            self.source_downs.append(
                nn.Conv1d(spectrum, width, 1)
                if down == 1
                else nn.Conv1d(spectrum, width, 2 * down, stride=down, padding=down // 2)
            )
            self.source_resblocks.append(
                ResBlock(
                    width, config.source_resblock_kernel_sizes[i], config.source_resblock_dilation_sizes[i]
                )
            )
            for size, dilations in zip(
                config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
            ):
                self.resblocks.append(ResBlock(width, size, dilations))
        self.conv_post = nn.Conv1d(widths[-1], spectrum, 7, padding=3)

    def forward(self, mel: Tensor, noise: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Waveform of a (right-padded) batch.

        Args:
            mel: [B, 80, T] log mel.
            noise: standard normal [1 or B, harmonics, 480 T], e.g. from ``SourceNoise``.
            lengths: frames per row; None when all have T.

        Returns:
            [B, 480 T] within +-audio_limit at 24 kHz, meaningless beyond a row's end.
        """
        masks = RowMasks(self.config, lengths, mel.shape[2], mel)
        mel = masked(mel, masks.mel)
        source, _ = self.m_source(self.f0_predictor(mel, masks.mel), noise)
        return self.decode(mel, source, masks)

    def decode(self, mel: Tensor, source: Tensor, masks: RowMasks | None = None) -> Tensor:
        """Waveform from mel [B, 80, T] (zero on padding) and excitation [B, 1, 480 T]."""
        masks = masks or RowMasks(self.config, None, mel.shape[2], mel)
        magnitude, phase = self.spectrum(mel, source, masks)
        magnitude = masked(magnitude.clamp(max=100.0), masks.spectrum)
        spectrum = torch.cat([magnitude * phase.cos(), magnitude * phase.sin()], dim=1)
        limit = self.config.audio_limit
        return self.stft.inverse(spectrum, masks.spectrum).clamp(-limit, limit)

    def spectrum(self, mel: Tensor, source: Tensor, masks: RowMasks) -> tuple[Tensor, Tensor]:
        """Magnitude (not yet limited) and phase, each [B, 9, 120 T + 1]."""
        config = self.config
        source = source[:, 0]
        if masks.samples is not None:
            beyond = torch.arange(source.shape[1], device=source.device) >= masks.samples[:, None]
            source = source.masked_fill(beyond, 0.0)
        excitation = masked(self.stft.transform(source, masks.samples), masks.spectrum)
        x = masked(self.conv_pre(mel), masks.mel)
        kernels = len(config.resblock_kernel_sizes)
        for i, (up, down, source_block) in enumerate(
            zip(self.ups, self.source_downs, self.source_resblocks, strict=True)
        ):
            mask = masks.stages[i]
            x = up(F.leaky_relu(x, config.lrelu_slope))
            if i == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            x = masked(x, mask) + source_block(masked(down(excitation), mask), mask)
            blocks = self.resblocks[i * kernels : (i + 1) * kernels]
            x = sum(block(x, mask) for block in blocks) / kernels
        # The published decoder leaves this slope at the default of the function.
        x = self.conv_post(F.leaky_relu(x, 0.01))
        bins = config.n_fft // 2 + 1
        return x[:, :bins].exp(), x[:, bins:].sin()
