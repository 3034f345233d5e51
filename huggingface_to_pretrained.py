"""Stage 5: a Hugging Face checkpoint -> CosyVoice2's llm.pt, checked against its source before it is kept.

    python huggingface_to_pretrained.py --hf-cosyvoice2-llm-path exp/run/merged/global_step_100 --output-path llm.pt

To use it, copy a CosyVoice2 folder and put the new llm.pt in the place of the old one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Convert a Hugging Face checkpoint back to CosyVoice2's llm.pt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--hf-cosyvoice2-llm-path",
        type=Path,
        required=True,
        help="converted or trained and merged checkpoint, either head, one file or shards",
    )
    parser.add_argument("--output-path", type=Path, required=True, help="llm.pt to write")
    parser.add_argument(
        "--text-rows",
        type=int,
        help="rows of the text table; default: what conversion.json says, else the published 151936",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the output")
    return parser


def main() -> int:
    args = get_parser().parse_args()
    from cosyvoice.checkpoint import CheckpointError
    from cosyvoice.llm.to_pretrained import convert

    try:
        written = convert(args.hf_cosyvoice2_llm_path, args.output_path, args.text_rows, args.force)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.output_path}: {written.n_tensors} tensors; its logits differ by at most "
        f"{written.max_logit_difference:.2g} from {args.hf_cosyvoice2_llm_path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
