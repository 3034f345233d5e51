"""The Hugging Face tokenizer of the language model: text pieces, speech pieces, chat template."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import AddedToken

from cosyvoice.checkpoint import CheckpointError
from cosyvoice.speech_tokens import SOS, TASK_ID, TEXT_SPECIALS, VocabLayout

END_OF_TEXT = "<|endoftext|>"

# A conversation is one user turn, the text, and the assistant's speech. veRL's rows end in an empty assistant turn.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '" + SOS + "' + message['content'] + '" + TASK_ID + "' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer(blank_path: Path, n_speech: int) -> tuple[PreTrainedTokenizerFast, VocabLayout]:
    """The text tokenizer of ``CosyVoice-BlankEN`` with the speech part of the vocabulary behind it.

    Speech pieces are added as normal tokens: special ones would vanish when an answer is decoded with
    ``skip_special_tokens=True``, which is how trainers decode.

    Raises:
        CheckpointError: the folder holds no tokenizer, or one that already knows some of the pieces.
    """
    if not (blank_path / "vocab.json").is_file() and not (blank_path / "tokenizer.json").is_file():
        raise CheckpointError(f"{blank_path}: found no vocab.json or tokenizer.json, expected a Qwen2 tokenizer")
    base = AutoTokenizer.from_pretrained(blank_path, use_fast=True, local_files_only=True)
    backend = base.backend_tokenizer
    # Wrapped again from its own file format: transformers 5 rebuilds a "Qwen2Tokenizer" from vocabulary and merges
    # when it is loaded, and was seen to add <|endoftext|> behind the last piece while doing so.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(TEXT_SPECIALS),
        clean_up_tokenization_spaces=False,
        model_max_length=base.model_max_length,
    )
    layout = VocabLayout.build(len(tokenizer), n_speech)
    vocab = tokenizer.get_vocab()
    if sorted(vocab.values()) != list(range(len(tokenizer))):
        raise CheckpointError(f"{blank_path}: tokenizer: found gaps in its {len(tokenizer)} ids, expected none")
    pieces = [piece for piece, _ in layout.pieces()]
    if known := [piece for piece in pieces if piece in vocab]:
        raise CheckpointError(
            f"{blank_path}: tokenizer: found {known[0]!r} already ({len(known)} speech pieces), expected none"
        )
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in pieces])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer, layout


def load_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, VocabLayout]:
    """Load a converted tokenizer and look its layout up.

    Raises:
        CheckpointError: there is none, or it lacks the speech pieces, or its length is not the layout's.
    """
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path}: found no tokenizer.json, expected a converted CosyVoice2 checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    try:
        layout = VocabLayout.from_tokenizer(tokenizer)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if len(tokenizer) != layout.n_tokens:
        raise CheckpointError(f"{path}: tokenizer: found {len(tokenizer)} pieces, expected {layout.n_tokens}")
    return tokenizer, layout
