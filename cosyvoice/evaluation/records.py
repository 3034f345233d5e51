"""The files of an evaluated test set, written by synthesis and by scoring, read by both and by the report.

    DIR/<split>/                one system (DIR) on one test set
      utterances.jsonl          synthesis, one line per utterance:
                                id, text, language, prompt_key, prompt_text, prompt_audio, tokens (list of
                                int), n_tokens, ended (an end token was reached), seconds, seed, error (null
                                or a sentence)
      wav/<id>.wav              24 kHz; absent where error is set
      transcripts.jsonl         recognition: id, transcript, audio_status, message, seconds
      scores.jsonl              scoring, one line per utterance:
                                id, reference, transcript, audio_status, seconds,
                                metrics: {name: {rate, substitutions, deletions, insertions, n_ref}}
      summary.json              values with intervals; see ``scoring.summarise``
      errors.tsv                utterances with errors, worst first, with their alignments

``audio_status`` is ok, missing (no file), unreadable (not audio, or NaN in it) or empty (under 0.1 s).
All files are written under another name first and then renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO


class EvaluationError(ValueError):
    """A test set or a result folder that cannot be used. The message names file, line, found and expected."""


def split_name(split: str) -> str:
    """Name of a test set's result folder: the split itself, or the stem of a path.

    >>> split_name("zero_shot_zh"), split_name("data/test.jsonl"), split_name("sets/news/")
    ('zero_shot_zh', 'test', 'news')
    """
    name = Path(split).name
    return name.removesuffix(".jsonl")


def check_id(value: object, where: str) -> str:
    """An utterance id names a file, so it must be a plain file name.

    Raises:
        EvaluationError: not a string, empty, or with a path separator.
    """
    if (
        not isinstance(value, str)
        or not value
        or value.startswith(".")
        or any(c in value for c in "/\\\0\n\t")
    ):
        raise EvaluationError(
            f"{where}: 'id': found {value!r}, expected a name without / and white space controls"
        )
    return value


def write_atomically(path: str | Path, write: Callable[[IO[str]], object]) -> None:
    """Call ``write`` with a text file that takes the name ``path`` once it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> None:
    """Write one JSON object per line."""
    write_atomically(
        path, lambda file: file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    )


def write_json(path: str | Path, value: object) -> None:
    """Write one indented JSON document; NaN becomes null."""
    write_atomically(
        path, lambda file: file.write(json.dumps(_finite(value), ensure_ascii=False, indent=2) + "\n")
    )


def _finite(value: object) -> object:
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_jsonl(path: str | Path) -> list[dict]:
    """Read rows that have unique ``id``s.

    Raises:
        EvaluationError: no such file, a line that is not an object, a bad or repeated id.
    """
    path = Path(path)
    if not path.is_file():
        raise EvaluationError(f"{path}: no such file")
    rows, lines = [], {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvaluationError(f"{path} line {number}: found no JSON object: {error}") from error
        if not isinstance(row, dict):
            raise EvaluationError(f"{path} line {number}: found {type(row).__name__}, expected a JSON object")
        name = check_id(row.get("id"), f"{path} line {number}")
        if name in lines:
            raise EvaluationError(
                f"{path} line {number}: found the id {name!r} again, first in line {lines[name]}"
            )
        lines[name] = number
        rows.append(row)
    return rows


def result_folder(directory: str | Path, split: str) -> Path:
    """Folder of a split that was synthesised.

    Raises:
        EvaluationError: there is none; the message lists those that are there.
    """
    directory = Path(directory)
    folder = directory / split_name(split)
    if not folder.is_dir():
        known = sorted(p.parent.name for p in directory.glob("*/utterances.jsonl"))
        raise EvaluationError(
            f"{directory}: found no split {split_name(split)!r}, known here: {known or 'none'}"
        )
    return folder
