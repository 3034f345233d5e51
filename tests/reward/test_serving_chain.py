"""The worker's chain with random tiny models: statuses, order, phases. What is heard is noise."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_folder import write_cosyvoice, write_sensevoice

from cosyvoice.asr import RecogniserError, SenseVoice, clip_status, strip_tags
from cosyvoice.reward.config import RewardConfig, parse_weights
from cosyvoice.serving.chain import SelfTestError, make_chain
from cosyvoice.serving.items import Item
from cosyvoice.serving.worker import score_isolated
from cosyvoice.token2wav import Speech

slow = pytest.mark.slow
TEXT = "今天天气很好"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "asr_model": str(write_sensevoice(folder / "sensevoice")),
        "model_path": str(write_cosyvoice(folder / "cosyvoice")),
        "prompts": str(folder / "cosyvoice" / "prompts"),
        "cache_dir": str(folder / "cache"),
        "euler_steps": 2,
        "self_test_max_wer": 1e9,  # random models: only that a score comes out
        "reward": RewardConfig(weights=parse_weights("pinyin=1,similarity=0,nll=0")),
    }


@pytest.fixture(scope="module")
def chain(models):
    return make_chain(models, "cpu")


def tokens(seed, number):
    return np.random.default_rng(seed).integers(0, 256, number).astype(np.int32)


def noise(seconds, seed=0):
    return (0.2 * np.random.default_rng(seed).standard_normal(int(16000 * seconds))).astype(np.float32)


@slow
def test_every_item_has_its_own_outcome(chain):
    items = [
        Item(TEXT, tokens(0, 30)),
        Item(TEXT, tokens(1, 0)),
        Item(TEXT, np.array([5, 6561], np.int32)),
        Item(TEXT, tokens(2, 12), ended=False),
        Item(TEXT, None, np.zeros(16000, np.float32)),
        Item(TEXT, None, np.full(16000, np.nan, np.float32)),
        Item("！？", tokens(3, 9)),
        Item(TEXT, None, noise(1.0)),
        Item(TEXT, tokens(4, 7), out_of_range=1),
    ]
    records, seconds = chain.score(items)
    assert [record.status.value for record in records] == [
        *("ok", "empty", "out_of_range", "no_end", "silent", "server_error", "bad_reference", "ok", "out_of_range")
    ]
    assert records[0].seconds == pytest.approx(30 / 25)  # 25 speech tokens per second
    assert set(seconds) == {"decode", "resample", "asr", "score"}
    assert "NaN" in records[5].message
    assert np.isfinite(records[0].components["nll"])
    assert np.isfinite(records[0].components["similarity"])


@slow
def test_a_batch_equals_one_by_one(chain):
    items = [Item(TEXT, tokens(i, number), prompt_key=f"p{i % 2}") for i, number in enumerate((40, 8, 25))]
    together = chain.score(items)[0]
    for item, record in zip(items, together):
        alone = chain.score([item])[0][0]
        assert (alone.transcript, alone.wer, alone.score) == (record.transcript, record.wer, record.score)
        assert alone.components["nll"] == pytest.approx(record.components["nll"], rel=1e-3)


@slow
def test_nan_audio_of_the_decoder_is_the_systems_failure(chain, monkeypatch):
    def broken(sequences, prompts):
        return [Speech(noise(1) * np.float32(np.nan if len(each) == 9 else 1)) for each in sequences]

    monkeypatch.setattr(chain, "_token2wav", broken)
    result = score_isolated(chain, [Item(TEXT, tokens(0, 8)), Item(TEXT, tokens(1, 9)), Item(TEXT, tokens(2, 10))])
    assert [record.status.value for record in result.records] == ["ok", "server_error", "ok"]
    assert np.isnan(result.records[1].score)


@slow
def test_prompts_follow_the_key(chain):
    names = [chain._prompt(Item(TEXT, tokens(0, 5), prompt_key=key)).key for key in ("p0", "p1", "x", "x", "y")]
    assert names[:2] == ["p0", "p1"]
    assert names[2] == names[3]


@slow
def test_self_test(chain, models):
    assert chain.self_test()["known_sentence"]["text"] == TEXT
    strict = make_chain({**models, "self_test_max_wer": -1.0}, "cpu")
    with pytest.raises(SelfTestError, match="--self-test-max-wer"):
        strict.self_test()


@slow
def test_recogniser_batches_keep_order_and_survive_bad_clips(models):
    asr = SenseVoice(models["asr_model"], batch_size=2)
    clips = [noise(1.0), np.zeros(8000, np.float32), noise(0.5, 1), noise(0.01), noise(2.0, 2), noise(1, 3) * np.nan]
    heard = asr.transcribe(clips)
    assert [clip.status for clip in heard] == ["ok", "silent", "ok", "too_short", "ok", "not_finite"]
    assert [asr.transcribe([clip])[0].text for clip in clips] == [clip.text for clip in heard]
    assert heard[0].text
    assert "<|" not in "".join(clip.text for clip in heard)
    assert asr.transcribe([]) == []


@slow
def test_likelihood_prefers_what_was_heard(models):
    asr = SenseVoice(models["asr_model"])
    clip = noise(1.0)
    heard = asr.transcribe([clip])[0].text
    likely, other, nothing, silent = asr.reference_nll(
        [clip, clip, clip, np.zeros(16000, np.float32)], [heard, "人水山雨风", "", heard]
    )
    assert 0 <= likely < other
    assert np.isnan(nothing)
    assert silent == float("inf")


@slow
@pytest.mark.parametrize("missing", ["model.pt", "am.mvn", "tokens.json", "config.yaml"])
def test_an_incomplete_recogniser_folder_is_refused(models, tmp_path, missing):
    for path in Path(models["asr_model"]).iterdir():
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(RecogniserError, match=r"expected (a SenseVoice folder|tokens.json)"):
        SenseVoice(tmp_path)


@slow
def test_weights_that_do_not_fill_the_model_are_refused(models, tmp_path):
    """FunASR would leave the missing tensor at a random value and say so in one line of its chatter."""
    for path in Path(models["asr_model"]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    state = torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"]
    del state["ctc.ctc_lo.weight"]
    torch.save({"state_dict": state}, tmp_path / "model.pt")
    with pytest.raises(RecogniserError, match="ctc.ctc_lo.weight.*found nothing"):
        SenseVoice(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"language": "zz"}, "expected one of auto, zh"),
        ({"batch_size": 0}, "at least 1"),
        ({"device": "cuda:0"}, "no GPU"),
        ({"model": "/no/such/folder"}, "no such folder"),
        ({"model": "SenseVoiceSmall"}, "hub name org/name"),
    ],
)
def test_options_that_funasr_would_swallow(arguments, words):
    with pytest.raises(RecogniserError, match=words):
        SenseVoice(**{"model": "org/name", **arguments})


def test_tags_are_stripped_without_emoji():
    assert strip_tags("<|zh|><|HAPPY|><|BGM|><|withitn|>今天天气很好。") == "今天天气很好。"
    assert strip_tags("<|nospeech|><|EMO_UNKNOWN|><|Event_UNK|><|woitn|>") == ""
    assert strip_tags("1 < 2 | 3 > 2") == "1 < 2 | 3 > 2"


def test_clip_status():
    assert clip_status(np.zeros(399, np.float32)) == "too_short"
    assert clip_status(np.full(400, 9e-4, np.float32)) == "silent"
    assert clip_status(np.full(400, 2e-3, np.float32)) == "ok"
    assert clip_status(np.array([0.1, np.inf])) == "not_finite"
    with pytest.raises(ValueError, match="one dimension"):
        clip_status(np.zeros((1, 400)))
