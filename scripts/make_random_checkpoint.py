#!/usr/bin/env python3
"""Write a CosyVoice2 folder of the published size with random weights, to try conversions, memory and speed.

    python scripts/make_random_checkpoint.py --save-path /tmp/random --parts llm flow hift

Names and shapes come from the key list of the published checkpoint. The tokenizer has the published number of pieces
(151,646): the 256 bytes, fillers, and Qwen2's three specials; it spells every text byte by byte.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
from tqdm import tqdm

KEYS = Path(__file__).resolve().parents[1] / "tests" / "data" / "official_checkpoint_keys.json"
PARTS = ("llm", "flow", "hift")
TEXT_TABLE, TEXT_HEAD = "llm.model.model.embed_tokens.weight", "llm.model.lm_head.weight"

# Qwen2-0.5B's published configuration (spec, section 3).
QWEN2_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
N_TEXT_PIECES = 151643  # before the specials
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def random_tensor(name: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Values of a size that keeps activations finite through the whole network."""
    noise = torch.empty(shape).normal_(generator=generator)
    if name.endswith("original0"):  # gain of a weight-normed layer
        return noise.mul_(0.1).add_(1.0)
    if name.endswith("alpha") or (name.endswith("weight") and len(shape) == 1):  # snake, normalisation
        return noise.mul_(0.1).add_(1.0)
    if name == "llm_decoder.bias":
        return noise.mul_(1.1)  # the published one's standard deviation, as users report it
    if len(shape) == 1 or "pos_bias" in name:
        return noise.mul_(0.05)
    return noise.mul_(1.0 / math.sqrt(math.prod(shape[1:])))


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE (GPT-2) writes for each byte, in the order of Qwen2's vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(hidden))]


def write_blank(folder: Path) -> None:
    """``CosyVoice-BlankEN``: configuration and tokenizer, without weights, in the published folder's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN2_CONFIG, indent=2) + "\n")
    vocab = {letter: i for i, letter in enumerate(byte_letters())}
    vocab.update({f"\u0100filler{i}": i for i in range(len(vocab), N_TEXT_PIECES)})
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {
        str(N_TEXT_PIECES + i): {
            "content": piece,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, piece in enumerate(SPECIALS)
    }
    tokenizer = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIALS[1:]),
        "bos_token": None,
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[0],
        "unk_token": None,
        "errors": "replace",
        "model_max_length": QWEN2_CONFIG["max_position_embeddings"],
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")


def write_part(path: Path, shapes: dict[str, list[int]], seed: int) -> None:
    """One ``.pt`` file; the tied text head shares the text table's storage, as it does in the published file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tqdm(shapes.items(), desc=f"drawing {path.name}"):
        tensors[name] = tensors[TEXT_TABLE] if name == TEXT_HEAD else random_tensor(name, shape, generator)
    partial = path.with_name(f".{path.name}.partial")
    try:
        torch.save(tensors, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a CosyVoice2 folder of the published size with random weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--save-path", type=Path, required=True, help="folder to write")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which files to write")
    parser.add_argument("--seed", type=int, default=0, help="of the random values")
    return parser


def main() -> int:
    args = get_parser().parse_args()
    if args.save_path.exists() and (not args.save_path.is_dir() or any(args.save_path.iterdir())):
        print(f"error: {args.save_path}: found a file or a folder that is not empty, expected none", file=sys.stderr)
        return 1
    args.save_path.mkdir(parents=True, exist_ok=True)
    keys = json.loads(KEYS.read_text())
    (args.save_path / "cosyvoice2.yaml").write_text("sample_rate: 24000\n")
    for part in args.parts:
        if part == "llm":
            write_blank(args.save_path / "CosyVoice-BlankEN")
        write_part(args.save_path / f"{part}.pt", keys[f"{part}.pt"], args.seed + PARTS.index(part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
