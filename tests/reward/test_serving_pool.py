"""The pool answers every item, whatever happens to its workers. The workers are real processes without models."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from cosyvoice.reward.record import Status
from cosyvoice.serving.items import Item
from cosyvoice.serving.metrics import ServingMetrics
from cosyvoice.serving.pool import PoolError, WorkerPool, plan_workers
from cosyvoice.serving.slot import Limits
from cosyvoice.serving.worker import WorkerSpec, resolve_factory

sys.path.insert(0, str(Path(__file__).parent))  # found by the worker processes too
from serving_standins import expected_score


def make_pool(factory="Moody", workers=2, options=None, **limits):
    spec = WorkerSpec(f"serving_standins:{factory}", options or {})
    return WorkerPool(plan_workers(spec, "cpu", workers, 1), ServingMetrics(), Limits(**limits))


def items(*references):
    """Items of different lengths, the longest first."""
    return [
        Item(reference, np.arange(10 * (len(references) - i), dtype=np.int32)) for i, reference in enumerate(references)
    ]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = make_pool(options={"marker": str(tmp_path_factory.mktemp("pool") / "died")}, batch_timeout_s=3.0)
    made.start()
    yield made
    made.close()


def ask(pool, *references):
    return pool.submit(items(*references)).result(60)


def test_every_item_gets_its_own_answer_in_order(pool):
    asked = items("a", "b", "c", "d")
    records = pool.submit(asked).result(60)
    assert [record.reference for record in records] == ["a", "b", "c", "d"]
    assert [record.score for record in records] == [expected_score(item.tokens) for item in asked]


def test_no_items_no_wait(pool):
    assert pool.submit([]).result(0) == []


def test_an_item_that_raises_fails_alone(pool):
    records = ask(pool, "a", "raise", "b", "c", "raise")
    assert [record.status.value for record in records] == ["ok", "server_error", "ok", "ok", "server_error"]
    assert "told to raise" in records[1].message
    assert np.isnan(records[1].score)


def test_a_worker_that_dies_once_costs_nobody_an_answer(pool):
    before = pool.metrics.value("reward_worker_restarts_total", reason="died")
    assert {record.status for record in ask(pool, "a", "die once", "b")} == {Status.OK}
    assert pool.metrics.value("reward_worker_restarts_total", reason="died") == before + 1


@pytest.mark.slow
def test_an_item_that_kills_its_worker_fails_alone(pool):
    records = ask(pool, "a", "die", "b")
    assert [record.status.value for record in records] == ["ok", "server_error", "ok"]
    assert "exit code 17" in records[1].message


@pytest.mark.slow
def test_an_item_that_hangs_is_answered(pool):
    records = ask(pool, "a", "hang", "b")
    assert [record.status.value for record in records] == ["ok", "timeout", "ok"]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_nothing_is_lost(pool):
    victim = pool.describe()[0]["pid"]
    futures = []
    for number in range(60):
        futures.append(pool.submit(items(*["x"] * 32)))
        if number == 20:
            os.kill(victim, signal.SIGKILL)
    assert {record.status for future in futures for record in future.result(60)} == {Status.OK}
    wait_for(lambda: all(w["state"] == "ready" and w["pid"] != victim for w in pool.describe()))


@pytest.mark.slow
def test_a_stopped_process_counts_as_hanging(pool):
    """SIGSTOP, then batches larger than a pipe's buffer: the thread that feeds it must not block for ever."""
    os.kill(pool.describe()[1]["pid"], signal.SIGSTOP)
    batch = [Item("x", np.zeros(100_000, np.int32)) for _ in range(4)]
    futures = [pool.submit(batch) for _ in range(4)]
    assert {record.status for future in futures for record in future.result(60)} == {Status.OK}


@pytest.mark.slow
def test_recycled_after_a_number_of_requests():
    pool = make_pool("Trivial", workers=1, recycle_after=10)
    pool.start()
    try:
        first = pool.describe()[0]["pid"]
        for _ in range(3):
            assert {record.status for record in ask(pool, *["x"] * 10)} == {Status.OK}
        assert pool.metrics.value("reward_worker_restarts_total", reason="request count") >= 2
        assert pool.describe()[0]["pid"] != first
        assert not psutil.pid_exists(first)
    finally:
        pool.close()


@pytest.mark.slow
def test_recycled_above_a_memory_bound():
    pool = make_pool("Trivial", workers=1, rss_limit_bytes=1)
    pool.start()
    try:
        first = pool.describe()[0]["pid"]
        ask(pool, "x")
        wait_for(lambda: pool.metrics.value("reward_worker_restarts_total", reason="memory") == 1)
        assert {record.status for record in ask(pool, "x")} == {Status.OK}
        assert not psutil.pid_exists(first)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("factory", "words"),
    [("Broken", "no weights here"), ("FailsItsTest", "known sentence scored 0.9"), ("Nobody", "has no Nobody")],
)
def test_a_worker_that_cannot_start_is_reported(factory, words):
    pool = make_pool(factory, workers=1)
    with pytest.raises(PoolError, match=words):
        pool.start()
    (record,) = pool.submit(items("late")).result(1)
    assert record.status is Status.SERVER_ERROR


def test_close_answers_what_waits_and_leaves_no_process():
    pool = make_pool("Trivial", workers=1, options={"seconds": 0.5})
    pool.start()
    pid = pool.describe()[0]["pid"]
    futures = [pool.submit(items("x")) for _ in range(5)]
    pool.close()
    statuses = [future.result(1)[0].status for future in futures]
    assert Status.SERVER_ERROR in statuses
    assert set(statuses) <= {Status.OK, Status.SERVER_ERROR}
    assert not psutil.pid_exists(pid)


def test_cpu_workers_share_the_cores_and_gpus_get_one_each(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = WorkerSpec("a:b")
    assert [(s.device, s.threads) for s in plan_workers(spec, "cpu", 4, 1)] == [("cpu", 4)] * 4
    assert [s.device for s in plan_workers(spec, "cuda", 2, 2)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [s.threads for s in plan_workers(spec, "cpu", 4, 1)] == [2] * 4
    with pytest.raises(PoolError, match="expected at least 1"):
        plan_workers(spec, "cpu", 0, 1)


def test_factory_names():
    assert resolve_factory("os.path:join") is os.path.join
    with pytest.raises(ValueError, match="module:function"):
        resolve_factory("os.path")


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
