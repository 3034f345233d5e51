"""The vocabulary around speech: where speech tokens sit, how they are written, how an answer is read.

This is the one definition of these things. Both conversions, data preparation, the reward client and the synthesis of
test sets use it. It imports neither torch nor transformers, so that a command line can print its help at once.

A CosyVoice2 vocabulary in Hugging Face form is, in this order: the text tokenizer's own pieces, the text specials of
:data:`TEXT_SPECIALS` that it lacks, ``<|s_0|>`` .. ``<|s_{n-1}|>``, ``<|eos1|>`` .. ``<|eos3|>``, ``<|sos|>``,
``<|task_id|>``, and unused rows up to a multiple of 128.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

N_SPEECH = 6561  # 3 ** 8 codes of the published speech tokenizer
N_END = 3
PAD_ROWS_TO = 128

SOS = "<|sos|>"
TASK_ID = "<|task_id|>"
END_PIECES = tuple(f"<|eos{i}|>" for i in range(1, N_END + 1))

# The specials that CosyVoice2 adds to its text tokenizer, in its order; the order fixes every id behind them.
TEXT_SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endofprompt|>",
    "[breath]",
    "<strong>",
    "</strong>",
    "[noise]",
    "[laughter]",
    "[cough]",
    "[clucking]",
    "[accent]",
    "[quick_breath]",
    "<laughter>",
    "</laughter>",
    "[hissing]",
    "[sigh]",
    "[vocalized-noise]",
    "[lipsmack]",
    "[mn]",
)

# Pieces that steer the model. In a user's text they would be injected control, so data preparation refuses them. The
# bracketed sounds ([breath], <strong> ...) are markup that users write on purpose and are not among them.
_CONTROL = re.compile(
    r"<\|(?:s_-?\d+|eos\d+|sos|task_id|endoftext|endofprompt|im_start|im_end)\|>",
)
_PIECE = re.compile(rf"<\|s_(?P<speech>-?\d+)\|>|<\|eos(?P<end>[1-{N_END}])\|>")


def speech_piece(code: int) -> str:
    """The written form of speech code ``code``, for example ``<|s_12|>``."""
    return f"<|s_{code}|>"


def find_control_tokens(text: str) -> list[str]:
    """The model's control tokens that stand in ``text``, in order of appearance; empty where the text is clean."""
    return _CONTROL.findall(text)


def render_prompt(text: str, prompt_text: str = "", prompt_tokens: Sequence[int] = ()) -> str:
    """What the language model is given: ``<|sos|>`` prompt text + text ``<|task_id|>`` prompt speech.

    Args:
        text: what is to be spoken.
        prompt_text: what the speaker prompt says (zero-shot synthesis), else empty.
        prompt_tokens: the prompt's speech codes, each in [0, N_SPEECH).
    """
    return SOS + prompt_text + text + TASK_ID + "".join(map(speech_piece, prompt_tokens))


@dataclass(frozen=True)
class VocabLayout:
    """Where the speech part of the vocabulary sits.

    Attributes:
        n_speech: number of speech codes (6561 in the published model).
        first_speech_id: id of ``<|s_0|>``; it equals the number of text pieces.
        end_ids: ids of ``<|eos1|>`` .. ``<|eos3|>``.
        sos_id: id of ``<|sos|>``.
        task_id: id of ``<|task_id|>``.
        padded_size: number of rows of the embedding table, a multiple of 128.
    """

    n_speech: int
    first_speech_id: int
    end_ids: tuple[int, int, int]
    sos_id: int
    task_id: int
    padded_size: int

    @classmethod
    def build(cls, first_speech_id: int, n_speech: int = N_SPEECH) -> VocabLayout:
        """The layout that follows from the number of text pieces and of speech codes."""
        first_end = first_speech_id + n_speech
        size = first_end + N_END + 2
        return cls(
            n_speech=n_speech,
            first_speech_id=first_speech_id,
            end_ids=(first_end, first_end + 1, first_end + 2),
            sos_id=first_end + N_END,
            task_id=first_end + N_END + 1,
            padded_size=-(-size // PAD_ROWS_TO) * PAD_ROWS_TO,
        )

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> VocabLayout:
        """Look the layout up in a transformers tokenizer.

        Raises:
            ValueError: a piece is missing, or the pieces do not stand in one run in the expected order.
        """
        vocab = tokenizer.get_vocab()
        where = getattr(tokenizer, "name_or_path", "") or "tokenizer"
        if speech_piece(0) not in vocab:
            raise ValueError(f"{where}: found no piece {speech_piece(0)!r}, expected a converted CosyVoice2 tokenizer")
        first = vocab[speech_piece(0)]
        n_speech = 0
        while speech_piece(n_speech) in vocab:
            n_speech += 1
        layout = cls.build(first, n_speech)
        for piece, expected in layout.pieces():
            if vocab.get(piece) != expected:
                raise ValueError(f"{where}: piece {piece!r}: found id {vocab.get(piece)}, expected {expected}")
        return layout

    def pieces(self) -> Iterable[tuple[str, int]]:
        """Every piece of the speech part with its id, in order."""
        yield from ((speech_piece(i), self.first_speech_id + i) for i in range(self.n_speech))
        yield from zip(END_PIECES, self.end_ids)
        yield SOS, self.sos_id
        yield TASK_ID, self.task_id

    @property
    def n_tokens(self) -> int:
        """Number of pieces that exist (the length of the tokenizer)."""
        return self.task_id + 1

    @property
    def n_head(self) -> int:
        """Number of pieces that the model may generate: speech and end."""
        return self.n_speech + N_END


@dataclass(frozen=True)
class ParsedTokens:
    """An answer of the language model, as the decoder may take it.

    Attributes:
        ids: speech codes up to the first end token, each in [0, n_speech).
        ended: whether an end token was met.
        out_of_range: codes that no table row exists for; they are not in ``ids``.
        repeat_runs: (code, length) of every run of one code longer than one, in order.
        unknown: pieces that are neither speech nor end (text, control tokens); they are not in ``ids``.
    """

    ids: list[int]
    ended: bool
    out_of_range: list[int] = field(default_factory=list)
    repeat_runs: list[tuple[int, int]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def parse(answer: str | Sequence[int], layout: VocabLayout | None = None) -> ParsedTokens:
    """Read an answer: its speech codes up to the first end token, and all that was odd about it.

    Args:
        answer: decoded text ("<|s_12|><|s_7|><|eos1|>"), or ids of the vocabulary.
        layout: needed for ids; for text it sets the number of speech codes, else the published 6561.

    Raises:
        ValueError: ids without a layout.
    """
    n_speech = layout.n_speech if layout else N_SPEECH
    ids: list[int] = []
    out_of_range: list[int] = []
    unknown: list[str] = []
    ended = False
    for kind, value in _read_text(answer) if isinstance(answer, str) else _read_ids(answer, layout):
        if kind == "end":
            ended = True
            break
        if kind == "unknown":
            unknown.append(str(value))
        elif 0 <= int(value) < n_speech:
            ids.append(int(value))
        else:
            out_of_range.append(int(value))
    return ParsedTokens(ids, ended, out_of_range, _repeat_runs(ids), unknown)


def _read_text(answer: str) -> Iterator[tuple[str, str | int]]:
    position = 0
    for match in _PIECE.finditer(answer):
        if between := answer[position : match.start()].strip():
            yield "unknown", between
        position = match.end()
        if match["speech"] is not None:
            yield "speech", int(match["speech"])
        elif match["end"] is not None:
            yield "end", match["end"]
    if rest := answer[position:].strip():
        yield "unknown", rest


def _read_ids(answer: Sequence[int], layout: VocabLayout | None) -> Iterator[tuple[str, str | int]]:
    if layout is None:
        raise ValueError("parse: found ids without a layout, expected VocabLayout.from_tokenizer(tokenizer)")
    for token in map(int, answer):
        if token in layout.end_ids:
            yield "end", token
        elif 0 <= token - layout.first_speech_id < layout.n_speech:
            yield "speech", token - layout.first_speech_id
        else:
            yield "unknown", f"id {token}"


def _repeat_runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    runs = ((code, sum(1 for _ in run)) for code, run in groupby(ids))
    return [(code, length) for code, length in runs if length > 1]
