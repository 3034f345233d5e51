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
