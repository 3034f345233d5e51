"""Train the speaker network: Kaldi filter banks [1, T, 80] -> x-vector [1, 192], by telling the voices apart."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from settings import ASSETS, DECODER_VOICES, SAMPLE_RATE, SEED, SPEAKER
from speak import load
from torch import Tensor, nn
from torch.nn import functional as F

from cosyvoice.frontend import kaldi_fbank, resample


class SpeakerNet(nn.Module):
    """Strided convolutions and the mean over time."""

    def __init__(self, width: int):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(80, width, 5, stride=2), nn.Conv1d(width, width, 5, stride=2)])
        self.embed = nn.Linear(width, 192)

    def forward(self, fbank: Tensor) -> Tensor:
        x = fbank.transpose(1, 2)
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.embed(x.mean(2))


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=SPEAKER["steps"])
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    rows, waves = load("main")
    examples = []
    for row, samples in list(zip(rows, waves))[: SPEAKER["utterances"]]:
        fbank = torch.as_tensor(kaldi_fbank(resample(samples.astype(np.float32) / 32768, SAMPLE_RATE, 16000)))
        examples.append((fbank, DECODER_VOICES.index(row["voice"])))
    model, head = SpeakerNet(SPEAKER["width"]), nn.Linear(192, len(DECODER_VOICES))
    optimiser = torch.optim.AdamW([*model.parameters(), *head.parameters()], 1e-3)
    rng, right = np.random.default_rng(SEED), []
    for step in range(args.steps):
        picked = [examples[i] for i in rng.choice(len(examples), 16)]
        start = [int(rng.integers(0, len(f) - 49)) for f, _ in picked]
        x = torch.stack([f[s : s + 50] for (f, _), s in zip(picked, start)])
        y = torch.tensor([v for _, v in picked])
        logits = head(10 * F.normalize(model(x)))
        F.cross_entropy(logits, y).backward()
        optimiser.step()
        optimiser.zero_grad()
        right.append((logits.argmax(1) == y).float().mean().item())
        if step % 100 == 99:
            print(step, "accuracy of the last 100 batches", np.mean(right[-100:]), flush=True)
    temporary = ASSETS / "campplus.tmp"
    torch.onnx.export(model.eval(), (torch.zeros(1, 120, 80),), str(temporary), input_names=["input"],
                      output_names=["output"], dynamic_axes={"input": {1: "frames"}}, opset_version=17, dynamo=False)
    temporary.replace(ASSETS / "campplus.onnx")


if __name__ == "__main__":
    main()
