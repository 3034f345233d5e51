"""Euler solver with classifier-free guidance, from noise to mel.

Conditional flow matching as in Matcha-TTS (Mehta et al. 2024, arXiv:2309.03199) with the guidance
``v = (1 + g) v_cond - g v_uncond`` of Ho and Salimans (2022, arXiv:2207.12598).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cosyvoice.flow.estimator import Estimator

MAX_FRAMES = 15000
"""Mel frames of the noise table (300 s): the longest prompt plus answer."""


def noise_table(seed: int = 0, bins: int = 80) -> Tensor:
    """The starting point of every utterance: [1, bins, MAX_FRAMES] float32 on the CPU.

    Drawn whole, because the values of a shorter draw would differ.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn([1, bins, MAX_FRAMES], generator=generator)


def time_grid(n_steps: int = 10) -> tuple[list[float], list[float]]:
    """Start and size of each step on the cosine grid ``1 - cos(j/n pi/2)``.

    Time is summed up step by step in float32, as the published decoder does.
    """
    grid = 1 - torch.cos(torch.linspace(0, 1, n_steps + 1) * 0.5 * math.pi)
    t, dt = grid[0], grid[1] - grid[0]
    starts, sizes = [], []
    for j in range(n_steps):
        starts.append(t.item())
        sizes.append(dt.item())
        t = t + dt
        if j + 2 <= n_steps:
            dt = grid[j + 2] - t
    return starts, sizes


def solve(
    estimator: Estimator,
    noise: Tensor,
    mu: Tensor,
    speaker: Tensor,
    cond: Tensor,
    bias: Tensor | None,
    n_steps: int = 10,
    guidance: float = 0.7,
) -> Tensor:
    """Integrate from noise (t = 0) to mel (t = 1).

    Args:
        noise: [1 or B, T, 80] float32.
        mu: encoder output [B, T, 80], in the dtype in which the estimator works.
        speaker: [B, 80]. cond: prompt mel, then zeros [B, T, 80].
        bias: additive attention mask [B or 1, 1, 1 or T, T] or None.
        n_steps: Euler steps. guidance: g above; at 0 the unconditional half is left out.

    Returns:
        [B, T, 80] float32. The loop waits for nothing on the device: the state stays in
        float32, only the estimator's input and output have its own dtype.
    """
    batch, frames, bins = mu.shape
    halves = 2 if guidance else 1
    starts, sizes = time_grid(n_steps)
    shifts = estimator.time_shifts(torch.tensor(starts, device=mu.device))
    # Rows 0..B-1 are conditional; rows B..2B-1 keep zeros for mu, speaker and prompt.
    inputs = mu.new_zeros(halves, batch, frames, 4 * bins)
    inputs[0, :, :, bins : 2 * bins] = mu
    inputs[0, :, :, 2 * bins : 3 * bins] = speaker[:, None]
    inputs[0, :, :, 3 * bins :] = cond
    if bias is not None and bias.shape[0] > 1:
        bias = bias.repeat(halves, 1, 1, 1)
    x = noise.expand(batch, -1, -1).float().clone()
    for j, dt in enumerate(sizes):
        inputs[..., :bins] = x
        v = estimator(inputs.flatten(0, 1), shifts[j : j + 1], bias).float()
        if halves == 2:
            v = torch.lerp(v[batch:], v[:batch], 1.0 + guidance)
        x.add_(v, alpha=dt)
    return x
