"""One prompt: the recording's checks, its features and the trimming rule."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import numpy as np

from .audio import AudioError, resample
from .encoders import SpeakerEncoder, SpeechTokenizer
from .features import FBANK_HZ, MEL_BINS, MEL_HZ, log_mel_24k

MIN_HZ = 16_000
MIN_SECONDS = 0.5  # below, neither timbre nor rhythm can be heard
MAX_SECONDS = 30.0  # the speech tokenizer's window
SILENT_PEAK = 10 ** (-60 / 20)  # -60 dBFS
FULL_SCALE = 0.999
CLIPPED_WARNING = 0.001  # fraction of samples at full scale
CLIPPED_ERROR = 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """What the language model and the flow are conditioned on.

    Attributes:
        key: the prompt's name in its bank.
        text: what is said in the recording.
        tokens: int64 [P], speech tokens at 25 Hz.
        mel: float32 [2P, 80], log-mel at 50 Hz.
        embedding: float32 [192], speaker vector as the network gave it.
    """

    key: str
    text: str
    tokens: np.ndarray
    mel: np.ndarray
    embedding: np.ndarray

    def __post_init__(self) -> None:
        agree = self.tokens.ndim == 1 and self.mel.shape == (2 * len(self.tokens), MEL_BINS)
        if not agree or self.embedding.ndim != 1:
            raise ValueError(
                f"prompt {self.key!r}: found tokens {self.tokens.shape}, mel {self.mel.shape}, embedding "
                f"{self.embedding.shape}, expected [P], [2P, {MEL_BINS}] and one dimension"
            )


def check_recording(wave: np.ndarray, hz: int, name: str) -> None:
    """Refuse recordings that cannot serve as a prompt; log a warning for a lightly clipped one.

    Args:
        wave: float32 samples [L], full scale 1.0.
        hz: sampling rate.
        name: what messages call the recording.

    Raises:
        AudioError: rate under 16 kHz; under 0.5 s or over 30 s; peak under -60 dBFS; over 5 % of the
            samples at full scale.
    """
    if hz < MIN_HZ:
        raise AudioError(f"{name}: found a sampling rate of {hz} Hz, expected at least {MIN_HZ} Hz")
    seconds = wave.size / hz
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise AudioError(f"{name}: found {seconds:.2f} s of audio, expected {MIN_SECONDS} to {MAX_SECONDS} s")
    level = np.abs(wave)
    if level.max() < SILENT_PEAK:
        raise AudioError(f"{name}: found silence (peak {level.max():.1e} of full scale), expected speech")
    clipped = float((level >= FULL_SCALE).mean())
    if clipped > CLIPPED_ERROR:
        raise AudioError(
            f"{name}: found {clipped:.1%} of the samples clipped (at full scale), expected at most "
            f"{CLIPPED_ERROR:.0%}"
        )
    if clipped > CLIPPED_WARNING:
        log.warning("%s: %.2f %% of the samples are clipped, the voice may be distorted", name, 100 * clipped)


def compute_prompt(
    key: str,
    text: str,
    wave: np.ndarray,
    hz: int,
    speaker: SpeakerEncoder,
    tokenizer: SpeechTokenizer,
    name: str | None = None,
) -> Prompt:
    """Check a recording and compute its features.

    The wave is resampled from its own rate, once to 24 kHz for the mel and once to 16 kHz for the two
    networks. Tokens and mel are trimmed to agree: ``P = min(floor(frames / 2), tokens)``, mel ``2P`` frames.

    Args:
        key: the prompt's name.
        text: what is said.
        wave: float32 samples [L], full scale 1.0.
        hz: sampling rate of ``wave``.
        speaker: speaker network.
        tokenizer: speech-token network.
        name: what messages call the recording; the key if None.

    Raises:
        AudioError: the text is empty, the recording is refused (``check_recording``), or no token results.
    """
    name = name or f"prompt {key!r}"
    if not text.strip():
        raise AudioError(f"{name}: found no text, expected what is said in the recording")
    check_recording(wave, hz, name)
    to_rate = partial(resample, wave, hz)
    wave_16k = to_rate(FBANK_HZ)
    # Resampling rounds the length up: a recording of exactly 30 s must not become a sample longer.
    tokens = tokenizer(wave_16k[: int(MAX_SECONDS * FBANK_HZ)])
    mel = log_mel_24k(to_rate(MEL_HZ)).numpy()
    n = min(len(mel) // 2, len(tokens))
    if n == 0:
        raise AudioError(f"{name}: found no speech tokens in {wave.size / hz:.2f} s, expected at least one")
    return Prompt(key, text.strip(), tokens[:n], np.ascontiguousarray(mel[: 2 * n]), speaker(wave_16k))
