"""HiFT vocoder: mel to waveform."""

from cosyvoice.hift.config import HiFTConfig
from cosyvoice.hift.generator import HiFTGenerator, RowMasks
from cosyvoice.hift.source import SourceNoise

__all__ = ["HiFTConfig", "HiFTGenerator", "RowMasks", "SourceNoise"]
