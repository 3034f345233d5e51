"""veRL's checkpoint folders: which are complete, which one a run goes on from.

Layout (verl 0.9.1, FSDP): ``<folder>/global_step_N/data.pt`` and, below ``global_step_N/actor/``,
``{model,optim,extra_state}_world_size_W_rank_R.pt`` for each rank R and ``huggingface/`` with configuration
and tokenizer. ``<folder>/latest_checkpointed_iteration.txt`` holds the last N that was written to its end.
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from pathlib import Path

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
PARTS = ("model", "optim", "extra_state")


def step_of(folder: Path) -> int:
    """N of ``global_step_N``."""
    match = re.fullmatch(r"global_step_(\d+)", folder.name)
    if not match:
        raise ValueError(f"{folder}: expected a folder called global_step_N")
    return int(match.group(1))


def steps(folder: str | Path) -> list[Path]:
    """The ``global_step_N`` folders below ``folder``, oldest first."""
    found = [path for path in Path(folder).glob("global_step_*") if re.fullmatch(r"global_step_\d+", path.name)]
    return sorted(found, key=step_of)


def world_size(checkpoint: str | Path) -> int | None:
    """How many training processes wrote the checkpoint; None if there is no model shard."""
    shards = sorted(Path(checkpoint, "actor").glob("model_world_size_*_rank_*.pt"))
    match = re.fullmatch(r"model_world_size_(\d+)_rank_\d+\.pt", shards[0].name) if shards else None
    return int(match.group(1)) if match else None


def fault(checkpoint: str | Path) -> str | None:
    """What keeps a checkpoint from being resumed or merged, as a sentence; None if it is complete.

    ``torch.save`` writes a zip archive whose directory comes last, so a file that was cut short by a kill
    or a full disk has none. The tensors themselves are not read.
    """
    checkpoint = Path(checkpoint)
    world = world_size(checkpoint)
    if world is None:
        return f"{checkpoint / 'actor'}: no model_world_size_W_rank_R.pt"
    files = [checkpoint / "actor" / f"{part}_world_size_{world}_rank_{r}.pt" for part in PARTS for r in range(world)]
    for file in [*files, checkpoint / "data.pt"]:
        if not file.is_file():
            return f"{file}: no such file"
        if not zipfile.is_zipfile(file):
            return f"{file} ({file.stat().st_size} bytes): cut short, the archive has no directory"
    for name in ("config.json", "tokenizer_config.json"):
        if not (checkpoint / "actor" / "huggingface" / name).is_file():
            return f"{checkpoint / 'actor' / 'huggingface' / name}: no such file"
    return None


def read_tracker(folder: str | Path) -> int | None:
    """The step that the tracker names, None without a tracker."""
    tracker = Path(folder, TRACKER)
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    if not text.isdigit():
        logger.warning("%s: found %r, expected a step number; looking at the folders instead", tracker, text)
        return None
    return int(text)


def point_to_latest_complete(folder: str | Path) -> Path | None:
    """Make veRL resume from the newest complete checkpoint; nothing is deleted.

    veRL follows the tracker blindly: it trains from scratch when the folder is gone, and fails minutes
        after the start when a file is cut short. So an incomplete checkpoint is named in a warning and the
        tracker is set to the newest complete one (or moved aside if there is none).

    Returns:
        The checkpoint that ``trainer.resume_mode=auto`` will use, None when it will start from scratch.
    """
    folder = Path(folder)
    tracked = read_tracker(folder)
    chosen = None
    for checkpoint in reversed(steps(folder)):
        problem = fault(checkpoint)
        if problem is None:
            chosen = checkpoint
            break
        logger.warning("%s is not complete and is skipped: %s", checkpoint.name, problem)
    tracker = folder / TRACKER
    if chosen is None:
        if tracker.exists():
            os.replace(tracker, tracker.with_suffix(".txt.unusable"))
            logger.warning("%s named step %s, which is not there; it was moved aside", tracker, tracked)
        return None
    if step_of(chosen) != tracked:
        logger.warning("resuming from %s; %s said %s", chosen.name, tracker.name, tracked)
        temporary = tracker.with_suffix(".tmp")
        temporary.write_text(str(step_of(chosen)), encoding="utf-8")
        os.replace(temporary, tracker)
    return chosen
