"""Speak the sentences with espeak-ng: 24 kHz, whole speech tokens, silence trimmed."""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import subprocess

import numpy as np
import soundfile
from scipy.signal import resample_poly
from settings import CANONICAL_VOICE, SAMPLE_RATE, SEED, SPEED_WPM, SPOKEN, SYLLABLES, TOKEN_SAMPLES, VOICES, WORK
from tqdm import tqdm

LEAD_IN = 720  # samples of silence before the first sound: 30 ms
TAIL = 1680  # and after the last one: 70 ms


def raw(text: str, voice: str, speed: int) -> np.ndarray:
    """espeak-ng's audio of hanzi `text` at 24 kHz, read from its pinyin with tone digits."""
    variant, pitch = VOICES[voice]
    command = ["espeak-ng", "-v", f"cmn-latn-pinyin+{variant}", "-p", str(pitch), "-s", str(speed), "--stdout",
               " ".join(SYLLABLES[c] for c in text)]
    wav = subprocess.run(command, capture_output=True, check=True).stdout
    wave, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    return resample_poly(wave, SAMPLE_RATE // 150, rate // 150)


def speak(text: str, voice: str, speed: int) -> tuple[np.ndarray, np.ndarray]:
    """Speech in `voice` and in the canonical voice, int16 [n * 960] each, frame by frame the same sounds.

    espeak-ng's durations do not depend on the variant, so one pair of cuts serves both.
    """
    canonical = raw(text, CANONICAL_VOICE, speed)
    wave = canonical if voice == CANONICAL_VOICE else raw(text, voice, speed)
    loud = np.flatnonzero(np.abs(canonical) > 0.01)
    start, stop = loud[0], loud[-1] + 1
    both = []
    for w in (wave, canonical):
        w = np.pad(w, (0, max(0, stop - len(w))))[start:stop]
        w = np.pad(w, (LEAD_IN, TAIL))
        w = np.pad(w, (0, -len(w) % TOKEN_SAMPLES))
        both.append(np.round(w * min(1.0, 0.9 / np.abs(w).max()) * 32767).astype(np.int16))
    return both[0], both[1]


def spoken(job: tuple[str, int, str]) -> tuple[dict, np.ndarray, np.ndarray]:
    """One sentence of a split: its row and the two waves."""
    split, i, text = job
    rng = random.Random(f"{SEED} {split} {i}")
    voice, speed = SPOKEN[split][i % len(SPOKEN[split])], rng.randint(*SPEED_WPM)
    wave, canonical = speak(text, voice, speed)
    return {"text": text, "voice": voice, "speed": speed}, wave, canonical


def load(split: str) -> tuple[list[dict], list[np.ndarray]]:
    """Rows {text, voice, speed, start, stop} of a spoken split and their int16 waves (memory-mapped)."""
    rows = json.loads((WORK / f"{split}.json").read_text(encoding="utf-8"))
    samples = np.load(WORK / f"{split}.npy", mmap_mode="r")
    return rows, [samples[r["start"] : r["stop"]] for r in rows]


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", nargs="+", default=list(SPOKEN), help="which splits (default: all)")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    texts = json.loads((WORK / "texts.json").read_text(encoding="utf-8"))
    for split in args.splits:
        rows, waves, canonicals, at = [], [], [], 0
        jobs = [(split, i, text) for i, text in enumerate(texts[split])]
        with multiprocessing.Pool(2) as pool:
            for row, wave, canonical in tqdm(pool.imap(spoken, jobs, 16), total=len(jobs), desc=split, mininterval=5):
                rows.append({**row, "start": at, "stop": at + len(wave)})
                at += len(wave)
                waves.append(wave)
                canonicals.append(canonical)
        np.save(WORK / f"{split}.npy", np.concatenate(waves))
        np.save(WORK / f"{split}.canonical.npy", np.concatenate(canonicals))
        (WORK / f"{split}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        print(split, len(rows), "tokens on average", at / TOKEN_SAMPLES / len(rows))


if __name__ == "__main__":
    main()
