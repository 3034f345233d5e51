"""transformers class of the language model: a Qwen2 body and a compact speech head with bias.

The published model scores 6,564 pieces (6,561 speech codes and 3 end tokens) by a linear layer **with bias**. A stock
Qwen2 has one row per vocabulary piece and no bias: it would lose the bias and give each of the 151,772 other pieces a
logit of 0, hence mass (spec, section 3). Here the head keeps its 6,564 rows, and its logits are placed where the speech
pieces sit in the vocabulary; all other positions hold one constant. Text can thus be neither sampled nor learned, and
the head costs a 24th of a full one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2ForCausalLM

from cosyvoice.llm.config import MASKED_LOGIT, CosyVoice2Config
from cosyvoice.speech_tokens import VocabLayout


def place_logits(logits: torch.Tensor, layout: VocabLayout) -> torch.Tensor:
    """Spread the head's logits over the vocabulary.

    Args:
        logits: [..., n_speech + 3].
        layout: where they belong.

    Returns:
        [..., padded_size]; :data:`MASKED_LOGIT` everywhere else.
    """
    before = layout.first_speech_id
    return F.pad(logits, (before, layout.padded_size - before - layout.n_head), value=MASKED_LOGIT)


class SpeechHead(nn.Linear):
    """Linear layer over speech and end pieces whose output covers the whole vocabulary."""

    def __init__(self, hidden_size: int, layout: VocabLayout):
        super().__init__(hidden_size, layout.n_head, bias=True)
        self.layout = layout

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., padded_size]."""
        return place_logits(super().forward(hidden), self.layout)


class CosyVoice2ForCausalLM(Qwen2ForCausalLM):
    """Qwen2 body with :class:`SpeechHead`; the embedding table holds text, speech, end and control pieces."""

    config_class = CosyVoice2Config
    _tied_weights_keys: dict[str, str] = {}

    def __init__(self, config: CosyVoice2Config):
        layout = config.vocab_layout()
        super().__init__(config)
        self.lm_head = SpeechHead(config.hidden_size, layout)
        self.post_init()
