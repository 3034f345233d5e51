"""Texts (JSON or JSONL) to the parquet rows that veRL trains on, streamed.

A row that cannot be trained on is refused with its place in the file. The texts become prompts, so a text
that holds a control token of the model would steer the model instead of being spoken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ijson
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from cosyvoice.hashing import sha256_of
from cosyvoice.speech_tokens import find_control_tokens

logger = logging.getLogger(__name__)

BATCH_ROWS = 8192
SHOWN_REFUSALS = 10
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("text", pa.string())])),
    ]
)
"""The columns of veRL's RL data set. Stated, not inferred, so that every batch and file has the same."""


class DataError(ValueError):
    """A data file that cannot be used; the message names file, line, found and expected."""


class BadRow(ValueError):
    """One refused row: ``reason`` is what is counted, the message what is shown."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Written:
    """What `write_parquet` made of one input file. `texts` are digests, for finding duplicates."""

    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    input_sha256: str = ""
    output_sha256: str = ""
    duplicates: int = 0
    texts: set[bytes] = field(default_factory=set)


class _HashedReader:
    """A binary file whose bytes are hashed and shown on a progress bar as they are read."""

    def __init__(self, stream: BinaryIO, bar: tqdm) -> None:
        self.stream, self.bar, self.sha256 = stream, bar, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        return self._seen(self.stream.read(size))

    def lines(self) -> Iterator[bytes]:
        return map(self._seen, self.stream)

    def _seen(self, data: bytes) -> bytes:
        self.sha256.update(data)
        self.bar.update(len(data))
        return data


def check_text(row: Any, max_chars: int) -> str:
    """The text of a parsed row, as it stands.

    Raises:
        BadRow: no ``text``, not a string, empty, too long, not encodable, or with control tokens in it.
    """
    if not isinstance(row, dict):
        raise BadRow("no object", f'found {type(row).__name__}, expected an object with the key "text"')
    if "text" not in row:
        raise BadRow("no text", f'no key "text", found {sorted(map(str, row))}')
    text = row["text"]
    if not isinstance(text, str):
        raise BadRow("not a string", f'"text" is {type(text).__name__}, expected a string')
    if not text.strip():
        raise BadRow("empty", '"text" is empty')
    if found := find_control_tokens(text):
        raise BadRow("control tokens", f'"text" holds the model\'s control token {found[0]}')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("broken UTF-8", '"text" holds half of a surrogate pair') from None
    if len(text) > max_chars:
        raise BadRow("too long", f'"text" has {len(text)} characters, expected at most {max_chars}')
    return text


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRow("broken UTF-8", f"byte {error.start + 1} of the line is not UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRow("broken JSON", f"not JSON: {error}") from None


def _rows(path: Path, reader: _HashedReader, is_array: bool) -> Iterator[tuple[str, Any]]:
    """(place, parsed row or BadRow) for each row; the place is "file:line" or "file, item n"."""
    if is_array:
        try:
            for number, row in enumerate(ijson.items(reader, "item"), 1):
                yield f"{path}, item {number}", row
        except (ijson.JSONError, UnicodeDecodeError) as error:  # a broken array has no next row to go on with
            raise DataError(f"{path}: not a JSON array: {error}") from None
        return
    for number, line in enumerate(reader.lines(), 1):
        if line.strip():
            try:
                row = _parse_line(line)
            except BadRow as bad:
                row = bad
            yield f"{path}:{number}", row


def read_texts(
    path: Path, *, max_chars: int, on_bad_row: str, written: Written, progress: bool = True
) -> Iterator[str]:
    """The texts of a JSONL file or of a JSON array of objects, one at a time; counts go to ``written``.

    Raises:
        DataError: a refused row with ``on_bad_row`` "error"; a broken array; a file without any text.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with (
        path.open("rb") as stream,
        tqdm(
            total=path.stat().st_size, unit="B", unit_scale=True, desc=path.name, disable=not progress
        ) as bar,
    ):
        start = stream.read(4096)
        stream.seek(0)
        reader = _HashedReader(stream, bar)
        if start.startswith(BYTE_ORDER_MARK):
            reader.read(len(BYTE_ORDER_MARK))
        is_array = start.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["
        for place, row in _rows(path, reader, is_array):
            try:
                if isinstance(row, BadRow):
                    raise row
                text = check_text(row, max_chars)
            except BadRow as bad:
                if on_bad_row == "error":
                    raise DataError(f"{place}: {bad}") from None
                written.refused[bad.reason] += 1
                if written.refused.total() <= SHOWN_REFUSALS:
                    logger.warning("%s: left out: %s", place, bad)
                continue
            written.rows += 1
            yield text
        written.input_sha256 = reader.sha256.hexdigest()
    if not written.rows:
        raise DataError(
            f'{path}: no usable row among {written.refused.total()}, expected at least one with a "text"'
        )


def make_batch(texts: list[str], first_index: int, split: str, data_source: str) -> pa.RecordBatch:
    """Rows of veRL's schema for ``texts``, which are rows ``first_index`` and following of ``split``."""
    rows = [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": text}, {"role": "assistant", "content": ""}],
            "ability": "text-to-speech",
            "reward_model": {"style": "rule", "ground_truth": text},
            "extra_info": {"split": split, "index": index, "text": text},
        }
        for index, text in enumerate(texts, first_index)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def write_parquet(
    source: Path,
    target: Path,
    *,
    split: str,
    data_source: str,
    max_chars: int,
    on_bad_row: str,
    other_texts: Iterable[bytes] = (),
    keep_texts: bool = False,
    progress: bool = True,
) -> Written:
    """Stream ``source`` into the parquet file ``target``, which the caller moves to its name.

    Args:
        other_texts: digests of texts that are counted as duplicates if they turn up here.
        keep_texts: return this file's digests (16 bytes a row) in ``Written.texts``.
    """
    written, other, batch = Written(), frozenset(other_texts), []
    with pq.ParquetWriter(target, SCHEMA, compression="zstd") as writer:
        texts = read_texts(
            source, max_chars=max_chars, on_bad_row=on_bad_row, written=written, progress=progress
        )
        for text in texts:
            if other or keep_texts:
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                written.duplicates += digest in other
                if keep_texts:
                    written.texts.add(digest)
            batch.append(text)
            if len(batch) == BATCH_ROWS:
                writer.write_batch(make_batch(batch, written.rows - len(batch), split, data_source))
                batch = []
        if batch:
            writer.write_batch(make_batch(batch, written.rows - len(batch), split, data_source))
    written.output_sha256 = sha256_of(target)
    return written


def upload(files: Iterable[Path], url: str) -> None:
    """Copy files to a folder that fsspec knows by its URL (hdfs://, s3://, file:// ...).

    A file gets its own name only when it is there whole.
    """
    import fsspec

    system, folder = fsspec.core.url_to_fs(url)
    system.makedirs(folder, exist_ok=True)
    for file in files:
        target = f"{folder.rstrip('/')}/{file.name}"
        system.put_file(os.fspath(file), target + ".part")
        system.mv(target + ".part", target)
