"""What prompts cost at the first use and after it.

    .venv/reward/bin/python scripts/bench/prompts.py [--model-dir FOLDER] [--prompts FOLDER_OR_JSONL]

Prints seconds to load the bank into an empty cache and from a full one, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import tempfile
import time

from cosyvoice.checkpoint import CosyVoice2Folder
from cosyvoice.frontend import PromptBank


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", default="assets/cosyvoice2-tiny", help="checkpoint (default: %(default)s)")
    parser.add_argument("--prompts", default="assets/cosyvoice2-tiny/prompts", help="recordings (default: %(default)s)")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    folder = CosyVoice2Folder(args.model_dir)
    with tempfile.TemporaryDirectory() as cache:
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            bank = PromptBank.load(args.prompts, folder, cache, progress=False)
            seconds.append(time.perf_counter() - start)
    first, later = seconds[0], min(seconds[1:])
    print(f"{len(bank)} prompts: first {first:.3f} s, from the cache {later:.4f} s, ratio {first / later:.0f}")


if __name__ == "__main__":
    main()
