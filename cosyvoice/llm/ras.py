"""Repetition-aware sampling (RAS), the sampler of CosyVoice's own inference (VALL-E 2, arXiv:2406.05370, section 3.2).

A piece is drawn from a nucleus. If it already stands among the last few generated pieces, it is drawn again from the
whole distribution without it, which breaks loops. Training rolls out without RAS; it is here to synthesise the way
CosyVoice does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor

from cosyvoice.speech_tokens import VocabLayout


@dataclass(frozen=True)
class RasConfig:
    """Values of ``cosyvoice2.yaml``.

    Attributes:
        top_p: the nucleus grows while its mass is below this.
        top_k: and while it holds fewer pieces than this.
        win_size: number of last generated pieces that count as recent.
        tau_r: share of the window that a piece must fill to be drawn again; 0.1 of 10 is a single occurrence.
    """

    top_p: float = 0.8
    top_k: int = 25
    win_size: int = 10
    tau_r: float = 0.1


PUBLISHED = RasConfig()


def nucleus(log_probs: torch.Tensor, config: RasConfig = PUBLISHED) -> tuple[torch.Tensor, torch.Tensor]:
    """The pieces that may be drawn first.

    Args:
        log_probs: [n] log-probabilities; masked pieces are -inf.

    Returns:
        Their ids, most likely first (equal ones by id), and their probabilities, not renormalised. The piece that
        carries the mass over ``top_p`` is among them.
    """
    probs, ids = log_probs.softmax(dim=-1).sort(descending=True, stable=True)
    mass_before = probs.cumsum(dim=-1) - probs
    n_kept = int((mass_before[: config.top_k] < config.top_p).sum())
    return ids[:n_kept], probs[:n_kept]


def is_repeated(drawn: int, history: Sequence[int], config: RasConfig = PUBLISHED) -> bool:
    """Whether ``drawn`` fills the share ``tau_r`` of the window at the end of ``history``."""
    window = list(history)[-config.win_size :]
    return window.count(drawn) >= config.win_size * config.tau_r


def probs_without(log_probs: torch.Tensor, drawn: int) -> torch.Tensor:
    """[n] probabilities of the second draw: over all pieces but ``drawn``, neither top-p nor top-k."""
    rest = log_probs.clone()
    rest[drawn] = -torch.inf
    return rest.softmax(dim=-1)


def ras_sample(
    logits: torch.Tensor,
    history: Sequence[int],
    config: RasConfig = PUBLISHED,
    generator: torch.Generator | None = None,
) -> int:
    """Draw one piece.

    Args:
        logits: [n] scores; masked pieces are -inf.
        history: pieces generated so far (without the prompt), oldest first.

    Raises:
        ValueError: no piece is left to draw, or a score is nan.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    if log_probs.isnan().any():
        raise ValueError(f"RAS: found nan among {logits.numel()} scores, or nothing but -inf; expected a finite one")
    ids, probs = nucleus(log_probs, config)
    drawn = int(ids[torch.multinomial(probs, 1, generator=generator)])
    if not is_repeated(drawn, history, config):
        return drawn
    rest = probs_without(log_probs, drawn)
    if rest.isnan().any():
        raise ValueError(f"RAS: found piece {drawn} repeated and no other to draw, expected at least one more")
    return int(torch.multinomial(rest, 1, generator=generator))


class RasLogitsProcessor(LogitsProcessor):
    """RAS for ``model.generate``: draws the piece, and leaves it as the only one that ``generate`` can take.

    Use it with ``do_sample=False`` (nothing is left to choose) and without top-p, top-k or temperature of
    ``generate``'s own.

    Args:
        layout: of the model's vocabulary; only speech and end pieces are drawn.
        prompt_length: length of ``input_ids`` given to ``generate``; what follows is the history. Prompt speech
            is no part of it.
        min_new_tokens: before so many, ``<|eos1|>`` is not drawn. The two other end pieces are, as in CosyVoice (spec,
            section 3).
        generator: source of the draws.
    """

    def __init__(
        self,
        layout: VocabLayout,
        prompt_length: int,
        min_new_tokens: int = 0,
        config: RasConfig = PUBLISHED,
        generator: torch.Generator | None = None,
    ):
        self.layout, self.config, self.generator = layout, config, generator
        self.prompt_length, self.min_new_tokens = prompt_length, min_new_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids [batch, length], scores [batch, vocab_size] -> scores, -inf but for one 0 per row."""
        first = self.layout.first_speech_id
        chosen = torch.full_like(scores, -torch.inf)
        for row in range(len(scores)):
            history = [i - first for i in input_ids[row, self.prompt_length :].tolist()]
            logits = scores[row, first : first + self.layout.n_head].float()
            if len(history) < self.min_new_tokens:
                logits = logits.clone()
                logits[self.layout.n_speech] = -torch.inf
            chosen[row, first + ras_sample(logits, history, self.config, self.generator)] = 0.0
        return chosen
