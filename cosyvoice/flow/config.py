"""Sizes of the flow-matching decoder. Defaults are those of the published CosyVoice2-0.5B."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EncoderConfig:
    """Token encoder: two stacks of relative-position attention blocks around a 2x upsampling."""

    input_size: int = 512
    output_size: int = 512
    attention_heads: int = 8
    linear_units: int = 2048
    num_blocks: int = 6
    num_up_blocks: int = 4
    """Blocks after the upsampling. Published yaml files lack it (always 4 there)."""
    static_chunk_size: int = 25
    """Attention chunk in tokens, used only when streaming."""


@dataclass(frozen=True)
class EstimatorConfig:
    """Velocity estimator: a U-Net with a single resolution."""

    in_channels: int = 320
    out_channels: int = 80
    channels: int = 256
    attention_head_dim: int = 64
    num_heads: int = 8
    n_blocks: int = 4
    """Transformer blocks after each resnet."""
    num_mid_blocks: int = 12
    static_chunk_size: int = 50
    """Attention chunk in mel frames, used only when streaming."""


@dataclass(frozen=True)
class FlowConfig:
    """Everything ``flow.pt`` needs: the two networks and what stands around them."""

    input_size: int = 512
    output_size: int = 80
    """Mel bins."""
    spk_embed_dim: int = 192
    vocab_size: int = 6561
    token_mel_ratio: int = 2
    pre_lookahead_len: int = 3
    inference_cfg_rate: float = 0.7
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
