"""Batches of different lengths give the numbers of one utterance at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cosyvoice.flow import Flow, encoder, noise_table, solve, time_grid

LENGTHS = [(7, 13), (5, 21), (0, 9), (6, 46), (3, 1)]  # prompt and answer tokens


@pytest.fixture(scope="module")
def flow(golden_decoder) -> Flow:
    return golden_decoder.load_flow()


@pytest.fixture(scope="module")
def noise() -> Tensor:
    return noise_table(0)


def utterances() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens [S], prompt mel [2P, 80], embedding [192] of each."""
    draw = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, 256, (p + n,), generator=draw),
            torch.randn(2 * p, 80, generator=draw),
            torch.randn(192, generator=draw),
        )
        for p, n in LENGTHS
    ]


def one_by_one(flow: Flow, noise: Tensor, **options) -> list[Tensor]:
    return [
        flow.generate(tokens[None], [len(tokens)], [mel], voice[None], noise, **options)[0]
        for tokens, mel, voice in utterances()
    ]


def together(flow: Flow, noise: Tensor, **options) -> list[Tensor]:
    """One batch, with ids that mean something in the padding and some room to spare."""
    items = utterances()
    lengths = [len(tokens) for tokens, _, _ in items]
    batch = torch.full((len(items), max(lengths) + 3), 17)
    for row, (tokens, _, _) in enumerate(items):
        batch[row, : len(tokens)] = tokens
    voices = torch.stack([voice for _, _, voice in items])
    return flow.generate(batch, lengths, [mel for _, mel, _ in items], voices, noise, **options)


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference over all mels, relative to each one's largest value."""
    assert [each.shape for each in found] == [(80, 2 * n) for _, n in LENGTHS]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"guidance": 0.0, "n_steps": 3}])
def test_batch_equals_singles(flow: Flow, noise: Tensor, options: dict) -> None:
    assert worst(together(flow, noise, **options), one_by_one(flow, noise, **options)) < 1e-5


@torch.inference_mode()
def test_without_zeroing_the_padding_it_would_leak(flow: Flow, noise: Tensor, monkeypatch) -> None:
    """The comparison above can fail: leave out the encoder's masks and it does, by far."""
    expected = one_by_one(flow, noise)
    monkeypatch.setattr(encoder, "valid_steps", lambda lengths, size, device: None)
    assert worst(together(flow, noise), expected) > 1e-2


@torch.inference_mode()
def test_guidance_and_steps_matter(flow: Flow, noise: Tensor) -> None:
    default = one_by_one(flow, noise)
    assert worst(one_by_one(flow, noise, guidance=0.7, n_steps=10), default) == 0
    assert worst(one_by_one(flow, noise, guidance=0.0), default) > 1e-2
    assert worst(one_by_one(flow, noise, n_steps=5), default) > 1e-3


@torch.inference_mode()
def test_bfloat16_stays_close(golden_decoder, flow: Flow, noise: Tensor) -> None:
    half = golden_decoder.load_flow().bfloat16()
    for found, expected in zip(one_by_one(half, noise), one_by_one(flow, noise), strict=True):
        assert found.dtype == torch.float32
        assert ((found - expected).square().mean() / expected.square().mean()).sqrt() < 0.02


def test_cosine_grid() -> None:
    starts, sizes = time_grid(10)
    for j, start in enumerate(starts):
        assert start == pytest.approx(1 - math.cos(j / 10 * math.pi / 2), abs=2e-7)
    assert starts[-1] + sizes[-1] == pytest.approx(1.0, abs=2e-7)
    assert time_grid(1) == ([0.0], [pytest.approx(1.0, abs=1e-7)])


class _LinearField:
    """dx/dt = mu + speaker + cond where there is a condition, and -2 where all three are zero."""

    def time_shifts(self, t: Tensor) -> Tensor:
        return t[:, None, None]

    def __call__(self, inputs: Tensor, shifts: Tensor, bias: Tensor | None) -> Tensor:
        _, mu, speaker, cond = inputs.unflatten(2, (4, 80)).unbind(2)
        given = mu + speaker + cond
        return torch.where(given == 0, torch.full_like(given, -2.0), given)


def test_solver_on_a_field_with_a_known_answer() -> None:
    """A constant velocity of 1 + 2 + 4 = 7 against -2 leads to x0 + 1.7 * 7 + 0.7 * 2."""
    mu, noise = torch.full((2, 5, 80), 1.0), torch.randn(1, 5, 80)
    mel = solve(_LinearField(), noise, mu, torch.full((2, 80), 2.0), 4 * mu, None, n_steps=10, guidance=0.7)
    torch.testing.assert_close(mel, (noise + 13.3).expand(2, -1, -1), rtol=0, atol=1e-5)


def test_relative_attention_formula() -> None:
    """Scores by the formula of Transformer-XL, one query and key at a time."""
    torch.manual_seed(0)
    width, heads, size = 8, 2, 5
    attention = encoder.RelativeAttention(width, heads)
    torch.nn.init.normal_(attention.pos_bias_u)
    torch.nn.init.normal_(attention.pos_bias_v)
    x = torch.randn(1, size, width)
    q, k, v = (
        layer(x)[0].view(size, heads, 4) for layer in (attention.linear_q, attention.linear_k, attention.linear_v)
    )
    expected = torch.zeros(size, heads, 4)
    for i in range(size):
        for h in range(heads):
            scores = []
            for j in range(size):
                rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
                pe = torch.stack([((i - j) * rates).sin(), ((i - j) * rates).cos()], dim=1).flatten()
                at = attention.linear_pos(pe).view(heads, 4)[h]
                u, w = attention.pos_bias_u[h], attention.pos_bias_v[h]
                scores.append(((q[i, h] + u) @ k[j, h] + (q[i, h] + w) @ at) / 4**0.5)
            expected[i, h] = torch.stack(scores).softmax(0) @ v[:, h]
    found = attention(x, encoder.RelativePositions(width)(size, x), None)
    torch.testing.assert_close(found[0], attention.linear_out(expected.flatten(1)), rtol=1e-5, atol=1e-6)


def test_every_weight_is_trainable(golden_decoder) -> None:
    flow = Flow(golden_decoder.config.flow)
    tokens = torch.randint(0, 256, (2, 6))
    velocity = flow(
        tokens, [6, 4], torch.randn(2, 192), torch.randn(2, 12, 80), torch.tensor([0.2, 0.7]), torch.randn(2, 12, 80)
    )
    velocity[1, 8:] = 0
    velocity.square().mean().backward()
    without = [name for name, weight in flow.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []
