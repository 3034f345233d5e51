#!/usr/bin/env python3
"""Stage 0: JSONL texts to veRL's parquet files, train.parquet and test.parquet, with a manifest."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

from cosyvoice.data_prep import DataError, Written, upload, write_parquet

MANIFEST_VERSION = 1
logger = logging.getLogger("prepare_data")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--train_file", required=True, help='training texts: JSONL, or a JSON array, of objects with "text"'
    )
    parser.add_argument("--test_file", required=True, help="validation texts, of the same form")
    parser.add_argument("--local_dir", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--hdfs_dir", help="URL of a folder to copy the results to, of any kind that fsspec knows"
    )
    parser.add_argument(
        "--data_source", help="name of the data in veRL's metrics; not set: {train_file}_{test_file}"
    )
    parser.add_argument("--max_chars", type=int, default=300, help="longest text, in characters")
    parser.add_argument(
        "--on_bad_row",
        choices=("error", "skip"),
        default="error",
        help="stop at a refused row, or leave it out",
    )
    return parser


def describe(source: str, target: Path, written: Written) -> dict[str, object]:
    """A file's part of the manifest."""
    return {
        "input": source,
        "input_sha256": written.input_sha256,
        "output": target.name,
        "output_sha256": written.output_sha256,
        "rows": written.rows,
        "refused": dict(sorted(written.refused.items())),
    }


def prepare(args: argparse.Namespace) -> None:
    """Write both parquet files and the manifest, or nothing."""
    started = time.monotonic()
    args.local_dir.mkdir(parents=True, exist_ok=True)
    options = {
        "data_source": args.data_source or f"{args.train_file}_{args.test_file}",
        "max_chars": args.max_chars,
        "on_bad_row": args.on_bad_row,
    }
    targets = {split: args.local_dir / f"{split}.parquet" for split in ("test", "train")}
    manifest_path = args.local_dir / "manifest.json"
    parts = {
        path: path.with_name(f"{path.name}.{os.getpid()}.part") for path in (*targets.values(), manifest_path)
    }
    try:
        # The test texts first: they are few, so their digests are what is held in memory.
        test = write_parquet(
            Path(args.test_file), parts[targets["test"]], split="test", keep_texts=True, **options
        )
        train = write_parquet(
            Path(args.train_file), parts[targets["train"]], split="train", other_texts=test.texts, **options
        )
        manifest = {
            "version": MANIFEST_VERSION,
            "options": options,
            "train": describe(args.train_file, targets["train"], train),
            "test": describe(args.test_file, targets["test"], test),
            "train_rows_with_a_test_text": train.duplicates,
        }
        parts[manifest_path].write_text(
            json.dumps(manifest, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
        )
        for path, part in parts.items():
            os.replace(part, path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    for split, written in (("train", train), ("test", test)):
        refused = f", {written.refused.total()} refused {dict(written.refused)}" if written.refused else ""
        logger.info("%s: %d rows%s", targets[split], written.rows, refused)
    if train.duplicates:
        logger.warning("%d training rows have a text that is also a test text", train.duplicates)
    logger.info("done in %.1f s", time.monotonic() - started)
    if args.hdfs_dir:
        upload(parts, args.hdfs_dir)
        logger.info("copied to %s", args.hdfs_dir)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(filename)s:%(lineno)d %(message)s")
    try:
        prepare(get_parser().parse_args(argv))
    except (DataError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
