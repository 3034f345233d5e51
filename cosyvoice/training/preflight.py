"""What is checked before veRL is started, because veRL would find out minutes later, or never.

    python -m cosyvoice.training.preflight HYDRA_OVERRIDE...

takes the very overrides that ``python -m verl.trainer.main_ppo`` is going to get and checks that

- data and model are those that the run in ``trainer.default_local_dir`` began with: veRL would go on from the
  dataloader state of other data and skip samples silently;
- the checkpoint to go on from is complete, and was written by as many training processes as there are now;
- no setting is on that would compute other logits than the model's;
- the disk has room for a checkpoint.

It notes the fingerprint of a new run in ``<trainer.default_local_dir>/run.json``. It imports no torch: it
takes the seconds that reading the files takes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from cosyvoice.hashing import sha256_of
from cosyvoice.training import checkpoints

logger = logging.getLogger("preflight")

BYTES_PER_PARAMETER = 16
"""A checkpoint holds float32 weights and two Adam moments; the model itself may be stored in 2 bytes."""


FUSED_KERNELS = "actor_rollout_ref.model.use_fused_kernels"


class PreflightError(ValueError):
    """The run must not be started like this; the message says why and what to do."""


def parse_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """``key=value`` words to a dictionary; later ones win, ``+`` and quotes round a value are dropped."""
    values: dict[str, str] = {}
    for word in overrides:
        key, separator, value = word.lstrip("+").partition("=")
        if separator:
            values[key] = value.strip("'\"")
    return values


def as_paths(value: str) -> list[Path]:
    """A Hydra value that is one path or a list of paths."""
    return [Path(part.strip().strip("'\"")) for part in value.strip("[]").split(",") if part.strip()]


def fingerprint(data: Sequence[Path], model: Path) -> dict[str, str]:
    """SHA-256 of each training file and of the model's configuration, tokenizer and weights."""
    files = {f"data/{path.name}": path for path in data}
    names = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja")
    files |= {f"model/{name}": model / name for name in names if (model / name).is_file()}
    weights = sorted(model.glob("*.safetensors"))
    files |= {f"model/{path.name}": path for path in weights}
    for path in files.values():
        if not path.is_file():
            raise PreflightError(f"{path}: no such file")
    if not weights:
        raise PreflightError(f"{model}: no *.safetensors in it, expected a Hugging Face checkpoint (stage -1)")
    total = sum(path.stat().st_size for path in files.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="fingerprint", leave=False, disable=total < 1 << 28) as bar:
        return {name: sha256_of(path, bar) for name, path in files.items()}


def check_same_run(folder: Path, current: Mapping[str, str]) -> None:
    """Refuse to go on with other data or another model than the run in ``folder`` began with."""
    note = folder / "run.json"
    if not checkpoints.steps(folder) or not note.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(".tmp")
        temporary.write_text(json.dumps({"fingerprint": dict(current)}, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, note)
        return
    begun = json.loads(note.read_text(encoding="utf-8"))["fingerprint"]
    for name in sorted(set(begun) | set(current)):
        if begun.get(name) != current.get(name):
            old, new = (str(prints.get(name, "no such file"))[:12] for prints in (begun, current))
            raise PreflightError(
                f"{note}: {name}: the run began with {old}, found {new}: other data or another model. "
                "Give the new run its own name (--name) or put back the old files"
            )


def check_world(checkpoint: Path, world: int) -> None:
    """FSDP shards can only be loaded by as many processes as wrote them."""
    written = checkpoints.world_size(checkpoint)
    if written != world:
        raise PreflightError(
            f"{checkpoint}: written by {written} training processes, found {world} (GPUs per node x nodes); "
            f"resume with {written}, or merge it (stage 3) and begin a new run from the merged model"
        )


def check_disk(folder: Path, model: Path, checkpoint: Path | None) -> None:
    """Room for the next checkpoint, judged by the last one or by the size of the model."""
    if checkpoint is not None:
        needed = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    else:
        needed = BYTES_PER_PARAMETER // 2 * sum(path.stat().st_size for path in model.glob("*.safetensors"))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PreflightError(
            f"{folder}: a checkpoint needs about {needed / 2**30:.2f} GiB, found {free / 2**30:.2f} GiB "
            "free; make room (older global_step_* folders, for instance)"
        )


def check(overrides: Sequence[str]) -> Path | None:
    """Run every check. Returns the checkpoint that veRL will resume from, None for a start from scratch."""
    values = parse_overrides(overrides)
    for key in ("data.train_files", "actor_rollout_ref.model.path", "trainer.default_local_dir"):
        if not values.get(key):
            raise PreflightError(f"{key}: not among the overrides")
    if values.get(FUSED_KERNELS, "False").lower() in ("true", "1", "yes", "on"):
        raise PreflightError(
            f"{FUSED_KERNELS}: found {values[FUSED_KERNELS]}, expected False: veRL's fused kernels multiply by "
            "lm_head.weight alone, without the speech head's bias and its place in the vocabulary"
        )
    folder, model = Path(values["trainer.default_local_dir"]), Path(values["actor_rollout_ref.model.path"])
    folder.mkdir(parents=True, exist_ok=True)
    mode = values.get("trainer.resume_mode", "auto")
    resume = None
    if mode == "auto":
        resume = checkpoints.point_to_latest_complete(folder)
    elif mode == "disable" and checkpoints.steps(folder):
        raise PreflightError(
            f"{folder}: holds checkpoints of an earlier run, and trainer.resume_mode=disable would overwrite "
            "them; give the new run its own name (--name)"
        )
    check_same_run(folder, fingerprint(as_paths(values["data.train_files"]), model))
    if resume is not None:
        world = int(values.get("trainer.n_gpus_per_node", 8)) * int(values.get("trainer.nnodes", 1))
        check_world(resume, world)
    if int(values.get("trainer.save_freq", -1)) > 0:
        check_disk(folder, model, resume)
    return resume


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cosyvoice.training.preflight",
        description="Check a GRPO run before veRL is started.",
    )
    parser.add_argument("overrides", nargs="+", help="the Hydra overrides that verl.trainer.main_ppo will get")
    return parser


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(levelname)s: %(message)s")
    args = get_parser().parse_args()
    try:
        resume = check(args.overrides)
    except PreflightError as error:
        logger.error("%s", error)
        return 1
    logger.info("the run %s", f"goes on from {resume}" if resume else "begins from scratch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
