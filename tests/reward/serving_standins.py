"""Stand-in workers for the serving tests: no model, just the behaviour that a test needs.

Each is a factory ``(options, device) -> scorer``, found by the pool under its dotted name ``serving_standins:NAME``.
A scorer's answer is computed from the item alone, so that a test can tell whether the right answer came back.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from cosyvoice.reward.record import RewardRecord, Status


def expected_score(tokens: np.ndarray) -> float:
    """A score that depends on every token: a lost, swapped or cut row shows."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.int64)
    return float(int((np.asarray(tokens, np.int64) * weights).sum()) % 997) / 997.0


class Trivial:
    """Answers at once, or after ``seconds`` per batch, as a device that works on it."""

    def __init__(self, options: dict[str, Any], device: str) -> None:
        self.options = options

    def score(self, items):
        time.sleep(float(self.options.get("seconds", 0)))
        return [self.one(item) for item in items], {"decode": 0.0, "asr": 0.0, "score": 0.0}

    def one(self, item) -> RewardRecord:
        values = item.tokens if item.tokens is not None else np.zeros(0)
        return RewardRecord(
            score=expected_score(values),
            status=Status.OK,
            wer=0.0,
            reference=item.reference,
            transcript=f"{item.reference}|{item.prompt_key}",
            n_tokens=len(values),
        )


class Moody(Trivial):
    """Obeys the reference text: raise, kill the process, or hang."""

    def one(self, item) -> RewardRecord:
        if item.reference == "raise":
            raise ValueError("told to raise")
        if item.reference == "die":
            os._exit(17)
        if item.reference == "die once":
            marker = self.options["marker"]
            if not os.path.exists(marker):
                with open(marker, "w"):
                    os._exit(18)
        if item.reference == "hang":
            time.sleep(3600)
        return super().one(item)


class Broken:
    """Cannot start."""

    def __init__(self, options: dict[str, Any], device: str) -> None:
        raise RuntimeError("no weights here")


class FailsItsTest(Trivial):
    def self_test(self) -> dict[str, Any]:
        raise RuntimeError("known sentence scored 0.9, expected at most 0.1")


class Tested(Trivial):
    """Has a self test, and tells clients a known sentence."""

    def self_test(self) -> dict[str, Any]:
        known = {"text": "你好", "tokens": [1, 2, 3], "prompt_key": "p", "max_wer": 0.0}
        return {"self_test": "fine", "known_sentence": known}
