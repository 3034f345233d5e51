"""The report of a run: one HTML file that holds everything, to be opened from disk or sent by mail.

    python -m cosyvoice.evaluation.report exp/tiny

Curves of the training, the test sets before and after with intervals and a paired test, utterances to listen to,
guards, and what the run was made with. Written at any time: what is not there yet is left out. Beside it,
report.json holds the best checkpoint and the findings for scripts.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from . import guards
from .compare import compare_scores
from .guards import Finding
from .plots import interval_chart
from .records import EvaluationError, write_atomically, write_json
from .report_charts import training_charts
from .report_data import Run, System, load_run
from .report_examples import METRIC, examples
from .report_settings import commit, machine, seeds, versions

METRIC_NAMES = {
    "seed_tts": ("Seed-TTS-eval", "mean of the utterances' error rates, its punctuation rule"),
    "corpus": ("Corpus", "all errors over all reference units"),
    "pinyin": ("Pinyin, toned", "the reward's units, heard by the held-out recogniser"),
    "pinyin_toneless": ("Pinyin, toneless", "the same without tones"),
}


@dataclass(frozen=True)
class Comparison:
    """One test set: the chosen checkpoint against the model before training."""

    split: str
    recogniser: str
    step: int
    result: dict
    chart: str
    facts: list[tuple[str, str, str]]


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    args = get_parser().parse_args(argv)
    try:
        target = write_report(args.run_dir, args.output, args.examples, args.seed, not args.no_audio)
    except EvaluationError as error:
        print(f"error: {error}")
        return 1
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")
    return 0


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write the report of a run as one self-contained HTML file, with report.json beside it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, help="run folder, exp/<name>")
    parser.add_argument("--output", type=Path, help="HTML file; None: RUN_DIR/report.html")
    parser.add_argument("--examples", type=int, default=4, help="utterances to listen to, of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice of utterances")
    parser.add_argument("--no-audio", action="store_true", help="leave the sound out: a small file")
    return parser


def write_report(
    run_dir: Path, output: Path | None = None, n_examples: int = 4, seed: int = 0, with_audio: bool = True
) -> Path:
    """Read a run and write its report; returns the HTML file's path.

    Raises:
        EvaluationError: no such folder, damaged scores, systems that were scored on different references.
    """
    run = load_run(run_dir)
    target = output or run.path / "report.html"
    best = best_system(run)
    comparisons = compare_all(run, best) if best else []
    findings = find(run, best, comparisons)
    sounds = {}
    if best and run.before and comparisons:
        split = comparisons[0].split
        sounds = examples(run.before.sets[split], best.sets[split], n_examples, seed, with_audio)
    page = _template().render(
        run=run,
        title=run.path.name,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        commit=commit(),
        machine=machine(),
        tiles=tiles(run, comparisons),
        findings=findings,
        charts=training_charts(run),
        comparisons=comparisons,
        checkpoints=checkpoint_table(run, best),
        alone=_alone(run, comparisons),
        metric_names=METRIC_NAMES,
        examples=sounds,
        versions=versions(),
        seeds=seeds(run),
        config=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
    )
    write_atomically(target, lambda file: file.write(page))
    write_json(target.with_suffix(".json"), _facts(best, comparisons, findings))
    return target


def best_system(run: Run) -> System | None:
    """The trained checkpoint with the lowest held-out error, on the first test set that all of them have."""
    trained = run.trained
    shared = [name for name in trained[0].sets if all(name in one.sets for one in trained)] if trained else []
    if not shared:
        return trained[-1] if trained else None
    errors = {one.step: _value(one, shared[0]) for one in trained}
    step = guards.best_step(errors)
    return next(one for one in trained if one.step == step)


def _value(system: System, split: str, metric: str = METRIC) -> float:
    return system.sets[split].summary["metrics"][metric]["value"]


def compare_all(run: Run, best: System) -> list[Comparison]:
    """The best checkpoint against the model before training, on each test set that both have."""
    found = []
    for split, after in best.sets.items() if run.before else ():
        if split not in run.before.sets:
            continue
        before = run.before.sets[split]
        result = compare_scores([before.scores], [after.scores])
        systems = [run.before, *[one for one in run.trained if split in one.sets]]
        metrics = [one.sets[split].summary["metrics"][METRIC] for one in systems]
        chart = interval_chart(
            ["before", *[f"step {one.step}" for one in systems[1:]]],
            [(m["value"], m["low"], m["high"]) for m in metrics],
            f"corpus error rate on {split} with intervals",
        )
        recogniser = Path(after.summary.get("recogniser", "unknown")).name
        facts = _facts_of(before.summary, after.summary, result)
        found.append(Comparison(split, recogniser, best.step, result, chart, facts))
    return found


def _facts_of(before: dict, after: dict, result: dict) -> list[tuple[str, str, str]]:
    """Rows (what, before, after) of everything but the error rates."""
    rows = [("Utterances", f"{before['n_utterances']}", f"{after['n_utterances']}")]
    rows.append(("Without usable audio", f"{before['n_missing']}", f"{after['n_missing']}"))
    rows.append(("Seconds of speech", f"{before['seconds']:.0f}", f"{after['seconds']:.0f}"))
    if ratio := result["duration_ratio"]:
        span = f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        rows.append(("Length, after over before", "1", span))
    old, new = before.get("tokens"), after.get("tokens")
    if old and new:
        rows.append(("Stops by itself", f"{100 * old['ended']:.1f} %", f"{100 * new['ended']:.1f} %"))
        rows.append(("Distinct speech tokens", f"{old['distinct']:,}", f"{new['distinct']:,}"))
        rows.append(
            ("Entropy of the tokens, bits", f"{old['entropy_bits']:.2f}", f"{new['entropy_bits']:.2f}")
        )
        pairs = f"{100 * old['distinct_pairs']:.1f} %", f"{100 * new['distinct_pairs']:.1f} %"
        rows.append(("Distinct neighbouring pairs", *pairs))
        rows.append(("Longest run of one token", f"{old['longest_run']}", f"{new['longest_run']}"))
    for key, label in (("speaker_similarity", "Speaker similarity to the prompt"), ("mos", "Predicted MOS")):
        if key in before and key in after:
            rows.append((label, f"{before[key]['mean']:.3f}", f"{after[key]['mean']:.3f}"))
    return rows


def checkpoint_table(run: Run, best: System | None) -> list[dict]:
    """A row for each evaluated system and test set, with every metric; of use from two checkpoints up."""
    if len(run.trained) < 2:
        return []
    return [
        {
            "split": split,
            "name": "before" if one is run.before else f"step {one.step}",
            "best": one is best,
            "metrics": one.sets[split].summary["metrics"],
        }
        for split in dict.fromkeys(name for one in run.systems for name in one.sets)
        for one in run.systems
        if split in one.sets
    ]


def _alone(run: Run, comparisons: list[Comparison]) -> list[dict]:
    """Systems that have nothing to be compared with yet."""
    if comparisons:
        return []
    return [
        {"name": one.name, "split": split, "summary": found.summary}
        for one in run.systems
        for split, found in one.sets.items()
    ]


def find(run: Run, best: System | None, comparisons: list[Comparison]) -> list[Finding]:
    """Everything that the guards say about a run."""
    reward = run.get("reward/score/mean", "critic/score/mean", "critic/rewards/mean")
    lengths = run.get("reward/n_tokens/mean", "response_length/mean")
    first = comparisons[0] if comparisons else None
    difference = first.result["metrics"][METRIC]["difference"] if first else None
    ratio = first.result["duration_ratio"] if first else None
    findings = guards.reward_against_error(reward, difference)
    findings += guards.length_drift(ratio["value"] if ratio else None, lengths)
    if first and best and run.before:
        old, new = (one.sets[first.split].summary for one in (run.before, best))
        findings += guards.diversity_loss(old.get("tokens"), new.get("tokens"))
    findings += guards.training_health(
        run.get("reward/zero_variance_share"),
        run.get("reward/non_stop_share"),
        run.get("reward/failed"),
        run.get("actor/grad_norm"),
    )
    findings += guards.selection_note(len(run.trained), len(comparisons))
    return findings


def tiles(run: Run, comparisons: list[Comparison]) -> list[dict]:
    """The few numbers at the head of the page: label, value, detail, tone ("good", "bad" or "")."""
    shown = []
    for one in comparisons[:2]:
        test = one.result["metrics"][METRIC]
        change = test["difference"]
        tone = "good" if change["high"] < 0 else "bad" if change["low"] > 0 else ""
        shown.append(
            {
                "label": f"Held-out error, {one.split}",
                "value": f"{100 * test['before']['value']:.2f} → {100 * test['after']['value']:.2f} %",
                "detail": f"{signed(change['value'])} points, 95 % interval {signed(change['low'])} to "
                f"{signed(change['high'])}",
                "tone": tone,
            }
        )
    reward = run.get("reward/score/mean", "critic/score/mean")
    if reward is not None:
        means = guards.ends(reward) or (reward.values[0], reward.values[-1], 0.0)
        shown.append(
            {
                "label": "Mean reward",
                "value": f"{means[0]:.3f} → {means[1]:.3f}",
                "detail": "first and last fifth of the run",
                "tone": "",
            }
        )
        seconds = run.get("timing_s/step")
        detail = f"{np.median(seconds.values):.1f} s a step" if seconds is not None else "logged"
        shown.append(
            {"label": "Training steps", "value": f"{reward.steps[-1]:,}", "detail": detail, "tone": ""}
        )
    if comparisons:
        n = len(run.trained)
        detail = f"lowest held-out error of {n}" if n > 1 else "the only one evaluated"
        shown.append(
            {"label": "Best checkpoint", "value": f"step {comparisons[0].step}", "detail": detail, "tone": ""}
        )
    return shown


def signed(share: float, digits: int = 2) -> str:
    """A difference in percent points with its sign; the minus is the typographic one."""
    return f"{100 * share:+.{digits}f}".replace("-", "−")


def _facts(best: System | None, comparisons: list[Comparison], findings: list[Finding]) -> dict:
    return {
        "best_step": best.step if best else None,
        "metric": METRIC,
        "comparisons": {one.split: one.result for one in comparisons},
        "findings": [asdict(finding) for finding in findings],
    }


def _template():
    environment = Environment(
        loader=PackageLoader("cosyvoice.evaluation", "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda value, digits=2: f"{100 * value:.{digits}f}"
    environment.filters["signed"] = signed
    return environment.get_template("report_template.html")


if __name__ == "__main__":
    raise SystemExit(main())
