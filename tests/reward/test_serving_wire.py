"""Requests that arrive are checked row by row; what goes out has REWARDS first and NaN for system failures."""

import json

import numpy as np
import pytest

from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving import wire
from cosyvoice.serving.items import Item, failure


def request(tokens=((1, 2, 3, 0),), lengths=(3,), text=(b"\xe4\xbd\xa0\xe5\xa5\xbd",), **more):
    data = {
        "TOKENS": np.array(tokens, np.int32),
        "TOKEN_LENS": np.array(lengths, np.int32).reshape(-1, 1),
        "GT_TEXT": np.array(text, dtype=object).reshape(-1, 1),
    }
    data.update({name: np.array(values, dtype=object).reshape(-1, 1) for name, values in more.items()})
    return data


def read(data, model=wire.TOKEN_MODEL, limits=None):
    return wire.read_request(model, data, limits or wire.Limits())


def test_a_row_is_cut_to_its_length():
    (item,) = read(request())
    assert isinstance(item, Item)
    assert item.tokens.tolist() == [1, 2, 3]
    assert (item.reference, item.prompt_key, item.ended, item.out_of_range) == ("你好", "你好", True, 0)


def test_tokens_are_copied_out_of_the_request():
    data = request()
    (item,) = read(data)
    data["TOKENS"][:] = 9
    assert item.tokens.tolist() == [1, 2, 3]


def test_options_and_prompt_key():
    (item,) = read(request(PROMPT_KEY=[b"p7"], OPTIONS=[b'{"ended": false, "out_of_range": 2}']))
    assert (item.prompt_key, item.ended, item.out_of_range) == ("p7", False, 2)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"lengths": (-1,)}, Status.BAD_REQUEST, "TOKEN_LENS -1"),
        ({"lengths": (5,)}, Status.BAD_REQUEST, "width of TOKENS, 4"),
        ({"text": (b"",)}, Status.BAD_REFERENCE, "GT_TEXT is empty"),
        ({"text": (b"  ",)}, Status.BAD_REFERENCE, "GT_TEXT is empty"),
        ({"text": (b"\xff\xfe",)}, Status.BAD_REQUEST, "not UTF-8"),
        ({"text": (b"a" * 10_000_000,)}, Status.BAD_REQUEST, "10000000 bytes"),
        ({"OPTIONS": [b"{"]}, Status.BAD_REQUEST, "not JSON"),
        ({"OPTIONS": [b"[1]"]}, Status.BAD_REQUEST, "JSON object"),
        ({"OPTIONS": [b'{"endde": true}']}, Status.BAD_REQUEST, "endde"),
        ({"OPTIONS": [b'{"ended": 1}']}, Status.BAD_REQUEST, "ended (bool)"),
        ({"PROMPT_KEY": [b"\xff"]}, Status.BAD_REQUEST, "PROMPT_KEY is not UTF-8"),
    ],
)
def test_a_bad_row_gets_its_status(change, status, words):
    (record,) = read(request(**change))
    assert record.status is status
    assert words in record.message
    assert np.isnan(record.score)


def test_a_bad_row_leaves_its_neighbours_alone():
    rows = read(request(tokens=((1, 2), (3, 4), (5, 6)), lengths=(2, 7, 1), text=(b"a", b"b", b"c")))
    assert [isinstance(row, Item) for row in rows] == [True, False, True]
    assert rows[2].tokens.tolist() == [5]


def test_longer_than_the_server_takes():
    (record,) = read(request(), limits=wire.Limits(max_tokens=2))
    assert record.status is Status.BAD_REQUEST
    assert "--max-tokens" in record.message


def test_missing_tensors_and_odd_shapes():
    data = request()
    del data["TOKEN_LENS"]
    assert "TOKEN_LENS is missing" in read(data)[0].message
    data = request()
    data["TOKEN_LENS"] = np.array([[1, 2]], np.int32)
    assert "expected [B, width] and [B, 1]" in read(data)[0].message


def test_a_request_for_information_needs_no_text():
    assert read(request(text=(b"",), OPTIONS=[b'{"info": true}'])) == [wire.INFO]


def test_a_waveform():
    data = {
        "WAV": np.array([[0.5, 0.25, 0.0]], np.float32),
        "WAV_LENS": np.array([[2]], np.int32),
        "GT_TEXT": np.array([["好".encode()]], dtype=object),
    }
    (item,) = read(data, wire.WAVE_MODEL)
    assert item.tokens is None
    assert item.wave.tolist() == [0.5, 0.25]


def test_outputs():
    good = RewardRecord(score=0.25, status=Status.OK, transcript="你")
    bad = failure(Status.TIMEOUT, "too late")
    out = wire.write_response([good, bad, {"max_tokens": 7}])
    assert list(out) == ["REWARDS", "TRANSCRIPTS", "STATUS", "DETAILS"]
    assert out["REWARDS"].dtype == np.float32
    assert out["REWARDS"].shape == (3, 1)
    assert out["REWARDS"][0, 0] == 0.25
    assert np.isnan(out["REWARDS"][1, 0])
    assert [value.decode() for value in out["STATUS"][:, 0]] == ["ok", "timeout", "info"]
    assert RewardRecord.from_json(out["DETAILS"][0, 0]) == good
    assert json.loads(out["DETAILS"][2, 0]) == {"max_tokens": 7}


def test_a_model_failure_is_not_a_failure_of_the_system():
    with pytest.raises(ValueError, match="needs a score"):
        failure(Status.EMPTY, "no token")
