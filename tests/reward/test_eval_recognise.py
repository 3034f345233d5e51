"""sherpa-onnx for real, with a network that knows a language of tones: which WAV says what is known beforehand.

Every character is a sine of its own frequency. The network reads the filter bank of each frequency as that
character's score, so a WAV's transcript follows from how the WAV was made.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import soundfile
from onnx import TensorProto, helper, numpy_helper

from cosyvoice.evaluation import compare, decode_and_score
from cosyvoice.evaluation.recognise import detect_kind, find_model, load_recogniser, recognise
from cosyvoice.evaluation.records import EvaluationError, read_jsonl, split_name, write_json, write_jsonl

TONES = {"你": 400, "好": 700, "世": 1100, "界": 1700, "天": 2600, "地": 3800}
REPO = Path(__file__).parents[2]


def say(text: str, hz: int = 24_000) -> np.ndarray:
    """0.2 s of tone per character with 0.1 s of silence around it."""
    gap = np.zeros(hz // 10)
    t = np.arange(hz // 5) / hz
    parts = [gap]
    for character in text:
        parts += [0.3 * np.sin(2 * np.pi * TONES[character] * t), gap]
    return np.concatenate(parts).astype(np.float32)


def nearest_bin(hz: float) -> int:
    """Which of sherpa-onnx's 80 filter banks (20 Hz to 400 Hz under Nyquist) peaks next to a frequency."""
    corners = np.linspace(np.log1p(20 / 700), np.log1p(7600 / 700), 82)
    return int(np.abs(corners[1:-1] - np.log1p(hz / 700)).argmin())


def write_judge(folder: Path, model_type: str | None = "zipformer2_ctc") -> Path:
    """A CTC network with the inputs and outputs of an exported Zipformer; subsampling 4."""
    folder.mkdir()
    matrix = np.zeros((80, 1 + len(TONES)), np.float32)
    for column, hz in enumerate(TONES.values(), 1):
        matrix[nearest_bin(hz), column] = 1
    constants = {"matrix": matrix, "four": np.array(4, np.int64)}
    nodes = [
        helper.make_node("Transpose", ["x"], ["bins_first"], perm=[0, 2, 1]),
        helper.make_node("AveragePool", ["bins_first"], ["pooled"], kernel_shape=[4], strides=[4]),
        helper.make_node("Transpose", ["pooled"], ["frames"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["frames", "matrix"], ["scores"]),  # blank scores 0: between tone and silence
        helper.make_node("LogSoftmax", ["scores"], ["log_probs"], axis=2),
        helper.make_node("Div", ["x_lens", "four"], ["log_probs_len"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tones",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "T", 80]),
            helper.make_tensor_value_info("x_lens", TensorProto.INT64, ["N"]),
        ],
        [
            helper.make_tensor_value_info("log_probs", TensorProto.FLOAT, ["N", "T4", 1 + len(TONES)]),
            helper.make_tensor_value_info("log_probs_len", TensorProto.INT64, ["N"]),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if model_type:
        helper.set_model_props(model, {"model_type": model_type})
    onnx.save(model, str(folder / "model.onnx"))
    tokens = ["<blk>", *TONES]
    (folder / "tokens.txt").write_text("".join(f"{t} {i}\n" for i, t in enumerate(tokens)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    return write_judge(tmp_path_factory.mktemp("models") / "judge")


TEXTS = {"a": "你好世界", "b": "天地", "c": "你", "d": "地天地天好", "e": "界界好"}


def write_set(directory: Path, said: dict[str, str], references: dict[str, str] | None = None) -> Path:
    """A result folder in which every utterance says what ``said`` says."""
    folder = directory / "test"
    (folder / "wav").mkdir(parents=True)
    rows = [
        {"id": name, "text": text, "language": "zh", "tokens": [1, 2, 2], "ended": True}
        for name, text in (references or TEXTS).items()
    ]
    write_jsonl(folder / "utterances.jsonl", rows)
    for name, text in said.items():
        soundfile.write(folder / "wav" / f"{name}.wav", say(text), 24_000)
    return folder


def run(directory: Path, judge: Path, *options: str) -> dict:
    arguments = [str(directory), "test", "--judge", str(judge), "--no-progress", "--resamples", "200", *options]
    return decode_and_score.run(decode_and_score.get_parser().parse_args(arguments))


def test_batches_of_any_size_give_the_known_transcripts_in_order(tmp_path, judge):
    folder = write_set(tmp_path, TEXTS)
    network = load_recogniser(judge)
    for batch_size in (1, 2, 16):
        found = recognise(network, list(TEXTS), folder / "wav", batch_size, progress=False)
        assert {r.id: r.transcript for r in found} == TEXTS
        assert [r.id for r in found] == list(TEXTS)
    assert found[0].seconds == pytest.approx(0.1 + 4 * 0.3)


def test_unusable_files_get_a_status_and_do_not_harm_their_batch(tmp_path, judge):
    folder = write_set(tmp_path, {"a": "你好世界", "c": "你"})
    wavs = folder / "wav"
    soundfile.write(wavs / "empty.wav", np.zeros(0), 24_000)
    soundfile.write(wavs / "blip.wav", np.zeros(100), 24_000)
    soundfile.write(wavs / "nan.wav", np.full(24_000, np.nan, np.float32), 24_000, subtype="FLOAT")
    (wavs / "text.wav").write_text("no audio")
    soundfile.write(wavs / "phone.wav", say("天地", 8000), 8000)
    soundfile.write(wavs / "cd.wav", np.stack([say("天地", 44_100)] * 2, 1), 44_100)
    soundfile.write(wavs / "silent.wav", np.zeros(24_000), 24_000)
    ids = ["a", "empty", "blip", "nan", "text", "gone", "phone", "cd", "silent", "c"]
    found = {r.id: r for r in recognise(load_recogniser(judge), ids, wavs, progress=False)}
    assert {name: r.audio_status for name, r in found.items()} == {
        "a": "ok", "empty": "empty", "blip": "empty", "nan": "unreadable", "text": "unreadable", "gone": "missing",
        "phone": "ok", "cd": "ok", "silent": "ok", "c": "ok",
    }  # fmt: skip
    transcripts = {name: r.transcript for name, r in found.items() if r.transcript}
    assert transcripts == {"a": "你好世界", "phone": "天地", "cd": "天地", "c": "你"}
    assert "0.004 s" in found["blip"].message
    assert str(wavs / "gone.wav") in found["gone"].message


def test_a_test_set_is_scored_end_to_end(tmp_path, judge, capsys):
    folder = write_set(tmp_path, {"a": "你好世界", "b": "天", "c": "好", "d": "地天地天好你"})  # e is missing
    summary = run(tmp_path, judge)
    # Errors: a 0/4, b 1 deleted of 2, c 1 substituted of 1, d 1 inserted on 5, e all 3 deleted.
    corpus = summary["metrics"]["corpus"]
    assert [corpus[k] for k in ("substitutions", "deletions", "insertions", "n_ref")] == [1, 4, 1, 15]
    assert corpus["value"] == pytest.approx(6 / 15)
    assert summary["metrics"]["seed_tts"]["value"] == pytest.approx((0 + 1 / 2 + 1 + 1 / 5 + 1) / 5)
    assert [m["id"] for m in summary["missing"]] == ["e"]
    assert summary["tokens"]["n_tokens"] == 15
    stored = json.loads((folder / "summary.json").read_text())
    assert stored["metrics"] == summary["metrics"]
    assert [row["id"] for row in read_jsonl(folder / "scores.jsonl")] == list(TEXTS)
    table = (folder / "errors.tsv").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[0] for line in table] == ["id", "e", "c", "b", "d"]
    printed = capsys.readouterr().out
    assert "seed_tts" in printed
    assert "1 without usable audio, counted as all deleted" in printed
    assert "[你→好]" in printed
    skipped = run(tmp_path, judge, "--skip-missing")
    assert skipped["metrics"]["corpus"]["value"] == pytest.approx(3 / 12)
    assert (skipped["n_utterances"], skipped["skip_missing"]) == (4, True)
    again = run(tmp_path, tmp_path / "no judge is opened", "--score-only")
    assert again["metrics"] == summary["metrics"]


def test_before_and_after_are_compared_over_their_seeds(tmp_path, judge, capsys):
    write_set(tmp_path / "before", {name: text[:-1] or "地" for name, text in TEXTS.items()})
    for seed in (0, 1):
        write_set(tmp_path / f"after{seed}", TEXTS)
    for name in ("before", "after0", "after1"):
        run(tmp_path / name, judge)
    arguments = ["--before", str(tmp_path / "before"), "--after", str(tmp_path / "after0"), str(tmp_path / "after1")]
    output = tmp_path / "comparison.json"
    assert compare.main([*arguments, "--split", "data/test.jsonl", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["metrics"]["corpus"]["before"]["value"] == pytest.approx(5 / 15)
    assert found["metrics"]["corpus"]["after"]["value"] == 0
    assert found["metrics"]["corpus"]["relative"]["value"] == pytest.approx(-1)
    assert found["metrics"]["corpus"]["p_value"] < 0.01
    assert found["duration_ratio"]["value"] > 1.1
    assert "-33.33" in capsys.readouterr().out
    assert compare.main([*arguments, "--split", "other"]) == 1
    assert "no split 'other', known here: ['test']" in capsys.readouterr().err


def test_the_shell_script_scores_as_the_module_does(tmp_path, judge):
    folder = write_set(tmp_path, TEXTS)
    command = ["bash", str(REPO / "scripts" / "compute_wer.sh"), str(tmp_path), "test", "--judge", str(judge)]
    environment = {"REWARD_PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "summary.json").read_text())["metrics"]["corpus"]["value"] == 0
    no_split = subprocess.run(command[:3], capture_output=True, text=True, timeout=20)
    assert no_split.returncode == 2
    assert "usage: bash scripts/compute_wer.sh DIR SPLIT" in no_split.stderr


def test_wrong_input_is_named(tmp_path, judge, capsys):
    folder = write_set(tmp_path, TEXTS)

    def message(*options: str, directory: Path = tmp_path, split: str = "test") -> str:
        code = decode_and_score.main([str(directory), split, "--judge", str(judge), "--no-progress", *options])
        assert code == 1
        return capsys.readouterr().err

    assert "found no split 'other', known here: ['test']" in message(split="other")
    assert "absent.jsonl: no such file" in message("--references", str(tmp_path / "absent.jsonl"))
    assert "nowhere: no such folder" in message("--judge", str(tmp_path / "nowhere"))
    (tmp_path / "bare").mkdir()
    assert "bare: found []" in message("--judge", str(tmp_path / "bare"))
    assert "transcripts.jsonl: no such file" in message("--score-only")
    rows = (folder / "utterances.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "utterances.jsonl").write_text("\n".join([*rows, rows[1]]), encoding="utf-8")
    assert "line 6: found the id 'b' again, first in line 2" in message()
    (folder / "utterances.jsonl").write_text('{"id": "../x", "text": "你"}')
    assert "line 1: 'id': found '../x'" in message()
    (folder / "utterances.jsonl").write_text('{"id": "x", "text": " "}')
    assert "'x': 'text': found ' '" in message()
    write_jsonl(folder / "utterances.jsonl", [{"id": i, "text": "你", "language": i} for i in ("zh", "en")])
    assert "found languages ['en', 'zh']" in message()


def test_other_systems_can_be_scored_from_kaldi_text_and_a_folder_of_wavs(tmp_path, judge):
    folder = write_set(tmp_path / "somewhere", TEXTS)
    (tmp_path / "text").write_text("a 你好世界\nb  天地\n\n", encoding="utf-8")
    options = ["--references", str(tmp_path / "text"), "--wav-dir", str(folder / "wav")]
    summary = run(tmp_path / "scores", judge, *options)
    assert (summary["n_utterances"], summary["metrics"]["corpus"]["value"]) == (2, 0)
    assert (tmp_path / "scores" / "test" / "summary.json").is_file()


def test_the_kind_of_network_is_read_from_the_file(tmp_path, judge):
    assert detect_kind(judge) == "zipformer_ctc"
    assert detect_kind(write_judge(tmp_path / "bare", model_type=None)) == "zipformer_ctc"
    for model_type, kind in [("wenet_ctc", "wenet_ctc"), ("sense_voice_ctc", "sense_voice"), ("paraformer",) * 2]:
        assert detect_kind(write_judge(tmp_path / kind, model_type)) == kind
    with pytest.raises(EvaluationError, match="'nonsense', expected one of"):
        load_recogniser(judge, "nonsense")
    assert find_model(judge) == judge


def test_files_of_results_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.jsonl"
    write_jsonl(path, [{"id": "a"}])

    def broken():
        yield {"id": "b"}
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_jsonl(path, broken())
    assert [row["id"] for row in read_jsonl(path)] == ["a"]
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]
    write_json(tmp_path / "y.json", {"p": float("nan"), "q": [1.0]})
    assert json.loads((tmp_path / "y.json").read_text()) == {"p": None, "q": [1.0]}
    assert split_name("a/b/test.jsonl") == "test"
