"""Scores against Seed-TTS-eval's published rule (tests/data/seed_tts_pairs.json) and against hand-worked cases."""

import json
from pathlib import Path

import numpy as np
import pytest

from cosyvoice.evaluation.protocols import corpus_units, pinyin_units, protocols, seed_tts_units, toneless_units
from cosyvoice.evaluation.recognise import Recognised
from cosyvoice.evaluation.records import EvaluationError
from cosyvoice.evaluation.scoring import (
    Scored,
    alignment_text,
    error_table,
    score,
    score_utterance,
    summarise,
    token_diversity,
)
from cosyvoice.reward.text import normalise, to_pinyin

# Made by make_seed_tts_pairs.py beside it, which shares nothing with the project.
PAIRS = json.loads((Path(__file__).parents[1] / "data" / "seed_tts_pairs.json").read_text(encoding="utf-8"))


def heard(name: str, text: str, status: str = "ok") -> Recognised:
    return Recognised(name, text, status, "" if status == "ok" else "why", 1.0)


def test_there_are_enough_published_pairs():
    assert len(PAIRS) >= 30
    assert {pair["language"] for pair in PAIRS} == {"zh", "en"}


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{p['language']}-{i}" for i, p in enumerate(PAIRS)])
def test_seed_tts_errors_follow_the_published_rule(pair):
    scored = score_utterance(pair["reference"], heard("x", pair["hypothesis"]), pair["language"])
    found = scored.metrics["seed_tts"]
    assert found["n_ref"] == pair["n_ref"]
    assert found["substitutions"] + found["deletions"] + found["insertions"] == pair["errors"]
    assert found["rate"] == pytest.approx(pair["errors"] / pair["n_ref"])


def test_seed_tts_score_is_the_mean_of_rates_and_corpus_pools_errors():
    references = {"a": "今天天气很好", "b": "好", "c": "世界你好吗"}
    transcripts = [heard("a", "今天天气很好"), heard("b", "号啊"), heard("c", "世界你号吗")]
    summary = summarise(score(references, transcripts, "zh"), resamples=50)
    # Rates 0/6, 2/1 and 1/5; errors 0 + 2 + 1 over 12 characters.
    assert summary["metrics"]["seed_tts"]["value"] == pytest.approx((0 + 2 + 0.2) / 3)
    assert summary["metrics"]["corpus"]["value"] == pytest.approx(3 / 12)
    counts = [summary["metrics"]["corpus"][k] for k in ("substitutions", "deletions", "insertions", "n_ref")]
    assert counts == [2, 0, 1, 12]
    assert summary["metrics"]["corpus"]["n_perfect"] == 1
    aggregates = {name: m["aggregate"] for name, m in summary["metrics"].items()}
    assert aggregates == {"seed_tts": "mean", "corpus": "pooled", "pinyin": "pooled", "pinyin_toneless": "pooled"}


def test_pinyin_hears_what_characters_do_not():
    # 她/他 sound alike; 买 mai3 and 卖 mai4 differ by tone alone; 东西 and 西东 differ in both.
    found = {
        (ref, hyp): {
            name: m["substitutions"] + m["deletions"] + m["insertions"]
            for name, m in score_utterance(ref, heard("x", hyp), "zh").metrics.items()
        }
        for ref, hyp in [("她来了", "他来了"), ("买东西", "卖东西"), ("花了100元", "花了一百元")]
    }
    assert found["她来了", "他来了"] == {"seed_tts": 1, "corpus": 1, "pinyin": 0, "pinyin_toneless": 0}
    assert found["买东西", "卖东西"] == {"seed_tts": 1, "corpus": 1, "pinyin": 1, "pinyin_toneless": 0}
    assert found["花了100元", "花了一百元"] == {"seed_tts": 3, "corpus": 3, "pinyin": 0, "pinyin_toneless": 0}
    assert pinyin_units("买东西", "zh") == ["mai3", "dong1", "xi1"]
    assert toneless_units("买东西", "zh") == ["mai", "dong", "xi"]


@pytest.mark.parametrize(
    "text",
    [
        "今天，天气很好。", "他说：“不去！”", "一，二；三", "3.5米", "3，5米", "yes,no吗", "GPT-4好", "３．５％",
        "繁體字，不好", "〇三", "你 好",
    ],
)  # fmt: skip
def test_looking_pinyin_up_without_punctuation_changes_nothing(text):
    assert pinyin_units(text, "zh") == to_pinyin(normalise(text))


@pytest.mark.parametrize(
    ("text", "language", "seed_tts", "corpus"),
    [
        ("Ｗi-Fi 很快！", "zh", list("ＷiFi很快"), list("wifi很快")),
        ("A😀B", "zh", ["A", "😀", "B"], ["a", "b"]),
        ("Don’t stop-now", "en", ["dont", "stopnow"], ["don't", "stop", "now"]),
        ("'Tis", "en", ["'tis"], ["tis"]),
        ("é ü", "en", ["é", "ü"], ["é", "ü"]),
    ],
)
def test_units_of_the_two_protocols(text, language, seed_tts, corpus):
    assert seed_tts_units(text, language) == seed_tts
    assert corpus_units(text, language) == corpus


def test_english_has_no_pinyin_and_other_languages_no_protocol():
    assert set(protocols("en")) == {"seed_tts", "corpus"}
    with pytest.raises(ValueError, match="'fr'"):
        protocols("fr")


@pytest.mark.parametrize("status", ["missing", "unreadable", "empty"])
def test_audio_that_is_not_there_counts_as_all_deleted_and_is_listed(status):
    scored = score({"a": "你好", "b": "世界"}, [heard("a", "你好"), heard("b", "世界", status)], "zh")
    summary = summarise(scored, resamples=50)
    assert summary["metrics"]["corpus"]["value"] == 0.5
    assert summary["metrics"]["corpus"]["deletions"] == 2
    assert summary["n_utterances"] == 2
    assert summary["missing"] == [{"id": "b", "reason": f"{status}: why"}]
    skipped = summarise(score({"a": "你好", "b": "世界"}, [heard("a", "你好")], "zh", skip_missing=True), resamples=50)
    assert (skipped["n_utterances"], skipped["metrics"]["corpus"]["value"]) == (1, 0.0)


def test_a_reference_without_a_transcript_is_missing():
    (scored,) = score({"a": "你好"}, [], "zh")
    assert (scored.audio_status, scored.metrics["corpus"]["deletions"]) == ("missing", 2)
    with pytest.raises(EvaluationError, match="none of 1"):
        score({"a": "你好"}, [], "zh", skip_missing=True)


def test_scoring_refuses_what_has_no_answer():
    with pytest.raises(EvaluationError, match=r"'a'.*'！？'.*no units"):
        score({"a": "！？"}, [heard("a", "x")], "zh")
    with pytest.raises(EvaluationError, match="no reference"):
        score({}, [], "zh")
    with pytest.raises(EvaluationError, match="1 transcripts have no reference, first .'z'."):
        score({"a": "你好"}, [heard("z", "你好")], "zh")


def test_two_processes_score_as_one():
    references = {f"u{i}": "今天天气很好"[: 1 + i % 6] for i in range(7)}
    transcripts = [heard(name, text[1:]) for name, text in references.items()]
    assert score(references, transcripts, "zh") == score(references, transcripts, "zh", workers=2)


def test_scored_utterances_survive_json():
    (scored,) = score({"a": "你好"}, [heard("a", "你号")], "zh")
    assert Scored.from_json(json.loads(json.dumps(scored.to_json()))) == scored


@pytest.mark.parametrize(
    ("reference", "transcript", "language", "expected"),
    [
        ("今天气，好看吗", "天气很好看吗", "zh", "[-今]天气[+很]好看吗"),
        ("买东西", "卖东西", "zh", "[买→卖]东西"),
        ("你好", "", "zh", "[-你好]"),
        ("The quick fox", "a quick red fox", "en", "[the→a] quick [+red] fox"),
    ],
)
def test_alignments_are_readable(reference, transcript, language, expected):
    assert alignment_text(reference, transcript, language) == expected


def test_error_table_lists_the_worst_first_and_no_perfect_one():
    references = {"ok": "今天", "half": "你好", "long": "今天天气很好啊哈", "gone": "世界"}
    transcripts = [heard("ok", "今天。"), heard("half", "你号"), heard("long", "今天天气")]
    transcripts.append(heard("gone", "", "missing"))
    table = error_table(score(references, transcripts, "zh"), "zh")
    assert table["id"].tolist() == ["gone", "long", "half"]  # 100 %; 4 of 8; 1 of 2
    assert table["alignment"].tolist() == ["[-世界]", "今天天气[-很好啊哈]", "你[好→号]"]
    assert error_table(score({"ok": "今天"}, [heard("ok", "今天")], "zh"), "zh").empty


def test_token_diversity_by_hand():
    found = token_diversity([[1, 1, 2, 3], [1, 2]])
    # 6 tokens: 1 x3, 2 x2, 3 x1; pairs 11, 12, 23, 12: three different of four.
    expected_entropy = -(3 / 6 * np.log2(3 / 6) + 2 / 6 * np.log2(2 / 6) + 1 / 6 * np.log2(1 / 6))
    assert found == {
        "n_tokens": 6,
        "distinct": 3,
        "entropy_bits": pytest.approx(expected_entropy),
        "distinct_pairs": 0.75,
        "longest_run": 2,
    }
    assert token_diversity([[7] * 10])["longest_run"] == 10
    assert token_diversity([])["entropy_bits"] == 0
