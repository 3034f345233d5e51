"""Where a waveform is silent, and how many pauses a text asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

WINDOW_SECONDS = 0.025
HOP_SECONDS = 0.010
#: A frame is silent this far below the loud frames (95th percentile) of the same utterance ...
RELATIVE_DB = 35.0
#: ... and below this level in any case.
FLOOR_DBFS = -60.0

#: Punctuation at which a reader may pause. Not between digits (3.5, 1,234, 10:05).
_PAUSE = re.compile(r"(?:(?<!\d)[,.:]+|[,.:]+(?!\d)|[，。！？；：、!?;…—\n]+)+")


@dataclass(frozen=True)
class SpeechActivity:
    """Seconds of speech, and the lengths in seconds of the silences inside it (outer silence left out)."""

    speech_seconds: float
    pauses: tuple[float, ...]


def speech_activity(wav: np.ndarray, sample_rate: int) -> SpeechActivity:
    """Find silences by energy.

    Args:
        wav: [L] finite samples, full scale 1.0.
        sample_rate: in Hz.

    Returns:
        Speech time without any silence, and the silences between first and last speech, in order.
    """
    window, hop = round(WINDOW_SECONDS * sample_rate), round(HOP_SECONDS * sample_rate)
    if len(wav) < window:
        return SpeechActivity(0.0, ())
    energy = np.concatenate([[0.0], np.cumsum(np.square(wav, dtype=np.float64))])
    starts = np.arange(0, len(wav) - window + 1, hop)
    # A cumulative sum can round to just below zero in digital silence.
    power = np.maximum(energy[starts + window] - energy[starts], 0.0) / window
    level = 10.0 * np.log10(power + 1e-12)
    speech = level > max(np.percentile(level, 95) - RELATIVE_DB, FLOOR_DBFS)
    voiced = np.flatnonzero(speech)
    if len(voiced) == 0:
        return SpeechActivity(0.0, ())
    # Silent frames between two speech frames: their windows overlap both neighbours, so what is silent from
    # end to end is the hop distance less the part of a window that sticks out.
    gaps = np.diff(voiced) - 1
    overlap = window - hop
    pauses = tuple(float(gap * hop - overlap + hop) / sample_rate for gap in gaps[gaps * hop > overlap])
    span = float((voiced[-1] - voiced[0]) * hop + window) / sample_rate
    return SpeechActivity(span - sum(pauses), pauses)


def granted_pauses(text: str) -> int:
    """Pauses that the punctuation of a text asks for: marks inside it, neighbouring ones count once.

    >>> granted_pauses("你好，世界！今天3.5度……好吗？")
    3
    """
    return len(_PAUSE.findall(text.strip().strip(_OUTER)))


_OUTER = "，。！？；：、,.:!?;…—“”\"'‘’（）()《》 \n"
