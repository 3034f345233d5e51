"""Many prompts, read from a folder or a JSONL file, picked by a key.

Sources:
    JSONL   one object per line with ``key``, ``audio`` (path, relative to the JSONL file) and ``text``;
    folder  with a ``prompts.jsonl`` in it: that file; else every audio file in it, with its text in
            ``<name>.txt`` beside it and ``<name>`` as the key.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from tqdm import tqdm

from .audio import AudioError, decode_audio
from .cache import PromptCache, default_cache_dir
from .encoders import SpeakerEncoder, SpeechTokenizer
from .prompt import Prompt, compute_prompt

if TYPE_CHECKING:
    from ..checkpoint import CosyVoice2Folder

AUDIO_SUFFIXES = {".wav", ".flac", ".ogg", ".mp3"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptEntry:
    """A recording and its text, before any feature is computed."""

    key: str
    audio: Path
    text: str


def read_jsonl(path: str | Path) -> list[PromptEntry]:
    """Read a prompt list.

    Raises:
        AudioError: a line is not a JSON object, or lacks ``key``, ``audio`` or ``text``.
    """
    path = Path(path)
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise AudioError(f"{path} line {number}: found no JSON object: {error}") from error
        values = [row.get(name) if isinstance(row, dict) else None for name in ("key", "audio", "text")]
        for name, value in zip(("key", "audio", "text"), values, strict=True):
            if not isinstance(value, str) or not value.strip():
                raise AudioError(f"{path} line {number}: {name!r}: found {value!r}, expected some text")
        entries.append(PromptEntry(values[0], path.parent / values[1], values[2]))
    return entries


def read_folder(path: str | Path) -> list[PromptEntry]:
    """List a folder's prompts (see the module's docstring), by name.

    Raises:
        AudioError: a recording has no text file, or an empty one.
    """
    path = Path(path)
    if (path / "prompts.jsonl").is_file():
        return read_jsonl(path / "prompts.jsonl")
    entries = []
    for audio in sorted(file for file in path.iterdir() if file.suffix.lower() in AUDIO_SUFFIXES):
        text_file = audio.with_suffix(".txt")
        if not text_file.is_file():
            raise AudioError(f"{audio}: found no {text_file.name} beside it, expected what is said in it")
        text = text_file.read_text(encoding="utf-8").strip()
        if not text:
            raise AudioError(f"{text_file}: found no text, expected what is said in {audio.name}")
        entries.append(PromptEntry(audio.stem, audio, text))
    return entries


def read_entries(source: str | Path) -> list[PromptEntry]:
    """List the prompts of a folder or a JSONL file.

    Raises:
        AudioError: the source is missing, malformed, or holds no prompt.
    """
    source = Path(source)
    if source.is_dir():
        entries = read_folder(source)
    elif source.is_file():
        entries = read_jsonl(source)
    else:
        raise AudioError(f"{source}: no such folder or file, expected prompt recordings")
    if not entries:
        raise AudioError(f"{source}: found no prompt, expected at least one recording with its text")
    return entries


class _Networks:
    """Both ONNX networks, opened at the first prompt that is not cached: at full size that takes seconds."""

    def __init__(self, folder: CosyVoice2Folder):
        self._folder = folder
        self._lock = Lock()

    @cached_property
    def _pair(self) -> tuple[SpeakerEncoder, SpeechTokenizer]:
        return SpeakerEncoder(self._folder.campplus_path), SpeechTokenizer(self._folder.speech_tokenizer_path)

    def get(self) -> tuple[SpeakerEncoder, SpeechTokenizer]:
        with self._lock:
            return self._pair


class PromptBank:
    """Prompts by key, in the order of their keys.

    Args:
        prompts: at least one; no key twice.

    Raises:
        ValueError: no prompt, or a key that occurs twice.
    """

    def __init__(self, prompts: Iterable[Prompt]):
        self._prompts: dict[str, Prompt] = {}
        for prompt in sorted(prompts, key=lambda p: p.key):
            if prompt.key in self._prompts:
                raise ValueError(f"prompt bank: found the key {prompt.key!r} twice, expected every key once")
            self._prompts[prompt.key] = prompt
        if not self._prompts:
            raise ValueError("prompt bank: found no prompt, expected at least one")
        self._keys = list(self._prompts)

    @classmethod
    def load(
        cls,
        source: str | Path,
        folder: CosyVoice2Folder,
        cache_dir: str | Path | None = None,
        progress: bool = True,
        workers: int = 1,
    ) -> PromptBank:
        """Read a folder or JSONL of recordings; see ``from_entries`` for the rest.

        Raises:
            AudioError: the source is missing, holds no prompt, or one of its prompts cannot be used.
        """
        return cls.from_entries(read_entries(source), folder, cache_dir, progress, workers)

    @classmethod
    def from_entries(
        cls,
        entries: Iterable[PromptEntry],
        folder: CosyVoice2Folder,
        cache_dir: str | Path | None = None,
        progress: bool = True,
        workers: int = 1,
        refused: dict[str, str] | None = None,
    ) -> PromptBank:
        """Compute the prompts, or find them in the cache.

        Args:
            entries: recordings with their texts.
            folder: the checkpoint, of which the two ONNX networks are used.
            cache_dir: where prompts are kept between runs; the user's cache folder if None.
            progress: show a progress bar.
            workers: threads that compute prompts; onnxruntime releases the interpreter lock.
            refused: if given, prompts that cannot be used are left out and their messages put here by key.

        Raises:
            AudioError: a prompt cannot be used; the message names the recording.
            ValueError: no usable entry, or a key that occurs twice.
        """
        entries = list(entries)
        files = [folder.campplus_path, folder.speech_tokenizer_path]
        cache = PromptCache(cache_dir or default_cache_dir(), files)
        networks = _Networks(folder)

        def prompt(entry: PromptEntry) -> Prompt | None:
            try:
                return compute(entry)
            except AudioError as error:
                if refused is None:
                    raise
                refused[entry.key] = str(error)
                return None

        def compute(entry: PromptEntry) -> Prompt:
            name = str(entry.audio)
            if not entry.audio.is_file():
                raise AudioError(f"{name}: no such file, expected the recording of prompt {entry.key!r}")
            data = entry.audio.read_bytes()
            found = cache.get(entry.key, data, entry.text)
            if found is None:
                wave, hz = decode_audio(data, name)
                found = compute_prompt(entry.key, entry.text, wave, hz, *networks.get(), name=name)
                cache.put(found, data, entry.text)
            return found

        with ThreadPoolExecutor(max_workers=workers) as pool:
            done: Iterator[Prompt | None] = pool.map(prompt, entries)
            bar = tqdm(done, total=len(entries), desc="prompts", unit="prompt", disable=not progress)
            try:
                return cls(found for found in bar if found is not None)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def pick(self, key: str) -> Prompt:
        """A prompt that depends on ``key`` and on the bank's keys alone: equal in every process and run."""
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return self._prompts[self._keys[number % len(self._keys)]]

    def __getitem__(self, key: str) -> Prompt:
        try:
            return self._prompts[key]
        except KeyError:
            known = f"{len(self)} prompts, first {self._keys[:3]}"
            raise KeyError(f"prompt bank: found no prompt {key!r} among {known}") from None

    def __contains__(self, key: str) -> bool:
        return key in self._prompts

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts.values())

    def __len__(self) -> int:
        return len(self._prompts)
