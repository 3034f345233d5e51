"""Features of the spoken splits: 24 kHz mel, Whisper log-mel and f0, all aligned to whole speech tokens."""

from __future__ import annotations

import argparse
import multiprocessing

import numpy as np
import torch
from scipy.ndimage import median_filter
from settings import SAMPLE_RATE, SPOKEN, TOKEN_SAMPLES, WORK
from speak import load
from tqdm import tqdm

from cosyvoice.frontend import log_mel_24k, resample, whisper_log_mel

F0_WINDOW = 1200
F0_RANGE = (48.0, 320.0)


def track_f0(wave: np.ndarray) -> np.ndarray:
    """f0 [L // 480] in Hz, 0 where unvoiced, from the normalised autocorrelation of 50 ms windows.

    espeak-ng's voiced sounds are almost perfectly periodic, so the first strong peak is the period.
    """
    hop, n = 480, len(wave) // 480
    half = F0_WINDOW // 2
    padded = np.pad(wave.astype(np.float32), (half, half + F0_WINDOW))
    longest, shortest = int(SAMPLE_RATE / F0_RANGE[0]), int(SAMPLE_RATE / F0_RANGE[1])
    starts = np.arange(n) * hop + hop // 2
    frames = torch.from_numpy(np.stack([padded[s : s + F0_WINDOW + longest] for s in starts]))
    base = frames[:, :F0_WINDOW]
    spectrum = torch.fft.rfft(frames, 4096) * torch.fft.rfft(base, 4096).conj()
    correlation = torch.fft.irfft(spectrum, 4096)[:, : longest + 1]
    power = torch.nn.functional.pad(frames.square().cumsum(1), (1, 0))
    energy = power[:, F0_WINDOW : F0_WINDOW + longest + 1] - power[:, : longest + 1]
    ncc = (correlation / (energy * energy[:, :1]).sqrt().clamp(min=1e-6)).numpy()
    f0 = np.zeros(n, np.float32)
    for t in range(n):
        if energy[t, 0] < 0.02:
            continue
        row = ncc[t]
        best = row[shortest:].max()
        if best < 0.7:
            continue
        inner = np.arange(shortest, longest)
        peaks = inner[(row[inner] >= row[inner - 1]) & (row[inner] >= row[inner + 1]) & (row[inner] > 0.9 * best)]
        if len(peaks) == 0:
            continue
        k = peaks[0]
        a, b, c = row[k - 1], row[k], row[k + 1]
        f0[t] = SAMPLE_RATE / (k + 0.5 * (a - c) / min(a - 2 * b + c, -1e-6))
    return median_filter(f0, 3)


def extract(both: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Mel [2n, 80], Whisper log-mel [4n, 128] and f0 [2n] of int16 speech of n tokens; canonical mel and f0."""
    samples, canonical = both
    wave = samples.astype(np.float32) / 32768
    mel = np.asarray(log_mel_24k(wave), np.float16)
    whisper = np.asarray(whisper_log_mel(resample(wave, SAMPLE_RATE, 16000)), np.float16)
    f0 = track_f0(wave)
    if not len(mel) == len(f0) == len(wave) // 480 or len(whisper) != len(wave) // 240:
        raise ValueError(f"{len(wave)} samples gave {len(mel)} mel, {len(whisper)} Whisper and {len(f0)} f0 frames")
    canonical = canonical.astype(np.float32) / 32768
    return mel, whisper, f0, np.asarray(log_mel_24k(canonical), np.float16), track_f0(canonical)


class Features:
    """Memory-mapped features of one split; `part(i)` gives the token range of utterance i."""

    def __init__(self, split: str):
        self.rows, self.waves = load(split)
        self.mel = np.load(WORK / f"{split}.mel.npy", mmap_mode="r")
        self.whisper = np.load(WORK / f"{split}.whisper.npy", mmap_mode="r")
        self.f0 = np.load(WORK / f"{split}.f0.npy", mmap_mode="r")
        self.canonical_mel = np.load(WORK / f"{split}.canonical.mel.npy", mmap_mode="r")
        self.canonical_f0 = np.load(WORK / f"{split}.canonical.f0.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, i: int) -> tuple[int, int]:
        row = self.rows[i]
        return row["start"] // TOKEN_SAMPLES, row["stop"] // TOKEN_SAMPLES

    def canonical_of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Mel [2n, 80] and f0 [2n] of the same sentence in the canonical voice."""
        a, b = self.part(i)
        return self.canonical_mel[2 * a : 2 * b].astype(np.float32), self.canonical_f0[2 * a : 2 * b]

    def mel_of(self, i: int) -> np.ndarray:
        a, b = self.part(i)
        return self.mel[2 * a : 2 * b].astype(np.float32)

    def f0_of(self, i: int) -> np.ndarray:
        a, b = self.part(i)
        return self.f0[2 * a : 2 * b]

    def whisper_of(self, i: int) -> np.ndarray:
        a, b = self.part(i)
        return self.whisper[4 * a : 4 * b].astype(np.float32)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", nargs="+", default=list(SPOKEN), help="which splits (default: all)")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    for split in args.splits:
        rows, waves = load(split)
        canonical = np.load(WORK / f"{split}.canonical.npy", mmap_mode="r")
        pairs = [(w, canonical[r["start"] : r["stop"]]) for r, w in zip(rows, waves)]
        with multiprocessing.Pool(2, torch.set_num_threads, (1,)) as pool:
            parts = list(tqdm(pool.imap(extract, pairs, 16), desc=split, total=len(waves), mininterval=5))
        for name, values in zip(("mel", "whisper", "f0", "canonical.mel", "canonical.f0"), zip(*parts)):
            np.save(WORK / f"{split}.{name}.npy", np.concatenate(values))


if __name__ == "__main__":
    main()
