"""Utterances to listen to, before and after training: which ones, their sound, and their aligned transcripts."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from markupsafe import Markup

from ..reward.error_rate import align
from .protocols import protocols
from .report_data import TestSet

#: The protocol whose error decides what improved and what worsened; its units are shown.
METRIC = "corpus"
MAX_SECONDS = 30.0


@dataclass(frozen=True)
class Take:
    """One system's reading: MP3 as a data URI or "" with the reason, transcript with marks, error rate."""

    audio: str
    reason: str
    marked: Markup
    rate: float


@dataclass(frozen=True)
class Example:
    id: str
    reference: str
    prompt: str
    before: Take
    after: Take


def pick(before: TestSet, after: TestSet, n: int, seed: int) -> dict[str, list[str]]:
    """Ids of the ``n`` most improved, most worsened and of ``n`` other random utterances.

    Ties go to the longer reference, which shows more, then to the id.
    """

    def change(name: str) -> float:
        return after.scores[name].metrics[METRIC]["rate"] - before.scores[name].metrics[METRIC]["rate"]

    common = [name for name in before.scores if name in after.scores]
    order = sorted(common, key=lambda name: (change(name), -len(before.scores[name].reference), name))
    improved = [name for name in order if change(name) < 0][:n]
    worsened = [name for name in reversed(order) if change(name) > 0][:n]
    rest = sorted(set(common) - set(improved) - set(worsened))
    chosen = random.Random(seed).sample(rest, min(n, len(rest)))
    return {"Most improved": improved, "Most worsened": worsened, "At random": chosen}


def examples(
    before: TestSet, after: TestSet, n: int, seed: int, with_audio: bool
) -> dict[str, list[Example]]:
    """The groups of :func:`pick`, ready to be shown; a group without utterances is left out."""
    language = after.summary.get("language", "zh")
    groups = {}
    for title, names in pick(before, after, n, seed).items():
        if names:
            groups[title] = [_example(name, before, after, language, with_audio) for name in names]
    return groups


def _example(name: str, before: TestSet, after: TestSet, language: str, with_audio: bool) -> Example:
    prompt = after.utterances.get(name, {}).get("prompt_audio") or ""
    sound: Callable[[Path], tuple[str, str]] = encode if with_audio else lambda _: ("", "left out")
    takes = []
    for one in (before, after):
        scored = one.scores[name]
        audio, reason = sound(one.folder / "wav" / f"{name}.wav")
        if scored.audio_status != "ok":
            reason = f"{scored.audio_status}: {scored.message}".rstrip(": ")
        marked = mark(scored.reference, scored.transcript, language)
        takes.append(Take(audio, reason, marked, scored.metrics[METRIC]["rate"]))
    return Example(name, after.scores[name].reference, sound(Path(prompt))[0] if prompt else "", *takes)


def mark(reference: str, transcript: str, language: str) -> Markup:
    """The transcript as HTML: ``<ins>`` for what was added, ``<del>`` for what is missing, both where it differs.

    Safe: texts are escaped.
    """
    units, joint = protocols(language)[METRIC], "" if language == "zh" else " "
    parts = []
    for chunk in align(units(reference, language), units(transcript, language)):
        expected, heard = joint.join(chunk.reference), joint.join(chunk.hypothesis)
        if chunk.kind == "equal":
            parts.append(Markup.escape(expected))
            continue
        lost = Markup("<del>{}</del>").format(expected) if expected else Markup("")
        extra = Markup("<ins>{}</ins>").format(heard) if heard else Markup("")
        parts.append(lost + extra)
    return Markup(joint).join(parts)


def encode(path: Path) -> tuple[str, str]:
    """(data URI of the file as MP3, ""), or ("", why there is none). About 6 kB a second."""
    if not path.is_file():
        return "", "no audio file"
    try:
        wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        return "", f"not readable: {error}"
    if not len(wave) or not np.isfinite(wave).all():
        return "", "empty, or with samples that are not finite"
    if len(wave) > MAX_SECONDS * rate:
        return "", f"longer than {MAX_SECONDS:.0f} s"
    buffer = io.BytesIO()
    soundfile.write(buffer, np.clip(wave.mean(axis=1), -1.0, 1.0), rate, format="MP3")
    return "data:audio/mpeg;base64," + base64.b64encode(buffer.getvalue()).decode(), ""
