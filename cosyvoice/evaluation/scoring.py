"""From references and transcripts to scores, intervals and the list of the worst utterances."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
import pandas as pd

from ..reward.error_rate import ErrorRate, align, error_rate
from .protocols import AGGREGATE, MEAN, protocols
from .recognise import Recognised
from .records import EvaluationError
from .statistics import LEVEL, RESAMPLES, bootstrap_all

COUNTS = ("substitutions", "deletions", "insertions", "n_ref")


@dataclass(frozen=True)
class Scored:
    """One utterance's scores; see ``records`` for the fields.

    ``metrics`` maps a protocol's name to rate, substitutions, deletions, insertions and n_ref.
    """

    id: str
    reference: str
    transcript: str
    audio_status: str
    seconds: float | None
    message: str = ""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict) -> Scored:
        """From a line of scores.jsonl, which may hold further measures."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def _counts(rate: ErrorRate) -> dict[str, float]:
    return {"rate": rate.rate} | {name: getattr(rate, name) for name in COUNTS}


def score_utterance(reference: str, recognised: Recognised, language: str) -> Scored:
    """Score one transcript under every protocol of the language.

    Audio that is not "ok" counts as all units deleted.

    Raises:
        EvaluationError: a reference without a unit to compare: the test set is at fault, not the system.
    """
    metrics = {}
    heard = recognised.transcript if recognised.audio_status == "ok" else ""
    for name, units in protocols(language).items():
        expected = units(reference, language)
        if not expected:
            raise EvaluationError(
                f"utterance {recognised.id!r}: the reference {reference!r} has no units under {name!r}, "
                "expected text that can be spoken"
            )
        metrics[name] = _counts(error_rate(expected, units(heard, language)))
    return Scored(
        recognised.id,
        reference,
        heard,
        recognised.audio_status,
        recognised.seconds,
        recognised.message,
        metrics,
    )


def _score_chunk(pairs: list[tuple[str, Recognised]], language: str) -> list[Scored]:
    return [score_utterance(reference, recognised, language) for reference, recognised in pairs]


def score(
    references: dict[str, str],
    recognised: Iterable[Recognised],
    language: str,
    skip_missing: bool = False,
    workers: int = 1,
) -> list[Scored]:
    """Score a test set, in the order of its references.

    Args:
        references: id -> text.
        recognised: transcripts; a reference without one counts as missing audio.
        language: "zh" or "en".
        skip_missing: leave out utterances without usable audio, as the published scripts do. This shrinks the
            denominator: a system that fails to answer looks better.
        workers: processes; text normalisation is the slow part (1 to 2 ms per text and core).

    Raises:
        EvaluationError: no reference; transcripts of unknown ids; every utterance skipped.
    """
    if not references:
        raise EvaluationError("scoring: found no reference, expected at least one")
    by_id = {item.id: item for item in recognised}
    if unknown := sorted(by_id.keys() - references.keys()):
        raise EvaluationError(f"scoring: {len(unknown)} transcripts have no reference, first {unknown[:3]}")
    absent = partial(Recognised, transcript="", audio_status="missing", message="no transcript", seconds=None)
    pairs = [(text, by_id.get(name) or absent(id=name)) for name, text in references.items()]
    if skip_missing:
        pairs = [pair for pair in pairs if pair[1].audio_status == "ok"]
        if not pairs:
            raise EvaluationError(f"scoring: none of {len(references)} utterances has usable audio")
    if workers == 1:
        return _score_chunk(pairs, language)
    _score_chunk(pairs[:1], language)  # loads the dictionaries, which forked processes then share
    size = math.ceil(len(pairs) / workers)
    chunks = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    with ProcessPoolExecutor(max_workers=workers) as pool:
        return [
            scored for chunk in pool.map(partial(_score_chunk, language=language), chunks) for scored in chunk
        ]


def columns(scored: Sequence[Scored], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(numerator, denominator) [U] whose ratio of sums is the metric of the set.

    The mean of rates has the rates over ones; a pooled rate has errors over reference units.
    """
    if AGGREGATE[metric] == MEAN:
        rates = np.array([s.metrics[metric]["rate"] for s in scored])
        return rates, np.ones(len(scored))
    counts = np.array([[s.metrics[metric][name] for name in COUNTS] for s in scored], dtype=np.float64)
    return counts[:, :3].sum(1), counts[:, 3]


def token_diversity(sequences: Iterable[Sequence[int]]) -> dict[str, float]:
    """How varied the speech tokens of a test set are: a collapsing model repeats few codes.

    Returns:
        ``n_tokens``; ``distinct`` codes; ``entropy_bits`` of their distribution; ``distinct_pairs`` =
        different neighbouring pairs over all pairs; ``longest_run`` of one code.
    """
    codes: Counter[int] = Counter()
    pairs: set[tuple[int, int]] = set()
    n_pairs = longest = 0
    for sequence in sequences:
        codes.update(sequence)
        neighbours = list(zip(sequence, sequence[1:], strict=False))
        pairs.update(neighbours)
        n_pairs += len(neighbours)
        run = 0
        for index, code in enumerate(sequence):
            run = run + 1 if index and sequence[index - 1] == code else 1
            longest = max(longest, run)
    total = sum(codes.values())
    shares = np.array(list(codes.values()), dtype=np.float64) / max(total, 1)
    return {
        "n_tokens": total,
        "distinct": len(codes),
        "entropy_bits": float(-(shares * np.log2(shares)).sum()) if total else 0.0,
        "distinct_pairs": len(pairs) / n_pairs if n_pairs else 0.0,
        "longest_run": longest,
    }


def summarise(
    scored: Sequence[Scored], resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL
) -> dict[str, object]:
    """The numbers of a test set.

    Returns:
        ``n_utterances``, ``n_missing``, ``missing`` (id and reason), ``seconds`` (sum over usable audio),
        ``metrics``: name -> value, low, high, aggregate ("mean" or "pooled"), the summed counts and
        ``n_perfect``; ``bootstrap``: resamples, seed, level.
    """
    missing = [
        {"id": s.id, "reason": f"{s.audio_status}: {s.message}"} for s in scored if s.audio_status != "ok"
    ]
    metrics = {}
    names = list(scored[0].metrics)
    intervals = bootstrap_all([columns(scored, name) for name in names], resamples, seed, level)
    for metric, interval in zip(names, intervals, strict=True):
        counts = {name: int(sum(s.metrics[metric][name] for s in scored)) for name in COUNTS}
        perfect = sum(s.metrics[metric]["rate"] == 0 for s in scored)
        metrics[metric] = {**asdict(interval), "aggregate": AGGREGATE[metric], **counts, "n_perfect": perfect}
    return {
        "n_utterances": len(scored),
        "n_missing": len(missing),
        "missing": missing,
        "seconds": round(sum(s.seconds or 0.0 for s in scored), 3),
        "metrics": metrics,
        "bootstrap": {"resamples": resamples, "seed": seed, "level": level},
    }


def alignment_text(reference: str, transcript: str, language: str) -> str:
    """The corpus alignment on one line: ``[a→b]`` substituted, ``[-a]`` deleted, ``[+b]`` inserted.

    >>> alignment_text("今天气好看吗", "天气很好看吗", "zh")
    '[-今]天气[+很]好看吗'
    """
    units, joint = protocols(language)["corpus"], "" if language == "zh" else " "
    marks = {"equal": "{0}", "substitute": "[{0}→{1}]", "delete": "[-{0}]", "insert": "[+{1}]"}
    chunks = align(units(reference, language), units(transcript, language))
    return joint.join(marks[c.kind].format(joint.join(c.reference), joint.join(c.hypothesis)) for c in chunks)


def error_table(scored: Sequence[Scored], language: str) -> pd.DataFrame:
    """Utterances with an error under the corpus protocol, worst first (rate, then number of errors)."""
    rows = []
    for s in scored:
        counts = s.metrics["corpus"]
        if counts["rate"] > 0:
            rows.append(
                {
                    "id": s.id,
                    **{f"{name}_rate": round(m["rate"], 4) for name, m in s.metrics.items()},
                    **{name: int(counts[name]) for name in COUNTS},
                    "audio_status": s.audio_status,
                    "seconds": s.seconds,
                    "reference": s.reference,
                    "transcript": s.transcript,
                    "alignment": alignment_text(s.reference, s.transcript, language),
                }
            )
    names = ["id", "corpus_rate", *COUNTS, "audio_status", "seconds", "reference", "transcript", "alignment"]
    table = pd.DataFrame(rows, columns=None if rows else names)
    if rows:
        errors = table["substitutions"] + table["deletions"] + table["insertions"]
        table = table.assign(_errors=errors).sort_values(
            ["corpus_rate", "_errors", "id"], ascending=[False, False, True], kind="stable"
        )
        table = table.drop(columns="_errors").reset_index(drop=True)
    return table


def summary_table(summary: dict) -> pd.DataFrame:
    """The metrics in percent, for printing."""
    rows = {
        name: {
            "error %": 100 * m["value"],
            f"{summary['bootstrap']['level']:.0%} low": 100 * m["low"],
            "high": 100 * m["high"],
            "by": m["aggregate"],
            "sub": m["substitutions"],
            "del": m["deletions"],
            "ins": m["insertions"],
            "units": m["n_ref"],
            "perfect": m["n_perfect"],
        }
        for name, m in summary["metrics"].items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")
