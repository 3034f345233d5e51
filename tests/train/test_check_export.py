"""scripts/check_export.py: an export gives the merged model's tokens, and a damaged one is found out."""

import importlib.util
from pathlib import Path

import pytest
import torch

from cosyvoice.checkpoint import load_tensors
from cosyvoice.llm import names, to_huggingface, to_pretrained

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # builds the checkpoint in both forms
TINY = ROOT / "assets" / "cosyvoice2-tiny"


def script():
    spec = importlib.util.spec_from_file_location("check_export", ROOT / "scripts" / "check_export.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(Hugging Face folder, exported llm.pt) of the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("export")
    to_huggingface.convert(TINY, folder / "hf", torch.float32, "speech", progress=False)
    to_pretrained.convert(folder / "hf", folder / "llm.pt", progress=False)
    return folder / "hf", folder / "llm.pt"


def run(merged, llm_pt):
    return script().main(["--merged", str(merged), "--llm-pt", str(llm_pt), "--max-tokens", "24"])


def test_an_export_says_the_same(pair, capsys):
    assert run(*pair) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["same", m] for m in ("greedy", "ras") for _ in range(3)]
    assert all(int(line.split()[2]) >= 8 for line in lines)


@pytest.mark.parametrize("name", [names.HEAD_BIAS, names.SPEECH_TABLE, names.CONTROL_TABLE])
def test_a_damaged_export_is_found_out(pair, tmp_path, capsys, name):
    tensors = dict(load_tensors(pair[1]))
    rows = torch.arange(len(tensors[name]))
    if name == names.HEAD_BIAS:  # the tiny model's is nearly flat: a shift would not be heard
        tensors[name] = tensors[name] + 4.0 * (rows % 2)
    else:
        tensors[name] = tensors[name][rows.roll(1)]  # every row one further
    torch.save(tensors, tmp_path / "llm.pt")
    assert run(pair[0], tmp_path / "llm.pt") == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_a_file_of_another_model_is_named(pair, tmp_path, capsys):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "llm.pt")
    assert run(pair[0], tmp_path / "llm.pt") == 1
    assert "is missing, expected CosyVoice2's llm.pt" in capsys.readouterr().err
