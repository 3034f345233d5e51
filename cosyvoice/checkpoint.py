"""The CosyVoice2 checkpoint folder: find, check, load safely."""

from __future__ import annotations

from pathlib import Path

import torch


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names file, key, found and expected."""


def load_tensors(path: str | Path, mmap: bool = True) -> dict[str, torch.Tensor]:
    """Load a plain ``torch.save`` dictionary of tensors, without running any pickled code.

    Args:
        path: a ``.pt`` file as CosyVoice2 publishes them (``llm.pt``, ``flow.pt``, ``hift.pt``).
        mmap: map the file instead of reading it, so that memory holds only what is used.

    Returns:
        name -> tensor, on the CPU, in the file's own dtype.

    Raises:
        CheckpointError: the file is missing, truncated, or is not a dictionary of tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, expected a checkpoint written by torch.save")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises several types for truncated and foreign files
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes): cannot be read as tensors: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: found {type(tensors).__name__}, expected a dict of tensors")
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: key {name!r}: found {type(value).__name__}, expected a tensor")
    return tensors
