"""The reward metrics of a step, against numbers worked by hand, and the file that keeps them."""

import json

import pytest

from cosyvoice.training.step_metrics import MetricsFile, summarise

SAMPLES = [
    # two of group a, three of group b (all equal), one alone
    {"score": 1.0, "wer": 0.0, "status": "ok", "n_tokens": 10, "reward_clock": "100.0 103.0"},
    {"score": 0.0, "wer": float("nan"), "status": "no_end", "n_tokens": 30, "reward_clock": "101.0 109.5"},
    {"score": 0.5, "wer": 0.5, "status": "ok", "n_tokens": 20, "reward_clock": "102.0 103.0"},
    {"score": 0.5, "wer": 0.5, "status": "ok", "n_tokens": 20, "reward_clock": "104.0 106.0"},
    {"score": 0.5, "wer": 0.5, "status": "ok", "n_tokens": 20, "reward_clock": "103.0 105.0"},
    {"score": 0.2, "wer": 1.0, "status": "empty", "n_tokens": 0, "reward_clock": "100.5 101.0"},
]
GROUPS = ["a", "a", "b", "b", "b", "c"]


def test_summary_of_a_step():
    failures = [{"status": "timeout"}, {"status": "timeout"}, {"status": "bad_reference"}]
    metrics = summarise(SAMPLES, GROUPS, failures, started=98.0)
    expected = {
        "reward/n": 6,
        "reward/failed": 3,
        "reward/failed/timeout": 2,
        "reward/failed/bad_reference": 1,
        "reward/score/mean": 0.45,
        "reward/score/p50": 0.5,
        "reward/score/min": 0.0,
        "reward/score/max": 1.0,
        "reward/wer/mean": 0.5,  # of the five that have one
        "reward/n_tokens/mean": 100 / 6,
        "reward/status/ok": 4,
        "reward/status/no_end": 1,
        "reward/status/empty": 1,
        "reward/non_stop_share": 1 / 6,
        "reward/zero_variance_share": 0.5,  # b of a and b; c is alone
        "reward/group_std/mean": 0.25,  # (0.5 + 0) / 2
        "reward/generation_s": 6.0,  # the last answer went to the reward at 104
        "reward/wait_s": 5.5,  # the last score came at 109.5
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    # population std of 1, 0, .5, .5, .5, .2: squares about .45 sum to .575
    assert metrics["reward/score/std"] == pytest.approx((0.575 / 6) ** 0.5)


def test_a_step_without_any_scored_sample_has_only_counts():
    assert summarise([], [], [{"status": "timeout"}]) == {
        "reward/n": 0, "reward/failed": 1, "reward/failed/timeout": 1
    }  # fmt: skip
    with pytest.raises(ValueError, match="6 samples but 1 group names"):
        summarise(SAMPLES, ["a"])


def test_a_resumed_run_writes_each_step_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (1, 2, 3, 4):
        first.append(step, 10.0 * step, {"reward/n": step})
    with path.open("a") as file:
        file.write('{"step": 5, "rew')  # torn by a kill
    resumed = MetricsFile(path)
    for step in (3, 4):
        resumed.append(step, 100.0 * step, {"reward/n": -step})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["time"], line["reward/n"]) for line in lines] == [
        (1, 10.0, 1), (2, 20.0, 2), (3, 300.0, -3), (4, 400.0, -4)
    ]  # fmt: skip
