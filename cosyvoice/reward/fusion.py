"""Fusion: component values and weights in, one score out. Pure functions, found by name in ``FUSIONS``.

The harmonic mean and the gate punish the worst component: no strength elsewhere buys off a failure, which is
how a reward is kept from being hacked through its easiest part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

#: (values in [0, 1], weights > 0) -> score in [0, 1]
Fusion = Callable[[Sequence[float], Sequence[float]], float]


def linear(values: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted mean, ``sum(w v) / sum(w)``."""
    return sum(w * v for v, w in zip(values, weights)) / sum(weights)


def harmonic(values: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted harmonic mean, ``sum(w) / sum(w / v)``; 0 if any value is 0."""
    if min(values) <= 0.0:
        return 0.0
    return sum(weights) / sum(w / v for v, w in zip(values, weights))


def gate(values: Sequence[float], weights: Sequence[float]) -> float:
    """Product of powers, ``prod(v^w)``: the weight is how hard a component closes the gate."""
    return math.prod(v**w for v, w in zip(values, weights))


FUSIONS: dict[str, Fusion] = {"linear": linear, "harmonic": harmonic, "gate": gate}


def fuse(components: dict[str, float], weights: Sequence[tuple[str, float]], fusion: str) -> float:
    """Fuse the components that have a weight above 0; the others are only watched.

    Raises:
        ValueError: a component that has a weight was not measured (NaN).
    """
    used = [(name, components[name], weight) for name, weight in weights if weight > 0.0]
    for name, value, weight in used:
        if math.isnan(value):
            raise ValueError(f"component {name!r} has the weight {weight:g} but was not measured")
    score = FUSIONS[fusion]([value for _, value, _ in used], [weight for _, _, weight in used])
    return min(1.0, max(0.0, score))
