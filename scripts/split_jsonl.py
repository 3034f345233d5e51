#!/usr/bin/env python3
"""Split one JSONL file into training lines (from its start) and test lines (from its end)."""

from __future__ import annotations

import argparse
import os
import random
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--input", type=Path, required=True, help="JSONL file")
    parser.add_argument("--train-file", type=Path, required=True, help="file for the first --n-train lines")
    parser.add_argument("--test-file", type=Path, required=True, help="file for the last --n-test lines")
    parser.add_argument("--n-train", type=int, default=80000, help="training lines")
    parser.add_argument("--n-test", type=int, default=100, help="test lines")
    parser.add_argument("--shuffle-seed", type=int, help="shuffle the lines first; not set: keep their order")
    return parser


def line_starts(path: Path) -> array:
    """Byte offset of every line that is not blank (8 bytes of memory a line)."""
    starts, position = array("Q"), 0
    with path.open("rb") as stream:
        for line in stream:
            if line.strip():
                starts.append(position)
            position += len(line)
    return starts


def copy_lines(source: Path, starts: Iterable[int], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with source.open("rb") as stream, part.open("wb") as out:
            for start in starts:
                stream.seek(start)
                out.write(stream.readline().rstrip(b"\r\n") + b"\n")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = get_parser().parse_args(argv)
    if not args.input.is_file():
        sys.exit(f"{args.input}: no such file")
    starts = line_starts(args.input)
    if min(args.n_train, args.n_test) < 1 or args.n_train + args.n_test > len(starts):
        sys.exit(
            f"{args.input} has {len(starts)} lines, --n-train {args.n_train} and --n-test {args.n_test} "
            "need to be at least 1 each and no more than that together"
        )
    if args.shuffle_seed is not None:
        random.Random(args.shuffle_seed).shuffle(starts)
    copy_lines(args.input, starts[: args.n_train], args.train_file)
    copy_lines(args.input, starts[len(starts) - args.n_test :], args.test_file)
    print(f"{args.train_file}: {args.n_train} lines, {args.test_file}: {args.n_test} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
