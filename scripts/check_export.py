#!/usr/bin/env python3
"""Show that an exported llm.pt says what the merged checkpoint says: the same speech tokens, token by token.

    python scripts/check_export.py --merged exp/tiny/merged/global_step_20 --llm-pt exp/tiny/export/llm.pt

Each form is read with its own tables, names and head. Both then continue the same texts, greedily and with
CosyVoice's repetition-aware sampling (RAS) from equal seeds. Exit status 1 if a token differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache

from cosyvoice.checkpoint import CheckpointError, load_tensors
from cosyvoice.evaluation.generate import Sampling, draw
from cosyvoice.llm import names
from cosyvoice.llm.load import (
    HFTensors,
    Parts,
    embed_hf,
    embed_pretrained,
    hf_config,
    parts_from_hf,
    parts_from_pretrained,
)
from cosyvoice.llm.to_pretrained import SAMPLE_TEXTS, release_memory
from cosyvoice.llm.tokenizer import load_tokenizer
from cosyvoice.speech_tokens import VocabLayout

METHODS = ("greedy", "ras")
#: Codes of a made-up prompt: its length and its contents do not matter, only that both forms get it.
PROMPT = (11, 222, 3333, 4444)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--merged", type=Path, required=True, help="Hugging Face folder of the merged checkpoint"
    )
    parser.add_argument("--llm-pt", type=Path, required=True, help="exported file")
    parser.add_argument(
        "--text", action="append", help="text to continue, may be repeated; None: three short ones"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first text's draws; the next texts count up"
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="speech tokens of a text at most")
    return parser


def speak(
    parts: Parts,
    start: torch.Tensor,
    row_of: Callable[[int], torch.Tensor],
    layout: VocabLayout,
    sampling: Sampling,
    seed: int,
    min_tokens: int,
    max_tokens: int,
) -> list[int]:
    """Continue a prompt, one token at a time.

    Args:
        start: [1, T, hidden] embeddings of the prompt.
        row_of: speech code -> its embedding [hidden].
        min_tokens: no end piece before so many, so that there is something to compare.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache()
    codes: list[int] = []
    embeddings = start
    while len(codes) < max_tokens:
        logits = parts(embeddings, cache)[1][0, -1].clone()
        if len(codes) < min_tokens:
            logits[layout.n_speech :] = -torch.inf
        code = draw(logits, codes, sampling, generator)
        if code >= layout.n_speech:
            break
        codes.append(code)
        embeddings = row_of(code).float()[None, None]
    return codes


def speak_all(
    parts: Parts,
    embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    row_of: Callable[[int], torch.Tensor],
    layout: VocabLayout,
    texts: Sequence[torch.Tensor],
    seed: int,
    max_tokens: int,
    name: str,
) -> dict[tuple[str, int], list[int]]:
    """Tokens by (method, number of the text)."""
    prompt = torch.tensor([code % layout.n_speech for code in PROMPT])
    cases = [(method, i) for method in METHODS for i in range(len(texts))]
    spoken = {}
    for method, i in tqdm(cases, desc=name):
        start, least = embed(texts[i], prompt), min(2 * len(texts[i]), max_tokens)
        spoken[method, i] = speak(parts, start, row_of, layout, Sampling(method), seed + i, least, max_tokens)
    return spoken


def check(merged: Path, llm_pt: Path, texts: Sequence[str], seed: int, max_tokens: int) -> list[str]:
    """Compare the two forms; returns one sentence for each text and method, those that differ begin with DIFFERS.

    One model is in memory at a time.

    Raises:
        CheckpointError: one of the two cannot be read.
    """
    config = hf_config(merged)
    tokenizer, layout = load_tokenizer(merged)
    ids = [torch.tensor(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]

    def from_merged() -> dict[tuple[str, int], list[int]]:
        tensors = HFTensors(merged)
        table = tensors[names.HF_TABLE]
        return speak_all(
            parts_from_hf(tensors, config, layout),
            lambda text, speech: embed_hf(table, layout, text, speech),
            lambda code: table[layout.first_speech_id + code],
            layout,
            ids,
            seed,
            max_tokens,
            "merged",
        )

    def from_llm_pt() -> dict[tuple[str, int], list[int]]:
        tensors = load_tensors(llm_pt)
        missing = {
            names.TEXT_TABLE,
            names.SPEECH_TABLE,
            names.CONTROL_TABLE,
            names.HEAD_BIAS,
        } - tensors.keys()
        if missing:
            raise CheckpointError(f"{llm_pt}: key {min(missing)!r} is missing, expected CosyVoice2's llm.pt")
        return speak_all(
            parts_from_pretrained(tensors, config),
            lambda text, speech: embed_pretrained(tensors, text, speech),
            lambda code: tensors[names.SPEECH_TABLE][code],
            layout,
            ids,
            seed,
            max_tokens,
            "llm.pt",
        )

    expected = from_merged()
    release_memory()
    found = from_llm_pt()
    lines = []
    for (method, i), tokens in expected.items():
        other = found[method, i]
        if tokens == other:
            lines.append(f"same     {method:6} {len(tokens):4} tokens  {texts[i]}")
        else:
            at = next((n for n, pair in enumerate(zip(tokens, other)) if pair[0] != pair[1]), -1)
            where = f"from token {at} on" if at >= 0 else f"in length, {len(tokens)} and {len(other)}"
            lines.append(f"DIFFERS  {method:6} {where}  {texts[i]}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    args = get_parser().parse_args(argv)
    try:
        lines = check(args.merged, args.llm_pt, args.text or SAMPLE_TEXTS, args.seed, args.max_tokens)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return int(any(line.startswith("DIFFERS") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
