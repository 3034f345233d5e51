"""Token encoder of the flow: speech-token embeddings [B, S, C] to mel-rate features [B, 2S, C].

Pre-norm attention blocks with the relative positions of Transformer-XL (Dai et al. 2019,
arXiv:1901.02860), a convolution that looks three tokens ahead, and a 2x upsampling half way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice.flow.config import EncoderConfig
from cosyvoice.flow.masks import attention_bias, valid_steps


class RelativePositions(nn.Module):
    """Sinusoids of relative distances, kept between calls and grown when a longer input comes.

    ``pe(r)[2m] = sin(r w_m)``, ``pe(r)[2m+1] = cos(r w_m)``, ``w_m = 10000^(-2m/C)``.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self._table: Tensor | None = None  # rows r = K-1 .. -K, where K is half of the row count

    def forward(self, size: int, like: Tensor) -> Tensor:
        """[2 * size, C] for the distances r = size-1, ..., 0, ..., -size, in the dtype of ``like``."""
        table = self._table
        if table is None or table.device != like.device or table.dtype != like.dtype or len(table) < 2 * size:
            reach = max(size, 512)
            rates = torch.exp(
                torch.arange(0, self.channels, 2, dtype=torch.float32) * -(math.log(10000.0) / self.channels)
            )
            angles = torch.arange(reach - 1, -reach - 1, -1, dtype=torch.float32)[:, None] * rates
            table = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).to(like)
            self._table = table
        first = len(table) // 2 - size
        return table[first : first + 2 * size]


class RelativeAttention(nn.Module):
    """Attention whose scores are ``((q+u) k + (q+v) W_pos pe(i-k)) / sqrt(d)``."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, channels // heads
        self.linear_q = nn.Linear(channels, channels)
        self.linear_k = nn.Linear(channels, channels)
        self.linear_v = nn.Linear(channels, channels)
        self.linear_out = nn.Linear(channels, channels)
        self.linear_pos = nn.Linear(channels, channels, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, self.head_size))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, self.head_size))

    def forward(self, x: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor:
        """x [B, S, C], positions [2S, C], bias additive and broadcast to [B, heads, S, S] -> [B, S, C]."""
        batch, size, channels = x.shape
        split = (batch, size, self.heads, self.head_size)
        q = self.linear_q(x).view(split)
        k = self.linear_k(x).view(split).transpose(1, 2)
        v = self.linear_v(x).view(split).transpose(1, 2)
        by_distance = self.linear_pos(positions).view(2 * size, self.heads, self.head_size).permute(1, 2, 0)
        scale = 1.0 / math.sqrt(self.head_size)
        distance_scores = torch.matmul((q + self.pos_bias_v).transpose(1, 2) * scale, by_distance)
        distance_scores = shift_to_keys(distance_scores)
        if bias is not None:
            distance_scores = distance_scores + bias
        q = (q + self.pos_bias_u).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=distance_scores, scale=scale)
        return self.linear_out(mixed.transpose(1, 2).reshape(batch, size, channels))


def shift_to_keys(by_distance: Tensor) -> Tensor:
    """Turn scores per distance into scores per key, as a view.

    ``by_distance`` [..., S, 2S] has column c for distance ``S-1-c``; key k of query i is at distance
    ``i-k``, that is in column ``S-1-i+k``: one element further left on each row, so a row length
    of 2S-1 on the flattened scores lines the keys up.
    """
    size = by_distance.shape[-2]
    row = 2 * size - 1
    flat = by_distance.flatten(-2)[..., size - 1 : size - 1 + size * row]
    return flat.unflatten(-1, (size, row))[..., :size]


class FeedForward(nn.Module):
    """Linear, SiLU, Linear."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(channels, hidden)
        self.w_2 = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.silu(self.w_1(x)))


class EncoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, both residual."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.output_size
        self.norm_mha = nn.LayerNorm(width, eps=1e-12)
        self.self_attn = RelativeAttention(width, config.attention_heads)
        self.norm_ff = nn.LayerNorm(width, eps=1e-12)
        self.feed_forward = FeedForward(width, config.linear_units)

    def forward(self, x: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.norm_mha(x), positions, bias)
        return x + self.feed_forward(self.norm_ff(x))


class InputLayer(nn.Module):
    """Linear, LayerNorm, times sqrt(C)."""

    def __init__(self, input_size: int, channels: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(input_size, channels), nn.LayerNorm(channels, eps=1e-5))
        self.gain = math.sqrt(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.gain


class LookAhead(nn.Module):
    """Two residual convolutions over [B, S, C]: one sees ``reach`` steps ahead, the other two back."""

    def __init__(self, channels: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.conv1 = nn.Conv1d(channels, channels, reach + 1)
        self.conv2 = nn.Conv1d(channels, channels, 3)

    def forward(self, x: Tensor, ahead: Tensor | None) -> Tensor:
        """``ahead`` [B, reach, C]: what follows x; zeros when None."""
        y = F.pad(x, (0, 0, 0, self.reach)) if ahead is None else torch.cat([x, ahead], dim=1)
        y = F.leaky_relu(self.conv1(y.transpose(1, 2)), 0.01)
        return self.conv2(F.pad(y, (2, 0))).transpose(1, 2) + x


class Upsample(nn.Module):
    """Repeat every step, then a convolution that looks left: [B, S, C] -> [B, ratio * S, C]."""

    def __init__(self, channels: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = nn.Conv1d(channels, channels, 2 * ratio + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).repeat_interleave(self.ratio, dim=2)
        return self.conv(F.pad(x, (2 * self.ratio, 0))).transpose(1, 2)


class TokenEncoder(nn.Module):
    """The whole encoder. Right padding does not change valid steps (see ``forward``)."""

    def __init__(self, config: EncoderConfig, look_ahead: int, ratio: int) -> None:
        super().__init__()
        self.config, self.ratio, self.look_ahead = config, ratio, look_ahead
        width = config.output_size
        self.embed = InputLayer(config.input_size, width)
        self.positions = RelativePositions(width)
        self.pre_lookahead_layer = LookAhead(width, look_ahead)
        self.encoders = nn.ModuleList([EncoderBlock(config) for _ in range(config.num_blocks)])
        self.up_layer = Upsample(width, ratio)
        self.up_embed = InputLayer(width, width)
        self.up_encoders = nn.ModuleList([EncoderBlock(config) for _ in range(config.num_up_blocks)])
        self.after_norm = nn.LayerNorm(width, eps=1e-5)

    def forward(
        self, x: Tensor, lengths: Sequence[int], streaming: bool = False, finalize: bool = True
    ) -> Tensor:
        """Encode a right-padded batch.

        Args:
            x: [B, S, input_size], zero on padding.
            lengths: valid steps per row.
            streaming: limit attention to chunks.
            finalize: False when the last ``look_ahead`` steps are only context (one row at a time).

        Returns:
            [B, ratio * S', C] with S' = S, or S - look_ahead when not ``finalize``. Steps beyond
            a row's end are finite and meaningless.
        """
        x = self.embed(x)
        ahead = None
        if not finalize:
            x, ahead = x[:, : -self.look_ahead], x[:, -self.look_ahead :]
            lengths = [length - self.look_ahead for length in lengths]
        valid = valid_steps(lengths, x.shape[1], x.device)
        if valid is not None:
            # The bias and the norm of `embed` made the padding non-zero again, and the
            # look-ahead convolution would mix it into the last tokens of the row.
            x = x * valid[:, :, None]
        x = self.pre_lookahead_layer(x, ahead)
        chunk = self.config.static_chunk_size if streaming else 0
        x = self._run(self.encoders, x, valid, chunk)
        x = self.up_embed(self.up_layer(x))
        if valid is not None:
            valid = valid.repeat_interleave(self.ratio, dim=1)
        x = self._run(self.up_encoders, x, valid, chunk * self.ratio)
        return self.after_norm(x)

    def _run(self, blocks: nn.ModuleList, x: Tensor, valid: Tensor | None, chunk: int) -> Tensor:
        positions = self.positions(x.shape[1], x)
        bias = attention_bias(valid, x.shape[1], chunk, x)
        for block in blocks:
            x = block(x, positions, bias)
        return x
