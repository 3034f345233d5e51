"""Two systems on one test set: paired bootstrap, several seeds pooled.

python -m cosyvoice.evaluation.compare --before exp/a/eval/before --after exp/a/eval/step_20 --split test
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from .protocols import AGGREGATE
from .records import EvaluationError, read_jsonl, result_folder, write_json
from .scoring import Scored, columns
from .statistics import LEVEL, RESAMPLES, PairedTest, bootstrap, paired_bootstrap


def load_scores(directories: Sequence[str | Path], split: str) -> list[dict[str, Scored]]:
    """Scores by id, of each folder.

    Raises:
        EvaluationError: a split or its scores.jsonl is not there.
    """
    runs = []
    for directory in directories:
        path = result_folder(directory, split) / "scores.jsonl"
        if not path.is_file():
            raise EvaluationError(
                f"{path}: no such file; score it first: bash scripts/compute_wer.sh {directory} {split}"
            )
        runs.append({row["id"]: Scored.from_json(row) for row in read_jsonl(path)})
    return runs


def _matrix(runs: list[dict[str, Scored]], ids: list[str], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(numerator, denominator), each [seeds, U]."""
    pairs = [columns([run[name] for name in ids], metric) for run in runs]
    return np.stack([top for top, _ in pairs]), np.stack([bottom for _, bottom in pairs])


def _mean_seconds(runs: list[dict[str, Scored]], ids: list[str]) -> np.ndarray:
    """Mean duration [U] over the seeds that have one; NaN where none has."""
    seconds = np.array([[run[name].seconds or np.nan for name in ids] for run in runs], dtype=np.float64)
    known = np.isfinite(seconds).sum(0)
    return np.where(known > 0, np.nansum(seconds, 0) / np.maximum(known, 1), np.nan)


def compare_scores(
    before: list[dict[str, Scored]],
    after: list[dict[str, Scored]],
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> dict:
    """Paired comparison of two systems, each given as one ``{id: Scored}`` per seed.

    Utterances that some run lacks (skipped audio) are left out of all and counted.

    Returns:
        ``n_utterances``, ``n_left_out``, ``n_seeds`` (before, after), ``metrics``: name -> aggregate and
        ``statistics.PairedTest`` as a dict; ``duration_ratio``: value, low, high of the mean over utterances
        of after's seconds over before's, null if no utterance has both.

    Raises:
        EvaluationError: no run, or no utterance in common; references that differ.
    """
    if not before or not after:
        raise EvaluationError(
            f"comparison: found {len(before)} and {len(after)} runs, expected one at least of each"
        )
    runs = before + after
    everything = list(dict.fromkeys(name for run in runs for name in run))
    ids = [name for name in everything if all(name in run for run in runs)]
    if not ids:
        raise EvaluationError("comparison: the systems have no utterance in common")
    for name in ids:
        if len(texts := {run[name].reference for run in runs}) > 1:
            raise EvaluationError(f"comparison: utterance {name!r} has different references: {sorted(texts)}")
    metrics = {}
    for metric in runs[0][ids[0]].metrics:
        test: PairedTest = paired_bootstrap(
            _matrix(before, ids, metric), _matrix(after, ids, metric), resamples, seed, level
        )
        metrics[metric] = {"aggregate": AGGREGATE[metric], **test.to_json()}
    ratio = _mean_seconds(after, ids) / _mean_seconds(before, ids)
    ratio = ratio[np.isfinite(ratio)]
    duration = asdict(bootstrap(ratio, np.ones(ratio.size), resamples, seed, level)) if ratio.size else None
    return {
        "n_utterances": len(ids),
        "n_left_out": len(everything) - len(ids),
        "n_seeds": {"before": len(before), "after": len(after)},
        "metrics": metrics,
        "duration_ratio": duration,
        "bootstrap": {"resamples": resamples, "seed": seed, "level": level},
    }


def compare(
    before_dirs: Sequence[str | Path],
    after_dirs: Sequence[str | Path],
    split: str,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> dict:
    """``compare_scores`` on result folders; several folders of one system are its seeds, pooled."""
    before, after = load_scores(before_dirs, split), load_scores(after_dirs, split)
    return compare_scores(before, after, resamples, seed, level)


def comparison_table(comparison: dict) -> pd.DataFrame:
    """The comparison in percent, for printing."""

    def span(interval: dict) -> str:
        return f"{100 * interval['value']:.2f} ({100 * interval['low']:.2f}, {100 * interval['high']:.2f})"

    rows = {
        name: {
            "before %": span(m["before"]),
            "after %": span(m["after"]),
            "difference": span(m["difference"]),
            "relative %": span(m["relative"]),
            "p": f"{m['p_value']:.4f}",
        }
        for name, m in comparison["metrics"].items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", nargs="+", required=True, help="result folders of one system, one per seed"
    )
    parser.add_argument("--after", nargs="+", required=True, help="result folders of the other system")
    parser.add_argument("--split", required=True, help="test set: its name or path")
    parser.add_argument("--output", type=Path, help="write the comparison to this JSON file")
    parser.add_argument(
        "--resamples", type=int, default=RESAMPLES, help="bootstrap draws (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = get_parser().parse_args(argv)
    try:
        comparison = compare(args.before, args.after, args.split, args.resamples, args.seed)
    except EvaluationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.split}: {comparison['n_utterances']} utterances, {comparison['n_left_out']} left out, seeds "
        f"{comparison['n_seeds']['before']} and {comparison['n_seeds']['after']}"
    )
    print(comparison_table(comparison).to_string())
    if ratio := comparison["duration_ratio"]:
        print(f"duration after / before: {ratio['value']:.3f} ({ratio['low']:.3f}, {ratio['high']:.3f})")
    if args.output:
        write_json(args.output, comparison)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
