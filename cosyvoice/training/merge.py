r"""Stage 3: a veRL checkpoint (FSDP shards) to a Hugging Face checkpoint, from the command line.

python -m cosyvoice.training.merge --checkpoint exp/tiny/train/global_step_20 --target
exp/tiny/merged/global_step_20
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

logger = logging.getLogger("merge")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Merge a veRL checkpoint into a Hugging Face one and check that nothing was lost.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder global_step_N that veRL wrote")
    parser.add_argument("--base", type=Path, required=True, help="the Hugging Face checkpoint the run began with")
    parser.add_argument("--target", type=Path, required=True, help="folder to make; must not exist")
    return parser


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(levelname)s: %(message)s")
    args = get_parser().parse_args()
    from cosyvoice.training.merging import MergeError, merge  # slow to import: after the arguments are read

    args.target.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = merge(args.checkpoint, args.base, args.target)
    except MergeError as error:
        logger.error("%s", error)
        return 1
    logger.info(
        "%s: %d tensors, %.2f M parameters from %d shard(s), %s; weights, end ids, tokenizer and greedy decoding "
        "checked against the shards",
        args.target,
        done["tensors"],
        done["parameters"] / 1e6,
        done["world_size"],
        done["dtype"],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
