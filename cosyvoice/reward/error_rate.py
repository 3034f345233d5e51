"""Error rate between two lists of units (syllables, characters, words), counted and aligned by jiwer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorRate:
    """Counts of the best alignment. ``rate`` = (S + D + I) / n_ref and can exceed 1."""

    rate: float
    substitutions: int
    deletions: int
    insertions: int
    hits: int
    n_ref: int


@dataclass(frozen=True)
class AlignedChunk:
    """A stretch of the alignment: ``kind`` is "equal", "substitute", "delete" or "insert"."""

    kind: str
    reference: tuple[str, ...]
    hypothesis: tuple[str, ...]


def error_rate(ref_units: Sequence[str], hyp_units: Sequence[str]) -> ErrorRate:
    """Compare a hypothesis with its reference.

    Empty sides are decided here: jiwer calls two empty strings a perfect match, which would reward an
    utterance without a reference.

    Args:
        ref_units: units of the reference, without white space inside.
        hyp_units: units of the hypothesis; none is an error rate of 1, all deleted.

    Raises:
        ValueError: the reference is empty, so there is no rate.
    """
    if not ref_units:
        raise ValueError("error rate: the reference has no units, expected at least one")
    if not hyp_units:
        return ErrorRate(1.0, 0, len(ref_units), 0, 0, len(ref_units))
    output = _process(ref_units, hyp_units)
    return ErrorRate(
        output.wer, output.substitutions, output.deletions, output.insertions, output.hits, len(ref_units)
    )


def align(ref_units: Sequence[str], hyp_units: Sequence[str]) -> list[AlignedChunk]:
    """The alignment that :func:`error_rate` counts, chunk by chunk; either side may be empty."""
    if not ref_units or not hyp_units:
        kind = "delete" if ref_units else "insert"
        both = (tuple(ref_units), tuple(hyp_units))
        return [AlignedChunk(kind, *both)] if any(both) else []
    return [
        AlignedChunk(
            chunk.type,
            tuple(ref_units[chunk.ref_start_idx : chunk.ref_end_idx]),
            tuple(hyp_units[chunk.hyp_start_idx : chunk.hyp_end_idx]),
        )
        for chunk in _process(ref_units, hyp_units).alignments[0]
    ]


def _process(ref_units: Sequence[str], hyp_units: Sequence[str]):
    import jiwer  # not needed to read a record, and absent from the training environment

    return jiwer.process_words(" ".join(ref_units), " ".join(hyp_units))
