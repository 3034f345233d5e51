"""Speech tokens to mel: embedding, encoder, flow matching."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice.flow.config import FlowConfig
from cosyvoice.flow.encoder import TokenEncoder
from cosyvoice.flow.estimator import Estimator
from cosyvoice.flow.masks import attention_bias, valid_steps
from cosyvoice.flow.solver import solve


class Decoder(nn.Module):
    """Holds the estimator under the name that ``flow.pt`` gives it."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.estimator = Estimator(config.estimator)


class Flow(nn.Module):
    """All of ``flow.pt``, under its names. Every method is differentiable but :meth:`generate`'s caller
    may put it under ``torch.inference_mode``."""

    def __init__(self, config: FlowConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or FlowConfig()
        bins = config.output_size
        self.input_embedding = nn.Embedding(config.vocab_size, config.input_size)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, bins)
        self.encoder = TokenEncoder(config.encoder, config.pre_lookahead_len, config.token_mel_ratio)
        self.encoder_proj = nn.Linear(config.encoder.output_size, bins)
        self.decoder = Decoder(config)

    def speaker(self, embedding: Tensor) -> Tensor:
        """Speaker x-vector [B, 192] -> [B, 80]; the vector's length does not matter."""
        unit = F.normalize(embedding.float(), dim=1, eps=1e-12)
        return self.spk_embed_affine_layer(unit.to(self.spk_embed_affine_layer.weight.dtype))

    def encode(
        self, tokens: Tensor, lengths: Sequence[int], streaming: bool = False, finalize: bool = True
    ) -> Tensor:
        """Mean of the mel: tokens [B, S] (prompt and answer, right-padded) -> mu [B, 2S, 80].

        Ids must be below ``vocab_size``; negative ids count as 0. With ``finalize=False`` the last
        three tokens are context only and the result is 2(S - 3) frames long.
        """
        x = self.input_embedding(tokens.clamp(min=0))
        valid = valid_steps(lengths, tokens.shape[1], tokens.device)
        if valid is not None:
            x = x * valid[:, :, None]
        return self.encoder_proj(self.encoder(x, lengths, streaming, finalize))

    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        embedding: Tensor,
        x: Tensor,
        t: Tensor,
        cond: Tensor,
    ) -> Tensor:
        """Velocity at x and t: what training regresses.

        Args:
            tokens: [B, S]; lengths: tokens per row; embedding: [B, 192].
            x: [B, 2S, 80]; t: [B] in [0, 1]; cond: prompt mel or zeros [B, 2S, 80].

        Returns:
            [B, 2S, 80]; frames beyond ``2 * lengths`` are meaningless.
        """
        mu = self.encode(tokens, lengths)
        return self.velocity(x, t, mu, self.speaker(embedding), cond, lengths)

    def velocity(
        self, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, cond: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """The estimator alone, for given mu [B, T, 80] and speaker [B, 80] (zeros: unconditional)."""
        estimator = self.decoder.estimator
        frames = x.shape[1]
        spread = speaker[:, None].expand(-1, frames, -1)
        ends = [self.config.token_mel_ratio * length for length in lengths]
        bias = attention_bias(valid_steps(ends, frames, x.device), frames, 0, x)
        return estimator(torch.cat([x, mu, spread, cond], dim=2), estimator.time_shifts(t), bias)

    def generate(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        prompt_mels: Sequence[Tensor],
        embedding: Tensor,
        noise: Tensor,
        n_steps: int = 10,
        guidance: float | None = None,
        streaming: bool = False,
        finalize: bool = True,
    ) -> list[Tensor]:
        """Mel of each utterance, the same whatever stands beside it in the batch (to rounding).

        Args:
            tokens: int64 [B, S], prompt then answer, right-padded. lengths: valid tokens per row.
            prompt_mels: one [F, 80] per row, F frames that are given and not returned.
            embedding: speaker x-vectors [B, 192].
            noise: [1, 80, >= 2S] from :func:`cosyvoice.flow.solver.noise_table`.
            guidance: None takes the checkpoint's rate.

        Returns:
            per row a float32 [80, 2 * length - F].
        """
        guidance = self.config.inference_cfg_rate if guidance is None else guidance
        mu = self.encode(tokens, lengths, streaming, finalize)
        frames = mu.shape[1]
        cut = 0 if finalize else self.config.pre_lookahead_len
        ends = [self.config.token_mel_ratio * (length - cut) for length in lengths]
        cond = torch.zeros_like(mu)
        for row, mel in enumerate(prompt_mels):
            cond[row, : len(mel)] = mel
        chunk = self.config.estimator.static_chunk_size if streaming else 0
        bias = attention_bias(valid_steps(ends, frames, mu.device), frames, chunk, mu)
        start = noise[:, :, :frames].transpose(1, 2)
        mel = solve(
            self.decoder.estimator, start, mu, self.speaker(embedding), cond, bias, n_steps, guidance
        )
        return [mel[row, len(given) : ends[row]].T for row, given in enumerate(prompt_mels)]
