"""Write CosyVoice-BlankEN/: a Qwen2 configuration and a byte-level tokenizer in which each character is one token."""

from __future__ import annotations

import argparse
import json

from settings import ASSETS, CHARACTERS, LLM
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2Tokenizer

FOLDER = ASSETS / "CosyVoice-BlankEN"


def text_tokenizer() -> Qwen2Tokenizer:
    """Qwen2's tokenizer class over 256 bytes and the merges that join the three bytes of our characters."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    pieces = ["".join(p for p, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(c)) for c in CHARACTERS]
    merges = sorted({(p[0], p[1]) for p in pieces}) + [(p[:2], p[2]) for p in pieces]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
                               unk_token=None, bos_token=None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def config() -> Qwen2Config:
    """The tiny Qwen2; the head size of 32 is one that vLLM's CPU attention knows."""
    return Qwen2Config(vocab_size=LLM["text_rows"], hidden_size=LLM["width"], intermediate_size=LLM["mlp"],
                       num_hidden_layers=LLM["layers"], num_attention_heads=LLM["heads"],
                       num_key_value_heads=LLM["kv_heads"], max_position_embeddings=2048, rms_norm_eps=1e-6,
                       tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, use_cache=True)


def get_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=__doc__)


def main() -> None:
    get_parser().parse_args()
    tokenizer = text_tokenizer()
    for c in CHARACTERS:
        if len(tokenizer.encode(c)) != 1:
            raise ValueError(f"tokenizer: {c!r} became {tokenizer.encode(c)}, expected one token")
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(FOLDER)
    settings = config()
    settings.bos_token_id = settings.eos_token_id = tokenizer.eos_token_id
    settings.architectures = ["Qwen2ForCausalLM"]
    settings.save_pretrained(FOLDER)
    GenerationConfig(bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id).save_pretrained(FOLDER)
    print("tokens", len(tokenizer), json.dumps(tokenizer.encode("我今天看书")))


if __name__ == "__main__":
    main()
