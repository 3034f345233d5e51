"""What one training step's rewards looked like, and the file that keeps it.

veRL logs the keys that a reward function returns in validation only, so the training step's own numbers
are made here: `summarise` is pure, `MetricsFile` appends its result to a JSONL beside the checkpoints.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DISTRIBUTIONS = (
    "score",
    "shaped_score",
    "wer",
    "wer_toneless",
    "cer",
    "n_tokens",
    "seconds",
    "reward_seconds",
)
"""Keys of a sample that get mean, std and quantiles; every other number gets its mean."""

QUANTILES = (10, 50, 90)


def distribution(values: Sequence[float], prefix: str) -> dict[str, float]:
    """Mean, population std, extremes and quantiles of the finite values; nothing if there are none."""
    finite = np.asarray([v for v in values if math.isfinite(v)], dtype=np.float64)
    if finite.size == 0:
        return {}
    summary = {f"{prefix}/mean": finite.mean(), f"{prefix}/std": finite.std()}
    summary |= {f"{prefix}/min": finite.min(), f"{prefix}/max": finite.max()}
    summary |= {f"{prefix}/p{q}": np.percentile(finite, q) for q in QUANTILES}
    return {name: float(value) for name, value in summary.items()}


def summarise(
    samples: Sequence[Mapping[str, Any]],
    groups: Sequence[str],
    failures: Sequence[Mapping[str, Any]] = (),
    started: float | None = None,
) -> dict[str, float]:
    """The reward metrics of one step.

    Args:
        samples: what the reward manager returned for each rollout that is trained on (``score``, ``status``,
            numbers, and ``reward_clock``: "START END" of the scoring in Unix seconds).
        groups: the prompt that each sample belongs to.
        failures: one record for each rollout that the system could not score (``status``).
        started: Unix time at which the step began to generate; without it the two times are left out.

    Returns:
        ``reward/<key>/{mean,std,min,max,p10,p50,p90}``, ``reward/status/<status>`` (counts),
        ``reward/non_stop_share``, ``reward/zero_variance_share`` (groups of two or more whose scores are all
        equal: they give no gradient), ``reward/group_std/mean``, ``reward/failed`` and
            ``reward/failed/<status>``, ``reward/generation_s`` (until the last rollout was handed to the
            reward) and ``reward/wait_s`` (from then until the last score came: what scoring adds to the
            step; it overlaps generation before).
    """
    if len(samples) != len(groups):
        raise ValueError(f"{len(samples)} samples but {len(groups)} group names")
    metrics: dict[str, float] = {"reward/n": float(len(samples)), "reward/failed": float(len(failures))}
    numbers: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for key, value in sample.items():
            if isinstance(value, bool | int | float | np.number):
                numbers[key].append(float(value))
    for key, values in numbers.items():
        if key in DISTRIBUTIONS:
            metrics |= distribution(values, f"reward/{key}")
        elif any(math.isfinite(v) for v in values):
            metrics[f"reward/{key}/mean"] = float(np.mean([v for v in values if math.isfinite(v)]))

    statuses = Counter(str(sample["status"]) for sample in samples if "status" in sample)
    metrics |= {f"reward/status/{status}": float(count) for status, count in statuses.items()}
    if statuses:
        metrics["reward/non_stop_share"] = statuses["no_end"] / len(samples)
    metrics |= {
        f"reward/failed/{status}": float(count)
        for status, count in Counter(str(failure["status"]) for failure in failures).items()
    }

    by_group: dict[str, list[float]] = defaultdict(list)
    for sample, group in zip(samples, groups, strict=True):
        if "score" in sample:
            by_group[group].append(float(sample["score"]))
    stds = [float(np.std(scores)) for scores in by_group.values() if len(scores) > 1]
    if stds:
        metrics["reward/zero_variance_share"] = float(np.mean([std == 0.0 for std in stds]))
        metrics["reward/group_std/mean"] = float(np.mean(stds))

    clocks = [tuple(map(float, sample["reward_clock"].split())) for sample in samples if "reward_clock" in sample]
    if clocks and started is not None:
        last_handed_over = max(begin for begin, _ in clocks)
        metrics["reward/generation_s"] = max(0.0, last_handed_over - started)
        metrics["reward/wait_s"] = max(0.0, max(end for _, end in clocks) - last_handed_over)
    return metrics


class MetricsFile:
    """A JSONL with one line per step: ``{"step": N, "time": unix seconds, <metric>: number, ...}``.

    A run that was killed and resumed does some steps again; their older lines are dropped, so every step
    stands in the file once, in order.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._resumed = False

    def append(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._resumed:
            self._drop_from(step)
            self._resumed = True
        line = json.dumps({"step": step, "time": round(time, 3), **metrics})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _drop_from(self, step: int) -> None:
        """Remove the lines of ``step`` and later ones, and a last line that a kill has torn."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                known = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError):
                continue
            if known < step:
                kept.append(line + "\n")
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)
