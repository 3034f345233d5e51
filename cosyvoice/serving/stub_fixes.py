"""Mends the Python files that PyTriton 0.7.0 copies into every model it serves (its "proxy" processes).

Each fix is a replacement of text, skipped with a warning if a later PyTriton no longer has the text.
"""

from __future__ import annotations

import logging

from pytriton.models.model import Model

#: file, text, replacement
FIXES = (
    # Each instance of a model waits 1.0 s for instance 0 and for its own loop: a busy host fails the whole start.
    ("communication.py", b"timeout_s: float = 1.0", b"timeout_s: float = 60.0"),
    ("communication.py", b"_STARTUP_TIMEOUT_S = 1.0", b"_STARTUP_TIMEOUT_S = 60.0"),
)
logger = logging.getLogger(__name__)


def mend(name: str, source: bytes) -> bytes:
    """The source of one proxy file with the fixes in it."""
    for file, old, new in FIXES:
        if name.endswith(file):
            if old not in source:
                logger.warning("PyTriton's %s has no %r: not 0.7.0, left as it is", file, old.decode())
            source = source.replace(old, new)
    return source


def install() -> None:
    """Apply the fixes to every model bound from now on in this process."""
    original = Model.get_proxy_model_files
    if getattr(original, "is_mended", False):
        return

    def get_proxy_model_files(self: Model) -> dict[str, bytes]:
        return {name: mend(name, source) for name, source in original(self).items()}

    get_proxy_model_files.is_mended = True
    Model.get_proxy_model_files = get_proxy_model_files
