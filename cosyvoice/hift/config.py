"""Sizes of the HiFT vocoder. Defaults are those of the published CosyVoice2-0.5B."""

from __future__ import annotations

import math
from dataclasses import dataclass

Dilations = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HiFTConfig:
    """Everything ``hift.pt`` needs. One entry per stage in the tuples of upsampling and source."""

    in_channels: int = 80
    base_channels: int = 512
    nb_harmonics: int = 8
    """Overtones; the source has one sine more."""
    sampling_rate: int = 24000
    nsf_alpha: float = 0.1
    nsf_sigma: float = 0.003
    nsf_voiced_threshold: float = 10
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    upsample_kernel_sizes: tuple[int, ...] = (16, 11, 7)
    n_fft: int = 16
    hop_len: int = 4
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: Dilations = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    source_resblock_kernel_sizes: tuple[int, ...] = (7, 7, 11)
    source_resblock_dilation_sizes: Dilations = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    lrelu_slope: float = 0.1
    audio_limit: float = 0.99
    f0_channels: int = 512

    @property
    def hop(self) -> int:
        """Samples per mel frame (480)."""
        return math.prod(self.upsample_rates) * self.hop_len
