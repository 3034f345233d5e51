"""Which training curves the report draws, and what each of them tells. A chart without data is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .plots import Line, line_chart, stack_chart
from .report_data import Run, Series

#: veRL's phases of a step, in their order; the rest of the step is summed up as "other".
PHASES = (
    ("generate", ("timing_s/gen",)),
    ("reward", ("timing_s/reward",)),
    ("log-probs", ("timing_s/old_log_prob",)),
    ("reference", ("timing_s/ref", "timing_s/RefPolicy")),
    ("update", ("timing_s/update_actor",)),
    ("weights", ("timing_s/update_weights",)),
)


@dataclass(frozen=True)
class Chart:
    """A drawn chart with its heading and one sentence on how to read it."""

    title: str
    text: str
    svg: str


def training_charts(run: Run) -> list[Chart]:
    """Every chart that the run has data for."""
    drawn = []
    for title, text, draw in _CHARTS:
        if svg := draw(run, title):
            drawn.append(Chart(title, text, svg))
    return drawn


def _line(
    label: str, series: Series | None, low: Series | None = None, high: Series | None = None
) -> list[Line]:
    if series is None:
        return []
    band = [None, None]
    # A step without quantiles would shift the band.
    if all(one is not None and np.array_equal(one.steps, series.steps) for one in (low, high)):
        band = [low.values, high.values]
    return [Line(label, series.steps, series.values, *band)]


def _band(run: Run, key: str, label: str) -> list[Line]:
    get = run.get
    return _line(label, get(f"reward/{key}/mean"), get(f"reward/{key}/p10"), get(f"reward/{key}/p90"))


def _reward(run: Run, caption: str) -> str:
    lines = _band(run, "score", "reward") or _line(
        "reward",
        run.get("critic/score/mean", "critic/rewards/mean"),
        run.get("critic/score/min"),
        run.get("critic/score/max"),
    )
    return line_chart(lines, caption=caption) if lines else ""


def _errors(run: Run, caption: str) -> str:
    lines = _line("toned pinyin", run.get("reward/wer/mean"))
    lines += _line("toneless", run.get("reward/wer_toneless/mean"))
    lines += _line("characters", run.get("reward/cer/mean"))
    return line_chart(lines, percent=True, from_zero=True, caption=caption) if lines else ""


def _validation(run: Run, caption: str) -> str:
    lines = []
    for label, key in (("toned pinyin", "wer"), ("toneless", "wer_toneless"), ("characters", "cer")):
        for series in run.matching(rf"val-(?:core|aux)/.*/{key}/mean@\d+").values():
            lines += _line(label, series)
            break
    return line_chart(lines, percent=True, from_zero=True, caption=caption) if lines else ""


def _groups(run: Run, caption: str) -> str:
    lines = _line("std inside groups", run.get("reward/group_std/mean"))
    lines += _line("share of groups without variance", run.get("reward/zero_variance_share"))
    return line_chart(lines, from_zero=True, caption=caption) if lines else ""


def _lengths(run: Run, caption: str) -> str:
    lines = _band(run, "n_tokens", "speech tokens") or _line("tokens", run.get("response_length/mean"))
    return line_chart(lines, caption=caption) if lines else ""


def _kl(run: Run, caption: str) -> str:
    lines = _line("policy before the update", run.get("actor/ppo_kl"))
    lines += _line("reference model", run.get("actor/kl_loss", "actor/reward_kl_penalty"))
    return line_chart(lines, caption=caption) if lines else ""


def _clipping(run: Run, caption: str) -> str:
    lines = _line("upper bound", run.get("actor/pg_clipfrac"))
    lines += _line("lower bound", run.get("actor/pg_clipfrac_lower"))
    return line_chart(lines, percent=True, from_zero=True, caption=caption) if lines else ""


def _gradient(run: Run, caption: str) -> str:
    series = run.get("actor/grad_norm")
    if series is None:
        return ""
    wide = bool(series.values.min() > 0 and series.values.max() > 20 * np.median(series.values))
    return line_chart(_line("norm", series), log=wide, from_zero=not wide, caption=caption)


def _entropy(run: Run, caption: str) -> str:
    lines = _line("entropy", run.get("actor/entropy", "actor/entropy_loss"))
    return line_chart(lines, caption=caption) if lines else ""


def _failures(run: Run, caption: str) -> str:
    counts = {name.rsplit("/", 1)[1]: one for name, one in run.matching(r"reward/status/\w+").items()}
    total = run.get("reward/n")
    if not counts or total is None:
        return ""
    shares = [
        (name, _on(total.steps, one) / np.maximum(total.values, 1.0))
        for name, one in sorted(counts.items())
        if name != "ok"
    ] or [("none", np.zeros(len(total)))]
    lines = [Line(name, total.steps, share) for name, share in shares]
    return line_chart(lines, percent=True, from_zero=True, caption=caption)


def _phases(run: Run, caption: str) -> str:
    step = run.get("timing_s/step")
    found = [(label, one) for label, names in PHASES if (one := run.get(*names)) is not None]
    if step is None or not found:
        return ""
    parts = [(label, _on(step.steps, one)) for label, one in found]
    other = np.maximum(step.values - sum(part for _, part in parts), 0.0)
    return stack_chart(step.steps, [*parts, ("other", other)], caption=caption)


def _components(run: Run, caption: str) -> str:
    found = run.matching(r"reward/component_\w+/mean")
    lines = [
        line
        for name, one in sorted(found.items())
        for line in _line(name.removeprefix("reward/component_").removesuffix("/mean"), one)
    ]
    return line_chart(lines[:7], caption=caption) if len(lines) > 1 else ""


def _on(steps: np.ndarray, series: Series) -> np.ndarray:
    """Values at these steps; a status or phase that a step did not log is 0 there."""
    by_step = dict(zip(series.steps.tolist(), series.values.tolist()))
    return np.array([by_step.get(int(step), 0.0) for step in steps])


_CHARTS: tuple[tuple[str, str, Callable[[Run, str], str]], ...] = (
    ("Reward", "Mean over the rollouts of a step; the band holds the middle 80 %.", _reward),
    (
        "Error rate of the rollouts",
        "As the reward's recogniser hears them, at the sampling temperature.",
        _errors,
    ),
    ("Error rate in validation", "Held-out texts, still the reward's recogniser.", _validation),
    ("Variance inside groups", "What GRPO learns from: groups without variance give no gradient.", _groups),
    ("Length", "Speech tokens per rollout, 25 a second; the band holds the middle 80 %.", _lengths),
    ("Reward components", "Each from 0 to 1, also those that are only watched.", _components),
    ("Failed rollouts", "Share that the model spoilt: cut off, silent, empty or invalid.", _failures),
    ("KL divergence", "From the policy before the update; with a KL term also from the reference.", _kl),
    ("Clipped tokens", "Share of tokens whose probability ratio met a clip bound.", _clipping),
    ("Gradient norm", "Before clipping.", _gradient),
    ("Entropy", "Of the next-token distribution; a fall to 0 ends exploration.", _entropy),
    ("Seconds per step", "By phase.", _phases),
)
