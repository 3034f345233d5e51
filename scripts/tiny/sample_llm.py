"""Sample speech tokens from a kept state of the language model, in batches of texts of equal length."""

from __future__ import annotations

from collections import defaultdict

import torch
from blank import text_tokenizer
from torch import Tensor
from train_llm import END, TinyLLM
from transformers import DynamicCache

TOKENS_PER_CHARACTER = 16  # an utterance longer than this has not ended by itself


def pick(logits: Tensor, temperature: float, top_p: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One id per row of [B, V]; temperature 0 takes the largest."""
    if temperature == 0:
        return logits.argmax(-1)
    values, ids = (logits / temperature).topk(top_k or logits.shape[-1])
    p = values.softmax(-1)
    p = p * (p.cumsum(-1) - p < top_p)
    return ids.gather(1, torch.multinomial(p, 1, generator=generator))[:, 0]


@torch.inference_mode()
def sample(model: TinyLLM, texts: list[str], temperature: float = 0.8, top_p: float = 0.95, top_k: int = 25,
           seed: int = 0) -> list[tuple[list[int], bool]]:
    """Tokens of each text (end token removed) and whether it ended by itself."""
    tokenizer, generator = text_tokenizer(), torch.Generator().manual_seed(seed)
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        by_length[len(text)].append(i)
    answers: list[tuple[list[int], bool]] = [([], False)] * len(texts)
    for length, rows in by_length.items():
        x = torch.stack([model.embed(tokenizer.encode(texts[i]), torch.zeros(0, dtype=torch.long)) for i in rows])
        cache, drawn, alive = DynamicCache(), [], torch.ones(len(rows), dtype=torch.bool)
        for _ in range(TOKENS_PER_CHARACTER * length):
            hidden = model.qwen(inputs_embeds=x, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
            ids = pick(model.llm_decoder(hidden), temperature, top_p, top_k, generator)
            drawn.append(ids)
            alive &= ids < END
            if not alive.any():
                break
            x = model.speech_embedding(ids)[:, None]
        columns = torch.stack(drawn, 1).tolist()
        for i, ids in zip(rows, columns):
            stop = next((k for k, t in enumerate(ids) if t >= END), None)
            answers[i] = (ids[:stop], stop is not None)
    return answers
