"""Bootstrap over utterances: intervals for one system, and the paired test between two.

Every score here is a ratio of sums over utterances, ``sum(numerator) / sum(denominator)``: for a corpus error
rate errors over reference units, for a mean of rates the rates over ones. Utterances are drawn with
replacement (Bisani and Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation",
ICASSP 2004); a draw takes an utterance with all its seeds, since samples of one sentence are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK = 256  # resamples drawn at once: 2,000 utterances then need 4 MB


@dataclass(frozen=True)
class Interval:
    """A value with its percentile interval; ``low`` and ``high`` enclose ``level`` of the resamples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Two systems on the same utterances.

    Attributes:
        before, after: the two values with their own intervals.
        difference: after - before.
        relative: (after - before) / before; NaN if the value before is 0.
        p_value: two-sided; twice the smaller share of resamples on either side of no difference, at most 1.
    """

    before: Interval
    after: Interval
    difference: Interval
    relative: Interval
    p_value: float

    def to_json(self) -> dict:
        return asdict(self)


def _as_sums(values: np.ndarray, what: str) -> np.ndarray:
    """Per-utterance sums [U] of values [U] or [seeds, U]."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(f"bootstrap: {what} has shape {values.shape}, expected [U] or [seeds, U] with U > 0")
    if not np.isfinite(values).all():
        raise ValueError(f"bootstrap: {what} holds values that are not finite")
    return values.sum(axis=0)


def _resampled_sums(columns: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Sums over ``resamples`` draws of utterances: columns [U, K] -> [resamples, K]."""
    rng = np.random.default_rng(seed)
    n = len(columns)
    sums = np.empty((resamples, columns.shape[1]))
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        # How often each utterance occurs in each draw. Counting beats drawing n indices and gathering.
        draws = rng.integers(0, n, size=(size, n), dtype=np.int32) + n * np.arange(size, dtype=np.int32)[:, None]
        counts = np.bincount(draws.ravel(), minlength=size * n).reshape(size, n)
        sums[start : start + size] = counts @ columns
    return sums


def _interval(value: float, resampled: np.ndarray, level: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def bootstrap(
    numerator: np.ndarray,
    denominator: np.ndarray,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """Value and interval of ``sum(numerator) / sum(denominator)``.

    Args:
        numerator: [U], or [seeds, U] to pool several runs over the same utterances.
        denominator: same shape, positive.
        resamples: number of draws.
        seed: of the draws; equal seeds give equal intervals.
        level: share of the draws inside the interval.

    Raises:
        ValueError: shapes that do not agree, no utterance, values that are not finite, a denominator <= 0.
    """
    return bootstrap_all([(numerator, denominator)], resamples, seed, level)[0]


def bootstrap_all(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> list[Interval]:
    """``bootstrap`` of several scores of the same utterances, over the same draws, in the time of one."""
    sums = [_as_sums(values, part) for pair in pairs for values, part in zip(pair, ("numerator", "denominator"))]
    sizes = [len(column) for column in sums]
    if len(set(sizes)) > 1:
        raise ValueError(f"bootstrap: found numerators and denominators for {sizes} utterances, expected equal numbers")
    if any((column <= 0).any() for column in sums[1::2]):
        raise ValueError("bootstrap: found a denominator <= 0, expected every utterance to count")
    drawn = _resampled_sums(np.stack(sums, 1), resamples, seed)
    return [
        _interval(sums[k].sum() / sums[k + 1].sum(), drawn[:, k] / drawn[:, k + 1], level)
        for k in range(0, len(sums), 2)
    ]


def paired_bootstrap(
    before: tuple[np.ndarray, np.ndarray],
    after: tuple[np.ndarray, np.ndarray],
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> PairedTest:
    """Compare two systems on the same utterances, in the same order.

    Both are resampled with the same draws, so that the difficulty of an utterance cancels.

    Args:
        before: (numerator, denominator), each [U] or [seeds, U].
        after: the same for the other system; the number of seeds may differ.
        resamples, seed, level: see ``bootstrap``.

    Raises:
        ValueError: as ``bootstrap``, or different numbers of utterances.
    """
    columns = [
        _as_sums(values, f"{part} {name}")
        for name, pair in (("before", before), ("after", after))
        for values, part in zip(pair, ("numerator", "denominator"), strict=True)
    ]
    if len({len(column) for column in columns}) != 1:
        raise ValueError(
            f"paired bootstrap: found {[len(c) for c in columns]} utterances, expected equal numbers"
        )
    if (columns[1] <= 0).any() or (columns[3] <= 0).any():
        raise ValueError("paired bootstrap: found a denominator <= 0, expected every utterance to count")
    # A system with more seeds must not weigh more: only ratios within a system are formed.
    totals = np.array([column.sum() for column in columns])
    sums = _resampled_sums(np.stack(columns, 1), resamples, seed)
    old, new = totals[0] / totals[1], totals[2] / totals[3]
    old_draws, new_draws = sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 3]
    difference = new_draws - old_draws
    tail = min((difference <= 0).sum(), (difference >= 0).sum())
    relative = _ratio(difference, old_draws)
    relative = relative[np.isfinite(relative)]
    return PairedTest(
        before=_interval(old, old_draws, level),
        after=_interval(new, new_draws, level),
        difference=_interval(new - old, difference, level),
        relative=_interval((new - old) / old, relative, level)
        if old > 0 and relative.size
        else Interval(float("nan"), float("nan"), float("nan")),
        # One is added on both sides, so that a finite number of draws never claims p = 0.
        p_value=float(min(1.0, 2 * (tail + 1) / (resamples + 1))),
    )
