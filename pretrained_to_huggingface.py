"""Stage -1: CosyVoice2's llm.pt -> a Hugging Face checkpoint that transformers, veRL and vLLM load.

    python pretrained_to_huggingface.py --pretrained-cosyvoice2-path CosyVoice2-0.5B --save-path exp/run/hf

Loading it needs `import cosyvoice.llm` (veRL: actor_rollout_ref.model.external_lib=cosyvoice.llm; vLLM finds it by
itself). `--head qwen2` writes the stock layout for tools that know only Qwen2, and prints what that loses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Convert CosyVoice2's llm.pt to Hugging Face form.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--pretrained-cosyvoice2-path",
        type=Path,
        required=True,
        help="CosyVoice2 folder; only llm.pt and CosyVoice-BlankEN/ are opened",
    )
    parser.add_argument("--save-path", type=Path, required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights written")
    parser.add_argument(
        "--head",
        choices=("speech", "qwen2"),
        default="speech",
        help="speech: 6,564 rows with bias, nothing lost; qwen2: stock full-size head without bias",
    )
    return parser


def main() -> int:
    args = get_parser().parse_args()
    import torch

    from cosyvoice.checkpoint import CheckpointError
    from cosyvoice.llm.stock_head import stock_head_loss
    from cosyvoice.llm.to_huggingface import convert

    try:
        layout = convert(args.pretrained_cosyvoice2_path, args.save_path, getattr(torch, args.dtype), args.head)
        print(
            f"{args.save_path}: {layout.n_speech} speech codes from id {layout.first_speech_id}, "
            f"{layout.padded_size} rows, {args.dtype}, head {args.head}"
        )
        if args.head == "qwen2":
            loss = stock_head_loss(args.pretrained_cosyvoice2_path / "llm.pt", args.save_path)
            print(
                f"a stock head loses: {loss.non_speech_mass:.1%} of the probability goes to pieces that are not "
                f"speech, and the most likely piece changes at {loss.argmax_changed:.1%} of {loss.positions} positions"
            )
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
