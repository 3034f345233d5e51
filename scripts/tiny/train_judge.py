"""Train the held-out judge: a convolutional CTC recogniser for sherpa-onnx, apart from the reward's in every way.

Other architecture (no attention), other features (Kaldi filter banks as sherpa-onnx computes them), other sentences,
two voices more, another seed, its own resynthesised audio. Exported under the contract of `from_zipformer_ctc`.
"""

from __future__ import annotations

import argparse
import os
import time

import kaldi_native_fbank
import numpy as np
import onnx
import torch
from nets import Buckets, ConvBlock, edit_distance, greedy_ctc, length_mask, pad_batch
from settings import ASSETS, CHARACTERS, JUDGE, SAMPLE_RATE, SEED, WORK
from speak import load
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from cosyvoice.frontend import resample

SUBSAMPLING = 4


def fbank(wave: np.ndarray) -> Tensor:
    """What sherpa-onnx's recognisers see by default: [T, 80] of 16 kHz audio in +-1."""
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0
    options.frame_opts.snip_edges = False
    options.mel_opts.num_bins = 80
    options.mel_opts.high_freq = -400
    computer = kaldi_native_fbank.OnlineFbank(options)
    computer.accept_waveform(16000, wave.tolist())
    computer.input_finished()
    return torch.from_numpy(np.stack([computer.get_frame(i) for i in range(computer.num_frames_ready)]))


class Judge(nn.Module):
    """Normalisation, two strided convolutions, residual blocks, CTC head; padding stays zero throughout."""

    def __init__(self, mean: Tensor, std: Tensor):
        super().__init__()
        width = JUDGE["width"]
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.conv1 = nn.Conv1d(80, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(width, JUDGE["kernel"], 0.1) for _ in range(JUDGE["blocks"]))
        self.head = nn.Conv1d(width, len(CHARACTERS) + 1, 1)

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, T, 80], x_lens int64 [N] -> log_probs [N, T', V], log_probs_len int64 [N]."""
        steps = torch.arange(x.shape[1], device=x.device)
        x = (x - self.mean) / self.std * (steps[None, :, None] < x_lens[:, None, None])
        y, lengths = x.transpose(1, 2), x_lens
        for conv in (self.conv1, self.conv2):
            lengths = torch.div(lengths + 1, 2, rounding_mode="floor")
            y = F.gelu(conv(y))
            mask = (torch.arange(y.shape[2], device=x.device)[None, None] < lengths[:, None, None]).to(y.dtype)
            y = y * mask
        for block in self.blocks:
            y = block(y, mask)
        return self.head(y).transpose(1, 2).log_softmax(-1), lengths


def filter_banks(split: str) -> tuple[list[Tensor], list[list[int]]]:
    """Filter banks and labels of a split; kept in the work folder."""
    kept = WORK / f"{split}.fbank.pt"
    rows, waves = load(split)
    if not kept.exists() or kept.stat().st_mtime < (WORK / f"{split}.npy").stat().st_mtime:
        features = [fbank(resample(w.astype(np.float32) / 32768, SAMPLE_RATE, 16000)).half()
                    for w in tqdm(waves, desc=split, mininterval=5)]
        torch.save(features, kept)
    return torch.load(kept, weights_only=True), [[CHARACTERS.index(c) + 1 for c in r["text"]] for r in rows]


class Examples:
    """Features and labels of some splits."""

    def __init__(self, splits: list[str]):
        parts = [filter_banks(split) for split in splits]
        self.features: list[Tensor] = [f for features, _ in parts for f in features]
        self.labels: list[list[int]] = [y for _, labels in parts for y in labels]

    def __len__(self) -> int:
        return len(self.features)


def augment(x: Tensor, lengths: Tensor, std: Tensor, rng: np.random.Generator) -> Tensor:
    """Noise, level and a masked band per row."""
    x = x + (rng.uniform(0, 0.35) * torch.randn_like(x) + 0.3 * torch.randn(len(x), 1, 1)) * std
    for row in x:
        start, width = int(rng.integers(0, 74)), int(rng.integers(0, 12))
        row[:, start : start + width] = row[:, start : start + width].mean()
    return x * length_mask(lengths, x.shape[1]).transpose(1, 2)


@torch.no_grad()
def evaluate(model: Judge, data: Examples) -> float:
    """Syllable error rate of greedy CTC decoding."""
    model.eval()
    wrong = total = 0
    for start in range(0, len(data), 50):
        x, lengths = pad_batch([f.float() for f in data.features[start : start + 50]])
        logp, out = model(x, lengths)
        for k, labels in enumerate(data.labels[start : start + 50]):
            wrong += edit_distance(labels, greedy_ctc(logp[k], int(out[k])))
            total += len(labels)
    model.train()
    return wrong / total


def save(model: Judge) -> None:
    """judge/model.onnx and judge/tokens.txt."""
    folder = ASSETS / "judge"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "model.tmp"
    inputs = (torch.zeros(2, 100, 80), torch.tensor([100, 90]))
    torch.onnx.export(model.eval(), inputs, str(temporary), opset_version=17,
                      input_names=["x", "x_lens"], output_names=["log_probs", "log_probs_len"], dynamo=False,
                      dynamic_axes={"x": {0: "N", 1: "T"}, "x_lens": {0: "N"}, "log_probs": {0: "N", 1: "T2"},
                                    "log_probs_len": {0: "N"}})
    network = onnx.load(str(temporary))
    for key, value in {"model_type": "zipformer2_ctc", "vocab_size": len(CHARACTERS) + 1,
                       "subsampling_factor": SUBSAMPLING}.items():
        entry = network.metadata_props.add()
        entry.key, entry.value = key, str(value)
    onnx.save(network, str(temporary))
    os.replace(temporary, folder / "model.onnx")
    lines = [f"{token} {i}" for i, token in enumerate(["<blk>", *CHARACTERS])]
    (folder / "tokens.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--splits", nargs="+", default=["judge"], help="audio to train on")
    parser.add_argument("--dev", nargs="+", default=["dev"], help="audio to measure on, each by itself")
    parser.add_argument("--steps", type=int, default=JUDGE["steps"])
    parser.add_argument("--rate", type=float, default=JUDGE["rate"])
    parser.add_argument("--start", help="state of a former run to go on from (in the work folder)")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.manual_seed(SEED + 1)
    torch.set_num_threads(1)
    data, devs = Examples(args.splits), {d: Examples([d]) for d in args.dev}
    frames = torch.cat([f.float() for f in data.features[::10]])
    model = Judge(frames.mean(0), frames.std(0))
    if args.start:
        model.load_state_dict(torch.load(WORK / args.start, weights_only=True))
    print("parameters", sum(p.numel() for p in model.parameters()))
    optimiser = torch.optim.AdamW(model.parameters(), args.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.rate, total_steps=args.steps, pct_start=0.1)
    buckets = Buckets([len(f) for f in data.features], JUDGE["batch"], SEED + 1)
    rng, began = np.random.default_rng(SEED + 1), time.time()
    for step in range(args.steps):
        ids = buckets.draw()
        x, lengths = pad_batch([data.features[i].float() for i in ids])
        logp, out = model(augment(x, lengths, model.std, rng), lengths)
        labels = [data.labels[i] for i in ids]
        loss = F.ctc_loss(logp.transpose(0, 1), torch.tensor(sum(labels, [])), out,
                          torch.tensor([len(y) for y in labels]), zero_infinity=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % 200 == 0 or step == args.steps - 1:
            errors = {d: round(evaluate(model, e), 4) for d, e in devs.items()}
            print(step, f"{time.time() - began:.0f}s ctc {loss.item():.3f}", errors, flush=True)
    torch.save(model.state_dict(), WORK / "judge.pt")
    save(model)


if __name__ == "__main__":
    main()
