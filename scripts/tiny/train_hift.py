"""Train HiFT: f0 by regression, the waveform by spectral losses on short segments of natural speech.

The excitation is made from the tracked f0 here, and its phase is locked to the fundamental of the recording. espeak-ng
adds up harmonics whose phases hang together, so the waveform is then almost a function of mel and excitation, and a
loss of the complex spectrum teaches the harmonics what magnitudes alone leave to chance.
"""

from __future__ import annotations

import argparse
import time

import librosa
import numpy as np
import torch
from features import Features
from settings import HIFT, HIFT_CONFIG, SEED, WORK
from torch import Tensor, nn

from cosyvoice.hift.config import HiFTConfig
from cosyvoice.hift.generator import HiFTGenerator

RESOLUTIONS = ((512, 128), (1024, 256), (1920, 480))  # FFT size and hop


class SpectralLoss(nn.Module):
    """At several resolutions: L1 of log magnitudes, convergence of magnitudes and complex values; L1 of log mel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mel", torch.from_numpy(librosa.filters.mel(sr=24000, n_fft=1920, n_mels=80, fmax=8000)))

    def forward(self, made: Tensor, true: Tensor) -> Tensor:
        total = made.new_zeros(())
        for size, hop in RESOLUTIONS:
            window = torch.hann_window(size)
            both = torch.stft(torch.cat([made, true]), size, hop, size, window, return_complex=True)
            a, b = (both.real.square() + both.imag.square() + 1e-8).sqrt().chunk(2)
            difference = torch.view_as_real(torch.sub(*both.chunk(2))).norm()
            total = total + (a.log() - b.log()).abs().mean() + ((a - b).norm() + difference) / b.norm()
        mel_a, mel_b = ((self.mel @ m).clamp(min=1e-4).log() for m in (a, b))
        return total / len(RESOLUTIONS) + 2 * (mel_a - mel_b).abs().mean()


def lock_phase(wave: np.ndarray, f0: np.ndarray) -> np.ndarray:
    """Change f0 [T] (by 25 Hz at most) so that its running sum follows the phase of the fundamental.

    `wave` [480 T + 1200] has a margin of 600 samples on both sides. The phase is taken at the frame centres, where
    `cosyvoice.hift.source` samples its own, from a 50 ms window demodulated at f0.
    """
    frames = np.lib.stride_tricks.sliding_window_view(wave, 1200)[240 :: 480][: len(f0)]
    time_s = (np.arange(1200) - 600) / 24000
    carrier = np.exp(-2j * np.pi * f0[:, None] * time_s) * np.hanning(1200)
    turns = np.angle((frames * carrier).sum(1)) / (2 * np.pi)
    locked, before = np.zeros_like(f0), 0.0
    for t in np.flatnonzero(f0):
        step = turns[t] - before
        locked[t] = 50 * (step + np.round(f0[t] / 50 - step))
        before = turns[t]
    return locked


def segments(data: Features, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random segments: mel [B, 80, T], f0 [B, T], f0 locked to the phase [B, T] and wave [B, 480 T]."""
    frames, parts = HIFT["frames"], []
    while len(parts) < HIFT["batch"]:
        i = int(rng.integers(len(data)))
        mel, f0 = data.mel_of(i), data.f0_of(i)
        if len(mel) > frames:
            s = int(rng.integers(0, len(mel) - frames))
            wide = np.pad(data.waves[i], 600)[480 * s : 480 * (s + frames) + 1200].astype(np.float32) / 32768
            f0 = f0[s : s + frames]
            parts.append((mel[s : s + frames].T, f0, lock_phase(wide, f0), wide[600:-600]))
    return tuple(torch.from_numpy(np.stack(x)) for x in zip(*parts))


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=HIFT["steps"])
    parser.add_argument("--rate", type=float, default=HIFT["rate"], help="highest learning rate")
    parser.add_argument("--start", action="store_true", help="go on from the state that is in the work folder")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    data = Features("main")
    model = HiFTGenerator(HiFTConfig(**HIFT_CONFIG))
    with torch.no_grad():  # start at the right magnitude: Hz for f0, quiet for the spectrum
        model.f0_predictor.classifier.bias.fill_(90.0)
        model.f0_predictor.classifier.weight.mul_(100.0)
        model.conv_post.bias[: model.config.n_fft // 2 + 1] = -3.0
    if args.start:
        model.load_state_dict(torch.load(WORK / "hift.pt", weights_only=True))
    print("parameters", sum(p.numel() for p in model.parameters()))
    spectral = SpectralLoss()
    optimiser = torch.optim.AdamW(model.parameters(), args.rate, betas=(0.8, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.rate, total_steps=args.steps, pct_start=0.05)
    rng, began, mean = np.random.default_rng(SEED), time.time(), [0.0, 0.0]
    for step in range(args.steps):
        mel, f0, locked, wave = segments(data, rng)
        source, _ = model.m_source(locked, torch.randn(1, model.config.nb_harmonics + 1, wave.shape[1]))
        made = model.decode(mel, source)
        f0_loss = (model.f0_predictor(mel, None) - f0).abs().mean() / 20
        loss = spectral(made, wave)
        (loss + f0_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        mean = [0.98 * a + 0.02 * b for a, b in zip(mean, (loss.item(), f0_loss.item()))]
        if step % 50 == 0 or step == args.steps - 1:
            scale = 1 - 0.98 ** (step + 1)
            shown = f"spectral {mean[0] / scale:.3f} f0 {20 * mean[1] / scale:.2f} Hz"
            print(step, f"{time.time() - began:.0f}s", shown, flush=True)
        if step % 250 == 249 or step == args.steps - 1:
            torch.save(model.state_dict(), WORK / "hift.pt")


if __name__ == "__main__":
    main()
