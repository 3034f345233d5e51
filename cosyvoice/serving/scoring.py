"""Score a file with a reward server: the body of ``reward_tts.py data.jsonl``."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cosyvoice.reward.record import RewardRecord
from cosyvoice.serving.client import ClientOptions, RewardClient, RewardSystemError
from cosyvoice.serving.items import failure
from cosyvoice.speech_tokens import parse

SAMPLE_RATE = 16000


@dataclass(frozen=True)
class Row:
    """A line of the input: an id, a text, and either speech tokens or an audio file."""

    id: str
    text: str
    tokens: list[int] | None = None
    ended: bool = True
    out_of_range: int = 0
    audio: Path | None = None


def read_rows(path: Path) -> list[Row]:
    """Read a JSONL with ``text`` and ``code`` or ``audio``, optionally ``id``.

    Raises:
        ValueError: a line is not JSON or lacks a key; the message names file and line.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line), number, path.parent))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: found no line, expected JSON objects with text and code or audio")
    return rows


def _row(values: dict, number: int, folder: Path) -> Row:
    text = values.get("text")
    if not isinstance(text, str):
        raise ValueError(f"key 'text': found {text!r}, expected a string")
    name = str(values.get("id", number))
    if "audio" in values:
        return Row(name, text, audio=folder / values["audio"])
    code = values.get("code")
    if isinstance(code, str):
        parsed = parse(code)
        # A written sequence need not end with an end token: what is in a file has ended.
        return Row(name, text, list(parsed.ids), out_of_range=len(parsed.out_of_range) + len(parsed.unknown))
    if not isinstance(code, list) or not all(isinstance(value, int) for value in code):
        raise ValueError(f"key 'code': found {str(code)[:60]!r}, expected a list of ids or \"<|s_1|>...\"")
    return Row(name, text, code)


def read_audio(path: Path) -> np.ndarray:
    """A recording as float32 [L] at 16 kHz."""
    from cosyvoice.frontend import load_audio  # torch: only who scores audio waits for it

    return load_audio(path, SAMPLE_RATE)[0]


async def score_file(
    path: Path, urls: str, options: ClientOptions, concurrency: int, output: Path | None = None
) -> int:
    """Score every line, show progress, print a table and the throughput.

    Returns:
        0 if every line got a score, 1 if some did not (the table says why).
    """
    rows = read_rows(path)
    began = time.monotonic()
    async with RewardClient(urls, options) as client:
        records = await _score_rows(rows, client, concurrency)
    seconds = time.monotonic() - began
    if output is not None:
        write_records(output, rows, records)
    print(format_table(records, seconds))
    return int(any(record.status.is_system for record in records))


async def _score_rows(rows: list[Row], client: RewardClient, concurrency: int) -> list[RewardRecord]:
    limit = asyncio.Semaphore(concurrency)
    bar = tqdm(total=len(rows), desc="scored", unit="utterance")

    async def one(row: Row) -> RewardRecord:
        async with limit:
            try:
                return await _ask(row, client)()
            except RewardSystemError as error:
                return failure(error.status, str(error))
            finally:
                bar.update()

    try:
        return list(await asyncio.gather(*[one(row) for row in rows]))
    finally:
        bar.close()


def _ask(row: Row, client: RewardClient) -> Callable[[], Awaitable[RewardRecord]]:
    if row.audio is None:
        return lambda: client.score(
            row.tokens, row.text, prompt_key=row.id, ended=row.ended, out_of_range=row.out_of_range
        )
    wave = read_audio(row.audio)
    return lambda: client.recognise(wave, row.text)


def write_records(path: Path, rows: list[Row], records: list[RewardRecord]) -> None:
    """One JSON object per line: ``id``, ``text`` and the record. Appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row, record in zip(rows, records):
            line = {"id": row.id, "text": row.text, **json.loads(record.to_json())}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def format_table(records: list[RewardRecord], seconds: float) -> str:
    """Statuses with counts, score and error rates, then throughput and what failed."""
    counts = Counter(record.status for record in records)
    lines = [f"{'status':<14}{'count':>7}{'score':>8}{'wer':>8}{'toneless':>10}{'cer':>8}{'audio s':>9}"]
    for status, count in counts.most_common():
        chosen = [record for record in records if record.status is status]
        lines.append(_line(status.value, count, chosen))
    lines.append(_line("all", len(records), [record for record in records if not record.status.is_system]))
    audio = sum(record.seconds for record in records)
    lines.append(
        f"{len(records)} utterances in {seconds:.1f} s: {len(records) / seconds:.1f} utterances/s, "
        f"{audio / seconds:.1f} s of audio per second"
    )
    message = next((record.message for record in records if record.status.is_system), "")
    if message:
        lines.append(f"first failure: {message}")
    return "\n".join(lines)


def _line(name: str, count: int, records: list[RewardRecord]) -> str:
    means = [
        _mean([record.score for record in records]),
        _mean([record.wer for record in records]),
        _mean([record.wer_toneless for record in records]),
        _mean([record.cer for record in records]),
        _mean([record.seconds for record in records]),
    ]
    cells = "".join(f"{value:>{width}.3f}" for value, width in zip(means, (8, 8, 10, 8, 9)))
    return f"{name:<14}{count:>7}{cells}"


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
