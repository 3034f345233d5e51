"""The CosyVoice2 checkpoint folder: find, check, load safely."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cosyvoice.checkpoint_yaml import FolderConfig, YamlError, read_yaml

if TYPE_CHECKING:
    from cosyvoice.flow import Flow
    from cosyvoice.hift import HiFTGenerator

YAML_NAMES = ("cosyvoice2.yaml", "cosyvoice.yaml")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names file, key, found and expected."""


def load_tensors(path: str | Path, mmap: bool = True) -> dict[str, Tensor]:
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
            f"{path} ({path.stat().st_size} bytes): cannot be read as tensors: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: found {type(tensors).__name__}, expected a dict of tensors")
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: key {name!r}: found {type(value).__name__}, expected a tensor")
    return tensors


def fold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace weight-normed pairs by the weight they stand for.

    ``weight = g v / ||v||`` with the norm over all dimensions but the first (Salimans and Kingma 2016,
    arXiv:1602.07868). Both spellings are known: ``X.parametrizations.weight.original0`` (g) with
    ``...original1`` (v), and ``X.weight_g`` with ``X.weight_v``. Other tensors pass unchanged.

    Raises:
        CheckpointError: one of a pair is missing.
    """
    folded = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(.*\.)(?:parametrizations\.weight\.original([01])|weight_([gv]))", name)
        if not match:
            folded[name] = value
            continue
        new_style, is_gain = match[2] is not None, match[2] == "0" or match[3] == "g"
        tails = ("parametrizations.weight.original0", "parametrizations.weight.original1")
        gain_name, direction_name = (match[1] + t for t in (tails if new_style else ("weight_g", "weight_v")))
        partner = direction_name if is_gain else gain_name
        if partner not in tensors:
            raise CheckpointError(f"key {name!r} has no partner, expected {partner!r} beside it")
        if is_gain:
            direction = tensors[direction_name]
            norm = direction.flatten(1).norm(dim=1).view(-1, *[1] * (direction.dim() - 1))
            folded[match[1] + "weight"] = direction * (value / norm)
    return folded


def check_state(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless names and shapes are exactly those of ``expected``."""
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:

        def some(names: list[str]) -> str:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return ", ".join(map(repr, names[:3])) + more if names else "none"

        raise CheckpointError(
            f"{path}: found {len(tensors)} tensors, expected {len(expected)}: "
            f"missing {some(missing)}; unknown {some(unknown)}"
        )
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise CheckpointError(
                f"{path}: key {name!r}: found shape {list(value.shape)}, "
                f"expected {list(expected[name].shape)}"
            )


class CosyVoice2Folder:
    """A checkpoint folder as published.

    Opening it reads ``cosyvoice2.yaml`` and the names in ``flow.pt``; the tensors are read when asked for.
    A file that is missing is an error when it is asked for, so that a folder without the speech
    tokenizer, say, can still speak from cached prompts.

    Attributes:
        path: the folder.
        config: the numbers of its yaml.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder, expected a CosyVoice2 checkpoint folder")
        names = [name for name in YAML_NAMES if (self.path / name).is_file()]
        if not names:
            others = sorted(each.name for each in self.path.glob("*.yaml"))
            raise CheckpointError(f"{self.path}: found yaml files {others}, expected {YAML_NAMES[0]}")
        yaml_path = self.path / names[0]
        try:
            self.config: FolderConfig = read_yaml(yaml_path)
        except YamlError as error:
            raise CheckpointError(f"{yaml_path}: {error}") from error
        if (self.path / "flow.pt").is_file():
            self.config = self._with_block_count(self.config)

    def _with_block_count(self, config: FolderConfig) -> FolderConfig:
        """Published yaml files do not say how many blocks follow the upsampling: the tensors do."""
        names = load_tensors(self.path / "flow.pt")
        found = {int(m[1]) for name in names if (m := re.match(r"encoder\.up_encoders\.(\d+)\.", name))}
        if not found:
            return config
        encoder = dataclasses.replace(config.flow.encoder, num_up_blocks=max(found) + 1)
        return dataclasses.replace(config, flow=dataclasses.replace(config.flow, encoder=encoder))

    def _need(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            raise CheckpointError(f"{path}: missing, expected in a CosyVoice2 checkpoint folder")
        return path

    @property
    def llm_path(self) -> Path:
        """Language model weights."""
        return self._need("llm.pt")

    @property
    def blank_path(self) -> Path:
        """Qwen2 configuration and tokenizer."""
        return self._need("CosyVoice-BlankEN")

    @property
    def flow_path(self) -> Path:
        """Flow weights."""
        return self._need("flow.pt")

    @property
    def hift_path(self) -> Path:
        """Vocoder weights."""
        return self._need("hift.pt")

    @property
    def campplus_path(self) -> Path:
        """Speaker network."""
        return self._need("campplus.onnx")

    @property
    def speech_tokenizer_path(self) -> Path:
        """Speech tokenizer network."""
        return self._need("speech_tokenizer_v2.onnx")

    def flow_state(self) -> dict[str, Tensor]:
        """Tensors of ``flow.pt``: exactly those of ``Flow(config.flow)``, else CheckpointError."""
        from cosyvoice.flow import Flow

        tensors = load_tensors(self.flow_path)
        with torch.device("meta"):
            expected = Flow(self.config.flow).state_dict()
        check_state(self.flow_path, tensors, expected)
        return tensors

    def hift_state(self) -> dict[str, Tensor]:
        """Tensors of ``hift.pt``, ``generator.`` stripped and weight norm folded, checked like the flow's."""
        from cosyvoice.hift import HiFTGenerator

        raw = load_tensors(self.hift_path)
        stripped = {name.replace("generator.", ""): value for name, value in raw.items()}
        try:
            tensors = fold_weight_norm(stripped)
        except CheckpointError as error:
            raise CheckpointError(f"{self.hift_path}: {error}") from error
        with torch.device("meta"):
            expected = HiFTGenerator(self.config.hift).state_dict()
        check_state(self.hift_path, tensors, expected)
        return tensors

    def load_flow(self) -> Flow:
        """The flow on the CPU in float32, in evaluation mode, without gradients."""
        from cosyvoice.flow import Flow

        with torch.device("meta"):
            flow = Flow(self.config.flow)
        flow.to_empty(device="cpu")  # all of it is parameters, which the next line fills
        flow.load_state_dict(self.flow_state())
        return _frozen(flow)

    def load_hift(self) -> HiFTGenerator:
        """The vocoder, likewise; its f0 predictor is set to float64 (see ``F0Predictor``)."""
        from cosyvoice.hift import HiFTGenerator

        hift = HiFTGenerator(self.config.hift)
        hift.load_state_dict(self.hift_state())
        hift.f0_predictor.double()
        return _frozen(hift)


def _frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)
