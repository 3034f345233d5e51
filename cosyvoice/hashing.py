"""SHA-256 of files, for manifests and fingerprints."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

BLOCK = 1 << 22


def sha256_of(path: str | Path, bar: tqdm | None = None) -> str:
    """SHA-256 of a file, in hexadecimal; `bar` is moved on by the bytes read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if bar is not None:
                bar.update(len(block))
    return digest.hexdigest()
