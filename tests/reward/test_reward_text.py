"""Normalisation, pinyin and error rate against pairs worked by hand (tests/data/reward_golden.jsonl)."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from cosyvoice.reward.error_rate import align, error_rate
from cosyvoice.reward.score import score_utterance
from cosyvoice.reward.text import count_syllables, drop_tones, normalise, to_pinyin

TABLE = Path(__file__).parents[1] / "data" / "reward_golden.jsonl"
GOLDEN = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def test_table_is_large_enough():
    assert len(GOLDEN) >= 60


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{i}-{case['why'][:40]}" for i, case in enumerate(GOLDEN)])
def test_golden_pair(case):
    reference = to_pinyin(normalise(case["reference"]), case["erhua"])
    transcript = to_pinyin(normalise(case["transcript"]), case["erhua"])
    assert " ".join(reference) == case["reference_units"]
    assert " ".join(transcript) == case["transcript_units"]
    toned = error_rate(reference, transcript)
    counts = (toned.substitutions, toned.deletions, toned.insertions)
    assert counts == (case["substitutions"], case["deletions"], case["insertions"])
    assert toned.n_ref == len(reference)
    assert toned.hits == toned.n_ref - toned.substitutions - toned.deletions
    assert toned.rate == pytest.approx(float(Fraction(case["error_rate"])))
    toneless = error_rate(drop_tones(reference), drop_tones(transcript))
    assert toneless.rate == pytest.approx(float(Fraction(case["toneless_error_rate"])))


@pytest.mark.parametrize("case", GOLDEN, ids=[str(i) for i in range(len(GOLDEN))])
def test_normalise_twice_is_normalise_once(case):
    for text in (case["reference"], case["transcript"]):
        assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    ("reference", "transcript", "tone", "reward"),
    [  # rewards 1 - tanh(3 w) recorded in the project's notes on the text tools
        ("他在哪儿", "他在哪", "toned", 0.365),
        ("买东西", "卖东西", "toned", 0.238),
        ("买东西", "卖东西", "toneless", 1.0),
        ("哪里", "那里", "toned", 0.095),
        ("哪里", "那里", "toneless", 1.0),
        ("打开wifi", "打开 wi fi", "toned", 0.036),
        # half the tone errors of 1/3: 1 - tanh(3 * 1/6)
        ("买东西", "卖东西", "mix:0.5", 0.538),
    ],
)
def test_recorded_rewards(reference, transcript, tone, reward):
    from cosyvoice.reward.config import RewardConfig

    record = score_utterance(
        reference, transcript, n_tokens=25, ended=True, seconds=1.0, config=RewardConfig(tone=tone)
    )
    assert record.score == pytest.approx(reward, abs=5e-4)


@pytest.mark.parametrize("text", ["", "   ", "，。！？", "😀", "<|endofprompt|>", "[breath]", "￥", "\n"])
def test_nothing_spoken_gives_no_units(text):
    assert to_pinyin(normalise(text)) == []


def test_error_rate_refuses_an_empty_reference():
    # jiwer alone answers 0 to ("", ""): an utterance without a reference would earn a reward of 1
    with pytest.raises(ValueError, match="reference"):
        error_rate([], [])


def test_alignment_of_units():
    kinds = [(chunk.kind, chunk.reference, chunk.hypothesis) for chunk in align(list("abcd"), list("axcde"))]
    assert kinds == [
        ("equal", ("a",), ("a",)),
        ("substitute", ("b",), ("x",)),
        ("equal", ("c", "d"), ("c", "d")),
        ("insert", (), ("e",)),
    ]
    assert [chunk.kind for chunk in align(["a"], [])] == ["delete"]
    assert align([], []) == []


@pytest.mark.parametrize(
    ("text", "syllables"),
    [("你好世界", 4), ("打开wifi", 4), ("hello world", 3), ("tts", 3), ("café", 2), ("𠮷", 1), ("", 0)],
)
def test_syllables(text, syllables):
    assert count_syllables(to_pinyin(normalise(text))) == syllables


def test_unknown_erhua_is_refused():
    with pytest.raises(ValueError, match="erhua 'drop'"):
        to_pinyin("你好", erhua="drop")
