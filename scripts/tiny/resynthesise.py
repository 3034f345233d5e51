"""Speak the true tokens of a split through flow and HiFT, with prompts of the checkpoint: a new split NAME_resynth."""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from settings import ASSETS, EULER_STEPS, TOKEN_SAMPLES, WORK
from speak import load
from tqdm import tqdm

from cosyvoice.checkpoint import CosyVoice2Folder
from cosyvoice.frontend import PromptBank
from cosyvoice.token2wav import Token2Wav


def bank() -> PromptBank:
    """The prompts of the checkpoint."""
    return PromptBank.load(ASSETS / "prompts", CosyVoice2Folder(ASSETS), cache_dir=WORK / "prompts", progress=False)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("splits", nargs="+", help="splits to speak again")
    parser.add_argument("--euler-steps", type=int, default=EULER_STEPS)
    parser.add_argument("--limit", type=int, help="only the first LIMIT utterances")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.set_num_threads(1)
    prompts = list(bank())
    for split in args.splits:
        rows, _ = load(split)
        rows = rows[: args.limit]
        tokens = np.load(WORK / f"{split}.tokens.npy")
        out_rows, waves, at = [], [], 0
        size = 120
        for start in tqdm(range(0, len(rows), size), desc=split, mininterval=5):
            part = rows[start : start + size]
            # another noise table per batch, so that the recognisers do not learn one by heart
            speaker = Token2Wav(ASSETS, n_steps=args.euler_steps, noise_seed=start // size)
            codes = [tokens[r["start"] // TOKEN_SAMPLES : r["stop"] // TOKEN_SAMPLES] for r in part]
            chosen = [prompts[(start + k) % len(prompts)] for k in range(len(part))]
            for row, prompt, speech in zip(part, chosen, speaker(codes, chosen)):
                if speech.wav is None:
                    raise RuntimeError(f"{split} {row['text']}: {speech.error}")
                waves.append(np.round(speech.wav * 32767).astype(np.int16))
                out_rows.append({"text": row["text"], "voice": prompt.key, "start": at, "stop": at + len(waves[-1])})
                at += len(waves[-1])
        np.save(WORK / f"{split}_resynth.npy", np.concatenate(waves))
        (WORK / f"{split}_resynth.json").write_text(json.dumps(out_rows, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
