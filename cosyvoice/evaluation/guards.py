"""Guards: which checkpoint is best, and what in a run deserves distrust. Pure functions over numbers.

The reward's own recogniser is no witness: the model may learn what pleases it. So the best checkpoint is the
one with the lowest held-out error of a recogniser that the reward never saw, and a reward that rises while that
error stays is a warning, as is speech that gets longer or shorter, and tokens that lose their variety.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .report_data import Series

#: Share of a run at each end over which it is averaged: single steps are noisy.
END_SHARE = 0.2
MAX_LENGTH_DRIFT = 0.10
#: Loss of distinct neighbouring token pairs, or of bits of the token distribution, that counts as collapse.
MAX_PAIR_LOSS, MAX_ENTROPY_LOSS = 0.15, 0.5
#: Groups whose rollouts all score the same teach nothing.
MAX_ZERO_VARIANCE = 0.6
MAX_NON_STOP = 0.05


@dataclass(frozen=True)
class Finding:
    """``level`` is "warning" or "note"."""

    level: str
    title: str
    text: str


def ends(series: Series | None) -> tuple[float, float, float] | None:
    """Means of the first and last fifth of a run, and the standard error of their difference.

    None for fewer than four points.
    """
    if series is None or len(series) < 4:
        return None
    n = max(2, round(len(series) * END_SHARE))
    first, last = series.values[:n], series.values[-n:]
    error = float(np.sqrt(first.var(ddof=1) / n + last.var(ddof=1) / n))
    return float(first.mean()), float(last.mean()), error


def best_step(errors: dict[int, float]) -> int | None:
    """Step with the lowest held-out error; of equals the earliest, which has moved least. None if there is none.

    Args:
        errors: step -> error rate of the judge; step 0 is the model before training.
    """
    return min(errors, key=lambda step: (errors[step], step)) if errors else None


def reward_against_error(reward: Series | None, difference: dict | None) -> list[Finding]:
    """A reward that rises while the judge hears no fewer errors.

    Args:
        reward: mean reward of each training step.
        difference: ``value``, ``low``, ``high`` of the judge's error, after minus before; None if not evaluated.
    """
    means = ends(reward)
    if means is None or difference is None:
        return []
    first, last, error = means
    rises = last - first > 2 * error and last - first > 0.01
    if not rises or difference["high"] < 0:
        return []
    heard = "rises" if difference["low"] > 0 else "shows no fall that stands out from chance"
    return [
        Finding(
            "warning",
            "The reward rises, the held-out error does not fall",
            f"Mean reward went from {first:.3f} to {last:.3f}, but the error of the held-out recogniser {heard} "
            f"({100 * difference['value']:+.2f} points, interval {100 * difference['low']:+.2f} to "
            f"{100 * difference['high']:+.2f}). The model may be learning what pleases the reward's recogniser. "
            "Listen to the pairs below, take an earlier checkpoint, or add a component to the reward.",
        )
    ]


def length_drift(ratio: float | None, lengths: Series | None) -> list[Finding]:
    """Speech that gets longer or shorter by more than 10 %.

    Args:
        ratio: seconds after over seconds before on the same test utterances.
        lengths: mean tokens per rollout of each training step.
    """
    findings = []
    means = ends(lengths)
    measured = [
        ("on the test set", ratio),
        ("over the training rollouts", means[1] / means[0] if means and means[0] > 0 else None),
    ]
    for where, value in measured:
        if value is not None and abs(value - 1.0) > MAX_LENGTH_DRIFT:
            way = "longer" if value > 1 else "shorter"
            findings.append(
                Finding(
                    "warning",
                    f"Speech gets {way}",
                    f"Lengths {where} are {100 * (value - 1):+.0f} % of where they started (bound "
                    f"{100 * MAX_LENGTH_DRIFT:.0f} %). Fast speech can hide errors from a recogniser; the duration "
                    "component of the reward holds it.",
                )
            )
    return findings


def diversity_loss(before: dict | None, after: dict | None) -> list[Finding]:
    """Tokens of the test set that lost their variety.

    Args:
        before, after: ``scoring.token_diversity`` of the two systems.
    """
    if not before or not after or not before.get("distinct_pairs"):
        return []
    pairs = 1.0 - after["distinct_pairs"] / before["distinct_pairs"]
    bits = before["entropy_bits"] - after["entropy_bits"]
    if pairs <= MAX_PAIR_LOSS and bits <= MAX_ENTROPY_LOSS:
        return []
    return [
        Finding(
            "warning",
            "Speech tokens lose their variety",
            f"Distinct neighbouring pairs {100 * -pairs:+.0f} %, entropy {-bits:+.2f} bits (bounds "
            f"-{100 * MAX_PAIR_LOSS:.0f} % and -{MAX_ENTROPY_LOSS} bits): flat prosody or loops are likely.",
        )
    ]


def training_health(
    zero_variance: Series | None, non_stop: Series | None, failed: Series | None, grad_norm: Series | None
) -> list[Finding]:
    """Signs in the training curves that little is learnt, or that it is learnt from the wrong samples."""
    findings = []
    if (means := ends(zero_variance)) and means[1] > MAX_ZERO_VARIANCE:
        findings.append(
            Finding(
                "warning",
                "Most groups teach nothing",
                f"In {100 * means[1]:.0f} % of the last groups all rollouts score the same, so they give no gradient. "
                "Harder texts, a higher temperature or dynamic sampling (--algorithm dapo) help.",
            )
        )
    if (means := ends(non_stop)) and means[1] > MAX_NON_STOP:
        findings.append(
            Finding(
                "warning",
                "Answers do not stop",
                f"{100 * means[1]:.1f} % of the last rollouts were cut off before an end token.",
            )
        )
    if failed is not None and (total := failed.values.sum()) > 0:
        findings.append(
            Finding(
                "note",
                "Some rollouts could not be scored",
                f"{total:.0f} rollouts failed in the reward server after retries. They were left out, not scored 0.",
            )
        )
    if (means := ends(grad_norm)) and means[1] > 10 * max(means[0], 1e-12):
        findings.append(
            Finding(
                "warning",
                "The gradient grows",
                f"Its norm went from {means[0]:.3g} to {means[1]:.3g}: a lower learning rate is safer.",
            )
        )
    return findings


def selection_note(n_checkpoints: int, n_sets: int) -> list[Finding]:
    """Choosing among checkpoints on the set that is then reported flatters the choice."""
    if n_checkpoints < 2:
        return []
    where = "the same test set" if n_sets == 1 else "the first test set"
    return [
        Finding(
            "note",
            "The best checkpoint was chosen here",
            f"It is the best of {n_checkpoints} on {where}, so its number there is a little too good. Publish one "
            "from a set that had no part in the choice.",
        )
    ]
