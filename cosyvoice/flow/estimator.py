"""Velocity estimator of the flow: resnets and transformer blocks over mel frames, one resolution.

Frames come as [B, T, C] throughout, so that norms, attention and convolutions (a matrix product over
neighbouring frames) all read contiguous channels. Every convolution looks left only: right padding
reaches valid frames through attention alone, and the key mask closes that way. No other mask is needed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice.flow.config import EstimatorConfig


class CausalConv(nn.Module):
    """Convolution over frames [B, T, C] that sees the current frame and ``kernel - 1`` before it.

    ``weight`` has the shape of ``nn.Conv1d`` ([out, in, kernel]) but lies in memory as
    [out, kernel, in], so that the matrix that ``forward`` multiplies by is a view of it.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(outputs, kernel, inputs).transpose(1, 2))
        self.bias = nn.Parameter(torch.empty(outputs))
        bound = 1.0 / math.sqrt(inputs * kernel)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel > 1:
            x = F.pad(x, (0, 0, self.kernel - 1, 0))
            x = x.unfold(1, self.kernel, 1).transpose(2, 3).flatten(2)
        return F.linear(x, self.weight.transpose(1, 2).flatten(1), self.bias)


class ConvBlock(nn.Module):
    """Causal convolution, LayerNorm over channels, Mish."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"0": CausalConv(inputs, outputs, 3), "2": nn.LayerNorm(outputs)})

    def forward(self, x: Tensor) -> Tensor:
        return F.mish(self.block["2"](self.block["0"](x)))


class ResnetBlock(nn.Module):
    """Two convolution blocks with the time shift between them, and a 1x1 residual path."""

    def __init__(self, inputs: int, outputs: int, time_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(time_size, outputs))
        self.block1 = ConvBlock(inputs, outputs)
        self.block2 = ConvBlock(outputs, outputs)
        self.res_conv = CausalConv(inputs, outputs, 1)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        """x [B, T, inputs], shift [B or 1, outputs] from :meth:`Estimator.time_shifts`."""
        h = self.block1(x) + shift[:, None, :]
        return self.block2(h) + self.res_conv(x)


class Attention(nn.Module):
    """Plain multi-head attention; the heads together are wider than the channels."""

    def __init__(self, channels: int, heads: int, head_size: int) -> None:
        super().__init__()
        inner = heads * head_size
        self.heads, self.head_size = heads, head_size
        self.to_q = nn.Linear(channels, inner, bias=False)
        self.to_k = nn.Linear(channels, inner, bias=False)
        self.to_v = nn.Linear(channels, inner, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(inner, channels)])

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        batch, size, _ = x.shape
        split = (batch, size, self.heads, self.head_size)
        q = self.to_q(x).view(split).transpose(1, 2)
        k = self.to_k(x).view(split).transpose(1, 2)
        v = self.to_v(x).view(split).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.to_out[0](mixed.transpose(1, 2).flatten(2))


class GeluProjection(nn.Module):
    """Linear and exact GELU."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x))


class FeedForward(nn.Module):
    """Expand four times with GELU, and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.ModuleDict(
            {"0": GeluProjection(channels, 4 * channels), "2": nn.Linear(4 * channels, channels)}
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net["2"](self.net["0"](x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, both residual."""

    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.channels)
        self.attn1 = Attention(config.channels, config.num_heads, config.attention_head_dim)
        self.norm3 = nn.LayerNorm(config.channels)
        self.ff = FeedForward(config.channels)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x + self.attn1(self.norm1(x), bias)
        return x + self.ff(self.norm3(x))


class TimeMLP(nn.Module):
    """Sinusoids of 1000 t through Linear, SiLU, Linear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.linear_1 = nn.Linear(inputs, outputs)
        self.linear_2 = nn.Linear(outputs, outputs)

    def sinusoids(self, t: Tensor) -> Tensor:
        """t [R] -> [R, inputs]: sines, then cosines, of ``1000 t exp(-i ln(10000) / (inputs/2 - 1))``."""
        half = self.inputs // 2
        steps = torch.arange(half, dtype=torch.float32, device=t.device)
        angles = 1000.0 * t.float()[:, None] * torch.exp(steps * -(math.log(10000.0) / (half - 1)))
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def forward(self, t: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(self.sinusoids(t).to(self.linear_1.weight.dtype))))


class Estimator(nn.Module):
    """The network v(x, t | mu, speaker, prompt)."""

    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__()
        self.config = config
        width, time_size = config.channels, 4 * config.channels

        def stage(inputs: int, last_conv: bool) -> nn.ModuleList:
            blocks = nn.ModuleList([TransformerBlock(config) for _ in range(config.n_blocks)])
            parts = [ResnetBlock(inputs, width, time_size), blocks]
            return nn.ModuleList([*parts, CausalConv(width, width, 3)] if last_conv else parts)

        self.time_mlp = TimeMLP(config.in_channels, time_size)
        self.down_blocks = nn.ModuleList([stage(config.in_channels, last_conv=True)])
        self.mid_blocks = nn.ModuleList([stage(width, last_conv=False) for _ in range(config.num_mid_blocks)])
        self.up_blocks = nn.ModuleList([stage(2 * width, last_conv=True)])
        self.final_block = ConvBlock(width, width)
        self.final_proj = CausalConv(width, config.out_channels, 1)

    def time_shifts(self, t: Tensor) -> Tensor:
        """What time adds inside each resnet: t [R] in [0, 1] -> [R, resnets, channels].

        It depends on nothing else, so a solver computes it for all its steps at once.
        """
        embedded = self.time_mlp(t)
        stages = [*self.down_blocks, *self.mid_blocks, *self.up_blocks]
        return torch.stack([stage[0].mlp(embedded) for stage in stages], dim=1)

    def forward(self, inputs: Tensor, shifts: Tensor, bias: Tensor | None = None) -> Tensor:
        """Velocity of a (padded) batch.

        Args:
            inputs: [B, T, in_channels] = x, mu, speaker, prompt mel, in this order.
            shifts: [B or 1, resnets, channels] from :meth:`time_shifts`.
            bias: additive attention mask, broadcast to [B, heads, T, T]; None when no frame is padding.

        Returns:
            [B, T, out_channels]; padded frames are finite and meaningless.
        """
        resnet, blocks, conv = self.down_blocks[0]
        x = self._stage(resnet, blocks, inputs, shifts[:, 0], bias)
        skip = x
        x = conv(x)
        for i, (resnet, blocks) in enumerate(self.mid_blocks, start=1):
            x = self._stage(resnet, blocks, x, shifts[:, i], bias)
        resnet, blocks, conv = self.up_blocks[0]
        x = self._stage(resnet, blocks, torch.cat([x, skip], dim=2), shifts[:, -1], bias)
        return self.final_proj(self.final_block(conv(x)))

    @staticmethod
    def _stage(
        resnet: ResnetBlock, blocks: nn.ModuleList, x: Tensor, shift: Tensor, bias: Tensor | None
    ) -> Tensor:
        x = resnet(x, shift)
        for block in blocks:
            x = block(x, bias)
        return x
