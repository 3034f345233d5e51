"""Components of the reward: pure functions from what was measured about an utterance to a value in [0, 1].

All have one calling convention, ``component(utterance, config) -> float``: 1 is right, 0 is as wrong as can
be, NaN means that what it needs was not measured. ``REGISTRY`` finds them by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cosyvoice.reward.config import RewardConfig
from cosyvoice.reward.curves import CURVES
from cosyvoice.reward.pauses import SpeechActivity

#: Longest pattern whose repetition is looked for, in tokens: two seconds, some ten syllables.
MAX_PERIOD = 50


@dataclass(frozen=True)
class Utterance:
    """What is known about an utterance when it is scored; None where it was not measured.

    Attributes:
        wer, wer_toneless: error rates over pinyin.
        syllables: of the reference.
        granted_pauses: pauses that the reference's punctuation asks for.
        seconds: length of the audio.
        ended: the model stopped by itself.
        tokens: its speech tokens, [T].
        activity: speech and silences of the audio.
        similarity: cosine between the speaker embeddings of audio and prompt.
        nll: negative log-likelihood of the reference per character under the recogniser, in nats.
    """

    wer: float
    wer_toneless: float
    syllables: int
    granted_pauses: int
    seconds: float
    ended: bool
    tokens: np.ndarray | None = None
    activity: SpeechActivity | None = None
    similarity: float | None = None
    nll: float | None = None


Component = Callable[[Utterance, RewardConfig], float]


def pinyin(utterance: Utterance, config: RewardConfig) -> float:
    """Error rate over pinyin through the configured curve."""
    share = config.toned_share
    return CURVES[config.curve](share * utterance.wer + (1.0 - share) * utterance.wer_toneless)


def duration(utterance: Utterance, config: RewardConfig) -> float:
    """Speech time per syllable against the expectation.

    The expectation does not depend on the prompt: a slow prompt would otherwise excuse slow speech. 1 up to
    the tolerated factor in either direction, falling linearly in the log of the factor to 0 at the limit.
    """
    speech = utterance.seconds if utterance.activity is None else utterance.activity.speech_seconds
    if speech <= 0.0:
        return 0.0
    factor = abs(math.log(speech / (utterance.syllables * config.seconds_per_syllable)))
    tolerance, limit = math.log(config.duration_tolerance), math.log(config.duration_limit)
    return _clip(1.0 - (factor - tolerance) / (limit - tolerance))


def repetition(utterance: Utterance, config: RewardConfig) -> float:
    """Share of tokens outside loops; 0 if the model did not stop at all."""
    if not utterance.ended:
        return 0.0
    if utterance.tokens is None:
        return math.nan
    return 1.0 - loop_share(utterance.tokens, config.max_loop_tokens)


def pause(utterance: Utterance, config: RewardConfig) -> float:
    """Halved by every pause above the bound that the punctuation does not ask for."""
    if utterance.activity is None:
        return math.nan
    long = sum(seconds > config.pause_bound for seconds in utterance.activity.pauses)
    return 0.5 ** max(0, long - utterance.granted_pauses)


def similarity(utterance: Utterance, config: RewardConfig) -> float:
    """Cosine similarity of speaker embeddings, negative values cut off."""
    return _clip(_measured(utterance.similarity))


def nll(utterance: Utterance, config: RewardConfig) -> float:
    """``exp(-NLL)``: the geometric mean probability of a reference character; 0 if it is impossible."""
    return _clip(math.exp(-_measured(utterance.nll)))


REGISTRY: dict[str, Component] = {
    function.__name__: function for function in (pinyin, duration, repetition, pause, similarity, nll)
}


def loop_share(tokens: Sequence[int] | np.ndarray, max_loop_tokens: int) -> float:
    """Share of tokens that only repeat a pattern, in loops that go on for more than ``max_loop_tokens``.

    Args:
        tokens: speech tokens [T].
        max_loop_tokens: a pattern (of 1 to ``MAX_PERIOD`` tokens) may be repeated for this many tokens.
    """
    tokens = np.asarray(tokens)
    looping = np.zeros(len(tokens), dtype=bool)
    for period in range(1, min(MAX_PERIOD, len(tokens) - 1) + 1):
        same = tokens[period:] == tokens[:-period]
        if np.count_nonzero(same) <= max_loop_tokens:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for start, stop in zip(edges[::2], edges[1::2]):
            if stop - start > max_loop_tokens:
                looping[start + period : stop + period] = True
    return float(looping.mean()) if len(tokens) else 0.0


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Cosine of the angle between two embeddings [D].

    Raises:
        ValueError: shapes differ, or an embedding is zero or not finite.
    """
    if left.shape != right.shape:
        raise ValueError(
            f"speaker embeddings: found shapes {left.shape} and {right.shape}, expected equal ones"
        )
    norm = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    if not (math.isfinite(norm) and norm > 0.0):
        raise ValueError(f"speaker embeddings: product of norms is {norm}, expected a positive number")
    return float(np.dot(left, right)) / norm


def _measured(value: float | None) -> float:
    return math.nan if value is None else value


def _clip(value: float) -> float:
    # min and max would quietly turn NaN into a bound, that is, into a score
    return value if math.isnan(value) else min(1.0, max(0.0, value))
