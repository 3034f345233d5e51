"""The checkpoint folder: strictness, both spellings of weight norm, the yaml read as data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cosyvoice.checkpoint import (
    CheckpointError,
    CosyVoice2Folder,
    check_state,
    fold_weight_norm,
    load_tensors,
)
from cosyvoice.checkpoint_yaml import FolderConfig, YamlError, read_yaml
from cosyvoice.flow import Flow
from cosyvoice.hift import HiFTGenerator

DATA = Path(__file__).parents[1] / "data"
OFFICIAL = json.loads((DATA / "official_checkpoint_keys.json").read_text())


@pytest.fixture
def folder(golden_decoder: CosyVoice2Folder, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(golden_decoder.path, tmp_path / "model"))


def rewrite(path: Path, change) -> None:
    tensors = dict(load_tensors(path, mmap=False))
    change(tensors)
    torch.save(tensors, path)


@pytest.mark.parametrize(("file", "network"), [("flow.pt", Flow), ("hift.pt", HiFTGenerator)])
def test_official_key_list_fits_exactly(file: str, network: type) -> None:
    with torch.device("meta"):
        published = {name: torch.empty(shape) for name, shape in OFFICIAL[file].items()}
        expected = network().state_dict()
        tensors = fold_weight_norm(published)
    check_state(Path(file), tensors, expected)
    assert file != "flow.pt" or len(tensors) == len(published) == 1121


def test_defaults_are_the_published_values(tmp_path: Path) -> None:
    (tmp_path / "cosyvoice2.yaml").write_text("flow: !new:package.Flow\n    input_size: 512\n")
    assert read_yaml(tmp_path / "cosyvoice2.yaml") == FolderConfig()


def test_yaml_of_the_published_structure(golden_decoder: CosyVoice2Folder, golden: Path) -> None:
    config = golden_decoder.config
    flow = json.loads((golden / "flow_tiny_config.json").read_text())
    assert config.sample_rate == 24000
    assert config.flow.vocab_size == flow["vocab_size"]
    assert config.flow.token_mel_ratio == 2  # through a reference
    assert config.flow.inference_cfg_rate == 0.7  # three levels down
    assert config.flow.encoder.num_up_blocks == 2  # not in the yaml: counted in the tensors
    assert config.flow.estimator.channels == 32
    assert config.flow.estimator.static_chunk_size == 8  # a product of two references
    assert config.hift.base_channels == 32
    assert config.hift.n_fft == 16
    assert config.sampling.top_k == 25


def test_nothing_in_the_yaml_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "cosyvoice2.yaml"
    path.write_text(
        f"a: !apply:os.mkdir ['{mark}']\nb: !new:os.mkdir ['{mark}']\n"
        f"c: !!python/object/apply:os.mkdir ['{mark}']\nsample_rate: 24000\n"
    )
    assert read_yaml(path).sample_rate == 24000
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("flow: {vocab_size: many}", ["flow.vocab_size", "'many'", "whole number"]),
        ("flow: {encoder: {num_blocks: true}}", ["flow.encoder.num_blocks", "True"]),
        ("flow: {encoder: 3}", ["flow.encoder", "3", "mapping"]),
        ("flow: {encoder: {use_cnn_module: true}}", ["flow.encoder.use_cnn_module", "True", "False"]),
        ("flow: {decoder: {estimator: {channels: [256, 256]}}}", ["channels", "[256, 256]", "one number"]),
        ("flow: {output_size: 100}", ["flow.decoder.estimator.in_channels", "320", "400"]),
        ("hift: {upsample_rates: [8, x, 3]}", ["hift.upsample_rates", "list of whole numbers"]),
        ("hift: {upsample_rates: [8, 5, 4]}", ["samples per mel frame", "32000", "24000"]),
        ("sample_rate: !ref <sample_rate>", ["circle"]),
        ("flow: {vocab_size: !ref <absent>}", ["flow.vocab_size", "None"]),
        ("- 1", ["list", "mapping"]),
        ("a: [", ["not readable as yaml"]),
    ],
)
def test_yaml_errors_name_what_is_wrong(tmp_path: Path, text: str, named: list[str]) -> None:
    path = tmp_path / "cosyvoice2.yaml"
    path.write_text(text)
    with pytest.raises(YamlError) as error:
        read_yaml(path)
    for part in named:
        assert part in str(error.value)
    with pytest.raises(CheckpointError, match="cosyvoice2.yaml"):
        CosyVoice2Folder(tmp_path)


def test_both_spellings_and_the_prefix_give_the_same_weights(golden_decoder, folder: Path, golden: Path) -> None:
    expected = golden_decoder.hift_state()
    new = load_file(golden / "hift_tiny_weights.safetensors")
    old = {}
    for name, value in new.items():
        name = name.replace("parametrizations.weight.original0", "weight_g")
        old[name.replace("parametrizations.weight.original1", "weight_v")] = value
    torch.save(old, folder / "hift.pt")
    found = CosyVoice2Folder(folder).hift_state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_folding_by_hand() -> None:
    """g v / ||v|| with the norm over all but the first dimension, also for a transposed convolution."""
    v = torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]])
    pair = {"up.weight_g": torch.tensor([10.0, 5.0]).view(2, 1, 1), "up.weight_v": v, "up.bias": torch.ones(1)}
    folded = fold_weight_norm(pair)
    assert folded.keys() == {"up.weight", "up.bias"}
    assert folded["up.weight"].tolist() == [[[6.0, 8.0]], [[0.0, 5.0]]]
    with pytest.raises(CheckpointError, match="up.weight_v"):
        fold_weight_norm({"up.weight_g": v})


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("flow.pt", lambda t: t.pop("encoder_proj.bias"), ["missing 'encoder_proj.bias'", "unknown none"]),
        ("flow.pt", lambda t: t.update(extra=torch.ones(1)), ["missing none", "unknown 'extra'"]),
        (
            "flow.pt",
            lambda t: t.update({"encoder_proj.bias": torch.ones(81)}),
            ["encoder_proj.bias", "[81]", "[80]"],
        ),
        ("hift.pt", lambda t: t.pop("generator.conv_post.bias"), ["missing 'conv_post.bias'"]),
        (
            "hift.pt",
            lambda t: t.pop("generator.ups.0.parametrizations.weight.original1"),
            ["ups.0.parametrizations.weight.original1"],
        ),
        ("hift.pt", lambda t: t.update({"generator.conv_pre.bias": [1.0]}), ["conv_pre.bias", "list", "tensor"]),
    ],
)
def test_strict_on_names_and_shapes(folder: Path, file: str, change, named: list[str]) -> None:
    rewrite(folder / file, change)
    opened = CosyVoice2Folder(folder)
    with pytest.raises(CheckpointError) as error:
        opened.flow_state() if file == "flow.pt" else opened.hift_state()
    for part in [str(folder / file), *named]:
        assert part in str(error.value)


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    opened = CosyVoice2Folder(folder)
    for name in ("llm_path", "blank_path", "campplus_path", "speech_tokenizer_path"):
        with pytest.raises(CheckpointError, match="missing"):
            getattr(opened, name)
    with pytest.raises(CheckpointError, match="no such folder"):
        CosyVoice2Folder(tmp_path / "nowhere")
    (folder / "cosyvoice2.yaml").rename(folder / "cosyvoice3.yaml")
    with pytest.raises(CheckpointError, match=r"found yaml files \['cosyvoice3.yaml'\], expected cosyvoice2.yaml"):
        CosyVoice2Folder(folder)


def test_truncated_and_foreign_files(folder: Path) -> None:
    whole = (folder / "flow.pt").read_bytes()
    (folder / "flow.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="flow.pt"):
        CosyVoice2Folder(folder)
    torch.save(CheckpointError, folder / "hift.pt")  # a pickled class: reading it would run code
    with pytest.raises(CheckpointError, match="hift.pt"):
        load_tensors(folder / "hift.pt")
    torch.save([torch.ones(1)], folder / "hift.pt")
    with pytest.raises(CheckpointError, match="found list, expected a dict"):
        load_tensors(folder / "hift.pt")
