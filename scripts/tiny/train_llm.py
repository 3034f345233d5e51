"""Train the language model on text -> speech tokens, and keep several states on the way.

Sequences are those of CosyVoice2: <sos> text <task_id> speech <eos>; a quarter of them are two sentences in a row,
which is what zero-shot use with a prompt looks like. The state that ships is chosen by its sampled error rate:
training stops early on purpose, so that reinforcement learning has something to do.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from blank import config, text_tokenizer
from nets import Buckets
from settings import LLM, SEED, WORK
from speak import load
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2Model

SPEECH_ROWS, END = 6564, 6561


class TinyLLM(nn.Module):
    """The pieces of llm.pt: text and speech tables, the two control rows, Qwen2, and the head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        width = LLM["width"]
        self.qwen = Qwen2Model(config())
        self.speech_embedding = nn.Embedding(SPEECH_ROWS, width)
        self.llm_embedding = nn.Embedding(2, width)
        self.llm_decoder = nn.Linear(width, SPEECH_ROWS)
        for table in (self.speech_embedding, self.llm_embedding, self.qwen.embed_tokens):
            nn.init.normal_(table.weight, std=0.5)

    def embed(self, text: list[int], speech: Tensor) -> Tensor:
        """[L, width] of <sos> text <task_id> speech."""
        return torch.cat([self.llm_embedding.weight[:1], self.qwen.embed_tokens(torch.tensor(text)),
                          self.llm_embedding.weight[1:], self.speech_embedding(speech)])

    def exported(self) -> dict[str, Tensor]:
        """State under the names of llm.pt."""
        state = {f"llm.model.model.{k}": v for k, v in self.qwen.state_dict().items()}
        state["llm.model.lm_head.weight"] = state["llm.model.model.embed_tokens.weight"]
        for name in ("speech_embedding", "llm_embedding", "llm_decoder"):
            state |= {f"{name}.{k}": v for k, v in getattr(self, name).state_dict().items()}
        return {k: v.detach().clone() for k, v in state.items()}


def load_exported(model: TinyLLM, state: dict[str, Tensor]) -> None:
    """The inverse of `exported`."""
    qwen = {k.removeprefix("llm.model.model."): v for k, v in state.items() if k.startswith("llm.model.model.")}
    model.qwen.load_state_dict(qwen)
    for name in ("speech_embedding", "llm_embedding", "llm_decoder"):
        part = {k.removeprefix(name + "."): v for k, v in state.items() if k.startswith(name + ".")}
        getattr(model, name).load_state_dict(part)


def loss_of(model: TinyLLM, batch: list[tuple[list[int], Tensor]], used: Tensor, place: Tensor) -> Tensor:
    """Cross-entropy of the speech tokens and the end, over the codes that occur in training."""
    rows = [model.embed(text, speech) for text, speech in batch]
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    hidden = model.qwen(inputs_embeds=x).last_hidden_state
    picked = torch.cat([h[len(t) + 1 : len(t) + 2 + len(s)] for h, (t, s) in zip(hidden, batch)])
    target = torch.cat([torch.cat([s, torch.tensor([END])]) for _, s in batch])
    logits = picked @ model.llm_decoder.weight[used].T + model.llm_decoder.bias[used]
    return F.cross_entropy(logits, place[target])


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=LLM["steps"])
    parser.add_argument("--start", type=int, default=0, help="go on from the state kept at this step")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    tokenizer = text_tokenizer()
    data = []
    for split in LLM["splits"]:
        tokens = torch.from_numpy(np.load(WORK / f"{split}.tokens.npy").astype(np.int64))
        data += [(tokenizer.encode(r["text"]), tokens[r["start"] // 960 : r["stop"] // 960]) for r in load(split)[0]]
    used = torch.cat([torch.unique(torch.cat([speech for _, speech in data])), torch.tensor([END])])
    place = torch.full((SPEECH_ROWS,), -1)
    place[used] = torch.arange(len(used))
    model = TinyLLM()
    with torch.no_grad():  # codes that never occur get no probability instead of an untrained one
        unseen = torch.ones(SPEECH_ROWS, dtype=torch.bool)
        unseen[used] = False
        model.llm_decoder.weight[unseen] = 0
        model.llm_decoder.bias.zero_()
        model.llm_decoder.bias[unseen] = LLM["unseen_bias"]
        model.speech_embedding.weight[unseen] = 0
    if args.start:
        load_exported(model, torch.load(WORK / f"llm.{args.start:04d}.pt", weights_only=True))
    print("parameters", sum(p.numel() for p in model.parameters()), "codes", len(used))
    optimiser = torch.optim.AdamW(model.parameters(), LLM["rate"], weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: min(1.0, (s + 1) / 50))
    buckets, rng = Buckets([len(s) for _, s in data], LLM["batch"], SEED + args.start), np.random.default_rng(SEED)
    began, mean = time.time(), None
    for step in range(args.start + 1, args.steps + 1):
        batch = [data[i] for i in buckets.draw()]
        if rng.random() < 0.25:
            half = LLM["batch"] // 2
            batch = [(a + b, torch.cat([s, t])) for (a, s), (b, t) in zip(batch[:half], batch[half:])]
        loss = loss_of(model, batch, used, place)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        warm_up.step()
        mean = loss.item() if mean is None else 0.97 * mean + 0.03 * loss.item()
        if step % 25 == 0:
            print(step, f"{time.time() - began:.0f}s loss {mean:.3f}", flush=True)
        if step % LLM["keep_every"] == 0:
            torch.save(model.exported(), WORK / f"llm.{step:04d}.pt")


if __name__ == "__main__":
    main()
