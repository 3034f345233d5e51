"""What a reward is: a record with a score, not a number.

Light on purpose (standard library only): the training process reads records, the reward server writes them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from enum import Enum

#: Every component, in the order of reports. ``components.REGISTRY`` holds the functions.
COMPONENT_NAMES = ("pinyin", "duration", "repetition", "pause", "similarity", "nll")


class Status(str, Enum):
    """What happened to an utterance.

    The model's doing (these have a score):

    * ``ok``: synthesised and transcribed.
    * ``empty``: the answer holds no speech token.
    * ``no_end``: the answer was cut off, the model did not stop by itself.
    * ``out_of_range``: the answer holds ids that are no speech codes.
    * ``silent``: the audio is silent or shorter than the recogniser's window.

    The system's doing (these never have a score; they are retried, then raised):

    * ``timeout``: no answer within the time limit.
    * ``server_error``: the server failed, or its audio is not finite.
    * ``bad_reference``: the text has nothing that can be spoken.
    * ``bad_request``: the request is malformed.
    """

    OK = "ok"
    EMPTY = "empty"
    NO_END = "no_end"
    OUT_OF_RANGE = "out_of_range"
    SILENT = "silent"
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"
    BAD_REFERENCE = "bad_reference"
    BAD_REQUEST = "bad_request"

    @property
    def is_system(self) -> bool:
        """True if the system failed, so that there is nothing to learn from."""
        return self in _SYSTEM


_SYSTEM = frozenset({Status.TIMEOUT, Status.SERVER_ERROR, Status.BAD_REFERENCE, Status.BAD_REQUEST})
_MODEL = tuple(status for status in Status if status not in _SYSTEM)


@dataclass
class RewardRecord:
    """One scored utterance.

    Attributes:
        score: reward in [0, 1]; NaN for a system failure.
        status: what happened.
        wer: error rate over toned pinyin (may exceed 1).
        wer_toneless: the same without tones.
        cer: error rate over characters.
        substitutions, deletions, insertions: counts over toned pinyin.
        reference, hypothesis: the two texts after normalisation.
        transcript: what the recogniser wrote.
        n_tokens: speech tokens (25 per second).
        seconds: length of the audio.
        syllables: syllables of the reference.
        components: component name -> value in [0, 1], NaN where it was not measured.
        message: one sentence for a person, empty if all went well.
    """

    score: float
    status: Status
    wer: float = math.nan
    wer_toneless: float = math.nan
    cer: float = math.nan
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    reference: str = ""
    hypothesis: str = ""
    transcript: str = ""
    n_tokens: int = 0
    seconds: float = 0.0
    syllables: int = 0
    components: dict[str, float] = field(default_factory=dict)
    message: str = ""

    def to_json(self) -> str:
        """One line of strict JSON: what is not finite becomes null."""
        values = dict(vars(self))
        values["status"] = self.status.value
        values["components"] = {name: _finite(value) for name, value in self.components.items()}
        for name in _FLOATS:
            values[name] = _finite(values[name])
        return json.dumps(values, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> RewardRecord:
        """Read what :meth:`to_json` wrote; null becomes NaN.

        Raises:
            ValueError: no JSON object, or keys, types or a status that a record does not have.
        """
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"reward record: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"reward record: found {type(values).__name__}, expected a JSON object")
        names = {item.name for item in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"reward record: unknown key {unknown[0]!r}, expected {sorted(names)}")
        if missing := sorted({"score", "status"} - set(values)):
            raise ValueError(f"reward record: key {missing[0]!r} is missing")
        try:
            values["status"] = Status(values["status"])
            for name in _FLOATS & set(values):
                values[name] = math.nan if values[name] is None else float(values[name])
            components = values.get("components", {}).items()
            values["components"] = {
                name: math.nan if value is None else float(value) for name, value in components
            }
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"reward record: {error}") from error
        return cls(**values)

    def numeric_metrics(self) -> dict[str, float]:
        """Floats for logging, under the same keys for every record, so that batches can be averaged.

        A component that was not measured is NaN: average with ``nanmean``.
        """
        metrics = {
            "wer": self.wer,
            "wer_toneless": self.wer_toneless,
            "cer": self.cer,
            "substitutions": self.substitutions,
            "deletions": self.deletions,
            "insertions": self.insertions,
            "n_tokens": self.n_tokens,
            "seconds": self.seconds,
            "syllables": self.syllables,
            "seconds_per_syllable": self.seconds / self.syllables if self.syllables else math.nan,
        }
        metrics.update({f"component_{name}": self.components.get(name, math.nan) for name in COMPONENT_NAMES})
        metrics.update({f"status_{status.value}": self.status is status for status in _MODEL})
        return {name: float(value) for name, value in metrics.items()}


_FLOATS = frozenset({"score", "wer", "wer_toneless", "cer", "seconds"})


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
