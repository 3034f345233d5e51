"""Train the SenseVoice-architecture recogniser of the reward and save it as a folder that FunASR loads.

Called twice: on espeak-ng's audio, then, starting from that, on a mix with audio resynthesised from true speech
tokens (`--splits main main_resynth --start`), because a recogniser that never heard the decoder misreads it.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np
import torch
import yaml
from funasr.frontends.wav_frontend import WavFrontend
from funasr.models.sense_voice.model import SenseVoiceSmall
from nets import Buckets, edit_distance, greedy_ctc, pad_batch
from settings import ASSETS, CHARACTERS, RECOGNISER, SAMPLE_RATE, SEED, WORK
from speak import load
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from cosyvoice.frontend import resample

TAGS = ["<|zh|>", "<|NEUTRAL|>", "<|Speech|>", "<|withitn|>", "<|woitn|>"]
TOKENS = ["<unk>", "<s>", "</s>", *TAGS, *CHARACTERS]  # id 0 is also CTC's blank, as in SenseVoiceSmall
LANGUAGES, TEXT_NORMS = (0, 3), {15: "<|woitn|>", 14: "<|withitn|>"}  # rows of the query embedding: auto, zh
FRONTEND = {"fs": 16000, "window": "hamming", "n_mels": 80, "frame_length": 25, "frame_shift": 10, "lfr_m": 7,
            "lfr_n": 6, "dither": 0.0}
MODEL = {"length_normalized_loss": True, "sos": 1, "eos": 2, "ignore_id": -1}


def encoder_conf() -> dict:
    """Sizes of the SANM encoder; names as in SenseVoiceSmall's config.yaml."""
    return {"output_size": RECOGNISER["width"], "attention_heads": 4, "linear_units": RECOGNISER["linear_units"],
            "num_blocks": RECOGNISER["blocks"], "tp_blocks": 1, "dropout_rate": 0.1, "positional_dropout_rate": 0.1,
            "attention_dropout_rate": 0.1, "input_layer": "pe", "pos_enc_class": "SinusoidalPositionEncoder",
            "normalize_before": True, "kernel_size": 11, "sanm_shfit": 0, "selfattention_layer_type": "sanm"}


def build() -> SenseVoiceSmall:
    """SenseVoiceSmall with the tiny sizes and random weights."""
    return SenseVoiceSmall(encoder="SenseVoiceEncoderSmall", encoder_conf=encoder_conf(), input_size=560,
                           vocab_size=len(TOKENS), **MODEL)


def filter_banks(split: str) -> tuple[list[Tensor], list[list[int]]]:
    """Stacked filter banks (LFR 7/6, not normalised) and labels of a split; kept in the work folder."""
    kept = WORK / f"{split}.lfr.pt"
    rows, waves = load(split)
    if not kept.exists() or kept.stat().st_mtime < (WORK / f"{split}.npy").stat().st_mtime:
        frontend, features = WavFrontend(**FRONTEND), []
        for samples in tqdm(waves, desc=split, mininterval=5):
            wave = torch.from_numpy(np.array(resample(samples.astype(np.float32) / 32768, SAMPLE_RATE, 16000)))
            features.append(frontend(wave[None], torch.tensor([len(wave)]))[0][0].half())
        torch.save(features, kept)
    return torch.load(kept, weights_only=True), [[TOKENS.index(c) for c in r["text"]] for r in rows]


class Examples:
    """Features and labels of some splits."""

    def __init__(self, splits: list[str]):
        parts = [filter_banks(split) for split in splits]
        self.features: list[Tensor] = [f for features, _ in parts for f in features]
        self.labels: list[list[int]] = [y for _, labels in parts for y in labels]

    def __len__(self) -> int:
        return len(self.features)


def log_probs(model: SenseVoiceSmall, x: Tensor, lengths: Tensor, language: int, norm: int) -> tuple[Tensor, Tensor]:
    """Four query frames (language, event, emotion, text normalisation), then speech; [B, 4+T, V]."""
    query = model.embed(torch.tensor([[language, 1, 2, norm]])).expand(len(x), -1, -1)
    out, out_lengths = model.encoder(torch.cat([query, x], 1), lengths + 4)
    return model.ctc.ctc_lo(out).log_softmax(-1), out_lengths


def augment(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Noise, level and masked bands on normalised features [B, T, 560]."""
    x = x + rng.uniform(0, 0.35) * torch.randn_like(x) + 0.3 * torch.randn(len(x), 1, 1)
    bins = x.unflatten(-1, (7, 80)).clone()
    for row in bins:
        start, width = rng.integers(0, 74), rng.integers(0, 12)
        row[..., start : start + width] = 0
    return bins.flatten(-2)


@torch.no_grad()
def evaluate(model: SenseVoiceSmall, data: Examples, shift: Tensor, scale: Tensor) -> float:
    """Syllable error rate of greedy CTC decoding."""
    model.eval()
    wrong = total = 0
    for start in range(0, len(data), 50):
        x, lengths = pad_batch([(f.float() + shift) * scale for f in data.features[start : start + 50]])
        logp, _ = log_probs(model, x, lengths, 3, 15)
        for k, labels in enumerate(data.labels[start : start + 50]):
            wrong += edit_distance(labels, greedy_ctc(logp[k, 4:], int(lengths[k])))
            total += len(labels)
    model.train()
    return wrong / total


def save(model: SenseVoiceSmall, shift: Tensor, scale: Tensor) -> None:
    """Write config.yaml, tokens.json, am.mvn and model.pt (half precision)."""
    folder = ASSETS / "sensevoice"
    folder.mkdir(parents=True, exist_ok=True)
    config = {"encoder": "SenseVoiceEncoderSmall", "encoder_conf": encoder_conf(), "model": "SenseVoiceSmall",
              "model_conf": MODEL, "tokenizer": "CharTokenizer",
              "tokenizer_conf": {"unk_symbol": "<unk>", "split_with_space": True}, "frontend": "WavFrontend",
              "frontend_conf": FRONTEND}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    (folder / "tokens.json").write_text(json.dumps(TOKENS, ensure_ascii=False), encoding="utf-8")
    rows = ["<Nnet>", "<Splice> 560 560", "[ 0 ]"]
    for tag, values in (("AddShift", shift), ("Rescale", scale)):
        rows += [f"<{tag}> 560 560", "<LearnRateCoef> 0 [ " + " ".join(f"{v:.5f}" for v in values.tolist()) + " ]"]
    (folder / "am.mvn").write_text("\n".join([*rows, "</Nnet>"]) + "\n", encoding="utf-8")
    state = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    torch.save({"state_dict": state}, folder / "model.tmp")
    os.replace(folder / "model.tmp", folder / "model.pt")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--splits", nargs="+", default=["main"], help="audio to train on")
    parser.add_argument("--dev", nargs="+", default=["dev"], help="audio to measure on, each by itself")
    parser.add_argument("--steps", type=int, default=RECOGNISER["steps"])
    parser.add_argument("--rate", type=float, default=RECOGNISER["rate"])
    parser.add_argument("--start", help="state of a former run to go on from (in the work folder)")
    parser.add_argument("--name", default="recogniser", help="state is written to NAME.pt in the work folder")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    data, devs = Examples(args.splits), {d: Examples([d]) for d in args.dev}
    model = build()
    if args.start:
        state = torch.load(WORK / args.start, weights_only=True)
        shift, scale = state.pop("shift"), state.pop("scale")
        model.load_state_dict(state)
    else:
        frames = torch.cat([f.float() for f in data.features[::10]])
        shift, scale = -frames.mean(0), 1 / frames.std(0)
    print("parameters", sum(p.numel() for p in model.parameters()))
    optimiser = torch.optim.AdamW(model.parameters(), args.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.rate, total_steps=args.steps, pct_start=0.1)
    buckets = Buckets([len(f) for f in data.features], RECOGNISER["batch"], SEED)
    rng, began = np.random.default_rng(SEED), time.time()
    for step in range(args.steps):
        ids = buckets.draw()
        x, lengths = pad_batch([(data.features[i].float() + shift) * scale for i in ids])
        norm = 15 if rng.random() < 0.8 else 14
        logp, _ = log_probs(model, augment(x, rng), lengths, int(rng.choice(LANGUAGES)), norm)
        tags = torch.tensor([TOKENS.index(t) for t in ("<|zh|>", "<|NEUTRAL|>", "<|Speech|>", TEXT_NORMS[norm])])
        tag_loss = F.nll_loss(logp[:, :4].flatten(0, 1), tags.repeat(len(ids)))
        labels = [data.labels[i] for i in ids]
        ctc = F.ctc_loss(logp[:, 4:].transpose(0, 1), torch.tensor(sum(labels, [])), lengths,
                         torch.tensor([len(y) for y in labels]), zero_infinity=True)
        (ctc + 0.1 * tag_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % 200 == 0 or step == args.steps - 1:
            errors = {d: round(evaluate(model, e, shift, scale), 4) for d, e in devs.items()}
            shown = f"ctc {ctc.item():.3f} tags {tag_loss.item():.3f}"
            print(step, f"{time.time() - began:.0f}s", shown, errors, flush=True)
    torch.save({**model.state_dict(), "shift": shift, "scale": scale}, WORK / f"{args.name}.pt")
    save(model, shift, scale)


if __name__ == "__main__":
    main()
