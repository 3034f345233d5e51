"""Fixtures shared by the tests of the training environment."""

import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory) -> Path:
    """The golden language model as a CosyVoice2 folder (``llm.pt``, ``CosyVoice-BlankEN``)."""
    import json

    import torch
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("golden") / "cosyvoice2"
    shutil.copytree(GOLDEN / "tiny_tokenizer", folder / "CosyVoice-BlankEN")
    config = json.loads((GOLDEN / "llm_tiny_config.json").read_text())["qwen2_config"]
    (folder / "CosyVoice-BlankEN" / "config.json").write_text(json.dumps(config))
    tensors = load_file(GOLDEN / "llm_tiny_weights.safetensors")
    # A published file holds the tied text table once.
    tensors["llm.model.lm_head.weight"] = tensors["llm.model.model.embed_tokens.weight"]
    torch.save(tensors, folder / "llm.pt")
    return folder


@pytest.fixture(scope="session")
def golden_hf(golden_folder, tmp_path_factory) -> Path:
    """Its Hugging Face form: speech head, float32."""
    import torch

    from cosyvoice.llm.to_huggingface import convert

    target = tmp_path_factory.mktemp("golden_hf") / "hf"
    convert(golden_folder, target, torch.float32, "speech", progress=False)
    return target


@pytest.fixture(scope="session")
def record_driver():
    """``record(folder, *options)``: what ``run.sh 2`` hands to Python, as a list of argument lists by module."""
    import json
    import subprocess
    import sys

    root = Path(__file__).parents[2]
    recorder = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    environment = {{k: v for k, v in os.environ.items() if k not in ("PATH", "CALLS", "PWD", "SHLVL", "_")}}
    calls.write(json.dumps([sys.argv[1:], environment]) + "\\n")
"""

    def record(folder: Path, *options: str) -> dict[str, tuple[list[str], dict[str, str]]]:
        folder.mkdir(exist_ok=True)
        for name in ("run.sh", "conf"):
            (shutil.copytree if (root / name).is_dir() else shutil.copy)(root / name, folder / name)
        (folder / "scripts").mkdir()
        for script in (root / "scripts").glob("*.sh"):
            shutil.copy(script, folder / "scripts")
        outputs = ("hf/config.json", "data/train.parquet", "data/test.parquet")
        for name in (*outputs, "train/latest_checkpointed_iteration.txt"):
            path = folder / "exp/run" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("20")
        (folder / "reward_tts.py").touch()
        python = folder / "python"
        python.write_text(recorder)
        python.chmod(0o755)
        done = subprocess.run(
            ["bash", "run.sh", "2", "--name", "run", "--train-python", str(python), *options], cwd=folder,
            env={"PATH": "/usr/bin:/bin", "CALLS": str(folder / "calls")},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        calls = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
        return {args[1]: (args[2:], environment) for args, environment in calls if args[0] == "-m"}

    return record
