"""Test sets in their published layouts and one's own; the cleaning of their texts."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from cosyvoice.evaluation.records import EvaluationError, read_jsonl
from cosyvoice.evaluation.testsets import TestUtterance, clean_text, load_test_set, read_own, store_hub_rows


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("他说：“我不去！”", "他说：我不去！"),
        ("《红楼梦》（上）", "红楼梦上"),
        ("  don't   stop  ", "don't stop"),
        ("it’s 'quoted' text", "it's quoted text"),
        ("2024年，3.5%。", "2024年，3.5%。"),
        ("[laughter]好", "[laughter]好"),
        ("“”", ""),
    ],
)
def test_cleaning_takes_quotes_and_brackets_and_nothing_else(text, expected):
    assert clean_text(text) == expected


def test_seed_tts_lists(tmp_path):
    with_recording, without = "a-1|提示|prompt-wavs/a.wav|你好。|wavs/a-1.wav", "b.wav|提示|prompt-wavs/b.wav|世界"
    write(tmp_path / "zh/meta.lst", f"{with_recording}\n\n{without}\n")
    write(tmp_path / "zh/hardcase.lst", "h|提示|prompt-wavs/h.wav|难\n")
    write(tmp_path / "en/meta.lst", "e|Prompt.|prompt-wavs/e.wav|Hello.\n")
    first, second = load_test_set("test_zh", tmp_path)
    assert first == TestUtterance("a-1", "你好。", "zh", "提示", tmp_path / "zh/prompt-wavs/a.wav")
    assert (second.id, second.text) == ("b", "世界")
    assert load_test_set("hard", tmp_path)[0].language == "zh"
    assert load_test_set("test_en", tmp_path)[0].language == "en"
    assert load_test_set(str(tmp_path / "zh"))[0] == first
    write(tmp_path / "zh/meta.lst", "a|提示|你好")
    with pytest.raises(EvaluationError, match=r"meta\.lst line 1: found 3 fields"):
        load_test_set("test_zh", tmp_path)
    with pytest.raises(EvaluationError, match=r"nowhere.*no such file"):
        load_test_set("test_zh", tmp_path / "nowhere")


def test_cv3_folders(tmp_path):
    folder = tmp_path / "zero_shot" / "zh"
    write(folder / "text", "u1 你好 世界\nu2 天地\n")
    write(folder / "prompt_text", "u1 提示一\nu2 提示二\n")
    write(folder / "prompt_wav.scp", "u1 wav/1.wav\nu2 /elsewhere/2.wav\n")
    first, second = load_test_set("zero_shot_zh", tmp_path)
    assert first == TestUtterance("u1", "你好 世界", "zh", "提示一", folder / "wav/1.wav")
    assert second.prompt_audio == Path("/elsewhere/2.wav")
    write(folder / "prompt_text", "u1 提示一\n")
    with pytest.raises(EvaluationError, match="'u2' is not in both"):
        load_test_set("zero_shot_zh", tmp_path)


def test_ones_own_set_by_file_and_by_folder(tmp_path):
    rows = [
        {"id": "x", "text": "你好"},
        {"id": "y", "text": "Hi", "language": "en", "prompt_text": "p", "prompt_audio": "y.wav"},
    ]
    path = write(tmp_path / "set.jsonl", "\n".join(map(json.dumps, rows)))
    expected = [TestUtterance("x", "你好", "zh"), TestUtterance("y", "Hi", "en", "p", tmp_path / "y.wav")]
    assert load_test_set(str(path)) == expected
    assert load_test_set(str(tmp_path)) == expected
    write(tmp_path / "other.jsonl", "{}")
    with pytest.raises(EvaluationError, match=r"\['other.jsonl', 'set.jsonl'\], expected meta.lst"):
        load_test_set(str(tmp_path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a"}, "'text': found None"),
        ({"id": "a", "text": "  "}, "'text': found '  '"),
        ({"id": "a/b", "text": "t"}, "line 1: 'id': found 'a/b'"),
        ({"text": "t"}, "'id': found None"),
        ({"id": "a", "text": "t", "prompt_audio": "a.wav"}, "expected both or neither"),
        ({"id": "a", "text": "t", "prompt_text": "p"}, "expected both or neither"),
        ({"id": "a", "text": "t", "language": "de"}, "'language': found 'de'"),
    ],
)
def test_rows_that_cannot_be_spoken_are_named(tmp_path, row, message):
    path = write(tmp_path / "set.jsonl", json.dumps(row))
    with pytest.raises(EvaluationError, match=message):
        load_test_set(str(path))


def test_repeated_ids_empty_and_unknown_sets(tmp_path):
    path = write(tmp_path / "set.jsonl", '{"id": "a", "text": "t"}\n{"id": "a", "text": "u"}\n')
    with pytest.raises(EvaluationError, match="line 2: found the id 'a' again, first in line 1"):
        load_test_set(str(path))
    with pytest.raises(EvaluationError, match="found no utterance"):
        load_test_set(str(write(tmp_path / "empty.jsonl", "\n")))
    lists = write(tmp_path / "zh/meta.lst", "a|p|a.wav|t\na|p|a.wav|u\n")
    with pytest.raises(EvaluationError, match=r"meta\.lst: found the id 'a' twice"):
        load_test_set("test_zh", lists.parents[1])
    with pytest.raises(EvaluationError, match="'tset_zh'.*none of test_zh, test_en, hard"):
        load_test_set("tset_zh")
    with pytest.raises(EvaluationError, match=r"absent\.jsonl: no such file"):
        load_test_set(str(tmp_path / "absent.jsonl"))


def test_hub_rows_are_stored_as_a_set_of_ones_own(tmp_path):
    encoded = io.BytesIO()
    soundfile.write(encoded, np.zeros(800), 16_000, format="FLAC")
    audio = {"bytes": encoded.getvalue(), "path": "whatever.flac"}
    rows = [{"id": i, "target_text": f"文{i}", "prompt_text": "提示", "prompt_audio": audio} for i in (7, 8)]
    path = store_hub_rows(rows, tmp_path / "set", "zh")
    found = read_own(path, "zh")
    assert [(u.id, u.text, u.prompt_text) for u in found] == [("7", "文7", "提示"), ("8", "文8", "提示")]
    assert soundfile.info(found[0].prompt_audio).samplerate == 16_000
    with pytest.raises(EvaluationError, match="no bytes in 'prompt_audio'"):
        store_hub_rows([*rows, {"id": 9, "target_text": "t"}], tmp_path / "broken", "zh")
    assert not (tmp_path / "broken" / "utterances.jsonl").exists()
    assert len(read_jsonl(path)) == 2
