"""Fixtures shared by the tests of this environment: the golden decoder as a checkpoint folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cosyvoice.checkpoint import CosyVoice2Folder

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the recorded tensors."""
    return DATA / "golden"


@pytest.fixture(scope="session")
def golden_decoder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> CosyVoice2Folder:
    """A folder as published, with the recorded flow and vocoder in it (no language model, no ONNX)."""
    path = tmp_path_factory.mktemp("golden_decoder")
    shutil.copy(DATA / "golden_cosyvoice2.yaml", path / "cosyvoice2.yaml")
    torch.save(load_file(golden / "flow_tiny_weights.safetensors"), path / "flow.pt")
    hift = load_file(golden / "hift_tiny_weights.safetensors")
    torch.save({f"generator.{name}": value for name, value in hift.items()}, path / "hift.pt")
    return CosyVoice2Folder(path)
