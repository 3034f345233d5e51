"""The tensors of the two models, request by request: checked, turned into items, and records turned into outputs.

``token2wav_asr``: TOKENS int32 [W] (padded), TOKEN_LENS int32 [1], GT_TEXT bytes [1]; optional PROMPT_KEY bytes [1]
and OPTIONS bytes [1] (JSON). ``sensevoice``: WAV float32 [L] at 16 kHz (padded), WAV_LENS int32 [1], GT_TEXT bytes
[1], optional OPTIONS. Both answer REWARDS float32 [1] (NaN if the system failed), TRANSCRIPTS, STATUS and DETAILS
bytes [1]. All have a batch dimension in front. Nothing here raises for a bad row: it gets its own status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving.items import Item, failure

TOKEN_MODEL = "token2wav_asr"
WAVE_MODEL = "sensevoice"
#: STATUS of an answer to ``OPTIONS {"info": true}``.
INFO = "info"
#: Longest reference; the longest spoken in 30 s has about 200 characters.
MAX_TEXT_BYTES = 8192
_OPTION_TYPES = {"ended": bool, "info": bool, "out_of_range": int}


@dataclass(frozen=True)
class Limits:
    """What a row may hold: speech tokens, and samples at 16 kHz."""

    max_tokens: int = 2048
    max_samples: int = 16000 * 120


class BadRow(ValueError):
    """A row that is answered with a status instead of being scored."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def read_request(model: str, data: Mapping[str, np.ndarray], limits: Limits) -> list[Item | RewardRecord | str]:
    """Turn one Triton request into its rows.

    Returns:
        Per row an item to score, a record if the row is bad, or :data:`INFO` if the row asks for information.
    """
    rows = max(len(tensor) for tensor in data.values())
    return [_read_row(model, data, row, limits) for row in range(rows)]


def _read_row(model: str, data: Mapping[str, np.ndarray], row: int, limits: Limits) -> Item | RewardRecord | str:
    item = Item(reference="", tokens=np.zeros(0, np.int32))
    try:
        options = _options(data, row)
        if options.get("info"):
            return INFO
        item.ended = options.get("ended", True)
        item.out_of_range = options.get("out_of_range", 0)
        item.reference = _text(data, "GT_TEXT", row)
        if not item.reference.strip():
            raise BadRow(Status.BAD_REFERENCE, "GT_TEXT is empty: an utterance needs a reference text")
        if model == TOKEN_MODEL:
            item.tokens = _sequence(data, "TOKENS", "TOKEN_LENS", row, limits.max_tokens)
            item.prompt_key = _text(data, "PROMPT_KEY", row) if "PROMPT_KEY" in data else ""
            # Without a key the text is it, so that all answers to one text share a prompt.
            item.prompt_key = item.prompt_key or item.reference
        else:
            item.tokens = None
            item.wave = _sequence(data, "WAV", "WAV_LENS", row, limits.max_samples)
    except BadRow as error:
        return failure(error.status, str(error), item)
    return item


def _sequence(data: Mapping[str, np.ndarray], name: str, lengths_name: str, row: int, most: int) -> np.ndarray:
    """The valid part of a padded row, copied out of shared memory."""
    for required in (name, lengths_name):
        if required not in data:
            raise BadRow(Status.BAD_REQUEST, f"{required} is missing")
    values, lengths = data[name], data[lengths_name]
    if values.ndim != 2 or lengths.size != len(lengths):
        raise BadRow(
            Status.BAD_REQUEST,
            f"{name} {list(values.shape)} with {lengths_name} {list(lengths.shape)}: expected [B, width] and [B, 1]",
        )
    length = int(lengths.reshape(-1)[row])
    if not 0 <= length <= values.shape[1]:
        raise BadRow(
            Status.BAD_REQUEST, f"{lengths_name} {length}: expected 0 to the width of {name}, {values.shape[1]}"
        )
    if length > most:
        raise BadRow(Status.BAD_REQUEST, f"{lengths_name} {length}: this server takes up to {most} (--max-tokens)")
    return values[row, :length].copy()


def _text(data: Mapping[str, np.ndarray], name: str, row: int) -> str:
    if name not in data:
        raise BadRow(Status.BAD_REQUEST, f"{name} is missing")
    values = data[name]
    if values.size != len(values):
        raise BadRow(Status.BAD_REQUEST, f"{name} {list(values.shape)}: expected [B, 1]")
    value = values.reshape(-1)[row]
    raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
    if len(raw) > MAX_TEXT_BYTES:
        raise BadRow(Status.BAD_REQUEST, f"{name} has {len(raw)} bytes, expected at most {MAX_TEXT_BYTES}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(Status.BAD_REQUEST, f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error


def _options(data: Mapping[str, np.ndarray], row: int) -> dict[str, Any]:
    raw = _text(data, "OPTIONS", row) if "OPTIONS" in data else ""
    if not raw:
        return {}
    try:
        options = json.loads(raw)
    except json.JSONDecodeError as error:
        raise BadRow(Status.BAD_REQUEST, f"OPTIONS is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise BadRow(Status.BAD_REQUEST, f"OPTIONS: found {type(options).__name__}, expected a JSON object")
    for key, value in options.items():
        if key not in _OPTION_TYPES or not isinstance(value, _OPTION_TYPES[key]):
            expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in _OPTION_TYPES.items())
            raise BadRow(Status.BAD_REQUEST, f"OPTIONS {key!r}: {value!r}: expected {expected}")
    return options


def write_response(records: list[RewardRecord | dict]) -> dict[str, np.ndarray]:
    """Outputs of one request, REWARDS first: the original recipe's client reads the first output.

    Args:
        records: one per row; a dictionary is the answer to an information row.
    """
    scores, transcripts, statuses, details = [], [], [], []
    for record in records:
        if isinstance(record, RewardRecord):
            scores.append(record.score)
            transcripts.append(record.transcript)
            statuses.append(Status(record.status).value)
            details.append(record.to_json())
        else:
            scores.append(0.0)
            transcripts.append("")
            statuses.append(INFO)
            details.append(json.dumps(record, ensure_ascii=False))
    return {
        "REWARDS": np.array(scores, dtype=np.float32).reshape(-1, 1),
        "TRANSCRIPTS": _bytes(transcripts),
        "STATUS": _bytes(statuses),
        "DETAILS": _bytes(details),
    }


def _bytes(texts: list[str]) -> np.ndarray:
    return np.array([text.encode("utf-8", "replace") for text in texts], dtype=object).reshape(-1, 1)
