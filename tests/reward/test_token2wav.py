"""Token2Wav: order, grouping, errors of single items, and independence from neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
import wave
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cosyvoice import token2wav
from cosyvoice.checkpoint import CosyVoice2Folder
from cosyvoice.flow import MAX_FRAMES
from cosyvoice.grouping import padding_fraction, plan_groups
from cosyvoice.token2wav import Token2Wav, read_tokens

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [9, 52, 13, 1, 50, 15]
PROMPTS = [7, 5, 0, 2, 3, 6]


def prompt(tokens: int, seed: int = 0) -> SimpleNamespace:
    """What the decoder reads of a `Prompt`."""
    draw = np.random.default_rng([seed, tokens])
    return SimpleNamespace(
        tokens=draw.integers(0, 256, tokens),
        mel=draw.standard_normal((2 * tokens, 80)).astype(np.float32),
        embedding=draw.standard_normal(192).astype(np.float32),
    )


@pytest.fixture(scope="module")
def items() -> tuple[list[np.ndarray], list[SimpleNamespace]]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 256, n) for n in LENGTHS], [prompt(p) for p in PROMPTS]


@pytest.fixture(scope="module")
def speak(golden_decoder) -> Token2Wav:
    return Token2Wav(golden_decoder, n_steps=4)


@pytest.fixture(scope="module")
def singles(speak: Token2Wav, items) -> list[np.ndarray]:
    return [speak([tokens], [given])[0].wav for tokens, given in zip(*items, strict=True)]


def test_lengths_and_range(singles: list[np.ndarray]) -> None:
    for wav, tokens in zip(singles, LENGTHS, strict=True):
        assert wav.shape == (960 * tokens,)
        assert wav.dtype == np.float32
        assert np.abs(wav).max() <= np.float32(0.99)
        assert wav.std() > 0.01


def test_neighbours_change_nothing_on_a_cpu(speak: Token2Wav, items, singles) -> None:
    for speech, alone in zip(speak(*items), singles, strict=True):
        assert np.array_equal(speech.wav, alone)


@torch.inference_mode()
@pytest.mark.parametrize("multiple", [1, 8])
def test_padded_batches_equal_singles(golden_decoder, speak: Token2Wav, items, singles, multiple: int) -> None:
    """Through real batches, as on a GPU: 1e-5 on the mel, 1e-4 on the wave of a mel. From tokens to wave this
    random checkpoint multiplies the rounding of the mel by 1e4 (its waves reach the limit everywhere), so that
    only the mean difference is bounded."""
    batched = Token2Wav(golden_decoder, n_steps=4, max_rows=8, max_padding=0.9)
    batched._multiple = multiple
    shapes = []
    generate = batched.flow.generate
    batched.flow.generate = lambda tokens, *rest: shapes.append(tuple(tokens.shape)) or generate(tokens, *rest)
    sequences = [np.concatenate([given.tokens, tokens]) for tokens, given in zip(*items, strict=True)]
    together, alone = batched._mels(sequences, items[1]), speak._mels(sequences, items[1])
    assert shapes == [(6, 57 if multiple == 1 else 64)]
    for found, expected in zip(together, alone, strict=True):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    for found, expected in zip(batched._waves(alone), speak._waves(alone), strict=True):
        assert np.abs(found - expected).max() < 1e-4
    for speech, expected in zip(batched(*items), singles, strict=True):
        assert np.sqrt(np.mean((speech.wav - expected) ** 2)) < 1e-3


@pytest.mark.parametrize(
    ("tokens", "given", "named"),
    [
        ([], prompt(2), "at least one speech token"),
        ([3, 256], prompt(2), "found id 256, expected ids in [0, 256)"),
        ([-1], prompt(2), "found id -1"),
        ([1.5], prompt(2), "found float64, expected whole numbers"),
        ([[1, 2]], prompt(2), "found shape [1, 2]"),
        ([1] * (MAX_FRAMES // 2), prompt(1), f"found {MAX_FRAMES + 2} mel frames, expected at most {MAX_FRAMES}"),
        ([1], SimpleNamespace(**{**vars(prompt(2)), "mel": np.zeros((3, 80), np.float32)}), "prompt mel"),
        ([1], SimpleNamespace(**{**vars(prompt(2)), "tokens": np.array([1, 999])}), "prompt tokens: found id 999"),
        ([1], SimpleNamespace(**{**vars(prompt(2)), "embedding": np.zeros(5, np.float32)}), "prompt embedding"),
        (
            [1],
            SimpleNamespace(**{**vars(prompt(2)), "embedding": np.full(192, np.nan, np.float32)}),
            "not finite",
        ),
    ],
)
def test_an_item_that_cannot_be_spoken_harms_no_other(
    speak: Token2Wav, items, singles, tokens: list, given: SimpleNamespace, named: str
) -> None:
    sequences, prompts = items
    speeches = speak([sequences[0], tokens, sequences[2]], [prompts[0], given, prompts[2]])
    assert speeches[1].wav is None
    assert named in speeches[1].error
    assert [speeches[0].error, speeches[2].error] == [None, None]
    assert np.array_equal(speeches[0].wav, singles[0])
    assert np.array_equal(speeches[2].wav, singles[2])


def test_nothing_to_say(speak: Token2Wav) -> None:
    assert speak([], []) == []
    with pytest.raises(ValueError, match="1 token sequences: found 0 prompts"):
        speak([[1]], [])


def test_arguments_reach_the_sound(golden_decoder, speak: Token2Wav, items, singles) -> None:
    first = ([items[0][0]], [items[1][0]])
    for options in ({"n_steps": 5}, {"guidance": 0.0}, {"noise_seed": 1}):
        other = Token2Wav(golden_decoder, **{"n_steps": 4, **options})(*first)[0].wav
        assert np.abs(other - singles[0]).max() > 1e-3
    assert np.abs(speak(first[0], [prompt(7, seed=1)])[0].wav - singles[0]).max() > 1e-3


def test_rows_are_grouped_by_length() -> None:
    lengths = [100, 10, 95, 91, 89, 10, 50]
    groups = plan_groups(lengths, lambda rows, longest: rows * longest, 1000, 8, max_padding=0.1)
    # 100+95+91: (300-286)/300 = 5 %; with 89: 6 % < 10 %; with 50 it would be 15 %.
    assert groups == [[0, 2, 3, 4], [6], [1, 5]]
    assert padding_fraction(lengths, groups) == pytest.approx(1 - 445 / 470)
    assert plan_groups(lengths, lambda rows, longest: rows * longest, 200, 8) == [[0, 2], [3, 4], [6], [1, 5]]
    assert plan_groups(lengths, lambda rows, longest: 0, 1, 3) == [[0, 2, 3], [4], [6], [1, 5]]
    assert plan_groups(lengths, lambda rows, longest: rows * longest, 5, 8) == [[0], [2], [3], [4], [6], [1], [5]]
    assert plan_groups([], lambda rows, longest: 0, 1, 8) == []


@pytest.mark.parametrize("seed", range(5))
def test_padding_stays_under_its_bound(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 500, 64).tolist()
    groups = plan_groups(lengths, lambda rows, longest: rows * longest, 10**9, 16)
    assert sorted(i for group in groups for i in group) == list(range(64))
    assert all(padding_fraction(lengths, [group]) <= 0.1 for group in groups)
    assert max(map(len, groups)) <= 16


def test_memory_estimates_grow_as_stated(golden_decoder) -> None:
    config = golden_decoder.config
    assert token2wav.flow_bytes(config.flow, 4, 100, 4) == 4 * token2wav.flow_bytes(config.flow, 1, 100, 4)
    assert token2wav.flow_bytes(config.flow, 1, 100, 2) * 2 == token2wav.flow_bytes(config.flow, 1, 100, 4)
    assert token2wav.hift_bytes(config.hift, 2, 50) == token2wav.hift_bytes(config.hift, 1, 100)


def test_reading_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text("<|s_12|><|s_7|>\n[3, 4] 5;6")
    assert read_tokens(path) == [12, 7, 3, 4, 5, 6]
    path.write_text("12 <|eos1|>")
    with pytest.raises(ValueError, match="eos1"):
        read_tokens(path)


def test_command_line(tmp_path: Path, monkeypatch, capsys) -> None:
    from tiny_folder import write_cosyvoice

    folder = write_cosyvoice(tmp_path / "model")
    (tmp_path / "tokens.txt").write_text("<|s_1|> 2 3")
    arguments = ["--model-path", folder, "--tokens", tmp_path / "tokens.txt", "--prompts", folder / "prompts"]
    arguments += ["--output", tmp_path / "out.wav", "--n-steps", "2"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["token2wav", *map(str, arguments)])
    token2wav.main()
    with wave.open(str(tmp_path / "out.wav")) as file:
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (24000, 2880, 1)
    assert "0.12 s from 3 tokens" in capsys.readouterr().out
    assert not (tmp_path / "out.wav.part").exists()
    (tmp_path / "tokens.txt").write_text("300")
    with pytest.raises(SystemExit, match="found id 300"):
        token2wav.main()


def test_trained_checkpoint_from_tokens_to_wave(tmp_path: Path) -> None:
    """With trained weights the whole chain in one padded batch stays within 1e-3 of one at a time."""
    from cosyvoice.frontend import PromptBank

    folder = CosyVoice2Folder(ROOT / "assets" / "cosyvoice2-tiny")
    bank = list(PromptBank.load(folder.path / "prompts", folder, tmp_path / "cache", progress=False))[:3]
    tokens = [given.tokens[:length] for given, length in zip(bank, (30, 11, 20), strict=True)]
    alone = Token2Wav(folder)(tokens, bank)
    together = Token2Wav(folder, max_rows=3, max_padding=0.9)(tokens, bank)
    for found, expected in zip(together, alone, strict=True):
        assert expected.wav.std() > 1e-3
        assert np.abs(found.wav - expected.wav).max() < 1e-3


@pytest.mark.slow
def test_gpu_check_runs_dry() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh"), "--device", "cpu", "--python", sys.executable],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert done.stdout.count("\nok ") + done.stdout.startswith("ok ") == 22
    assert done.stdout.count("| float32 |") == 2


@pytest.mark.slow
def test_compiled_estimator_gives_the_same_mel(golden_decoder, items, singles) -> None:
    compiled = Token2Wav(golden_decoder, n_steps=4, compile=True)
    for i in (0, 1):
        speech = compiled([items[0][i]], [items[1][i]])[0]
        assert np.sqrt(np.mean((speech.wav - singles[i]) ** 2)) < 1e-3


FULL_SIZE = """
import resource, sys, torch, numpy as np
from types import SimpleNamespace
from cosyvoice.token2wav import Token2Wav
torch.set_num_threads(1)
draw = np.random.default_rng(0)
given = SimpleNamespace(tokens=draw.integers(0, 6561, 75), mel=draw.standard_normal((150, 80)).astype(np.float32),
                        embedding=draw.standard_normal(192).astype(np.float32))
speech = Token2Wav(sys.argv[1], n_steps=1)([draw.integers(0, 6561, 150)], [given])[0]
assert speech.error is None and speech.wav.shape == (144000,), speech
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_full_size_folder_runs_under_3_gib(tmp_path: Path) -> None:
    from cosyvoice.flow import Flow
    from cosyvoice.hift import HiFTGenerator

    (tmp_path / "cosyvoice2.yaml").write_text("sample_rate: 24000\n")
    torch.save(Flow().state_dict(), tmp_path / "flow.pt")
    torch.save(HiFTGenerator().state_dict(), tmp_path / "hift.pt")
    done = subprocess.run(
        [sys.executable, "-c", FULL_SIZE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3.0
