"""What a run folder holds, read for the report: training scalars, evaluated systems, settings.

    RUN/train/metrics.jsonl           the reward metrics of each step (``training/step_metrics.py``)
    RUN/train/tensorboard/            veRL's own scalars
    RUN/train/*.jsonl                 the same from veRL's file logger: {"step": N, "data": {...}}
    RUN/train/hydra/.hydra/           the composed configuration and the overrides
    RUN/eval/SYSTEM/.../scores.jsonl  a scored test set; SYSTEM is "before" or "step_N", or one of these and a way of
                                      sampling, "before_greedy": shown as a test set of its own, "NAME, greedy"

Every part may be absent: a report of a run that is still going on shows what there is.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from .records import EvaluationError, read_jsonl
from .scoring import Scored

logger = logging.getLogger(__name__)
BEFORE = "before"
_SYSTEM = re.compile(rf"({BEFORE}|step_(\d+))(?:_([a-z]+))?")


@dataclass(frozen=True)
class Series:
    """One scalar over training: steps [N] ascending, values [N], finite."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class TestSet:
    """One system on one test set, scored."""

    folder: Path
    scores: dict[str, Scored]
    summary: dict
    utterances: dict[str, dict]


@dataclass(frozen=True)
class System:
    """A checkpoint that was evaluated: its name, its training step (0 before training), its test sets by name."""

    name: str
    step: int
    sets: dict[str, TestSet]


@dataclass(frozen=True)
class Run:
    """Everything the report shows; see the module's docstring for where it comes from."""

    path: Path
    series: dict[str, Series] = field(default_factory=dict)
    systems: list[System] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    config: dict = field(default_factory=dict)

    def get(self, *names: str) -> Series | None:
        """The first of these scalars that was logged."""
        return next((self.series[name] for name in names if name in self.series), None)

    def matching(self, pattern: str) -> dict[str, Series]:
        """All scalars whose whole name matches a regular expression."""
        return {name: one for name, one in self.series.items() if re.fullmatch(pattern, name)}

    @property
    def before(self) -> System | None:
        return next((system for system in self.systems if system.name == BEFORE), None)

    @property
    def trained(self) -> list[System]:
        """Evaluated checkpoints, by step."""
        return [system for system in self.systems if system.name != BEFORE]


def load_run(path: str | Path) -> Run:
    """Read a run folder.

    Raises:
        EvaluationError: there is no such folder, or a scores file in it is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise EvaluationError(f"{path}: no such folder, expected the run folder exp/<name>")
    overrides, config = _settings(path / "train")
    return Run(path.resolve(), load_series(path / "train"), _systems(path / "eval"), overrides, config)


def load_series(train: Path) -> dict[str, Series]:
    """Training scalars by name. Where two sources log one name, the JSON lines win over tensorboard's floats."""
    points: dict[str, dict[int, float]] = {}
    for source in (_tensorboard(train), _json_lines(train)):
        for name, step, value in source:
            points.setdefault(name, {})[step] = value
    series = {}
    for name, by_step in points.items():
        steps = np.array(
            sorted(step for step, value in by_step.items() if np.isfinite(value)), dtype=np.int64
        )
        if len(steps):
            series[name] = Series(steps, np.array([by_step[step] for step in steps]))
    return series


def _tensorboard(train: Path) -> Iterator[tuple[str, int, float]]:
    folders = {file.parent for file in train.rglob("events.out.tfevents.*")}
    if not folders:
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in sorted(folders):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                yield name, event.step, event.value


def _json_lines(train: Path) -> Iterator[tuple[str, int, float]]:
    for file in sorted(train.glob("*.jsonl")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                step, values = row["step"], row.get("data", row)
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
                # A run that was killed, or is being written to, ends in half a line.
                logger.warning("%s line %d: no JSON object with a step, left out", file, number)
                continue
            for name, value in values.items():
                if name not in ("step", "time") and isinstance(value, int | float):
                    yield name, int(step), float(value)


def _systems(folder: Path) -> list[System]:
    systems: dict[str, System] = {}
    # Sorted by name, a system's folder comes before those with a way of sampling in their names: its sets are first.
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        match = _SYSTEM.fullmatch(path.name)
        if not match:
            logger.warning("%s: expected the name before or step_N, left out", path)
            continue
        name, step, sampling = match.groups()
        system = systems.setdefault(name, System(name, int(step or 0), {}))
        for scores in sorted(path.rglob("scores.jsonl")):
            split = scores.parent.name + (f", {sampling}" if sampling else "")
            system.sets[split] = _test_set(scores.parent)
    return sorted((one for one in systems.values() if one.sets), key=lambda system: system.step)


def _test_set(folder: Path) -> TestSet:
    known = set(Scored.__dataclass_fields__)
    scores = {}
    for row in read_jsonl(folder / "scores.jsonl"):
        if missing := {"id", "reference", "transcript", "audio_status", "metrics"} - row.keys():
            raise EvaluationError(
                f"{folder / 'scores.jsonl'}: id {row['id']!r}: key {min(missing)!r} is missing"
            )
        # Optional measures stand beside the scores.
        scores[row["id"]] = Scored(**{"seconds": None, **{k: v for k, v in row.items() if k in known}})
    summary = folder / "summary.json"
    utterances = folder / "utterances.jsonl"
    return TestSet(
        folder,
        scores,
        json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {},
        {row["id"]: row for row in read_jsonl(utterances)} if utterances.is_file() else {},
    )


def _settings(train: Path) -> tuple[list[str], dict]:
    """Overrides and composed configuration of the last start of the training."""
    found = sorted(train.rglob(".hydra/config.yaml"), key=lambda file: file.stat().st_mtime)
    if not found:
        return [], {}
    config = yaml.safe_load(found[-1].read_text(encoding="utf-8")) or {}
    overrides = found[-1].with_name("overrides.yaml")
    lines = yaml.safe_load(overrides.read_text(encoding="utf-8")) if overrides.is_file() else []
    return [str(line) for line in lines or []], config
