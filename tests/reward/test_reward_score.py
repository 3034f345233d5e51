"""Scores, statuses, components, fusion and configuration, against values worked by hand."""

import argparse
import json
import math

import numpy as np
import pytest

from cosyvoice.reward import components
from cosyvoice.reward.components import REGISTRY, Utterance, cosine, loop_share
from cosyvoice.reward.config import RewardConfig, add_reward_options, parse_weights
from cosyvoice.reward.curves import CURVES
from cosyvoice.reward.fusion import fuse
from cosyvoice.reward.pauses import SpeechActivity, granted_pauses, speech_activity
from cosyvoice.reward.record import COMPONENT_NAMES, RewardRecord, Status
from cosyvoice.reward.score import score_utterance


def score(reference="你好世界", transcript="你好世界", **changes):
    facts = {"n_tokens": 25, "ended": True, "seconds": 1.0, **changes}
    return score_utterance(reference, transcript, **facts)


@pytest.mark.parametrize(
    ("curve", "rewards"),
    [  # published for .05 / .10 / .50
        ("tanh", (0.851, 0.709, 0.095)),
        ("exp15", (0.874, 0.684, 0.014)),
        ("exp", (0.882, 0.779, 0.287)),
    ],
)
def test_curves(curve, rewards):
    assert [CURVES[curve](wer) for wer in (0.05, 0.10, 0.50)] == pytest.approx(rewards, abs=6e-4)
    assert CURVES[curve](0.0) == 1.0
    assert 0.0 <= CURVES[curve](40.0) < 1e-6


def test_a_perfect_utterance():
    record = score()
    assert (record.score, record.status, record.wer, record.cer) == (1.0, Status.OK, 0.0, 0.0)
    assert (record.reference, record.hypothesis, record.syllables) == ("你好世界", "你好世界", 4)


def test_homophones_count_for_characters_only():
    record = score(transcript="你好是界")
    assert (record.wer, record.cer, record.score) == (0.0, 0.25, 1.0)


def test_an_empty_transcript_is_all_deleted():
    record = score(transcript="")
    assert (record.wer, record.wer_toneless, record.cer, record.deletions) == (1.0, 1.0, 1.0, 4)
    assert record.score == pytest.approx(1 - math.tanh(3))
    assert record.status is Status.OK


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"n_tokens": 0, "seconds": 0.0, "transcript": ""}, Status.EMPTY),
        ({"out_of_range": 2}, Status.OUT_OF_RANGE),
        ({"ended": False}, Status.NO_END),
        ({"clip_status": "silent", "transcript": ""}, Status.SILENT),
        ({"clip_status": "too_short", "transcript": ""}, Status.SILENT),
    ],
)
def test_model_failures_score_zero(facts, status):
    record = score(**facts)
    assert record.status is status
    assert not status.is_system
    assert record.score == 0.0
    assert record.message
    assert math.isfinite(record.wer)


def test_an_empty_answer_earns_nothing_from_any_component():
    config = RewardConfig(weights=(("pause", 1.0), ("repetition", 1.0)))
    record = score(n_tokens=0, seconds=0.0, transcript="", config=config)
    assert record.score == 0.0
    assert record.components["pause"] == 0.0
    assert math.isnan(record.components["nll"])


def test_no_end_may_keep_a_share_of_its_score():
    assert score(ended=False, config=RewardConfig(no_end_scale=0.25)).score == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"reference": "，。"}, Status.BAD_REFERENCE),
        ({"reference": "", "transcript": ""}, Status.BAD_REFERENCE),
        ({"clip_status": "not_finite", "transcript": ""}, Status.SERVER_ERROR),
    ],
)
def test_system_failures_have_no_score(facts, status):
    record = score(**facts)
    assert record.status is status
    assert status.is_system
    assert math.isnan(record.score)


def test_unknown_clip_status_is_refused():
    with pytest.raises(ValueError, match="'noisy'"):
        score(clip_status="noisy")


# ---- components ----


def utterance(**changes):
    facts = {
        "wer": 0.0,
        "wer_toneless": 0.0,
        "syllables": 10,
        "granted_pauses": 0,
        "seconds": 2.0,
        "ended": True,
    }
    return Utterance(**{**facts, **changes})


def test_registry_holds_every_name():
    assert tuple(REGISTRY) == COMPONENT_NAMES


@pytest.mark.parametrize(
    ("seconds", "value"),
    [
        (2.0, 1.0),  # as expected
        (2.5, 1.0),  # 1.25 times: tolerated
        (1.6, 1.0),
        (4.0, 0.5),  # factor 2 = sqrt(4/3 * 3), half way on a log scale between 4/3 and 3
        (1.0, 0.5),  # the same in the other direction
        (6.0, 0.0),
        (0.1, 0.0),
        (0.0, 0.0),
    ],
)
def test_duration(seconds, value):
    config = RewardConfig(seconds_per_syllable=0.2, duration_tolerance=4 / 3, duration_limit=3.0)
    assert components.duration(utterance(seconds=seconds), config) == pytest.approx(value)


def test_duration_leaves_pauses_out():
    heard = utterance(seconds=9.0, activity=SpeechActivity(2.0, (3.0, 4.0)))
    assert components.duration(heard, RewardConfig(seconds_per_syllable=0.2)) == 1.0


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        (list(range(60)), 0.0),
        ([7] * 20 + list(range(100, 140)), 0.0),  # a short run is a held sound or a silence
        ([7] * 41 + list(range(100, 159)), 0.4),  # 40 of 100 tokens repeat the first 7
        (list(range(10)) * 5, 0.8),  # period 10: 40 of 50 tokens repeat
        ([], 0.0),
        ([1], 0.0),
    ],
)
def test_loops(tokens, share):
    assert loop_share(tokens, 25) == pytest.approx(share)


def test_repetition_is_zero_without_an_end_and_unknown_without_tokens():
    assert components.repetition(utterance(ended=False), RewardConfig()) == 0.0
    assert math.isnan(components.repetition(utterance(), RewardConfig()))
    assert components.repetition(utterance(tokens=np.arange(50)), RewardConfig()) == 1.0


@pytest.mark.parametrize(
    ("pauses", "granted", "value"),
    [((), 0, 1.0), ((0.4, 0.3), 0, 1.0), ((0.8,), 0, 0.5), ((0.8,), 1, 1.0), ((0.8, 0.9, 0.7), 1, 0.25)],
)
def test_pause_errors(pauses, granted, value):
    heard = utterance(activity=SpeechActivity(2.0, pauses), granted_pauses=granted)
    assert components.pause(heard, RewardConfig(pause_bound=0.5)) == value


@pytest.mark.parametrize(("nll", "value"), [(0.0, 1.0), (math.log(2), 0.5), (math.inf, 0.0)])
def test_nll(nll, value):
    assert components.nll(utterance(nll=nll), RewardConfig()) == pytest.approx(value)


def test_nan_is_never_turned_into_a_value():
    assert math.isnan(components.nll(utterance(nll=math.nan), RewardConfig()))
    assert math.isnan(components.similarity(utterance(similarity=math.nan), RewardConfig()))


def test_similarity():
    assert cosine(np.array([3.0, 4.0]), np.array([4.0, 3.0])) == pytest.approx(0.96)
    assert components.similarity(utterance(similarity=0.96), RewardConfig()) == 0.96
    assert components.similarity(utterance(similarity=-0.5), RewardConfig()) == 0.0
    with pytest.raises(ValueError, match="norms"):
        cosine(np.zeros(2), np.ones(2))


# ---- silences ----


@pytest.mark.parametrize("rate", [16000, 24000])
@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_silences_are_found_by_energy(rate, noise):
    rng = np.random.default_rng(3)

    def tone(seconds):
        return 0.2 * np.sin(2 * np.pi * 200 * np.arange(round(seconds * rate)) / rate)

    def silence(seconds):
        return noise * rng.standard_normal(round(seconds * rate))

    wav = np.concatenate(
        [silence(0.3), tone(1.0), silence(0.7), tone(0.5), silence(0.1), tone(0.5), silence(0.4)]
    )
    activity = speech_activity(wav.astype(np.float32), rate)
    assert activity.pauses == pytest.approx((0.7, 0.1), abs=0.04)
    assert activity.speech_seconds == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("wav", [np.zeros(24000, np.float32), np.zeros(10, np.float32)])
def test_silence_holds_no_speech(wav):
    assert speech_activity(wav, 24000) == SpeechActivity(0.0, ())


@pytest.mark.parametrize(
    ("text", "pauses"),
    [
        ("你好世界", 0),
        ("你好世界。", 0),  # at the end nobody waits for it
        ("你好，世界！", 1),
        ("你好……世界", 1),  # neighbouring marks are one pause
        ("今天3.5度，10:05出发", 1),  # not inside numbers
        ("1,234元", 0),
        ("yes, no; maybe", 2),
        ("第一：看，第二：听", 3),
    ],
)
def test_granted_pauses(text, pauses):
    assert granted_pauses(text) == pauses


def test_a_pause_in_the_audio_reaches_the_score():
    rate = 24000
    tone = 0.2 * np.sin(2 * np.pi * 200 * np.arange(rate // 2) / rate)
    wav = np.concatenate([tone, np.zeros(rate), tone]).astype(np.float32)
    config = RewardConfig(weights=(("pinyin", 1.0), ("pause", 1.0)))
    facts = {"wav": wav, "sample_rate": rate, "seconds": 2.0, "config": config}
    assert score(**facts).score == pytest.approx(0.75)
    assert score(reference="你好，世界", **facts).score == pytest.approx(1.0)


# ---- fusion and configuration ----

VALUES = {"pinyin": 0.9, "duration": 0.3, "pause": 0.0}


@pytest.mark.parametrize(
    ("weights", "fusion", "score"),
    [
        ("pinyin=1,duration=0.5", "linear", 0.7),  # (0.9 + 0.15) / 1.5
        ("pinyin=1,duration=1", "harmonic", 0.45),  # 2 / (1/0.9 + 1/0.3)
        ("pinyin=1,duration=2", "gate", 0.081),  # 0.9 * 0.3^2
        ("pinyin=1,pause=1", "harmonic", 0.0),
        ("pinyin=1,pause=0", "harmonic", 0.9),  # weight 0 only watches
        ("pinyin=1,pause=1", "gate", 0.0),
    ],
)
def test_fusion(weights, fusion, score):
    assert fuse(VALUES, parse_weights(weights), fusion) == pytest.approx(score)


def test_a_weighted_component_must_be_measured():
    with pytest.raises(ValueError, match="'nll' has the weight 1"):
        score(config=RewardConfig(weights=(("pinyin", 1.0), ("nll", 1.0))))


def test_components_of_weight_zero_are_reported():
    record = score(tokens=np.arange(25), wav=np.ones(24000, np.float32), similarity=0.5, nll=0.0)
    assert record.score == 1.0
    assert set(record.components) == set(COMPONENT_NAMES)
    assert all(math.isfinite(value) for value in record.components.values())


def parse(line):
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_reward_options(parser)
    parser.format_help()
    return RewardConfig.from_args(parser.parse_args(line.split()))


def test_command_line_default_is_the_original_recipe():
    config = parse("")
    assert config == RewardConfig()
    assert (config.weights, config.curve, config.tone, config.erhua) == (
        (("pinyin", 1.0),),
        "tanh",
        "toned",
        "keep",
    )


def test_command_line():
    config = parse(
        "--reward-weights pinyin=1,duration=0.2,similarity=0 --fusion gate --curve exp15 --tone mix:0.25 "
        "--erhua fold --seconds-per-syllable 0.3 --no-end-scale 0.5 --max-loop-tokens 30"
    )
    assert config.weights == (("pinyin", 1.0), ("duration", 0.2), ("similarity", 0.0))
    assert (config.fusion, config.curve, config.toned_share, config.erhua) == ("gate", "exp15", 0.25, "fold")
    assert (config.seconds_per_syllable, config.no_end_scale, config.max_loop_tokens) == (0.3, 0.5, 30)
    assert config.measures("similarity")
    assert not config.measures("nll")


@pytest.mark.parametrize(
    "line",
    [
        "--reward-weights pinyin",
        "--reward-weights pinyin=x",
        "--reward-weights wer=1",
        "--reward-weights pinyin=0",
        "--reward-weights pinyin=-1",
        "--reward-weights pinyin=nan",
        "--reward-weights pinyin=1,pinyin=2",
        "--tone mix:2",
        "--tone tonal",
        "--fusion sum",
        "--curve tan",
    ],
)
def test_bad_options_are_refused_by_the_parser(line, capsys):
    with pytest.raises(SystemExit):
        parse(line)
    assert line.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        {"seconds_per_syllable": 0.0},
        {"duration_tolerance": 3.0},
        {"no_end_scale": 1.5},
        {"erhua": "drop"},
        {"max_loop_tokens": 0},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RewardConfig(**settings)


# ---- record ----


def test_record_goes_through_strict_json():
    record = score(reference="，", transcript="x")
    line = record.to_json()
    assert json.loads(line, parse_constant=pytest.fail)["score"] is None
    back = RewardRecord.from_json(line)
    assert back.status is Status.BAD_REFERENCE
    assert math.isnan(back.score)
    record = score(transcript="你好市姐姐", tokens=np.arange(25))
    assert RewardRecord.from_json(record.to_json()).to_json() == record.to_json()
    assert RewardRecord.from_json(record.to_json()).numeric_metrics()["wer"] == record.wer


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "list"),
        ('{"score": 1}', "'status' is missing"),
        ('{"score": 1, "status": "fine"}', "fine"),
        ('{"score": 1, "status": "ok", "wers": 2}', "'wers'"),
        ('{"score": "high", "status": "ok"}', "high"),
    ],
)
def test_foreign_records_are_refused(line, message):
    with pytest.raises(ValueError, match=message):
        RewardRecord.from_json(line)


def test_metrics_have_the_same_keys_whatever_happened():
    records = [
        score(),
        score(n_tokens=0),
        score(reference=""),
        RewardRecord(score=math.nan, status=Status.TIMEOUT),
        score(similarity=0.5, tokens=np.arange(9)),
    ]
    keys = {tuple(record.numeric_metrics()) for record in records}
    assert len(keys) == 1
    assert all(type(value) is float for record in records for value in record.numeric_metrics().values())
    assert records[1].numeric_metrics()["status_empty"] == 1.0
    assert records[0].numeric_metrics()["seconds_per_syllable"] == 0.25
