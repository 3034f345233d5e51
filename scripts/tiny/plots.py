"""Draw spectrograms and f0 tracks of espeak-ng beside resynthesis: what the decoder keeps and what it loses."""

from __future__ import annotations

import argparse

import matplotlib
import numpy as np
from features import track_f0
from settings import ASSETS
from speak import load

from cosyvoice.frontend import log_mel_24k

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def panel(axis: plt.Axes, wave: np.ndarray, title: str) -> None:
    """Log-mel with the f0 track over it."""
    mel, f0 = np.asarray(log_mel_24k(wave)), track_f0(wave)
    seconds = np.arange(len(mel)) * 0.02
    axis.imshow(mel.T, origin="lower", aspect="auto", extent=(0, len(mel) * 0.02, 0, 80), vmin=-10, vmax=2)
    axis.set_title(title, fontsize=8)
    axis.set_ylabel("mel bin")
    twin = axis.twinx()
    twin.plot(seconds, np.where(f0 > 0, f0, np.nan), "r.", markersize=2)
    twin.set_ylim(50, 300)
    twin.set_ylabel("f0 / Hz")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 1, 2], help="utterances of the test split")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    rows, natural = load("test")
    again_rows, again = load("test_resynth")
    plt.rcParams["font.family"] = ["sans-serif"]
    figure, axes = plt.subplots(len(args.rows), 2, figsize=(11, 2.6 * len(args.rows)), squeeze=False)
    for line, i in zip(axes, args.rows):
        panel(line[0], np.array(natural[i], np.float32) / 32768, f"test {i}: espeak-ng, voice {rows[i]['voice']}")
        title = f"true tokens, flow, HiFT, prompt {again_rows[i]['voice']}"
        panel(line[1], np.array(again[i], np.float32) / 32768, title)
    figure.tight_layout()
    figure.savefig(ASSETS / "espeak_and_resynthesis.png", dpi=80)


if __name__ == "__main__":
    main()
