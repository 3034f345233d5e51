"""Score an utterance: reference text, transcript and what was measured about the audio in, a record out.

Pure: no model and no server. The reference's side is prepared once per text and kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cosyvoice.reward.components import REGISTRY, Utterance
from cosyvoice.reward.config import RewardConfig
from cosyvoice.reward.error_rate import error_rate
from cosyvoice.reward.fusion import fuse
from cosyvoice.reward.pauses import granted_pauses, speech_activity
from cosyvoice.reward.record import COMPONENT_NAMES, RewardRecord, Status
from cosyvoice.reward.text import characters, count_syllables, drop_tones, normalise, to_pinyin

_DEFAULT = RewardConfig()


@dataclass(frozen=True)
class Reference:
    """The reference's side of every comparison. Without ``units`` nothing in it can be spoken."""

    text: str
    units: tuple[str, ...]
    units_toneless: tuple[str, ...]
    characters: tuple[str, ...]
    syllables: int
    granted_pauses: int


@lru_cache(maxsize=16384)
def prepare_reference(text: str, erhua: str = "keep") -> Reference:
    """Normalise a reference; the rollouts of a group, and later epochs, find it in the cache."""
    normalised = normalise(text)
    units = to_pinyin(normalised, erhua)
    return Reference(
        text=normalised,
        units=tuple(units),
        units_toneless=tuple(drop_tones(units)),
        characters=tuple(characters(normalised)),
        syllables=count_syllables(units),
        granted_pauses=granted_pauses(text),
    )


def score_utterance(
    reference: str,
    transcript: str,
    *,
    n_tokens: int | None,
    ended: bool,
    seconds: float,
    wav: np.ndarray | None = None,
    sample_rate: int = 24000,
    tokens: Sequence[int] | np.ndarray | None = None,
    out_of_range: int = 0,
    clip_status: str = "ok",
    similarity: float | None = None,
    nll: float | None = None,
    config: RewardConfig = _DEFAULT,
) -> RewardRecord:
    """Score one utterance.

    Args:
        reference: the text that should be heard, as written.
        transcript: what the recogniser heard; empty is an error rate of 1.
        n_tokens: number of speech tokens, or None if the audio did not come from tokens.
        ended: the model stopped by itself.
        seconds: length of the audio.
        wav: [L] samples, full scale 1.0, for speech time and pauses; without it the pause component is not
            measured and silences count as speech time.
        sample_rate: of ``wav``, in Hz.
        tokens: the speech tokens, for the repetition component.
        out_of_range: ids in the answer that are no speech codes.
        clip_status: the recogniser's word on the audio, "ok", "silent", "too_short" or "not_finite".
        similarity: cosine of speaker embeddings (``components.cosine``), if measured.
        nll: per character, in nats (``SenseVoice.reference_nll``), if measured.
        config: settings of the reward.

    Returns:
        A record; a model failure has the score 0 (``no_end``: scaled by ``config.no_end_scale``), a reference
        without speech and audio that is not finite are system failures with the score NaN.

    Raises:
        ValueError: a component that has a weight was not measured; an unknown ``clip_status``.
    """
    if clip_status not in _CLIP_STATUS:
        raise ValueError(f"clip status {clip_status!r}: expected one of {', '.join(_CLIP_STATUS)}")
    known = prepare_reference(reference, config.erhua)
    record = RewardRecord(
        score=math.nan,
        status=Status.OK,
        reference=known.text,
        transcript=transcript,
        n_tokens=0 if n_tokens is None else n_tokens,
        seconds=seconds,
        syllables=known.syllables,
        components=dict.fromkeys(COMPONENT_NAMES, math.nan),
    )
    if not known.units:
        record.status = Status.BAD_REFERENCE
        record.message = f"the reference {reference[:80]!r} has nothing that can be spoken"
        return record
    record.status, record.message = _status(n_tokens, ended, out_of_range, clip_status)
    if record.status.is_system:
        return record

    _compare(record, known, config.erhua)
    if record.status in (Status.EMPTY, Status.OUT_OF_RANGE, Status.SILENT):
        record.score = 0.0
        record.components = {name: 0.0 for name in COMPONENT_NAMES if config.measures(name)} | {
            name: math.nan for name in COMPONENT_NAMES if not config.measures(name)
        }
        return record
    utterance = Utterance(
        wer=record.wer,
        wer_toneless=record.wer_toneless,
        syllables=known.syllables,
        granted_pauses=known.granted_pauses,
        seconds=seconds,
        ended=ended,
        tokens=None if tokens is None else np.asarray(tokens),
        activity=None if wav is None else speech_activity(wav, sample_rate),
        similarity=similarity,
        nll=nll,
    )
    record.components = {name: REGISTRY[name](utterance, config) for name in COMPONENT_NAMES}
    record.score = fuse(record.components, config.weights, config.fusion)
    if record.status is Status.NO_END:
        record.score *= config.no_end_scale
    return record


_CLIP_STATUS = {
    "ok": (Status.OK, ""),
    "silent": (Status.SILENT, "the audio is silent"),
    "too_short": (Status.SILENT, "the audio is shorter than the recogniser's window"),
    "not_finite": (Status.SERVER_ERROR, "the audio holds NaN or infinite samples"),
}


def _status(n_tokens: int | None, ended: bool, out_of_range: int, clip_status: str) -> tuple[Status, str]:
    if out_of_range:
        return Status.OUT_OF_RANGE, f"{out_of_range} ids of the answer are no speech codes"
    if n_tokens == 0:
        return Status.EMPTY, "the answer holds no speech token"
    if clip_status != "ok":
        return _CLIP_STATUS[clip_status]
    if not ended:
        return Status.NO_END, "the answer was cut off before an end token"
    return Status.OK, ""


def _compare(record: RewardRecord, known: Reference, erhua: str) -> None:
    """Fill in the error rates."""
    record.hypothesis = normalise(record.transcript)
    units = to_pinyin(record.hypothesis, erhua)
    toned = error_rate(known.units, units)
    record.wer = toned.rate
    record.substitutions, record.deletions, record.insertions = (
        toned.substitutions,
        toned.deletions,
        toned.insertions,
    )
    record.wer_toneless = error_rate(known.units_toneless, drop_tones(units)).rate
    record.cer = error_rate(known.characters, characters(record.hypothesis)).rate
