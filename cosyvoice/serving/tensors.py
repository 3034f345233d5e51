"""The client's side of the wire: request tensors in KServe's binary form, and answers read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.http import InferInput, InferResult

from cosyvoice.reward.record import RewardRecord
from cosyvoice.serving.wire import INFO

#: Waveforms are padded to whole multiples of this many samples (4 s), so that some can share a batch.
WAVE_STEP = 64000


def token_inputs(
    tokens: Sequence[int], reference: str, *, width: int, prompt_key: str = "", options: Mapping[str, Any]
) -> list[InferInput]:
    """Tensors of one ``token2wav_asr`` request, batch of one.

    Always all of them, and rows of one width: Triton merges only requests that look the same.

    Raises:
        ValueError: more tokens than ``width``, or one that no int32 holds.
    """
    if len(tokens) > width:
        raise ValueError(f"{len(tokens)} speech tokens: expected at most the server's {width}")
    row = np.zeros((1, width), np.int32)
    values = np.asarray(tokens, np.int64)
    if values.size and np.abs(values).max() > np.iinfo(np.int32).max:
        raise ValueError(f"speech token {int(values[np.abs(values).argmax()])}: expected an int32")
    row[0, : len(tokens)] = values
    return [
        _tensor("TOKENS", row, "INT32"),
        _tensor("TOKEN_LENS", np.array([[len(tokens)]], np.int32), "INT32"),
        _text("GT_TEXT", reference),
        _text("PROMPT_KEY", prompt_key),
        _text("OPTIONS", json.dumps(options)),
    ]


def wave_inputs(wave: np.ndarray, reference: str, options: Mapping[str, Any] | None = None) -> list[InferInput]:
    """Tensors of one ``sensevoice`` request: float32 [L] at 16 kHz."""
    wave = np.asarray(wave, np.float32)
    if wave.ndim != 1:
        raise ValueError(f"waveform: found shape {list(wave.shape)}, expected one dimension [L]")
    row = np.zeros((1, max(1, -(-len(wave) // WAVE_STEP)) * WAVE_STEP), np.float32)
    row[0, : len(wave)] = wave
    return [
        _tensor("WAV", row, "FP32"),
        _tensor("WAV_LENS", np.array([[len(wave)]], np.int32), "INT32"),
        _text("GT_TEXT", reference),
        _text("OPTIONS", json.dumps(options or {})),
    ]


def read_answer(answer: InferResult) -> RewardRecord | dict[str, Any]:
    """The record of an answer, or the dictionary that answers ``OPTIONS {"info": true}``."""
    status = answer.as_numpy("STATUS").reshape(-1)[0].decode()
    details = answer.as_numpy("DETAILS").reshape(-1)[0].decode()
    return json.loads(details) if status == INFO else RewardRecord.from_json(details)


def _tensor(name: str, values: np.ndarray, kind: str) -> InferInput:
    tensor = InferInput(name, list(values.shape), kind)
    tensor.set_data_from_numpy(values)
    return tensor


def _text(name: str, text: str) -> InferInput:
    return _tensor(name, np.array([[text.encode()]], dtype=object), "BYTES")
