"""The report: what it reads, what it warns of, and that the page stands alone, also for a run that is not finished."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from base64 import b64decode

import numpy as np
import pytest
import soundfile
from PIL import Image

from cosyvoice.evaluation import guards, report
from cosyvoice.evaluation.plots import Line, interval_chart, line_chart, running_mean, stack_chart
from cosyvoice.evaluation.recognise import Recognised
from cosyvoice.evaluation.records import EvaluationError
from cosyvoice.evaluation.report_charts import training_charts
from cosyvoice.evaluation.report_data import Run, Series, load_run, load_series
from cosyvoice.evaluation.report_examples import encode, mark, pick
from cosyvoice.evaluation.scoring import score, summarise

TEXTS = {"u1": "今天天气很好", "u2": "他去公园看花", "u3": "<b>好</b>", "u4": "大家都笑了"}


def series(*values):
    return Series(np.arange(1, len(values) + 1), np.array(values, dtype=float))


def add_training(run, steps=8):
    folder = run / "train"
    hydra = folder / "hydra" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text("data:\n  seed: 1234\n  train_batch_size: 8\n")
    (hydra / "overrides.yaml").write_text("- data.train_batch_size=8\n")
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "time": 0.0, "reward/score/mean": 0.4 + 0.05 * step, "reward/n": 16.0}
            row |= {"reward/score/p10": 0.1, "reward/score/p90": 0.9, "reward/wer/mean": 0.3}
            file.write(json.dumps(row | {"reward/status/ok": 15.0, "reward/status/no_end": 1.0}) + "\n")
        file.write('{"step": 9, "rew')  # a run that is being written to


def add_system(run, name, heard, audio=True, split="test"):
    """A scored test set: ``heard`` maps ids to transcripts, the rest is heard as written."""
    folder = run / "eval" / name / split
    (folder / "wav").mkdir(parents=True)
    recognised = [Recognised(key, heard.get(key, text), "ok", "", 1.0) for key, text in TEXTS.items()]
    scored = score(TEXTS, recognised, "zh")
    rows = [{"id": key, "tokens": [1, 2], "ended": True, "seed": i} for i, key in enumerate(TEXTS)]
    if audio:
        prompt = run / "prompt.wav"
        soundfile.write(prompt, np.zeros(2400, np.float32), 24000)
        for row in rows:
            row["prompt_audio"] = str(prompt)
            soundfile.write(folder / "wav" / f"{row['id']}.wav", np.zeros(4800, np.float32), 24000)
    summary = {
        "language": "zh",
        "recogniser": "models/judge",
        "tokens": None,
        **summarise(scored, resamples=200),
    }
    (folder / "scores.jsonl").write_text(
        "".join(json.dumps({**one.to_json(), "speaker_similarity": 0.5}) + "\n" for one in scored)
    )
    (folder / "utterances.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def full_run(tmp_path):
    run = tmp_path / "demo"
    add_training(run)
    add_system(run, "before", {"u1": "今天很好", "u2": "他去花园看花", "u4": ""})
    add_system(run, "step_20", {"u1": "今天天气很好", "u2": "他去公园看花", "u3": "b坏b"})
    add_system(run, "step_40", {"u1": "今天天气", "u2": "他去公园看花"})
    return run


# ---- reading ----


def test_scalars_come_from_every_source(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for step in (1, 2):
            writer.add_scalar("actor/grad_norm", 0.5 * step, step)
            writer.add_scalar("reward/score/mean", -1.0, step)
    (tmp_path / "verl.jsonl").write_text('{"step": 2, "data": {"actor/entropy": 2.5, "bad": NaN}}\n')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "reward/score/mean": 0.75}\n{"step": 1, "reward/score/mean": 0.25}\n{"step": 3, "rewa'
    )
    found = load_series(tmp_path)
    assert found["actor/grad_norm"].values.tolist() == [0.5, 1.0]
    assert found["actor/entropy"].steps.tolist() == [2]
    # exact JSON wins over tensorboard's record of the same name, and steps are put in order
    assert found["reward/score/mean"].steps.tolist() == [1, 2]
    assert found["reward/score/mean"].values.tolist() == [0.25, 0.75]
    assert "bad" not in found


def test_a_run_is_read(full_run):
    run = load_run(full_run)
    assert [(one.name, one.step) for one in run.systems] == [("before", 0), ("step_20", 20), ("step_40", 40)]
    assert run.overrides == ["data.train_batch_size=8"]
    assert len(run.get("nothing", "reward/score/mean")) == 8
    assert set(run.before.sets["test"].scores) == set(TEXTS)


def test_a_way_of_sampling_is_a_test_set_of_its_own(full_run, caplog):
    add_system(full_run, "before_greedy", {"u4": ""})
    add_system(full_run, "step_20_greedy", {})
    add_system(full_run, "other", {})
    run = load_run(full_run)
    assert [one.name for one in run.systems] == ["before", "step_20", "step_40"]
    assert list(run.before.sets) == list(run.trained[0].sets) == ["test", "test, greedy"]
    assert run.before.sets["test, greedy"].scores["u4"].transcript == ""
    assert run.before.sets["test"].scores["u2"].transcript == "他去花园看花"
    assert "eval/other" in caplog.text
    assert "greedy" not in caplog.text


def test_no_run_and_damaged_scores_are_named(tmp_path):
    with pytest.raises(EvaluationError, match="no such folder"):
        load_run(tmp_path / "nowhere")
    add_system(tmp_path, "before", {}, audio=False)
    scores = tmp_path / "eval/before/test/scores.jsonl"
    scores.write_text('{"id": "u1", "reference": "x"}\n')
    with pytest.raises(EvaluationError, match="u1.*'audio_status' is missing"):
        load_run(tmp_path)


# ---- guards ----


def test_best_step_is_the_lowest_error_and_the_earliest_of_equals():
    assert guards.best_step({0: 0.3, 20: 0.1, 40: 0.1, 60: 0.2}) == 20
    assert guards.best_step({}) is None


RISING = series(0.30, 0.31, 0.40, 0.50, 0.60, 0.61)
FLAT = series(0.40, 0.41, 0.40, 0.41, 0.40, 0.41)


@pytest.mark.parametrize(
    ("reward", "difference", "warned"),
    [
        (RISING, (-0.02, -0.03, -0.01), False),  # the error falls as well
        (RISING, (0.0, -0.01, 0.01), True),
        (RISING, (0.02, 0.01, 0.03), True),
        (FLAT, (0.02, 0.01, 0.03), False),  # no reward to distrust
        (series(0.1, 0.9), (0.02, 0.01, 0.03), False),  # too short to say that it rises
        (None, (0.02, 0.01, 0.03), False),
    ],
)
def test_reward_that_the_judge_does_not_confirm(reward, difference, warned):
    found = guards.reward_against_error(reward, dict(zip(("value", "low", "high"), difference)))
    assert [finding.level for finding in found] == ["warning"] * warned


def test_reward_without_an_evaluation_says_nothing():
    assert guards.reward_against_error(RISING, None) == []


@pytest.mark.parametrize(
    ("ratio", "lengths", "titles"),
    [
        (1.09, None, []),
        (0.89, None, ["Speech gets shorter"]),
        (1.12, series(50, 50, 50, 56, 56, 56), ["Speech gets longer", "Speech gets longer"]),
        (None, series(50, 50, 50, 54, 54, 54), []),
    ],
)
def test_length_drift(ratio, lengths, titles):
    assert [finding.title for finding in guards.length_drift(ratio, lengths)] == titles


@pytest.mark.parametrize(
    ("pairs", "bits", "warned"), [(0.5, 9.0, False), (0.44, 9.0, False), (0.42, 9.0, True), (0.5, 8.4, True)]
)
def test_variety(pairs, bits, warned):
    before = {"distinct_pairs": 0.5, "entropy_bits": 9.0}
    found = guards.diversity_loss(before, {"distinct_pairs": pairs, "entropy_bits": bits})
    assert bool(found) is warned


def test_training_health():
    high, low = series(0.1, 0.1, 0.9, 0.9), series(0.0, 0.0, 0.0, 0.0)
    titles = [f.title for f in guards.training_health(high, high, series(0, 3, 0, 0), series(1, 1, 30, 30))]
    assert titles == [
        "Most groups teach nothing",
        "Answers do not stop",
        "Some rollouts could not be scored",
        "The gradient grows",
    ]
    assert guards.training_health(low, low, low, low) == []


# ---- charts ----


@pytest.mark.parametrize(
    "svg",
    [
        line_chart([Line("a<b", np.arange(60), np.arange(60) / 60, np.zeros(60), np.ones(60))], percent=True),
        line_chart([Line("a", np.array([3]), np.array([0.5])), Line("b", np.array([3]), np.array([0.1]))]),
        stack_chart(np.array([1]), [("x", np.array([1.0])), ("y", np.array([2.0]))], caption='say "x"'),
        interval_chart(["before", "step 20"], [(0.2, 0.1, 0.3), (0.1, 0.05, 0.2)]),
    ],
)
def test_charts_are_xml_without_colours_of_their_own(svg):
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    assert root.attrib["viewBox"].startswith("0 0 ")
    assert "var(--c1)" in svg
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", svg)


def test_running_mean():
    assert running_mean(np.array([0.0, 3.0, 6.0, 3.0]), 3).tolist() == [1.5, 3.0, 4.0, 4.5]


def test_only_charts_with_data_are_drawn(tmp_path):
    assert training_charts(Run(tmp_path)) == []
    run = Run(tmp_path, {"actor/grad_norm": series(1, 2, 3), "reward/score/mean": series(0.1, 0.2, 0.3)})
    assert [chart.title for chart in training_charts(run)] == ["Reward", "Gradient norm"]


# ---- utterances ----


def test_transcripts_are_marked_and_escaped():
    assert mark("大家都笑了", "大家笑了吗", "zh") == "大家<del>都</del>笑了<ins>吗</ins>"
    assert mark("买东西", "卖东西", "zh") == "<del>买</del><ins>卖</ins>东西"
    assert mark("yes we can", "yes you can", "en") == "yes <del>we</del><ins>you</ins> can"
    assert mark("a", "a&b", "zh") == "a<ins>b</ins>"
    assert "<script>" not in mark("好", "<script>x", "zh")


def test_utterances_to_listen_to(full_run):
    run = load_run(full_run)
    groups = pick(run.before.sets["test"], run.systems[1].sets["test"], n=2, seed=0)
    # errors before -> after: u4 5/5 -> 0, u1 2/6 -> 0, u2 1/6 -> 0, u3 0 -> 1/3
    assert groups["Most improved"] == ["u4", "u1"]
    assert groups["Most worsened"] == ["u3"]
    assert groups["At random"] == ["u2"]


def test_audio_is_inlined_as_mp3(tmp_path):
    time = np.arange(24000) / 24000
    soundfile.write(tmp_path / "a.wav", 0.5 * np.sin(2 * np.pi * 440 * time), 24000)
    uri, reason = encode(tmp_path / "a.wav")
    assert uri.startswith("data:audio/mpeg;base64,")
    assert reason == ""
    back, rate = soundfile.read(io.BytesIO(b64decode(uri.partition(",")[2])))
    assert rate == 24000
    assert len(back) == pytest.approx(24000, abs=2400)
    spectrum = np.abs(np.fft.rfft(back[:24000], 24000))
    assert abs(int(spectrum.argmax()) - 440) <= 2
    (tmp_path / "b.wav").write_bytes(b"no audio")
    soundfile.write(tmp_path / "c.wav", np.zeros(0), 24000)
    soundfile.write(tmp_path / "d.wav", np.zeros(8000 * 31), 8000)
    for name, why in (
        ("none", "no audio file"),
        ("b", "not readable"),
        ("c", "empty"),
        ("d", "longer than 30 s"),
    ):
        uri, reason = encode(tmp_path / f"{name}.wav")
        assert uri == ""
        assert why in reason


# ---- the page ----


def test_the_page_stands_alone_and_tells_the_numbers(full_run):
    assert report.main([str(full_run), "--examples", "2"]) == 0
    page = (full_run / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|\#)[^"']*""", page)
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") >= 4
    assert page.count('src="data:audio/mpeg') == 3 * 4  # before, after, prompt of four utterances
    assert "<b>好</b>" not in page  # texts are escaped
    assert "&lt;b&gt;好&lt;/b&gt;" in page
    # corpus protocol, 6 + 6 + 3 + 5 = 20 units; errors before 2 + 1 + 0 + 5, at step 20 only one, at step 40 two
    assert "40.00 → 5.00 %" in page
    assert "data.seed" in page
    assert "1234" in page
    facts = json.loads((full_run / "report.json").read_text())
    assert facts["best_step"] == 20
    assert facts["comparisons"]["test"]["metrics"]["corpus"]["after"]["value"] == pytest.approx(0.05)


def test_the_best_checkpoint_is_the_one_that_is_played_and_compared(full_run):
    run = load_run(full_run)
    best = report.best_system(run)
    assert best.name == "step_20"
    assert [one.step for one in report.compare_all(run, best)] == [20]
    assert [row["name"] for row in report.checkpoint_table(run, best) if row["best"]] == ["step 20"]


def test_an_unfinished_run_has_a_page(tmp_path):
    for name in ("nothing", "training", "before", "after"):
        (tmp_path / name).mkdir()
    add_training(tmp_path / "training", steps=1)
    add_system(tmp_path / "before", "before", {}, audio=False)
    add_system(tmp_path / "after", "step_7", {}, audio=False)
    expected = {
        "nothing": "No training step has been logged yet",
        "training": "No test set has been evaluated yet",
        "before": "Only one side has been evaluated so far",
        "after": "Only one side has been evaluated so far",
    }
    for name, sentence in expected.items():
        page = report.write_report(tmp_path / name).read_text(encoding="utf-8")
        assert sentence in page
    assert json.loads((tmp_path / "after" / "report.json").read_text())["best_step"] == 7


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path, capsys):
    assert report.main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere: no such folder" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "page_colour"), [("light", (246, 247, 249)), ("dark", (18, 21, 26))])
def test_a_browser_draws_it_in_both_colour_schemes(full_run, tmp_path, scheme, page_colour):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium on this machine")
    report.write_report(full_run)
    picture = tmp_path / "page.png"
    switch = {"light": "1", "dark": "0"}[scheme]
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", "--hide-scrollbars", "--window-size=1200,1400", f"--screenshot={picture}"]
    command += [f"--blink-settings=preferredColorScheme={switch}", (full_run / "report.html").as_uri()]
    with open(tmp_path / "browser.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(timeout=400)  # a few seconds on a quiet machine
        finally:
            with contextlib.suppress(ProcessLookupError):  # its helpers go with it
                os.killpg(process.pid, signal.SIGKILL)
    assert picture.is_file(), (tmp_path / "browser.log").read_text()
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert tuple(pixels[5, 5]) == page_colour
    # the curves are drawn in the scheme's own blue
    blue = {"light": (36, 104, 184), "dark": (109, 167, 236)}[scheme]
    assert (np.abs(pixels.astype(int) - blue).sum(axis=2) < 12).sum() > 300
