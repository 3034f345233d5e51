"""What travels between the server and its workers: items to score and records of what came out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from cosyvoice.reward.record import RewardRecord, Status


@dataclass
class Item:
    """One utterance to score: speech tokens to synthesise, or a waveform that needs the recogniser only.

    Attributes:
        reference: the text that should be heard.
        tokens: int32 [T] speech tokens, or None for a waveform.
        wave: float32 [L] at 16 kHz, or None for speech tokens.
        prompt_key: chooses the speaker prompt; equal keys get the same prompt.
        ended: False if the language model was cut off before an end token.
        out_of_range: pieces of the answer that are no speech code and so are not among the tokens.
    """

    reference: str
    tokens: np.ndarray | None = None
    wave: np.ndarray | None = None
    prompt_key: str = ""
    ended: bool = True
    out_of_range: int = 0

    def __len__(self) -> int:
        return len(self.tokens) if self.tokens is not None else len(self.wave)


@dataclass
class BatchResult:
    """What a worker sends back: one record per item, in order, and seconds per phase."""

    records: list[RewardRecord]
    seconds: dict[str, float] = field(default_factory=dict)
    rss_bytes: int = 0


def failure(status: Status, message: str, item: Item | None = None) -> RewardRecord:
    """A record of something the *system* did wrong: it has no score (NaN), so nobody can train on it."""
    if not status.is_system:
        raise ValueError(f"status {status.value!r} is the model's doing and needs a score")
    n_tokens = 0 if item is None or item.tokens is None else len(item.tokens)
    return RewardRecord(
        score=math.nan,
        status=status,
        reference="" if item is None else item.reference,
        n_tokens=n_tokens,
        message=message,
    )
