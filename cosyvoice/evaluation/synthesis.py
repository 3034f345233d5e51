"""A test set through the language model and Token2Wav, in parts that survive a stop.

    DIR/<split>/
      parts/<rank>-<n>.jsonl   one per finished group of utterances while the run is not complete
      utterances.jsonl, wav/   see ``records``; the list appears when all ranks have finished
      settings.json            what the files were made with; other settings in the same folder are an error

Rank r of n takes every n-th utterance. Seeds, prompts and files depend on the utterance alone, so a run may be stopped
and resumed with another number of ranks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import soundfile
from tqdm import tqdm

from ..frontend import Prompt, PromptBank, PromptEntry
from ..frontend.bank import read_entries
from ..frontend.cache import file_hash
from ..speech_tokens import find_control_tokens, render_prompt
from .generate import Generator, Request, utterance_seed
from .records import EvaluationError, read_jsonl, write_json, write_jsonl
from .testsets import TestUtterance, clean_text

if TYPE_CHECKING:
    from ..checkpoint import CosyVoice2Folder
    from ..token2wav import Token2Wav

#: CosyVoice's bounds on an answer, in speech tokens per text token of the sentence.
MIN_RATIO, MAX_RATIO = 2, 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """One utterance with its prompt, or the reason why it cannot be spoken."""

    utterance: TestUtterance
    prompt: Prompt | None
    recording: Path | None
    error: str | None
    zero_shot: bool


def choose_prompts(
    utterances: list[TestUtterance],
    folder: CosyVoice2Folder,
    prompts: str | Path | None,
    prompting: str = "auto",
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> list[Plan]:
    """Find the prompt of every utterance: its own recording, else one of the bank, picked by its id.

    Args:
        utterances: what to speak.
        folder: checkpoint with the two ONNX networks.
        prompts: bank (folder or JSONL) for utterances without one; may be None if none needs it.
        prompting: whether the language model is given the prompt's text and tokens: "zero-shot" always, "text-only"
            never (as in the training, the prompt then only conditions the flow), "auto" where the utterance has a
            prompt of its own.
        cache_dir: of the prompts' features.
        progress: show a progress bar.

    Raises:
        EvaluationError: an utterance needs the bank, and there is none.
        AudioError: the bank cannot be read. A bad recording of one utterance is an error of that utterance alone.
    """
    own = [u for u in utterances if u.prompt_audio]
    bank, audio = None, {u.id: u.prompt_audio for u in own}
    if len(own) < len(utterances):
        if prompts is None:
            lonely = next(u.id for u in utterances if not u.prompt_audio)
            raise EvaluationError(
                f"utterance {lonely!r}: found no prompt of its own and no prompt bank, expected --prompts"
            )
        entries = read_entries(prompts)
        bank = PromptBank.from_entries(entries, folder, cache_dir, progress)
        in_bank = {entry.key: entry.audio for entry in entries}
    refused: dict[str, str] = {}
    recordings: PromptBank | dict[str, Prompt] = {}
    if own:
        entries = [PromptEntry(u.id, u.prompt_audio, u.prompt_text) for u in own]
        try:
            recordings = PromptBank.from_entries(entries, folder, cache_dir, progress, refused=refused)
        except ValueError:
            if len(refused) < len(own):
                raise
    plans = []
    for u in utterances:
        error = refused.get(u.id)
        if control := find_control_tokens(u.text + u.prompt_text):
            error = f"text: found the control token {control[0]!r}, expected none"
        elif not clean_text(u.text):
            error = f"text: found {u.text!r}, expected something to say"
        prompt = None if error else recordings[u.id] if u.prompt_audio else bank.pick(u.id)
        recording = audio[u.id] if u.prompt_audio else in_bank[prompt.key] if prompt else None
        zero_shot = prompting == "zero-shot" or (prompting == "auto" and u.prompt_audio is not None)
        plans.append(Plan(u, prompt, recording, error, zero_shot))
    return plans


def make_request(
    plan: Plan, encode: Callable[[str], list[int]], seed: int, max_tokens: int | None
) -> Request:
    """The language model's side of a plan.

    Args:
        plan: with a prompt.
        encode: text -> ids of the converted tokenizer.
        seed: of the run.
        max_tokens: most tokens of an answer; None for CosyVoice's 20 per text token.
    """
    text = clean_text(plan.utterance.text)
    prompt_text = clean_text(plan.prompt.text) if plan.zero_shot else ""
    codes = plan.prompt.tokens.tolist() if plan.zero_shot else ()
    n_text = len(encode(text))
    return Request(
        ids=encode(render_prompt(text, prompt_text, codes)),
        seed=utterance_seed(seed, plan.utterance.id),
        min_tokens=MIN_RATIO * n_text,
        max_tokens=max_tokens or MAX_RATIO * n_text,
    )


def content_hash(paths: Iterable[Path], extra: str = "") -> str:
    """SHA-256 over the contents of files, in order, and a text."""
    parts = [extra, *(file_hash(path) for path in paths)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Output:
    """Result folder of one test set, shared by all ranks.

    Args:
        directory: ``DIR/<split>``.
        settings: all options that decide the result; must equal what an earlier run left.
        inputs: hashes of what was read. Results of other inputs (a model trained again under the same name) are
            stale: they are removed, and the log says so.

    Raises:
        EvaluationError: the folder was made with other settings.
    """

    def __init__(self, directory: str | Path, settings: dict, inputs: dict[str, str]):
        self.directory = Path(directory)
        self.wavs, self.parts = self.directory / "wav", self.directory / "parts"
        self.list, path = self.directory / "utterances.jsonl", self.directory / "settings.json"
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._locked():
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            before = found.pop("inputs", inputs)
            if found and found != settings:
                key = next(k for k in {**found, **settings} if found.get(k) != settings.get(k))
                raise EvaluationError(
                    f"{path}: {key}: found {found.get(key)!r} from an earlier run, expected {settings.get(key)!r}; "
                    "give another --output-dir, or --overwrite"
                )
            if before != inputs:
                changed = [k for k in inputs if before.get(k) != inputs[k]]
                log.warning("%s: %s changed since the last run, starting anew", self.directory, ", ".join(changed))
                for stale in self.directory.iterdir():
                    if stale.name != ".lock":
                        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
            self.wavs.mkdir(exist_ok=True)
            self.parts.mkdir(exist_ok=True)
            write_json(path, {**settings, "inputs": inputs})

    def _locked(self):
        lock = open(self.directory / ".lock", "w")  # noqa: SIM115 (closed by the caller's with)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def done(self) -> dict[str, dict]:
        """Rows that are finished, by id."""
        files = [self.list] if self.list.is_file() else []
        rows = [row for path in (*files, *sorted(self.parts.glob("*.jsonl"))) for row in read_jsonl(path)]
        return {row["id"]: row for row in rows}

    def write_wav(self, name: str, wave: np.ndarray, hz: int) -> None:
        """Write ``wav/<name>.wav``, 16 bit, whole or not at all."""
        temporary = self.wavs / f".{name}.{os.getpid()}.tmp"
        try:
            soundfile.write(temporary, wave, hz, subtype="PCM_16", format="WAV")
            os.replace(temporary, self.wavs / f"{name}.wav")
        finally:
            temporary.unlink(missing_ok=True)

    def add_part(self, rank: int, rows: list[dict]) -> None:
        """Store finished rows."""
        taken = {path.name for path in self.parts.iterdir()}
        number = next(n for n in range(len(taken) + 1) if f"{rank}-{n}.jsonl" not in taken)
        write_jsonl(self.parts / f"{rank}-{number}.jsonl", rows)

    def finish(self, order: list[str]) -> bool:
        """Join the parts if every utterance is finished; whichever rank is last does so."""
        with self._locked():
            rows = self.done()
            if any(name not in rows for name in order):
                return False
            write_jsonl(self.list, [rows[name] for name in order])
            shutil.rmtree(self.parts)
            return True


def synthesise(
    plans: list[Plan],
    generator: Generator,
    token2wav: Token2Wav,
    requests: list[Request],
    output: Output,
    seed: int,
    rank: int = 0,
    group: int = 128,
    progress: bool = True,
) -> list[dict]:
    """Speak what ``output`` has not yet, and store it group by group.

    Args:
        plans: the rank's utterances that are not done.
        generator: the language model.
        token2wav: the decoder.
        requests: one per plan that has no error, in order.
        output: result folder.
        seed: of the run, for the rows.
        rank: for the names of the parts.
        group: utterances between two stores.
        progress: show a progress bar.

    Returns:
        the rows, as in utterances.jsonl.
    """
    waiting = iter(requests)
    jobs = [(plan, None if plan.error else next(waiting)) for plan in plans]
    rows: list[dict] = []
    with tqdm(total=len(jobs), desc=f"synthesise (rank {rank})", unit="utt", disable=not progress) as bar:
        for start in range(0, len(jobs), group):
            part = _speak(jobs[start : start + group], generator, token2wav, output, seed)
            output.add_part(rank, part)
            rows += part
            bar.update(len(part))
    return rows


def _speak(
    jobs: list[tuple[Plan, Request | None]],
    generator: Generator,
    token2wav: Token2Wav,
    output: Output,
    seed: int,
) -> list[dict]:
    places = [i for i, (_, request) in enumerate(jobs) if request]
    answers = dict(generator.generate([jobs[i][1] for i in places]))
    rows: list[dict] = []
    for plan, _ in jobs:
        u, prompt = plan.utterance, plan.prompt
        rows.append(
            {
                "id": u.id,
                "text": u.text,
                "language": u.language,
                "prompt_key": prompt.key if prompt else None,
                "prompt_text": prompt.text if prompt else u.prompt_text,
                "prompt_audio": str(plan.recording) if plan.recording else None,
                "zero_shot": plan.zero_shot,
                "tokens": [],
                "n_tokens": 0,
                "ended": False,
                "seconds": 0.0,
                "seed": seed,
                "error": plan.error,
            }
        )
    spoken = []
    for number, place in enumerate(places):
        answer = answers[number]
        rows[place] |= {"tokens": answer.ids, "n_tokens": len(answer.ids), "ended": answer.ended}
        if not answer.ids:
            rows[place]["error"] = "the language model answered no speech token"
        elif answer.unknown or answer.out_of_range:
            strange = [*answer.unknown, *answer.out_of_range]
            rows[place]["error"] = f"the language model answered {strange[:3]}, expected speech tokens"
        else:
            spoken.append(place)
    speeches = token2wav([rows[i]["tokens"] for i in spoken], [jobs[i][0].prompt for i in spoken])
    for place, speech in zip(spoken, speeches, strict=True):
        if speech.error:
            rows[place]["error"] = speech.error
        else:
            output.write_wav(rows[place]["id"], speech.wav, token2wav.sample_rate)
            rows[place]["seconds"] = round(len(speech.wav) / token2wav.sample_rate, 4)
    return rows
