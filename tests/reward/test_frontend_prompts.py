"""Prompts: reading, checks, trimming, cache and bank, with small ONNX networks of the published shape."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import soundfile
from onnx import TensorProto, helper, numpy_helper

from cosyvoice.checkpoint import CheckpointError
from cosyvoice.frontend import (
    AudioError,
    Prompt,
    PromptBank,
    PromptEntry,
    SpeakerEncoder,
    SpeechTokenizer,
    compute_prompt,
    kaldi_fbank,
    load_audio,
    log_mel_24k,
    resample,
    whisper_log_mel,
)

HZ = 24_000


@dataclass
class Folder:
    """The two attributes of a checkpoint folder that the front end uses."""

    campplus_path: Path
    speech_tokenizer_path: Path


def write_network(path: Path, nodes, inputs, outputs, constants) -> Path:
    graph = helper.make_graph(
        nodes, "tiny", inputs, outputs, [numpy_helper.from_array(v, k) for k, v in constants.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def write_speaker(path: Path, seed: int = 0) -> Path:
    """Mean square of every filter bank over time, times a [80, 192] matrix."""
    matrix = np.random.default_rng(seed).standard_normal((80, 192)).astype(np.float32)
    nodes = [
        helper.make_node("Mul", ["zz", "zz"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "matrix"], ["vector"]),
    ]
    inputs = [helper.make_tensor_value_info("zz", TensorProto.FLOAT, [1, "frames", 80])]
    outputs = [helper.make_tensor_value_info("vector", TensorProto.FLOAT, [1, 192])]
    return write_network(path, nodes, inputs, outputs, {"matrix": matrix})


def write_tokenizer(path: Path) -> Path:
    """Means over four frames and all bins, scaled to ids, plus the length input: 25 Hz like the real one."""
    nodes = [
        helper.make_node("AveragePool", ["z"], ["pooled"], kernel_shape=[4], strides=[4]),
        helper.make_node("ReduceMean", ["pooled"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["mean", "scale"], ["scaled"]),
        helper.make_node("Abs", ["scaled"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["whole"], to=TensorProto.INT32),
        helper.make_node("Add", ["whole", "a"], ["ids"]),
    ]
    inputs = [
        helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 128, "frames"]),
        helper.make_tensor_value_info("a", TensorProto.INT32, [1]),
    ]
    outputs = [helper.make_tensor_value_info("ids", TensorProto.INT32, [1, "tokens"])]
    return write_network(path, nodes, inputs, outputs, {"scale": np.array(1000, np.float32)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Folder:
    root = tmp_path_factory.mktemp("networks")
    return Folder(write_speaker(root / "speaker.onnx"), write_tokenizer(root / "tokenizer.onnx"))


@pytest.fixture(scope="module")
def networks(folder):
    return SpeakerEncoder(folder.campplus_path), SpeechTokenizer(folder.speech_tokenizer_path)


def tone(seconds: float = 1.2, hz: int = HZ, f: float = 200.0, gain: float = 0.3) -> np.ndarray:
    t = np.arange(round(seconds * hz)) / hz
    return (gain * np.sin(2 * np.pi * f * t) * (1 + 0.5 * np.sin(2 * np.pi * 3 * t))).astype(np.float32)


def fill(root: Path, names=("c", "a", "b")) -> Path:
    root.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        soundfile.write(root / f"{name}.wav", tone(1.0 + 0.1 * i, f=150 + 50 * i), HZ)
        (root / f"{name}.txt").write_text(f"文本{name}\n", encoding="utf-8")
    return root


# Reading


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_load_audio_reads_common_formats_at_their_own_rate(tmp_path, suffix):
    soundfile.write(tmp_path / f"x.{suffix}", tone(0.5, 22_050), 22_050)
    wave, hz = load_audio(tmp_path / f"x.{suffix}")
    assert (hz, wave.dtype, wave.shape) == (22_050, np.float32, (11_025,))
    np.testing.assert_allclose(wave[2000:-2000], tone(0.5, 22_050)[2000:-2000], atol=0.02)


def test_load_audio_averages_channels_and_resamples_on_request(tmp_path):
    left, right = tone(0.5, f=200), tone(0.5, f=900, gain=0.1)
    soundfile.write(tmp_path / "x.wav", np.stack([left, right], 1), HZ, subtype="FLOAT")
    wave, hz = load_audio(tmp_path / "x.wav")
    assert hz == HZ
    np.testing.assert_allclose(wave, (left + right) / 2, atol=1e-7)
    wave_16k, hz = load_audio(tmp_path / "x.wav", to_hz=16_000)
    assert hz == 16_000
    np.testing.assert_array_equal(wave_16k, resample(wave, HZ, 16_000))


def test_unreadable_recordings_are_named(tmp_path):
    (tmp_path / "text.wav").write_text("not audio at all")
    (tmp_path / "empty.wav").write_bytes(b"")
    soundfile.write(tmp_path / "none.wav", np.zeros(0), HZ)
    soundfile.write(tmp_path / "nan.wav", np.full(HZ, np.nan, np.float32), HZ, subtype="FLOAT")
    for name, message in [
        ("text.wav", "cannot be read as audio"),
        ("empty.wav", "0 bytes"),
        ("none.wav", "no samples"),
        ("nan.wav", "NaN"),
        ("absent.wav", "no such file"),
    ]:
        with pytest.raises(AudioError, match=message) as caught:
            load_audio(tmp_path / name)
        assert name in str(caught.value)


# Checks


@pytest.mark.parametrize(
    ("wave", "hz", "text", "message"),
    [
        (tone(0.49), HZ, "文", r"0\.49 s"),
        (tone(30.01, 16_000), 16_000, "文", r"30\.01 s"),
        (np.zeros(HZ, np.float32), HZ, "文", "silence"),
        (tone(gain=5e-4), HZ, "文", "silence"),
        (np.clip(tone(gain=10), -1, 1), HZ, "文", "clipped"),
        (tone(1.0, 8000), 8000, "文", "8000 Hz"),
        (tone(), HZ, "  ", "no text"),
    ],
)
def test_unusable_prompts_are_refused_with_the_recordings_name(networks, wave, hz, text, message):
    with pytest.raises(AudioError, match=message) as caught:
        compute_prompt("key", text, wave, hz, *networks, name="some/file.wav")
    assert str(caught.value).startswith("some/file.wav: found")


def test_a_few_clipped_samples_are_a_warning(networks, caplog):
    wave = tone()
    wave[1000:1100] = 1.0  # 100 of 28,800
    with caplog.at_level(logging.WARNING):
        compute_prompt("key", "文", wave, HZ, *networks)
    assert "0.35 % of the samples are clipped" in caplog.text


@pytest.mark.parametrize("hz", [16_000, 22_050, 24_000, 44_100])
def test_exactly_thirty_seconds_are_accepted_at_any_rate(networks, hz):
    prompt = compute_prompt("key", "文", tone(30.0, hz), hz, *networks)
    assert len(prompt.tokens) == 750


# Features


def test_a_prompt_holds_what_the_networks_answer_for_the_published_inputs(folder, networks):
    wave = tone()
    prompt = compute_prompt("key", " 你好 ", wave, HZ, *networks)
    wave_16k = resample(wave, HZ, 16_000)
    whisper = whisper_log_mel(wave_16k).numpy()
    frames = len(whisper)
    ids = np.abs(1000 * whisper.reshape(frames // 4, 4, 128).mean((1, 2))).astype(int) + frames
    assert (prompt.key, prompt.text, prompt.tokens.dtype) == ("key", "你好", np.int64)
    assert np.abs(prompt.tokens - ids).max() <= 1  # truncation of a rounded mean
    matrix = numpy_helper.to_array(onnx.load(str(folder.campplus_path)).graph.initializer[0])
    expected = (kaldi_fbank(wave_16k).numpy() ** 2).mean(0) @ matrix
    np.testing.assert_allclose(prompt.embedding, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(prompt.mel, log_mel_24k(wave).numpy())


@pytest.mark.parametrize(
    # samples at 24 kHz; mel frames floor(L/480); tokens floor(floor(ceil(L*2/3)/160)/4); P is the smaller of
    # half the frames and the tokens
    ("samples", "tokens"),
    [(24_000, 25), (24_479, 25), (24_480, 25), (24_959, 25), (24_960, 26), (24_000 + 959, 25)],
)
def test_tokens_and_mel_are_trimmed_to_agree(networks, samples, tokens):
    prompt = compute_prompt("key", "文", tone(2.0)[:samples], HZ, *networks)
    assert (len(prompt.tokens), prompt.mel.shape) == (tokens, (2 * tokens, 80))


def test_mel_limits_a_tokenizer_that_answers_too_much(networks):
    speaker, tokenizer = networks
    prompt = compute_prompt("key", "文", tone(1.0), HZ, speaker, lambda wave: np.tile(tokenizer(wave), 2))
    assert (len(prompt.tokens), len(prompt.mel)) == (25, 50)
    with pytest.raises(AudioError, match="no speech tokens"):
        compute_prompt("key", "文", tone(1.0), HZ, speaker, lambda wave: np.zeros(0, np.int64))


def test_a_prompt_refuses_parts_that_do_not_agree():
    with pytest.raises(ValueError, match=r"'k'.*\(7, 80\)"):
        Prompt("k", "t", np.zeros(3, np.int64), np.zeros((7, 80), np.float32), np.zeros(192, np.float32))


def test_networks_of_another_shape_are_refused(tmp_path, folder):
    with pytest.raises(CheckpointError, match="2 inputs"):
        SpeakerEncoder(folder.speech_tokenizer_path)
    with pytest.raises(CheckpointError, match="1 inputs"):
        SpeechTokenizer(folder.campplus_path)
    with pytest.raises(CheckpointError, match="no such file"):
        SpeakerEncoder(tmp_path / "absent.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\x00garbage")
    with pytest.raises(CheckpointError, match=r"bad\.onnx \(8 bytes\)"):
        SpeechTokenizer(tmp_path / "bad.onnx")


def test_the_tokenizer_refuses_more_than_thirty_seconds(networks):
    with pytest.raises(ValueError, match=r"30\.1 s"):
        networks[1](np.zeros(int(30.1 * 16_000), np.float32))


# Bank and cache


def same(a: Prompt, b: Prompt) -> bool:
    return a.key == b.key and a.text == b.text and all(
        np.array_equal(x, y) and x.dtype == y.dtype
        for x, y in ((a.tokens, b.tokens), (a.mel, b.mel), (a.embedding, b.embedding))
    )


def test_bank_over_a_folder_and_over_jsonl_agree(tmp_path, folder):
    root = fill(tmp_path / "prompts")
    bank = PromptBank.load(root, folder, tmp_path / "cache", progress=False)
    assert [p.key for p in bank] == ["a", "b", "c"]
    assert bank["b"].text == "文本b"
    lists = tmp_path / "lists"
    lists.mkdir()
    rows = [{"key": k, "audio": f"../prompts/{k}.wav", "text": f"文本{k}"} for k in ("b", "c", "a")]
    (lists / "p.jsonl").write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    other = PromptBank.load(lists / "p.jsonl", folder, tmp_path / "cache2", progress=False, workers=2)
    assert all(same(x, y) for x, y in zip(bank, other, strict=True))
    (root / "prompts.jsonl").write_text(json.dumps({**rows[0], "audio": "a.wav"}), encoding="utf-8")
    assert len(PromptBank.load(root, folder, tmp_path / "cache", progress=False)) == 1


def test_a_cached_prompt_opens_no_network(tmp_path, folder, monkeypatch):
    root = fill(tmp_path / "prompts")
    first = PromptBank.load(root, folder, tmp_path / "cache", progress=False)

    def refuse(*_):
        raise AssertionError("a network was opened although everything is cached")

    monkeypatch.setattr("cosyvoice.frontend.bank.SpeakerEncoder", refuse)
    again = PromptBank.load(root, folder, tmp_path / "cache", progress=False)
    assert all(same(x, y) for x, y in zip(first, again, strict=True))
    soundfile.write(root / "a.wav", tone(1.5), HZ)
    with pytest.raises(AssertionError):
        PromptBank.load(root, folder, tmp_path / "cache", progress=False)


def test_every_input_is_part_of_the_cache_key(tmp_path, folder):
    cache = tmp_path / "cache"
    root = fill(tmp_path / "prompts", ["a"])

    def entries_after_load(networks: Folder) -> int:
        PromptBank.load(root, networks, cache, progress=False)
        return len(list(cache.iterdir()))

    assert entries_after_load(folder) == 1
    assert entries_after_load(folder) == 1
    (root / "a.txt").write_text("别的", encoding="utf-8")
    assert entries_after_load(folder) == 2
    soundfile.write(root / "a.wav", tone(1.3), HZ)
    assert entries_after_load(folder) == 3
    other = Folder(write_speaker(tmp_path / "other.onnx", seed=1), folder.speech_tokenizer_path)
    assert entries_after_load(other) == 4


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_damaged_cache_entries_are_computed_again_with_a_warning(tmp_path, folder, caplog, damage):
    root = fill(tmp_path / "prompts", ["a"])
    first = PromptBank.load(root, folder, tmp_path / "cache", progress=False)
    (entry,) = (tmp_path / "cache").iterdir()
    data = bytearray(entry.read_bytes())
    good = bytes(data)
    data[-5] ^= 0x10
    entry.write_bytes({"cut": good[:-40], "flip": bytes(data), "empty": b"", "foreign": b"x" * 400}[damage])
    with caplog.at_level(logging.WARNING):
        again = PromptBank.load(root, folder, tmp_path / "cache", progress=False)
    assert "damaged cache entry" in caplog.text
    assert entry.name in caplog.text
    assert same(first["a"], again["a"])
    assert len(entry.read_bytes()) == len(good)
    caplog.clear()
    assert same(first["a"], PromptBank.load(root, folder, tmp_path / "cache", progress=False)["a"])
    assert not caplog.text
    assert len(list(entry.parent.iterdir())) == 1


def test_a_failed_write_leaves_nothing_behind(tmp_path, folder, monkeypatch):
    root = fill(tmp_path / "prompts", ["a"])

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("cosyvoice.frontend.cache.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        PromptBank.load(root, folder, tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_picking_is_deterministic_and_spread(tmp_path, folder):
    root = fill(tmp_path / "prompts")
    bank = PromptBank.load(root, folder, tmp_path / "cache", progress=False)
    reversed_bank = PromptBank(reversed(list(bank)))
    picked = [bank.pick(f"utt{i}").key for i in range(300)]
    assert picked == [reversed_bank.pick(f"utt{i}").key for i in range(300)]
    # `printf utt0 | sha256sum` starts with fe6543584f02559c. As 16 = 1 (mod 3), that number is its sum of
    # digits modulo 3: 112 mod 3 = 1, the second key.
    assert picked[0] == "b"
    assert min(picked.count(k) for k in "abc") > 70


def test_bank_errors_name_what_is_wrong(tmp_path, folder):
    def load(source):
        return PromptBank.load(source, folder, tmp_path / "cache", progress=False)

    with pytest.raises(AudioError, match="no such folder or file"):
        load(tmp_path / "absent")
    (tmp_path / "bare").mkdir()
    with pytest.raises(AudioError, match="found no prompt"):
        load(tmp_path / "bare")
    root = fill(tmp_path / "prompts")
    (root / "b.txt").unlink()
    with pytest.raises(AudioError, match=r"b\.wav: found no b\.txt"):
        load(root)
    (root / "b.txt").write_text(" \n")
    with pytest.raises(AudioError, match=r"b\.txt: found no text"):
        load(root)
    bad = tmp_path / "bad.jsonl"
    for line, message in [
        ("{", "line 2: found no JSON"),
        ('{"key": "x", "audio": "a.wav"}', "line 2: 'text': found None"),
        ('["x"]', "line 2: 'key'"),
        ('{"key": "x", "audio": "absent.wav", "text": "t"}', r"absent\.wav: no such file"),
        ('{"key": "a", "audio": "prompts/c.wav", "text": "t"}', "'a' twice"),
    ]:
        bad.write_text('{"key": "a", "audio": "prompts/a.wav", "text": "t"}\n' + line)
        with pytest.raises(ValueError, match=message):
            load(bad)
    with pytest.raises(KeyError, match="'zz'"):
        PromptBank.from_entries([PromptEntry("a", root / "a.wav", "t")], folder, tmp_path, False)["zz"]
