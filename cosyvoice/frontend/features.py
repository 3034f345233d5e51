"""The three spectral features of CosyVoice2's front end.

All take float waves [..., L] (NumPy or torch, full scale 1.0, any leading batch dimensions, all rows of
the same length) and give float32 tensors [..., frames, bins], time before frequency, on the wave's device.
Rows of different lengths must not be padded into one batch: the 24 kHz mel reflects the signal at its end
and the Whisper features are scaled by the loudest frame.

Facts from the reference front end; filter banks are computed from their published formulas.
"""

from __future__ import annotations

from functools import lru_cache
from math import log1p

import numpy as np
import torch

MEL_HZ, MEL_HOP, MEL_WIN, MEL_BINS = 24_000, 480, 1920, 80
WHISPER_HZ, WHISPER_HOP, WHISPER_WIN, WHISPER_BINS = 16_000, 160, 400, 128
FBANK_HZ, FBANK_HOP, FBANK_WIN, FBANK_FFT, FBANK_BINS = 16_000, 160, 400, 512, 80

Wave = np.ndarray | torch.Tensor


def slaney_filters(hz: int, n_fft: int, bins: int, top_hz: float = 8000.0) -> torch.Tensor:
    """Triangular mel filters of Slaney's Auditory Toolbox, each of unit area (librosa's default).

    The scale is linear up to 1 kHz (15 mel) and logarithmic above, with a factor of 6.4 per 27 mel.

    Returns:
        float32 [bins, n_fft // 2 + 1], from 0 Hz to ``top_hz``.
    """

    def to_mel(f: float) -> float:
        return f * 3 / 200 if f < 1000 else 15 + 27 * np.log(f / 1000) / np.log(6.4)

    mel = np.linspace(0.0, to_mel(top_hz), bins + 2)
    corners = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    f = np.arange(n_fft // 2 + 1) * hz / n_fft
    triangle = np.minimum((f - left) / (centre - left), (right - f) / (right - centre)).clip(min=0)
    return torch.from_numpy((triangle * 2 / (right - left)).astype(np.float32))


def kaldi_filters() -> torch.Tensor:
    """Kaldi's mel filters, 20 Hz to 8 kHz: triangles on the scale ``1127 ln(1 + f / 700)``, height 1.

    In single precision, as Kaldi has them: next to a bin's corner the rounding of the slopes shows in the
    logarithm of a faint bin (1e-4).

    Returns:
        float32 [80, 257]; the Nyquist frequency has weight zero.
    """
    lowest, highest = (1127 * log1p(f / 700) for f in (20, FBANK_HZ / 2))
    step = (highest - lowest) / (FBANK_BINS + 1)
    corner = lowest + step * torch.arange(FBANK_BINS + 2)[:, None]
    left, centre, right = corner[:-2], corner[1:-1], corner[2:]
    mel = 1127 * (1 + torch.arange(FBANK_FFT // 2) * (FBANK_HZ / FBANK_FFT) / 700).log()
    triangle = torch.minimum((mel - left) / (centre - left), (right - mel) / (right - centre))
    return torch.nn.functional.pad(triangle.clamp(min=0), (0, 1))


@lru_cache(maxsize=16)
def _constants(kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(analysis window, filters transposed to [frequencies, bins]) on a device."""
    if kind == "mel":
        window, filters = torch.hann_window(MEL_WIN), slaney_filters(MEL_HZ, MEL_WIN, MEL_BINS)
    elif kind == "whisper":
        window = torch.hann_window(WHISPER_WIN)
        filters = slaney_filters(WHISPER_HZ, WHISPER_WIN, WHISPER_BINS)
    else:  # Kaldi's "Povey" window: a symmetric Hann window to the power of 0.85
        window = torch.hann_window(FBANK_WIN, periodic=False, dtype=torch.float64).pow(0.85)
        filters = kaldi_filters().double()
    return window.to(device), filters.T.contiguous().to(device)


def _as_rows(wave: Wave, least: int, what: str) -> tuple[torch.Tensor, torch.Size]:
    """Float32 rows [R, L] and the leading shape to restore."""
    wave = torch.as_tensor(wave)
    if not wave.is_floating_point():
        raise ValueError(f"{what}: found samples of type {wave.dtype}, expected floats")
    if wave.ndim == 0 or wave.shape[-1] < least:
        raise ValueError(f"{what}: found a wave of shape {list(wave.shape)}, expected [..., L >= {least}]")
    wave = wave.to(torch.float32)
    return wave.reshape(-1, wave.shape[-1]), wave.shape[:-1]


def _restore(rows: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    return rows.reshape(*lead, *rows.shape[1:])


def log_mel_24k(wave: Wave) -> torch.Tensor:
    """The mel spectrogram that the flow produces and HiFT reads.

    STFT of 1920 samples every 480 (periodic Hann), after 720 reflected samples at both ends;
    magnitudes ``sqrt(re^2 + im^2 + 1e-9)``; 80 Slaney bins up to 8 kHz; ``ln(max(., 1e-5))``.

    Args:
        wave: [..., L] at 24 kHz, L >= 721.

    Returns:
        float32 [..., floor(L / 480), 80].
    """
    rows, lead = _as_rows(wave, (MEL_WIN - MEL_HOP) // 2 + 1, "log_mel_24k")
    window, filters = _constants("mel", rows.device)
    pad = (MEL_WIN - MEL_HOP) // 2
    rows = torch.nn.functional.pad(rows, (pad, pad), mode="reflect")
    spectrum = torch.stft(rows, MEL_WIN, MEL_HOP, MEL_WIN, window, center=False, return_complex=True)
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    return _restore((magnitude.transpose(-1, -2) @ filters).clamp(min=1e-5).log(), lead)


def whisper_log_mel(wave: Wave) -> torch.Tensor:
    """Whisper's log-mel features with 128 bins, the input of the speech tokenizer.

    STFT of 400 samples every 160 (periodic Hann, centred, reflected ends, last frame dropped); power;
    128 Slaney bins up to 8 kHz; log10 floored at 1e-10 and at 8 below **each row's own** maximum;
    then ``(x + 4) / 4``.

    Args:
        wave: [..., L] at 16 kHz, L >= 201.

    Returns:
        float32 [..., floor(L / 160), 128].
    """
    rows, lead = _as_rows(wave, WHISPER_WIN // 2 + 1, "whisper_log_mel")
    window, filters = _constants("whisper", rows.device)
    spectrum = torch.stft(rows, WHISPER_WIN, WHISPER_HOP, WHISPER_WIN, window, return_complex=True)
    power = spectrum[..., :-1].abs().square()
    log_mel = (power.transpose(-1, -2) @ filters).clamp(min=1e-10).log10()
    log_mel = torch.maximum(log_mel, log_mel.amax(dim=(-1, -2), keepdim=True) - 8.0)
    return _restore((log_mel + 4.0) / 4.0, lead)


def kaldi_fbank(wave: Wave, subtract_mean: bool = True) -> torch.Tensor:
    """Kaldi's 80 log filter banks, the input of the speaker encoder.

    Frames of 25 ms every 10 ms inside the signal only; per frame: mean removed, pre-emphasis 0.97, Povey
    window, 512-point power spectrum, 80 mel bins from 20 Hz to 8 kHz, ``ln(max(., 2^-23))``. No dither; the
    wave is not scaled to the int16 range.

    Args:
        wave: [..., L] at 16 kHz, L >= 400.
        subtract_mean: subtract each bin's mean over time, as the speaker encoder expects.

    Returns:
        float32 [..., 1 + floor((L - 400) / 160), 80].
    """
    rows, lead = _as_rows(wave, FBANK_WIN, "kaldi_fbank")
    window, filters = _constants("fbank", rows.device)
    # In double precision: in single, faint bins of a loud frame drown in rounding (1e-4 in the logarithm).
    frames = rows.double().unfold(-1, FBANK_WIN, FBANK_HOP)
    frames = frames - frames.mean(dim=-1, keepdim=True)
    previous = torch.cat([frames[..., :1], frames[..., :-1]], dim=-1)
    frames = (frames - 0.97 * previous) * window
    power = torch.fft.rfft(frames, FBANK_FFT).abs().square()
    fbank = (power @ filters).clamp(min=torch.finfo(torch.float32).eps).log().float()
    if subtract_mean:
        fbank = fbank - fbank.mean(dim=-2, keepdim=True)
    return _restore(fbank, lead)
