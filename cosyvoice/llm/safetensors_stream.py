"""Write a safetensors file tensor by tensor, so that no more than one piece of it is in memory.

``safetensors.torch.save_file`` wants all tensors at once; for a conversion that changes the dtype that is a second copy
of the model beside the first. The format (github.com/huggingface/safetensors, "Format"): the length of the header as
8 bytes, little-endian; the header, JSON, padded with spaces to a multiple of 8; the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Planned:
    """A tensor to write: its shape, and a function that gives its rows in consecutive blocks when asked."""

    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[torch.Tensor]]


def write(path: Path, tensors: Mapping[str, Planned], dtype: torch.dtype, progress: bool = True) -> None:
    """Write ``tensors`` in their order, every block cast to ``dtype``.

    Raises:
        ValueError: the blocks of a tensor do not add up to its shape.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, planned in tensors.items():
        end = offset + math.prod(planned.shape) * dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(planned.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (
        path.open("wb") as file,
        tqdm(total=offset, unit="B", unit_scale=True, desc=f"writing {path.name}", disable=not progress) as bar,
    ):
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        start = file.tell()
        for name, planned in tensors.items():
            for block in planned.blocks():
                block = block.to(dtype).contiguous()
                file.write(memoryview(block.view(torch.uint8).numpy().reshape(-1)))
                bar.update(block.numel() * dtype.itemsize)
            expected = start + header[name]["data_offsets"][1]
            if file.tell() != expected:
                raise ValueError(f"{path}: key {name!r}: found {file.tell()} bytes so far, expected {expected}")
