"""The vocoder against tensors recorded from the reference implementation, stage by stage.

The recorded source is fed to the decoder, and the recorded f0 to the source, because phases of thousands of
radians turn a rounding of f0 into 1e-3 of the wave. Tolerances follow `golden/README.md`: 1e-4 given the
recorded source (relative where values are above 1), 1e-3 for the wave from mel.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosyvoice.flow import noise_table
from cosyvoice.hift import HiFTGenerator, RowMasks, SourceNoise

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASES = {case["name"]: case for case in json.loads((GOLDEN / "hift_cases.json").read_text())}


@pytest.fixture(scope="module")
def hift(golden_decoder) -> HiFTGenerator:
    return golden_decoder.load_hift()


def close(found: Tensor, expected: Tensor, name: str, bound: float = 1e-4) -> None:
    assert found.shape == expected.shape, name
    assert (found - expected).abs().max() <= bound * expected.abs().max().clamp(min=1), name


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_every_recorded_tensor(hift: HiFTGenerator, name: str) -> None:
    tensors = load_file(GOLDEN / f"hift_case_{name}.safetensors")
    mel, noise = tensors["in.mel"], tensors["out.draw1_sine_noise"].transpose(1, 2)
    recorded = {key[4:]: value for key, value in tensors.items() if key.startswith("out.")}
    made: dict[str, Tensor] = {}

    f0 = hift.f0_predictor(mel, None)
    close(f0, recorded.pop("f0"), "f0", 1e-6)
    source, waves = hift.m_source(tensors["out.f0"], noise)
    made["sine_waves"] = waves.transpose(1, 2)
    made["source_pre_cache"] = source.transpose(1, 2)
    if "in.cache_source" in tensors:
        given = tensors["in.cache_source"].shape[2]
        source = torch.cat([tensors["in.cache_source"], source[:, :, given:]], dim=2)
    made["source"] = source
    voiced = (tensors["out.f0"] > hift.config.nsf_voiced_threshold).float()
    made["uv"] = voiced.repeat_interleave(480, dim=1)[..., None]
    assert int(voiced.sum()) == CASES[name]["voiced"]

    handles = [
        module.register_forward_hook(lambda _, __, output, key=key: made.__setitem__(key, output))
        for key, module in hift.named_modules()
        if key in recorded
    ]
    try:
        masks = RowMasks(hift.config, None, mel.shape[2], mel)
        made["magnitude_unclipped"], made["phase"] = hift.spectrum(mel, recorded["source"], masks)
        made["wav"] = hift.decode(mel, recorded["source"])
        made["s_stft"] = hift.stft.transform(recorded["source"][:, 0])
        limited, hift.config = hift.config, dataclasses.replace(hift.config, audio_limit=float("inf"))
        made["wav_unclamped"] = hift.decode(mel, recorded["source"])
        hift.config = limited
    finally:
        for handle in handles:
            handle.remove()
    del recorded["draw0_rand_ini"], recorded["draw1_sine_noise"]  # random draws, the second is an input here
    assert recorded.keys() == made.keys()
    for key, value in recorded.items():
        close(made[key], value, key)
    assert int((made["wav"].abs() == hift.config.audio_limit).sum()) == pytest.approx(
        CASES[name]["wav_clamped"], abs=2
    )


@torch.inference_mode()
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case["cache"]])
def test_wave_from_mel(hift: HiFTGenerator, name: str) -> None:
    """From mel to wave with the recorded draws. In the loud case (f0 up to 516 Hz, magnitudes at the limit)
    the recording's own rounding of f0, 4e-4 Hz from a float64 run, already makes 1.2e-3."""
    tensors = load_file(GOLDEN / f"hift_case_{name}.safetensors")
    wav = hift(tensors["in.mel"], tensors["out.draw1_sine_noise"].transpose(1, 2))
    assert (wav - tensors["out.wav"]).abs().max() <= (2e-3 if "loud" in name else 1e-3)


@torch.inference_mode()
def test_tokens_to_wave(golden_decoder, hift: HiFTGenerator) -> None:
    tensors = load_file(GOLDEN / "chain_case_a.safetensors")
    tokens = torch.cat([tensors["in.prompt_token"], tensors["in.token"]], dim=1).long()
    mel = golden_decoder.load_flow().generate(
        tokens, [tokens.shape[1]], [tensors["in.prompt_feat"][0]], tensors["in.embedding"], noise_table(0)
    )[0][None]
    assert (mel - tensors["out.mel"]).abs().max() <= 1e-4
    noise = tensors["out.draw1_sine_noise"].transpose(1, 2)
    source, _ = hift.m_source(tensors["out.f0"], noise)
    close(source, tensors["out.source"], "source")
    close(hift.decode(mel, tensors["out.source"]), tensors["out.wav"], "wave from the recorded source", 1e-3)
    assert (hift(mel, noise) - tensors["out.wav"]).abs().max() <= 1e-3


LENGTHS = [18, 11, 30, 1]


@torch.inference_mode()
def test_batch_equals_singles(hift: HiFTGenerator) -> None:
    """Rows of different lengths with large values in the padding."""
    draw = torch.Generator().manual_seed(1)
    mels = [1.6 * torch.randn(80, frames, generator=draw) for frames in LENGTHS]
    batch = 9 * torch.randn(len(LENGTHS), 80, max(LENGTHS) + 2, generator=draw)
    for row, mel in enumerate(mels):
        batch[row, :, : mel.shape[1]] = mel
    noise = SourceNoise(9)
    waves = hift(batch, noise(480 * batch.shape[2]), LENGTHS)
    for wave, mel in zip(waves, mels, strict=True):
        alone = hift(mel[None], noise(480 * mel.shape[1]))[0]
        assert (wave[: len(alone)] - alone).abs().max() < 1e-4


@torch.inference_mode()
def test_without_masks_padding_leaks(hift: HiFTGenerator) -> None:
    """The comparison above can fail: a row padded without its length differs before its end."""
    mel = torch.randn(1, 80, 18, generator=torch.Generator().manual_seed(1))
    noise = SourceNoise(9)
    padded = torch.nn.functional.pad(mel, (0, 12))
    alone, beside = hift(mel, noise(480 * 18)), hift(padded, noise(480 * 30))
    assert (alone - beside[:, : 480 * 18]).abs().max() > 1e-2
    assert (hift(padded, noise(480 * 30), [18])[:, : 480 * 18] - alone).abs().max() < 1e-4


def test_sines_at_constant_pitch(hift: HiFTGenerator) -> None:
    """At 100 Hz, after the half frame at rest, harmonic h turns h * 100 / 24000 per sample."""
    sines = hift.m_source.sines(torch.full((1, 4), 100.0))[0].double()
    sample = torch.arange(4 * 480, dtype=torch.float64)
    # Frame centres are at 239.5 + 480 t, where the phase is (t + 1) frames' worth; at rest outside.
    frames = ((sample - 239.5) / 480).clamp(0, 3) + 1
    for h in range(1, 10):
        expected = 0.1 * torch.sin(2 * torch.pi * h * 100 / 24000 * 480 * frames)
        torch.testing.assert_close(sines[h - 1], expected, rtol=0, atol=1e-5)


def test_spectrum_and_inverse_agree_with_torch(hift: HiFTGenerator) -> None:
    wave = torch.randn(2, 480, generator=torch.Generator().manual_seed(2))
    window = torch.hann_window(16)
    expected = torch.stft(wave, 16, 4, 16, window, return_complex=True)
    found = hift.stft.transform(wave)
    torch.testing.assert_close(found, torch.cat([expected.real, expected.imag], 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(hift.stft.inverse(found), wave, rtol=0, atol=1e-5)


def test_source_noise_is_a_table() -> None:
    noise, other = SourceNoise(9), SourceNoise(9)
    long = noise(150_000).clone()
    assert long.shape == (1, 9, 150_000)
    assert torch.equal(other(700), long[:, :, :700])  # whatever was asked before
    assert torch.equal(other(150_000), long)
    assert not torch.equal(SourceNoise(9, seed=1)(700), long[:, :, :700])
    assert abs(long.mean()) < 0.01
    assert abs(long.std() - 1) < 0.01
    rows = torch.corrcoef(long[0, :, :100_000])
    assert (rows - torch.eye(9)).abs().max() < 0.02
    blocks = torch.corrcoef(torch.stack([long[0, 0, :48000], long[0, 0, 48000:96000]]))
    assert blocks[0, 1].abs() < 0.03


def test_every_weight_is_trainable(golden_decoder) -> None:
    hift = HiFTGenerator(golden_decoder.config.hift)
    torch.nn.init.constant_(hift.f0_predictor.classifier.bias, 200.0)  # voiced, else the sines are cut off
    hift(torch.randn(1, 80, 6), torch.randn(1, 9, 480 * 6)).square().mean().backward()
    without = [name for name, weight in hift.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []
