"""Train the speech tokenizer: Whisper log-mel [1,128,frames] -> FSQ codes at 25 Hz, exported to ONNX.

The codes are supervised by what was said, not by who said it: a decoder rebuilds from them mel and f0 of the same
sentence in one canonical voice, and a small recogniser (CTC over toned syllables, as the real tokenizer's
supervision) must be able to read them. Dense targets train in a tenth of the steps that CTC alone needs.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from features import Features
from nets import Buckets, ConvBlock, edit_distance, greedy_ctc, length_mask, pad_batch
from settings import ASSETS, CHARACTERS, SEED, TOKENIZER, WORK
from torch import Tensor, nn
from torch.nn import functional as F

FSQ_DIMS, FSQ_LEVELS = 8, 3


class Encoder(nn.Module):
    """[B, 128, 4n] -> FSQ values in (-1, 1) [B, 8, n]; convolutions only, so its view is local."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.conv1 = nn.Conv1d(128, width, 5, stride=2, padding=2)
        self.conv2 = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(ConvBlock(width, 5) for _ in range(blocks))
        self.project = nn.Conv1d(width, FSQ_DIMS, 1)

    def forward(self, mel: Tensor, mask: Tensor | None = None) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel))))
        for block in self.blocks:
            x = block(x, mask)
        return torch.tanh(self.project(x))


class Model(nn.Module):
    """Encoder, quantiser and the two decoders that supervise it."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.encoder = Encoder(width, blocks)
        self.read = nn.Conv1d(FSQ_DIMS, width, 1)
        self.reader = nn.ModuleList(ConvBlock(width, 5, 0.1) for _ in range(TOKENIZER["decoder_blocks"]))
        self.ctc = nn.Conv1d(width, len(CHARACTERS) + 1, 1)
        self.build = nn.Conv1d(FSQ_DIMS, width, 1)
        self.builder = nn.ModuleList(ConvBlock(width, 5) for _ in range(TOKENIZER["decoder_blocks"]))
        self.out = nn.Conv1d(width, 2 * 82, 1)

    def forward(self, mel: Tensor, mask: Tensor, quantised: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities [B, n, V], rebuilt frames [B, 2n, 82] (mel, log f0, voicing), codes [B, 8, n]."""
        soft = self.encoder(mel, mask)
        codes = soft + (soft.round() - soft).detach() if quantised else soft
        x = self.read(codes)
        for block in self.reader:
            x = block(x, mask)
        log_probs = self.ctc(x).transpose(1, 2).log_softmax(-1)
        y = self.build(codes)
        for block in self.builder:
            y = block(y, mask)
        frames = self.out(y).transpose(1, 2)
        return log_probs, frames.reshape(len(frames), -1, 82), codes


class Export(nn.Module):
    """What goes into speech_tokenizer_v2.onnx: token ids [1, n] of one utterance."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder
        self.register_buffer("powers", torch.tensor([FSQ_LEVELS**i for i in range(FSQ_DIMS)]))

    def forward(self, mel: Tensor, frames: Tensor) -> Tensor:
        digits = self.encoder(mel).round().long() + 1
        ids = (digits * self.powers[None, :, None]).sum(1)
        n = torch.div(frames[0].long() + 3, 4, rounding_mode="floor")
        return ids[:, :n]


def batch_of(data: Features, ids: list[int], stats: tuple[np.ndarray, np.ndarray], pitch: float) -> dict:
    """Padded tensors of some utterances; canonical mel normalised per bin, log f0 relative to its median."""
    mel, lengths4 = pad_batch([torch.from_numpy(data.whisper_of(i)) for i in ids])
    frames = []
    for i in ids:
        canonical, f0 = data.canonical_of(i)
        contour = np.where(f0 > 0, 6 * np.log(np.maximum(f0, 1) / pitch), 0).clip(-3, 3)
        normal = (canonical - stats[0]) / stats[1]
        frames.append(torch.from_numpy(np.concatenate([normal, contour[:, None], (f0 > 0)[:, None]], 1)).float())
    target, _ = pad_batch(frames)
    lengths = lengths4 // 4
    texts = [[CHARACTERS.index(c) + 1 for c in data.rows[i]["text"]] for i in ids]
    return {"mel": mel.transpose(1, 2), "lengths": lengths, "mask": length_mask(lengths, int(lengths.max())),
            "target": target, "labels": torch.tensor(sum(texts, [])),
            "label_lengths": torch.tensor([len(t) for t in texts]), "texts": texts}


def losses(model: Model, b: dict, quantised: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CTC per label, reconstruction, log-probabilities and codes."""
    log_probs, frames, codes = model(b["mel"], b["mask"], quantised)
    ctc = F.ctc_loss(log_probs.transpose(0, 1), b["labels"], b["lengths"], b["label_lengths"], zero_infinity=True)
    m = b["mask"].repeat_interleave(2, 2).transpose(1, 2)
    voiced = b["target"][..., 81:]
    error = (frames[..., :80] - b["target"][..., :80]).abs().mean(-1, keepdim=True)
    contour = ((frames[..., 80:81] - b["target"][..., 80:81]).abs() * voiced)
    voicing = F.binary_cross_entropy_with_logits(frames[..., 81:], voiced, reduction="none")
    rebuild = ((error + contour + 0.3 * voicing) * m).sum() / m.sum()
    return ctc, rebuild, log_probs, codes


@torch.no_grad()
def evaluate(model: Model, data: Features, stats: tuple, pitch: float) -> str:
    """Syllable error through the codes, reconstruction error and use of the codebook."""
    model.eval()
    wrong = total = 0
    rebuilt, used = [], []
    for start in range(0, len(data), 50):
        b = batch_of(data, list(range(start, min(start + 50, len(data)))), stats, pitch)
        _, rebuild, log_probs, codes = losses(model, b, True)
        rebuilt.append(float(rebuild))
        ids = ((codes.round().long() + 1) * torch.tensor([3**i for i in range(8)])[None, :, None]).sum(1)
        used += [ids[k, : b["lengths"][k]] for k in range(len(ids))]
        for k, text in enumerate(b["texts"]):
            wrong += edit_distance(text, greedy_ctc(log_probs[k], int(b["lengths"][k])))
            total += len(text)
    model.train()
    counts = torch.bincount(torch.cat(used)).float()
    p = counts[counts > 0] / counts.sum()
    perplexity = float((-(p * p.log()).sum()).exp())
    return f"dev error {wrong / total:.4f} rebuild {np.mean(rebuilt):.4f} codes {len(p)} perplexity {perplexity:.0f}"


def export(model: Model) -> None:
    """Write speech_tokenizer_v2.onnx beside the other assets."""
    net = Export(model.encoder).eval()
    ASSETS.mkdir(parents=True, exist_ok=True)
    temporary = ASSETS / "tokenizer.tmp"
    torch.onnx.export(net, (torch.zeros(1, 128, 160), torch.tensor([160], dtype=torch.int32)), str(temporary),
                      input_names=["feats", "feats_length"], output_names=["indices"], opset_version=17, dynamo=False,
                      dynamic_axes={"feats": {2: "frames"}, "indices": {1: "tokens"}})
    temporary.replace(ASSETS / "speech_tokenizer_v2.onnx")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=TOKENIZER["steps"])
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    data, dev = Features("main"), Features("dev")
    sample = np.concatenate([data.mel_of(i) for i in range(0, len(data), 10)])
    stats = (sample.mean(0), sample.std(0))
    canonical = np.concatenate([data.canonical_of(i)[0] for i in range(0, len(data), 10)])
    f0 = np.concatenate([data.canonical_of(i)[1] for i in range(0, len(data), 10)])
    pitch = float(np.median(f0[f0 > 0]))
    np.savez(WORK / "stats.npz", mean=stats[0], std=stats[1])  # of all voices, for the flow
    stats = (canonical.mean(0), canonical.std(0))
    model = Model(TOKENIZER["width"], TOKENIZER["blocks"])
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model, model.encoder)]
    print("parameters", sizes[0], "encoder", sizes[1])
    optimiser = torch.optim.AdamW(model.parameters(), TOKENIZER["rate"], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, TOKENIZER["rate"], total_steps=args.steps, pct_start=0.1)
    buckets = Buckets([b - a for a, b in map(data.part, range(len(data)))], TOKENIZER["batch"], SEED)
    began = time.time()
    for step in range(args.steps):
        b = batch_of(data, buckets.draw(), stats, pitch)
        ctc, rebuild, _, _ = losses(model, b, step >= TOKENIZER["warm"])
        (TOKENIZER["ctc"] * ctc + rebuild).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(step, f"{time.time() - began:.0f}s ctc {ctc.item():.3f} rebuild {rebuild.item():.3f}",
                  evaluate(model, dev, stats, pitch) if step % 200 == 0 or step == args.steps - 1 else "", flush=True)
    torch.save({k: v.detach() for k, v in model.state_dict().items()}, WORK / "tokenizer.pt")
    export(model)


if __name__ == "__main__":
    main()
