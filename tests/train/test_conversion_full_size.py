"""A random checkpoint of the published size, both ways: every bit, and the memory it takes.

About 6 GB of disk, 2.5 GB of memory.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cosyvoice.checkpoint import load_tensors

ROOT = Path(__file__).parents[2]
KEYS = json.loads((ROOT / "tests" / "data" / "official_checkpoint_keys.json").read_text())

pytestmark = pytest.mark.slow


def peak_bytes(*command):
    """Run a command line of the project; the peak of its resident memory, mapped pages of files included."""
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.fixture
def disk(tmp_path):
    """Space that is given back at once, and not when pytest tidies up three runs later."""
    if (free := shutil.disk_usage(tmp_path).free) < 8e9:
        pytest.skip(f"{tmp_path}: {free / 1e9:.1f} GB free, 8 GB needed")
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_round_trip_at_full_size(disk, record_property):
    source, hf, output = disk / "CosyVoice2-0.5B", disk / "hf", disk / "llm.pt"
    subprocess.run(
        [sys.executable, "scripts/make_random_checkpoint.py", "--save-path", source, "--parts", "llm"],
        cwd=ROOT,
        check=True,
    )
    size = (source / "llm.pt").stat().st_size
    original = load_tensors(source / "llm.pt")
    assert {name: list(value.shape) for name, value in original.items()} == KEYS["llm.pt"]
    assert len(original) == 295

    peaks = {
        "in": peak_bytes(
            "pretrained_to_huggingface.py",
            *("--pretrained-cosyvoice2-path", source, "--save-path", hf, "--dtype", "float32"),
        ),
        "out": peak_bytes("huggingface_to_pretrained.py", "--hf-cosyvoice2-llm-path", hf, "--output-path", output),
    }
    for way, peak in peaks.items():
        record_property(f"peak_over_size_{way}", peak / size)
        print(f"{way}: peak {peak / 1e9:.2f} GB, {peak / size:.2f} times the {size / 1e9:.2f} GB of llm.pt")
        assert peak <= 1.5 * size

    config = json.loads((hf / "config.json").read_text())
    assert (config["vocab_size"], config["first_speech_id"], config["n_speech"]) == (158336, 151663, 6561)
    written = load_tensors(output)
    assert list(written) == list(original)
    for name, value in original.items():
        assert written[name].dtype == value.dtype
        assert torch.equal(written[name], value), name
    assert output.stat().st_size <= size * 1.001  # the tied table is written once
