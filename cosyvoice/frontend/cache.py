"""Prompts on disk, found again by the content that they were made from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from cosyvoice.hashing import sha256_of

from .prompt import Prompt

FORMAT = 1  # raise when the features or the layout of an entry change

log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/cosyvoice2-grpo/prompts``, or the same under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "cosyvoice2-grpo" / "prompts"


@lru_cache(maxsize=16)
def _file_hash(path: str, size: int, mtime_ns: int) -> str:
    return sha256_of(path)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, remembered while its size and time stamp stay."""
    stat = os.stat(path)
    return _file_hash(str(path), stat.st_size, stat.st_mtime_ns)


def _checksum(tensors: dict[str, np.ndarray]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
        sha.update(np.ascontiguousarray(tensors[name]).tobytes())
    return sha.hexdigest()


class PromptCache:
    """A folder with one safetensors file per prompt, named by a hash of all that determines it.

    The name covers the audio file's bytes, the text, the bytes of both ONNX networks, and ``FORMAT``. So a
    changed input is a new entry, never a stale answer, and several processes and checkpoints may share one
    folder. Entries are written under a temporary name and renamed.

    Args:
        folder: created when missing.
        networks: the ONNX files that the prompts are computed with.
    """

    def __init__(self, folder: str | Path, networks: list[str | Path]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._networks = [file_hash(path) for path in networks]

    def path(self, audio: bytes, text: str) -> Path:
        """Where the prompt of this audio file and text is kept."""
        parts = [FORMAT, hashlib.sha256(audio).hexdigest(), text, *self._networks]
        return self.folder / (hashlib.sha256(json.dumps(parts).encode()).hexdigest() + ".safetensors")

    def get(self, key: str, audio: bytes, text: str) -> Prompt | None:
        """The stored prompt under the given key, or None. A damaged entry is logged and counts as absent."""
        path = self.path(audio, text)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                tensors = {name: file.get_tensor(name) for name in ("tokens", "mel", "embedding")}
                stored = (file.metadata() or {}).get("checksum")
            if stored != _checksum(tensors):
                raise ValueError("its checksum does not match its content")
            return Prompt(key, text.strip(), tensors["tokens"], tensors["mel"], tensors["embedding"])
        except Exception as error:  # whatever damage does to a file, computing the prompt again mends it
            log.warning("%s: damaged cache entry, prompt %r is computed again: %s", path, key, error)
            return None

    def put(self, prompt: Prompt, audio: bytes, text: str) -> None:
        """Store a prompt; replaces an entry of the same content."""
        tensors = {"tokens": prompt.tokens, "mel": prompt.mel, "embedding": prompt.embedding}
        about = {"key": prompt.key, "text": prompt.text, "checksum": _checksum(tensors)}
        data = save(tensors, metadata=about)
        handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, self.path(audio, text))
        except BaseException:
            os.unlink(temporary)
            raise
