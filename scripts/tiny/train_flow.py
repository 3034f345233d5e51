"""Train the flow: tokens, x-vector and prompt mel -> mel, by conditional flow matching.

The starting noise is N(0, 1) on the unnormalised log-mel, as in the published checkpoint; only the scale of the
first and last layers and of the loss knows the mel's mean and spread. The encoder output is pulled towards the
normalised mel by a loss of its own (as the prior loss of Matcha-TTS), which a network this small needs.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import torch
from features import Features
from nets import Buckets, length_mask, pad_batch
from settings import DECODER_VOICES, FLOW, FLOW_CONFIG, SEED, WORK
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cosyvoice.flow.config import EncoderConfig, EstimatorConfig, FlowConfig
from cosyvoice.flow.flow import Flow


def config() -> FlowConfig:
    """`FLOW_CONFIG` as the dataclasses that `Flow` takes."""
    numbers = dict(FLOW_CONFIG)
    return FlowConfig(encoder=EncoderConfig(**numbers.pop("encoder")),
                      estimator=EstimatorConfig(**numbers.pop("estimator")), **numbers)


class SharedDigits(nn.Module):
    """Embedding row of a code = its own part + a linear map of its eight FSQ digits.

    Codes that training never sees get a sensible row that way. Folded into a plain table at the end.
    """

    def __init__(self, size: int):
        super().__init__()
        codes = torch.arange(6561)
        self.register_buffer("digits", torch.stack([codes // 3**i % 3 - 1 for i in range(8)], 1).float())
        self.map = nn.Parameter(torch.randn(8, size) * 0.5)

    def forward(self, table: Tensor) -> Tensor:
        return table + self.digits @ self.map


def prepare(flow: Flow, mean: Tensor, std: Tensor) -> None:
    """Scale what touches raw mel, so that training starts at the right magnitude."""
    estimator = flow.decoder.estimator
    with torch.no_grad():
        flow.input_embedding.weight.mul_(0.1)
        first = estimator.down_blocks[0][0]
        for conv in (first.block1.block["0"], first.res_conv):
            for start in (0, 240):
                conv.weight[:, start : start + 80] /= std[None, :, None]
        estimator.final_proj.weight *= std[:, None, None]
        estimator.final_proj.bias.copy_(mean)
    parametrize.register_parametrization(flow.input_embedding, "weight", SharedDigits(flow.config.input_size))


class Batches:
    """Batches of utterances, a share of them behind a prompt of the same voice."""

    def __init__(self, data: Features, tokens: np.ndarray, vectors: np.ndarray, seed: int):
        self.data, self.tokens = data, tokens
        self.rng = np.random.default_rng(seed)
        sizes = [b - a for a, b in map(data.part, range(len(data)))]
        self.buckets = Buckets(sizes, FLOW["batch"], seed)
        by_voice = {v: [i for i in range(len(data)) if data.rows[i]["voice"] == v] for v in DECODER_VOICES}
        self.prompts = {v: [i for i in ids if sizes[i] <= FLOW["prompt_tokens"]] for v, ids in by_voice.items()}
        self.vectors = {v: vectors[[i for i in ids if i < len(vectors)]] for v, ids in by_voice.items()}

    def utterance(self, i: int) -> tuple[Tensor, Tensor]:
        a, b = self.data.part(i)
        return torch.from_numpy(self.tokens[a:b].astype(np.int64)), torch.from_numpy(self.data.mel_of(i))

    def draw(self) -> dict:
        """tokens [B, S], lengths, x1 and cond [B, 2S, 80], embedding [B, 192], weight [B, 2S, 1] of the loss."""
        tokens, mels, conds, vectors, weights = [], [], [], [], []
        prompted = self.rng.random() < FLOW["prompted"]
        for i in self.buckets.draw():
            voice = self.data.rows[i]["voice"]
            token, mel = self.utterance(i)
            cond, weight = torch.zeros_like(mel), torch.ones(len(mel), 1)
            if prompted:
                prompt_token, prompt_mel = self.utterance(int(self.rng.choice(self.prompts[voice])))
                token, mel = torch.cat([prompt_token, token]), torch.cat([prompt_mel, mel])
                cond = torch.cat([prompt_mel, cond])
                weight = torch.cat([torch.zeros(len(prompt_mel), 1), weight])
            tokens.append(token)
            mels.append(mel)
            conds.append(cond)
            weights.append(weight)
            vectors.append(self.vectors[voice][self.rng.integers(len(self.vectors[voice]))])
        token, lengths = pad_batch(tokens)
        return {"tokens": token, "lengths": lengths.tolist(), "x1": pad_batch(mels)[0], "cond": pad_batch(conds)[0],
                "embedding": torch.from_numpy(np.stack(vectors)), "weight": pad_batch(weights)[0]}


def losses(flow: Flow, b: dict, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Velocity error in units of the mel's spread, and the error of the encoder's guess."""
    x1, rows = b["x1"], len(b["x1"])
    noise = torch.randn_like(x1)
    t = 1 - torch.cos(torch.rand(rows) * math.pi / 2)
    x = (1 - t[:, None, None]) * noise + t[:, None, None] * x1
    mu = flow.encode(b["tokens"], b["lengths"])
    keep = (torch.rand(rows, 1, 1) >= FLOW["dropout"]).float()
    velocity = flow.velocity(x, t, mu * keep, flow.speaker(b["embedding"]) * keep[:, 0], b["cond"] * keep, b["lengths"])
    valid = length_mask(2 * torch.tensor(b["lengths"]), x1.shape[1]).transpose(1, 2)
    w = b["weight"] * valid
    matching = (((velocity - (x1 - noise)) / std).square() * w).sum() / w.sum() / 80
    prior = ((mu - (x1 - mean) / std).abs() * valid).sum() / valid.sum() / 80
    return matching, prior


def plain_state(flow: Flow) -> dict[str, Tensor]:
    """The state dict with the embedding folded into one table."""
    state = {k: v for k, v in flow.state_dict().items() if not k.startswith("input_embedding.")}
    return {"input_embedding.weight": flow.input_embedding.weight.detach().clone(), **state}


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=FLOW["steps"])
    parser.add_argument("--rate", type=float, default=FLOW["rate"], help="highest learning rate")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--start", action="store_true", help="go on from the state that is in the work folder")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    stats = np.load(WORK / "stats.npz")
    mean, std = torch.from_numpy(stats["mean"]), torch.from_numpy(stats["std"])
    tokens, vectors = (np.load(WORK / f"main.{name}.npy") for name in ("tokens", "speaker"))
    batches = Batches(Features("main"), tokens, vectors, args.seed)
    flow = Flow(config())
    if args.start:
        flow.load_state_dict(torch.load(WORK / "flow.pt", weights_only=True))
    else:
        prepare(flow, mean, std)
    print("parameters", sum(p.numel() for p in flow.parameters()),
          "estimator", sum(p.numel() for p in flow.decoder.parameters()))
    optimiser = torch.optim.AdamW(flow.parameters(), args.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.rate, total_steps=args.steps, pct_start=0.05)
    began, means = time.time(), [0.0, 0.0]
    for step in range(args.steps):
        matching, prior = losses(flow, batches.draw(), mean, std)
        (matching + prior).backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        means = [0.98 * a + 0.02 * x.item() for a, x in zip(means, (matching, prior))]
        if step % 50 == 0 or step == args.steps - 1:
            scale = 1 - 0.98 ** (step + 1)
            shown = f"matching {means[0] / scale:.4f} prior {means[1] / scale:.4f}"
            print(step, f"{time.time() - began:.0f}s", shown, flush=True)
        if step % 250 == 249 or step == args.steps - 1:
            torch.save(plain_state(flow), WORK / "flow.pt")


if __name__ == "__main__":
    main()
