"""Speaker similarity and MOS, with ONNX networks whose answers can be worked out by hand."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import soundfile
from onnx import TensorProto, helper, numpy_helper

from cosyvoice.evaluation import decode_and_score
from cosyvoice.evaluation.compare import load_scores
from cosyvoice.evaluation.measures import cosine, measure, mos_predictor, speaker_similarity
from cosyvoice.evaluation.records import EvaluationError, write_jsonl


def save(path: Path, nodes, inputs, output, constants=()) -> Path:
    names = [numpy_helper.from_array(value, name) for name, value in dict(constants).items()]
    graph = helper.make_graph(nodes, "tiny", inputs, [output], names)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def loudness_network(path: Path, length: int | str) -> Path:
    """Two outputs in a row: zero, and the mean of the absolute samples."""
    nodes = [
        helper.make_node("Abs", ["wave"], ["level"]),
        helper.make_node("ReduceMean", ["level"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Concat", ["zero", "mean"], ["scores"], axis=1),
    ]
    wave = helper.make_tensor_value_info("wave", TensorProto.FLOAT, [1, length])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 2])
    return save(path, nodes, [wave], scores, {"zero": np.zeros((1, 1), np.float32)})


def speaker_network(path: Path) -> Path:
    """The mean square of each filter bank over time, padded to 192 values."""
    nodes = [
        helper.make_node("Mul", ["fbank", "fbank"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "matrix"], ["vector"]),
    ]
    fbank = helper.make_tensor_value_info("fbank", TensorProto.FLOAT, [1, "frames", 80])
    vector = helper.make_tensor_value_info("vector", TensorProto.FLOAT, [1, 192])
    return save(path, nodes, [fbank], vector, {"matrix": np.eye(80, 192, dtype=np.float32)})


def wav(path: Path, level: float, seconds: float = 1.0, hz: int = 16_000, f: float = 300) -> Path:
    t = np.arange(round(seconds * hz)) / hz
    soundfile.write(path, level * np.sin(2 * np.pi * f * t) * np.sin(2 * np.pi * 2 * t), hz, subtype="FLOAT")
    return path


def test_cosine_by_hand():
    assert cosine(np.array([1.0, 0.0]), np.array([3.0, 3.0])) == pytest.approx(2**-0.5)
    assert cosine(np.zeros(2), np.ones(2)) == 0


@pytest.mark.parametrize(("length", "seconds"), [("samples", 1.0), (16_000, 2.5), (16_000, 1.0)])
def test_mos_is_the_mean_of_the_last_output_over_whole_windows(tmp_path, length, seconds):
    network = mos_predictor(loudness_network(tmp_path / "mos.onnx", length))
    path = wav(tmp_path / "a.wav", 0.5, seconds)
    samples = soundfile.read(path, dtype="float32")[0]
    used = samples[: len(samples) // 16_000 * 16_000] if length == 16_000 else samples
    assert network(path) == pytest.approx(np.abs(used).mean(), rel=1e-5)


def test_a_recording_shorter_than_the_window_is_repeated(tmp_path):
    network = mos_predictor(loudness_network(tmp_path / "mos.onnx", 16_000))
    half = wav(tmp_path / "half.wav", 0.5, 0.5)
    samples = soundfile.read(half, dtype="float32")[0]
    assert network(half) == pytest.approx(np.abs(samples).mean(), rel=1e-5)


def test_networks_of_another_shape_are_refused(tmp_path):
    with pytest.raises(EvaluationError, match=r"fbank.*expected one of shape \[1, samples\]"):
        mos_predictor(speaker_network(tmp_path / "speaker.onnx"))
    (tmp_path / "bad.onnx").write_bytes(b"no network")
    with pytest.raises(EvaluationError, match=r"bad\.onnx: cannot be opened"):
        mos_predictor(tmp_path / "bad.onnx")


def test_similarity_is_one_for_the_prompt_itself_and_lower_for_another_voice(tmp_path):
    similarity = speaker_similarity(speaker_network(tmp_path / "speaker.onnx"))
    prompt = wav(tmp_path / "prompt.wav", 0.5)
    assert similarity(prompt, prompt) == pytest.approx(1.0, abs=1e-6)
    assert similarity(wav(tmp_path / "low.wav", 0.5, f=2500), prompt) < 0.95
    assert similarity(wav(tmp_path / "blip.wav", 0.5, 0.01), prompt) is None
    with pytest.raises(EvaluationError, match=r"blip\.wav: found under 25 ms"):
        similarity(prompt, tmp_path / "blip.wav")


def test_measures_leave_out_what_has_no_audio_or_no_prompt(tmp_path):
    wav(tmp_path / "a.wav", 0.5)
    wav(tmp_path / "b.wav", 0.5)
    rows = [{"id": "a", "prompt_audio": str(tmp_path / "b.wav")}, {"id": "b", "prompt_audio": None}, {"id": "gone"}]
    found = measure(rows, tmp_path, lambda recording, prompt: 0.5, lambda recording: 4.0, progress=False)
    assert found == {"a": {"speaker_similarity": 0.5, "mos": 4.0}, "b": {"mos": 4.0}}


def test_measures_reach_the_summary_and_the_scores(tmp_path):
    folder = tmp_path / "test"
    (folder / "wav").mkdir(parents=True)
    wav(folder / "wav" / "a.wav", 0.5)
    write_jsonl(folder / "utterances.jsonl", [{"id": "a", "text": "你", "prompt_audio": str(folder / "wav" / "a.wav")}])
    row = {"id": "a", "transcript": "你", "audio_status": "ok", "message": "", "seconds": 1.0}
    write_jsonl(folder / "transcripts.jsonl", [row])
    networks = ["--speaker-model", str(speaker_network(tmp_path / "speaker.onnx"))]
    networks += ["--mos-model", str(loudness_network(tmp_path / "mos.onnx", "samples"))]
    arguments = [str(tmp_path), "test", "--score-only", "--no-progress", "--resamples", "50", *networks]
    assert decode_and_score.main(arguments) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["speaker_similarity"] == {"mean": pytest.approx(1.0), "n": 1}
    assert summary["mos"]["n"] == 1
    scored = json.loads((folder / "scores.jsonl").read_text())
    assert scored["mos"] == pytest.approx(summary["mos"]["mean"])
    assert load_scores([tmp_path], "test")[0]["a"].transcript == "你"
