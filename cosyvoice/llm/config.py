"""Configuration of the language model: Qwen2's, plus where the speech part of the vocabulary sits."""

from __future__ import annotations

from transformers import Qwen2Config

from cosyvoice.speech_tokens import N_SPEECH, VocabLayout

# The logit of every piece that is neither speech nor end. exp(MASKED_LOGIT - max) is exactly 0 in float32, bfloat16
# and float16 for any max above -9800, and p * MASKED_LOGIT is 0 as well, so that the entropy stays finite; with -inf
# it would be 0 * inf = nan. float16 can hold it.
MASKED_LOGIT = -1e4


QWEN2_TEXT_ROWS = 151936  # of the published CosyVoice-BlankEN


class CosyVoice2Config(Qwen2Config):
    """Qwen2's configuration and three numbers.

    Attributes:
        first_speech_id: id of ``<|s_0|>``, which is also the number of text pieces.
        n_speech: number of speech codes; the head has three rows more, for the end tokens.
        text_rows: rows of the text table in ``llm.pt``, unused ones included; only the way back needs it.
        vocab_size: rows of the embedding table, padded (see :class:`cosyvoice.speech_tokens.VocabLayout`).
    """

    model_type = "cosyvoice2"

    first_speech_id: int = 0
    n_speech: int = N_SPEECH
    text_rows: int = QWEN2_TEXT_ROWS

    def vocab_layout(self) -> VocabLayout:
        """Where the speech part of the vocabulary sits.

        Raises:
            ValueError: ``vocab_size`` is not what the other two numbers ask for.
        """
        layout = VocabLayout.build(self.first_speech_id, self.n_speech)
        if self.vocab_size != layout.padded_size:
            raise ValueError(
                f"config.json: vocab_size: found {self.vocab_size}, expected {layout.padded_size} "
                f"for first_speech_id {self.first_speech_id} and n_speech {self.n_speech}"
            )
        return layout
