"""What a stock Qwen2 head loses against the speech head with bias, measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache

from cosyvoice.checkpoint import load_tensors
from cosyvoice.llm import names
from cosyvoice.llm.load import embed_pretrained, hf_config, parts_from_pretrained
from cosyvoice.llm.to_pretrained import SAMPLE_TEXTS
from cosyvoice.llm.tokenizer import load_tokenizer


@dataclass(frozen=True)
class StockHeadLoss:
    """Means over positions: mass on pieces that are not speech, and share where the most likely piece changes."""

    non_speech_mass: float
    argmax_changed: float
    positions: int


def stock_head_loss(llm_pt: Path, hf_folder: Path, n_speech_tokens: int = 32, progress: bool = True) -> StockHeadLoss:
    """Compare the distributions after sample texts and each of the tokens that greedy decoding then gives.

    A stock head gives each of the other ``padded_size - n_head`` pieces a logit of 0 (spec, section 3), so that their
    mass is ``(rows - n) / (rows - n + sum exp z)``.
    """
    tokenizer, layout = load_tokenizer(hf_folder)
    tensors = load_tensors(llm_pt)
    parts = parts_from_pretrained(tensors, hf_config(hf_folder))
    others = torch.tensor(float(layout.padded_size - layout.n_head)).log()
    masses, changed = [], []
    for text in tqdm(SAMPLE_TEXTS, desc="measuring what a stock head loses", disable=not progress):
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        cache, row = DynamicCache(), embed_pretrained(tensors, ids, torch.tensor([], dtype=torch.long))
        for _ in range(n_speech_tokens):
            with_bias = parts(row, cache)[1][0, -1]
            without = with_bias - parts.head_bias
            masses.append(float((others - torch.logaddexp(others, without.logsumexp(0))).exp()))
            # A text piece wins where no speech logit is above its 0.
            changed.append(bool(without.max() <= 0 or without.argmax() != with_bias.argmax()))
            code = with_bias[: layout.n_speech].argmax()
            row = tensors[names.SPEECH_TABLE][code].float()[None, None]
    return StockHeadLoss(sum(masses) / len(masses), sum(changed) / len(changed), len(masses))
