"""Reading recordings, and changing their sampling rate with an exact windowed sinc."""

from __future__ import annotations

import io
from functools import lru_cache
from math import ceil, gcd
from pathlib import Path

import numpy as np
import soundfile

LOWPASS_WIDTH = 6  # zero crossings of the sinc on each side
ROLLOFF = 0.99  # cut-off as a fraction of the lower Nyquist frequency
_BLOCK = 65_536  # output samples computed at once: bounds memory, fits the cache


class AudioError(ValueError):
    """A recording that cannot be used. The message names the file, what was found and what was expected."""


def decode_audio(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """Decode the bytes of an audio file (WAV, FLAC, OGG, MP3: what libsndfile reads).

    Args:
        data: the file's content.
        name: what error messages call it, usually the path.

    Returns:
        ``(wave, hz)``: float32 samples [L], full scale 1.0, the mean of all channels; the file's own rate.

    Raises:
        AudioError: not audio, no samples, or samples that are NaN or infinite.
    """
    try:
        channels, hz = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, TypeError, ValueError) as error:
        raise AudioError(
            f"{name} ({len(data)} bytes): cannot be read as audio, expected WAV, FLAC, OGG or MP3: {error}"
        ) from error
    if channels.shape[0] == 0:
        raise AudioError(f"{name}: found no samples, expected a recording")
    if not np.isfinite(channels).all():
        raise AudioError(f"{name}: found samples that are NaN or infinite, expected finite numbers")
    return channels.mean(axis=1, dtype=np.float32), hz


def load_audio(path: str | Path, to_hz: int | None = None) -> tuple[np.ndarray, int]:
    """Read an audio file as mono float32, at its own rate or resampled.

    Args:
        path: WAV, FLAC, OGG or MP3 file; several channels are averaged.
        to_hz: resample to this rate; None keeps the file's own.

    Returns:
        ``(wave, hz)``: float32 samples [L], full scale 1.0, and their rate in Hz.

    Raises:
        AudioError: the file is missing, is not audio, is empty, or holds NaN.
    """
    path = Path(path)
    if not path.is_file():
        raise AudioError(f"{path}: no such file, expected a recording")
    wave, hz = decode_audio(path.read_bytes(), str(path))
    if to_hz is not None and to_hz != hz:
        wave, hz = resample(wave, hz, to_hz), to_hz
    return wave, hz


@lru_cache(maxsize=16)
def _polyphase_filter(up: int, down: int) -> tuple[np.ndarray, int]:
    """Filter taps for each of the ``up`` phases between two input samples: ([up, taps], taps to the left)."""
    cutoff = min(up, down) * ROLLOFF / down  # of the pass band, in cycles per two input samples
    reach = ceil(LOWPASS_WIDTH / cutoff)  # input samples until the window is zero
    phase = (np.arange(up) * down % up) / up
    # Distance from the output sample to each tap, in zero crossings of the sinc.
    distance = (np.arange(-reach, reach + 2)[None, :] - phase[:, None]) * cutoff
    window = np.cos(np.pi * distance.clip(-LOWPASS_WIDTH, LOWPASS_WIDTH) / (2 * LOWPASS_WIDTH)) ** 2
    return (cutoff * np.sinc(distance) * window).astype(np.float32), reach


def resample(wave: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """Change the sampling rate with a Hann-windowed sinc, any pair of integer rates.

    Output sample n stands at input position ``n * from_hz / to_hz``; its value is the sum of the
    input around it weighted by ``c sinc(c d) cos^2(pi c d / 12)`` for ``|c d| < 6``, with d the
    distance in input samples and ``c = 0.99 min(1, to_hz / from_hz)``. These are torchaudio's
    defaults (width 6, roll-off 0.99, Hann), which CosyVoice2's front end uses. Samples beyond the
    ends count as zero.

    Args:
        wave: float samples [L].
        from_hz: rate of ``wave`` in Hz.
        to_hz: rate wanted in Hz.

    Returns:
        float32 samples [ceil(L * to_hz / from_hz)].

    Raises:
        ValueError: ``wave`` is not one-dimensional, or a rate is not a positive integer.
    """
    wave = np.ascontiguousarray(wave, dtype=np.float32)
    if wave.ndim != 1:
        raise ValueError(f"resample: found a wave of shape {wave.shape}, expected one dimension")
    if from_hz <= 0 or to_hz <= 0 or int(from_hz) != from_hz or int(to_hz) != to_hz:
        raise ValueError(f"resample: found rates {from_hz} -> {to_hz} Hz, expected positive integers")
    if from_hz == to_hz or wave.size == 0:
        return wave.copy()
    common = gcd(int(from_hz), int(to_hz))
    up, down = int(to_hz) // common, int(from_hz) // common
    filters, reach = _polyphase_filter(up, down)
    taps = filters.shape[1]
    padded = np.pad(wave, (reach, taps))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps)
    out = np.empty(-(-wave.size * up // down), dtype=np.float32)
    for start in range(0, out.size, _BLOCK):
        n = np.arange(start, min(start + _BLOCK, out.size))
        np.einsum("nt,nt->n", windows[n * down // up], filters[n % up], out=out[start : start + n.size])
    return out
