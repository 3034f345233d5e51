"""Reward curves: error rate in, reward in [0, 1] out. All of them give 1 at no error and fall monotonically.

At an error rate of .05 / .10 / .50 they give: tanh .851 / .709 / .095, exp15 .874 / .684 / .014,
exp .882 / .779 / .287. The steeper the curve, the less a bad utterance that got a little better earns.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def tanh3(wer: float) -> float:
    """``1 - tanh(3 wer)``, the curve of the original recipe."""
    return min(1.0, max(0.0, 1.0 - math.tanh(3.0 * wer)))


def exp15(wer: float) -> float:
    """``exp(-12 wer^1.5)``: flat near zero, so that a single slip costs less; then steep."""
    return math.exp(-12.0 * wer**1.5)


def exp25(wer: float) -> float:
    """``exp(-2.5 wer)``: the mildest, still tells bad from worse at high error rates."""
    return math.exp(-2.5 * wer)


CURVES: dict[str, Callable[[float], float]] = {"tanh": tanh3, "exp15": exp15, "exp": exp25}
