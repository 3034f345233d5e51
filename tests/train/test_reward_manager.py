"""The reward manager with a stand-in for the TransferQueue: bounds, time-outs, waiting, and what is never a score."""

import asyncio
import time
import types

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto

from cosyvoice.training import reward_manager
from cosyvoice.training.reward_manager import PrimeRewardManager, Settings, UnscoredRollout, overlong_penalty


class Tokenizer:
    """Pieces by id; 9 is a special end token."""

    def decode(self, ids, skip_special_tokens):
        kept = [int(i) for i in ids if int(i) != 9 or not skip_special_tokens]
        return "".join("<|eos1|>" if i == 9 else f"<|s_{i}|>" for i in kept)


@pytest.fixture
def reports(monkeypatch):
    """The tags that are put into the TransferQueue."""
    tags = []

    async def put(key, partition_id, tag):
        tags.append((partition_id, tag))

    monkeypatch.setattr(reward_manager, "tq", types.SimpleNamespace(init=lambda: None, async_kv_put=put))
    return tags


def manager(compute_score, **settings):
    config = OmegaConf.create({"reward": {"prime": settings}, "data": {"max_response_length": 8}})
    return PrimeRewardManager(config, Tokenizer(), compute_score)


def rollout(ids=(1, 2, 9), width=5, **fields):
    """One row as veRL's agent loop passes it: two prompt tokens, the response padded to ``width``."""
    response = torch.zeros(1, width, dtype=torch.long)
    response[0, : len(ids)] = torch.tensor(ids)
    mask = torch.zeros(1, 2 + width, dtype=torch.long)
    mask[0, : 2 + len(ids)] = 1
    fields = {
        "data_source": "toy",
        "reward_model": {"ground_truth": "你好"},
        "extra_info": {"id": "utt1"},
        "uid": "u1",
        "global_steps": 7,
    } | fields
    arrays = {key: np.array([value], dtype=object) for key, value in fields.items()}
    return DataProto.from_dict(
        tensors={"prompts": torch.zeros(1, 2, dtype=torch.long), "responses": response, "attention_mask": mask},
        non_tensors=arrays,
    )


def test_the_function_sees_the_end_token_and_the_sample(reports):
    seen = {}

    async def compute_score(**arguments):
        seen.update(arguments)
        return {"score": 0.25, "wer": 0.5, "status": "ok"}

    result = asyncio.run(manager(compute_score).run_single(rollout()))
    assert seen == {
        "data_source": "toy",
        "solution_str": "<|s_1|><|s_2|><|eos1|>",
        "ground_truth": "你好",
        "extra_info": {"id": "utt1", "uid": "u1"},
    }
    assert result["reward_score"] == 0.25
    extra = result["reward_extra_info"]
    assert (extra["wer"], extra["status"], extra["shaped_score"]) == (0.5, "ok", 0.25)
    begin, end = map(float, extra["reward_clock"].split())
    assert 0 <= end - begin < 60
    assert reports == []


def test_a_plain_function_and_a_plain_number_work_too(reports):
    result = asyncio.run(manager(lambda **_: 1).run_single(rollout()))
    assert result["reward_score"] == 1.0
    assert result["reward_extra_info"]["score"] == 1


def test_no_more_than_the_bound_run_at_once(reports):
    running, most = 0, 0

    async def compute_score(**_):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 0.5

    async def all_of_them():
        one = manager(compute_score, max_in_flight=5)
        return await asyncio.gather(*(one.run_single(rollout()) for _ in range(40)))

    assert len(asyncio.run(all_of_them())) == 40
    assert most == 5


def test_a_server_that_comes_back_costs_nothing_but_time(reports):
    calls = 0

    async def compute_score(**_):
        nonlocal calls
        calls += 1
        if calls < 4:
            raise ConnectionError("http://toy:1: refused")
        if calls == 4:
            await asyncio.sleep(60)
        return {"score": 0.75}

    result = asyncio.run(manager(compute_score, retry_s=0.01, timeout_s=0.05, patience_s=30).run_single(rollout()))
    assert result["reward_score"] == 0.75
    assert calls == 5
    assert reports == []


def test_a_server_that_stays_away_is_reported_as_fatal(reports):
    async def compute_score(**_):
        raise ConnectionError("http://toy:1: refused")

    with pytest.raises(UnscoredRollout, match="http://toy:1: refused"):
        asyncio.run(manager(compute_score, retry_s=0.02, patience_s=0.1).run_single(rollout()))
    ((partition, tag),) = reports
    assert partition == "reward_failures"
    assert (tag["status"], tag["step"], tag["fatal"]) == ("server_error", 7, True)
    assert "ConnectionError: http://toy:1: refused" in tag["message"]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"score": 0.0, "status": "timeout", "message": "busy"}, "timeout"),
        ({"score": 0.0, "status": "server_error"}, "server_error"),
        ({"score": 0.0, "status": "bad_reference"}, "bad_reference"),
        ({"score": float("nan")}, "exception"),
        ({"score": None}, "exception"),
        (ValueError("a mistake in the function"), "exception"),
    ],
)
def test_a_failure_of_the_system_is_never_a_score(reports, answer, status):
    async def compute_score(**_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(UnscoredRollout):
        asyncio.run(manager(compute_score, retry_s=0.01, patience_s=0.03).run_single(rollout()))
    assert reports[0][1]["status"] == status


def test_what_waiting_cannot_cure_is_not_waited_for(reports):
    async def compute_score(**_):
        error = ValueError("the text is empty")
        error.status = "bad_reference"
        raise error

    begin = time.monotonic()
    with pytest.raises(UnscoredRollout):
        asyncio.run(manager(compute_score, retry_s=30, patience_s=600).run_single(rollout()))
    assert time.monotonic() - begin < 25
    assert reports[0][1]["fatal"] is False


def test_too_many_failures_in_a_row_are_fatal_and_a_success_starts_anew(reports):
    script = iter([False, False, True, False, False, False])

    async def compute_score(**_):
        if not next(script):
            raise KeyError("mistake")
        return 1.0

    one = manager(compute_score, max_failures=3)

    async def six():
        for _ in range(6):
            try:
                await one.run_single(rollout())
            except UnscoredRollout:
                continue

    asyncio.run(six())
    assert [tag["fatal"] for _, tag in reports] == [False, False, False, False, True]


def test_a_model_failure_has_a_score(reports):
    async def compute_score(**_):
        return {"score": 0.0, "status": "no_end"}

    result = asyncio.run(manager(compute_score).run_single(rollout()))
    assert result["reward_score"] == 0.0
    assert reports == []


@pytest.mark.parametrize(
    ("n_tokens", "expected"), [(0, 0), (75, 0), (80, -0.4), (100, -2.0), (120, -2.0), (90, -1.2)]
)
def test_soft_overlong_punishment(n_tokens, expected):
    """DAPO, equation 13: L_max 100, L_cache 25, scaled by 2."""
    assert overlong_penalty(n_tokens, 100, 0.25, 2.0) == pytest.approx(expected)
    assert overlong_penalty(n_tokens, 100, 0.0, 2.0) == 0


def test_the_penalty_shapes_the_reward_and_not_the_score(reports):
    one = manager(lambda **_: {"score": 1.0, "wer": 0.0}, overlong_share=0.5, overlong_penalty=1.0)
    result = asyncio.run(one.run_single(rollout(ids=(1, 2, 3, 4, 5, 6), width=8)))
    assert result["reward_score"] == pytest.approx(0.5)  # 6 of 8 tokens: half way through the last half
    assert result["reward_extra_info"]["score"] == 1.0
    assert result["reward_extra_info"]["shaped_score"] == pytest.approx(0.5)


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="unknown setting 'timeout'"):
        Settings.from_config({"timeout": 3})
