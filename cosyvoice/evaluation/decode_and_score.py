"""Recognise and score one test set of one system; the command line is scripts/offline-decode-files.py."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from ..frontend.audio import AudioError
from .protocols import LANGUAGES
from .recognise import KINDS, Recognised, find_model, load_recogniser, recognise
from .records import (
    EvaluationError,
    check_id,
    read_jsonl,
    result_folder,
    split_name,
    write_atomically,
    write_json,
    write_jsonl,
)
from .scoring import error_table, score, summarise, summary_table, token_diversity
from .statistics import RESAMPLES


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Recognise the WAV files of a test set with sherpa-onnx; print error rates with "
        "intervals. Writes transcripts.jsonl, scores.jsonl, summary.json and errors.tsv beside "
        "utterances.jsonl.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("directory", help="result folder of a system; <directory>/<split>/wav/<id>.wav are recognised")
    add("split", help="name or path of the test set, as given to infer_dataset.py")
    add(
        "--language", choices=LANGUAGES, help="None: as the utterances say, else by the split's name, else zh"
    )
    add("--references", type=Path, help="texts: JSONL (id, text) or Kaldi text; None: utterances.jsonl")
    add("--wav-dir", type=Path, help="folder of <id>.wav; None: <directory>/<split>/wav")
    add("--judge", type=Path, help="folder of a sherpa-onnx recogniser; None: Paraformer zh from the hub")
    add("--recogniser", choices=("auto", *KINDS), default="auto", help="kind of network in --judge")
    add("--num-threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="of the recogniser")
    add("--provider", default="cpu", help="of the recogniser: cpu or cuda")
    add("--batch-size", type=int, default=16, help="files recognised at once")
    add("--score-only", action="store_true", help="take the transcripts of an earlier run")
    add("--skip-missing", action="store_true", help="leave out utterances without usable audio")
    add("--resamples", type=int, default=RESAMPLES, help="bootstrap draws")
    add("--seed", type=int, default=0, help="of the bootstrap draws")
    add("--workers", type=int, default=max(1, os.cpu_count() or 1), help="processes that normalise texts")
    add("--speaker-model", type=Path, help="campplus.onnx: also measure the similarity to the prompt")
    add("--mos-model", type=Path, help="ONNX MOS predictor on 16 kHz waves: also predict a MOS")
    add("--worst", type=int, default=50, help="number of worst utterances to print")
    add("--no-progress", action="store_true", help="no progress bars")
    return parser


def read_references(path: Path) -> list[dict]:
    """Rows with id and text, from JSONL or Kaldi's text format (id, white space, text).

    Raises:
        EvaluationError: no such file; a row without text; a repeated id.
    """
    if path.suffix == ".jsonl" or not path.is_file():
        rows = read_jsonl(path)
    else:
        rows, seen = [], set()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            name, _, text = line.strip().partition(" ")
            if not name:
                continue
            if check_id(name, f"{path} line {number}") in seen:
                raise EvaluationError(f"{path} line {number}: found the id {name!r} again")
            seen.add(name)
            rows.append({"id": name, "text": text.strip()})
    for row in rows:
        if not isinstance(row.get("text"), str) or not row["text"].strip():
            raise EvaluationError(f"{path}: utterance {row['id']!r}: 'text': found {row.get('text')!r}")
    if not rows:
        raise EvaluationError(f"{path}: found no utterance, expected one at least")
    return rows


def pick_language(args: argparse.Namespace, rows: list[dict], split: str) -> str:
    """The language asked for, else what the utterances say, else what the split's name ends on, else zh.

    Raises:
        EvaluationError: the utterances name several languages, or one that has no protocol.
    """
    if args.language:
        return args.language
    named = {row["language"] for row in rows if row.get("language")}
    if len(named) > 1 or named - set(LANGUAGES):
        raise EvaluationError(
            f"split {split!r}: found languages {sorted(named)}, expected one of {LANGUAGES}"
        )
    return named.pop() if named else "en" if split.endswith("_en") else "zh"


def measured(args: argparse.Namespace, rows: list[dict], wav_dir: Path) -> dict[str, dict[str, float]]:
    """Optional measures per utterance; nothing asked, nothing loaded."""
    if not args.speaker_model and not args.mos_model:
        return {}
    from ..checkpoint import CheckpointError  # torch: seconds that plain scoring need not wait for
    from . import measures

    try:
        similarity = measures.speaker_similarity(args.speaker_model) if args.speaker_model else None
        mos = measures.mos_predictor(args.mos_model) if args.mos_model else None
        return measures.measure(rows, wav_dir, similarity, mos, not args.no_progress)
    except (CheckpointError, AudioError) as error:
        raise EvaluationError(str(error)) from error


def run(args: argparse.Namespace) -> dict:
    """Recognise, score and write; returns the summary."""
    split = split_name(args.split)
    if args.references and args.wav_dir:
        folder = Path(args.directory) / split
    else:
        folder = result_folder(args.directory, args.split)
    rows = read_references(args.references or folder / "utterances.jsonl")
    references = {row["id"]: row["text"] for row in rows}
    language = pick_language(args, rows, split)
    wav_dir = args.wav_dir or folder / "wav"
    if args.score_only:
        names = Recognised.__dataclass_fields__
        stored = read_jsonl(folder / "transcripts.jsonl")
        transcripts = [Recognised(**{name: row[name] for name in names}) for row in stored]
        recogniser = "as before"
    else:
        model = find_model(args.judge)
        network = load_recogniser(model, args.recogniser, language, args.num_threads, args.provider)
        transcripts = recognise(network, list(references), wav_dir, args.batch_size, not args.no_progress)
        write_jsonl(folder / "transcripts.jsonl", (t.to_json() for t in transcripts))
        recogniser = str(args.judge or model.name)
    # A process costs about a second to start: not worth it for a few texts.
    workers = args.workers if len(references) >= 1000 else 1
    scored = score(references, transcripts, language, args.skip_missing, workers)
    extra = measured(args, rows, wav_dir)
    summary = {
        "split": split,
        "language": language,
        "recogniser": recogniser,
        "skip_missing": args.skip_missing,
        **summarise(scored, args.resamples, args.seed),
    }
    if tokens := [row["tokens"] for row in rows if row.get("tokens")]:
        ended = sum(bool(row.get("ended")) for row in rows) / len(rows)
        summary["tokens"] = {**token_diversity(tokens), "ended": ended}
    for name in ("speaker_similarity", "mos"):
        if values := [found[name] for found in extra.values() if name in found]:
            summary[name] = {"mean": float(np.mean(values)), "n": len(values)}
    table = error_table(scored, language)
    write_jsonl(folder / "scores.jsonl", ({**s.to_json(), **extra.get(s.id, {})} for s in scored))
    write_atomically(folder / "errors.tsv", lambda file: table.to_csv(file, sep="\t", index=False))
    write_json(folder / "summary.json", summary)
    print_summary(summary, table, args.worst)
    return summary


def print_summary(summary: dict, table, worst: int) -> None:
    """The tables that people read: both protocols, what is missing, the worst utterances."""
    print(f"{summary['split']}: {summary['n_utterances']} utterances, recogniser {summary['recogniser']}")
    print(summary_table(summary).to_string(float_format="%.2f"))
    missing = "left out" if summary["skip_missing"] else "counted as all deleted"
    if summary["n_missing"]:
        print(f"{summary['n_missing']} without usable audio, {missing}:")
        for item in summary["missing"][:20]:
            print(f"  {item['id']}: {item['reason']}")
    for name in ("speaker_similarity", "mos"):
        if name in summary:
            print(f"{name}: {summary[name]['mean']:.4f} over {summary[name]['n']} utterances")
    if worst and len(table):
        shown = table.head(worst)
        print(f"the {len(shown)} worst of {len(table)} utterances with errors (all: errors.tsv):")
        for row in shown.itertuples():
            print(f"  {100 * row.corpus_rate:6.1f} %  {row.id}  {row.alignment}")


def main(argv: list[str] | None = None) -> int:
    args = get_parser().parse_args(argv)
    try:
        run(args)
    except EvaluationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
