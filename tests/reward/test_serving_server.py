"""The real server (PyTriton, worker processes, client) with workers that hold no model."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from server_process import ServerProcess, free_ports, tensors
from serving_standins import expected_score

from cosyvoice.reward.record import Status
from cosyvoice.serving.client import ClientOptions, RewardClient, RewardSystemError

pytestmark = pytest.mark.slow
CLIENTS = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two workers that take 0.2 s per batch, as models would, and obey the reference text."""
    folder = tmp_path_factory.mktemp("server")
    made = ServerProcess(
        folder / "server.log",
        *("--worker-factory", "serving_standins:Moody", "--number-of-devices", "2"),
        *("--worker-option", "seconds=0.2", f"marker={folder / 'died'}"),
    )
    try:
        yield made.wait_ready()
    finally:
        made.close()


async def ask_many(url, number, meanwhile=None, options=None):
    """``number`` requests of 50 to 500 tokens from 64 clients; every answer is compared with its request."""
    rng = np.random.default_rng(0)
    jobs = [rng.integers(0, 6561, rng.integers(50, 501)) for _ in range(number)]
    todo = iter(enumerate(jobs))
    statuses = []

    async with RewardClient(url, options or ClientOptions(connections=CLIENTS)) as client:

        async def one_client():
            for index, tokens in todo:
                record = await client.score(tokens, f"文本{index}", prompt_key=f"键{index}")
                assert record.transcript == f"文本{index}|键{index}"
                assert record.score == pytest.approx(expected_score(tokens), abs=1e-9)
                statuses.append(record.status)
                if meanwhile and len(statuses) == number // 2:
                    meanwhile()

        before = (await client.info())["batch_histogram"]
        await asyncio.gather(*[one_client() for _ in range(CLIENTS)])
        after = (await client.info())["batch_histogram"]
    batches = {int(size): count - before.get(size, 0) for size, count in after.items()}
    return statuses, batches


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 240))


def post_one(server, *args, **kwargs):
    """HTTP code, and the values of a one-row answer by name."""
    code, body = server.post(tensors(*args, **kwargs))
    outputs = json.loads(body).get("outputs", []) if body else []
    return code, {output["name"]: output["data"][0] for output in outputs}


def test_many_clients_with_mixed_lengths_fill_the_batches(server):
    statuses, batches = run(ask_many(server.url, 2000))
    assert statuses == [Status.OK] * 2000
    assert sum(size * count for size, count in batches.items()) == 2000
    mean = 2000 / sum(batches.values())
    print(f"batch sizes {batches}, mean {mean:.1f}")
    assert mean >= 12


def test_a_killed_worker_costs_no_answer_and_no_score(server):
    async def victim():
        async with RewardClient(server.url) as client:
            return (await client.info())["workers"][0]["pid"]

    pid = run(victim())
    restarts = server.metric("reward_worker_restarts_total")
    statuses, _ = run(ask_many(server.url, 1000, meanwhile=lambda: os.kill(pid, signal.SIGKILL)))
    assert statuses == [Status.OK] * 1000
    assert server.metric("reward_worker_restarts_total") == restarts + 1


def test_the_original_clients_request(server):
    """Three inputs of their own width; the client of the original recipe reads the first value of the first output."""
    code, body = server.post(tensors([[5, 6, 7]], [[3]], [["你好"]]))
    first = json.loads(body)["outputs"][0]
    assert code == 200
    assert first["name"] == "REWARDS"
    assert first["data"][0] == pytest.approx(expected_score(np.array([5, 6, 7])), abs=1e-6)


@pytest.mark.parametrize(
    ("args", "more", "status"),
    [
        (([[1, 2]], [[-1]], [["a"]]), {}, "bad_request"),
        (([[1, 2]], [[3]], [["a"]]), {}, "bad_request"),
        (([[1, 2]], [[2**31 - 1]], [["a"]]), {}, "bad_request"),
        (([[0] * 3000], [[3000]], [["a"]]), {}, "bad_request"),
        (([[1, 2]], [[2]], [[""]]), {}, "bad_reference"),
        (([[1, 2]], [[2]], [["a" * 10_000_000]]), {}, "bad_request"),
        (([[1, 2]], [[2]], [["a"]]), {"OPTIONS": [["no json"]]}, "bad_request"),
        (([[1, 2]], [[2]], [["raise"]]), {}, "server_error"),
        (([[1, 2]], [[0]], [["a"]]), {}, "ok"),  # the stand-in does not mind an empty answer
        (([[]], [[0]], [["a"]]), {}, "ok"),
    ],
)
def test_a_malformed_request_gets_its_status_and_the_next_one_works(server, args, more, status):
    code, values = post_one(server, *args, **more)
    assert code == 200
    assert values["STATUS"] == status
    assert json.loads(values["DETAILS"])["status"] == status
    if status != "ok":
        assert values["REWARDS"] != values["REWARDS"]  # NaN: nobody can train on it
        assert json.loads(values["DETAILS"])["message"]
    assert post_one(server, [[1, 2]], [[2]], [["a"]])[1]["STATUS"] == "ok"


def test_requests_that_triton_itself_refuses(server):
    inputs = tensors([[1, 2]], [[2]], [["a"]])
    code, body = server.post(inputs[:2])
    assert code == 400
    assert "GT_TEXT" in body or "expected" in body
    assert server.post(tensors([[1]] * 33, [[1]] * 33, [["a"]] * 33))[0] == 400
    # JSON numbers beyond int32 are cut off by Triton before anybody sees them: our client refuses them instead.
    assert post_one(server, [[2**40, 2]], [[2]], [["a"]])[0] in (200, 400)
    assert post_one(server, [[1, 2]], [[2]], [["a"]])[1]["STATUS"] == "ok"


def test_text_that_is_not_utf8(server):
    import tritonclient.http as triton_http

    values = [("TOKENS", np.array([[1, 2]], np.int32)), ("TOKEN_LENS", np.array([[2]], np.int32))]
    values.append(("GT_TEXT", np.array([[b"\xff\xfe"]], dtype=object)))
    inputs = []
    for name, value in values:
        kind = "BYTES" if value.dtype == object else "INT32"
        inputs.append(triton_http.InferInput(name, list(value.shape), kind))
        inputs[-1].set_data_from_numpy(value)
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        answer = client.infer("token2wav_asr", inputs)
    assert answer.as_numpy("STATUS")[0, 0] == b"bad_request"
    assert b"not UTF-8" in answer.as_numpy("DETAILS")[0, 0]


def test_bad_rows_of_a_batch_leave_the_others_alone(server):
    code, body = server.post(tensors([[1, 2], [3, 4], [5, 6]], [[2], [9], [2]], [["a"], ["b"], ["raise"]]))
    outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
    assert code == 200
    assert outputs["STATUS"] == ["ok", "bad_request", "server_error"]


def test_metrics(server):
    text = server.get("/metrics", server.ports[3])[1]
    for name in ("reward_requests_total", "reward_batch_size_bucket", "reward_queue_depth", "reward_rss_bytes"):
        assert f"\n{name}" in text
    for phase in ("queue", "decode", "asr", "score"):
        assert f'reward_phase_seconds_sum{{phase="{phase}"}}' in text
    assert server.metric("reward_workers_ready") == 2
    assert "nv_inference_pending_request_count" in server.get("/metrics", server.ports[2])[1]


def test_triton_is_started_again_if_it_dies(server):
    (triton,) = [each for each in server.family() if each.name() == "tritonserver"]
    workers = server.metric("reward_worker_restarts_total")

    async def body():
        async with RewardClient(server.url) as client:
            assert (await client.score([1, 2], "a")).status is Status.OK
            triton.kill()
            assert (await client.score([1, 2], "a")).status is Status.OK

    run(body())
    assert server.metric("reward_worker_restarts_total") == workers


def test_memory_stays_flat(server):
    """5,000 requests through server, Triton and its stubs; the workers' models are the recogniser's own affair."""
    run(ask_many(server.url, 1000))
    before = sum(process.memory_info().rss for process in server.family())
    run(ask_many(server.url, 5000))
    after = sum(process.memory_info().rss for process in server.family())
    print(f"resident memory {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB")
    assert after - before < 0.05 * before


def test_a_taken_port_is_one_sentence(tmp_path):
    ports = free_ports(4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[1]))
        taken.listen()
        server = ServerProcess(tmp_path / "log", "--worker-factory", "serving_standins:Trivial", ports=ports)
        assert server.process.wait(60) == 1
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.endswith(f"--grpc-port {ports[1]} on 127.0.0.1 cannot be used: Address already in use")


def test_a_failed_self_test_ends_the_server(tmp_path):
    server = ServerProcess(tmp_path / "log", "--worker-factory", "serving_standins:FailsItsTest")
    assert server.process.wait(120) == 1
    assert "known sentence scored 0.9, expected at most 0.1" in (tmp_path / "log").read_text().splitlines()[-1]


def leftovers(pid):
    return [*Path("/tmp").glob(f"cosyvoice-reward-{pid}-*"), *Path("/dev/shm").glob(f"pytrtion{pid}-*")]


def wait_until_gone(processes, seconds=60.0):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive


def test_a_killed_server_comes_back_and_the_client_goes_on(tmp_path):
    options = ("--worker-factory", "serving_standins:Tested")
    first = ServerProcess(tmp_path / "log", *options)
    second = None
    try:
        first.wait_ready()
        fast = ClientOptions(budget_s=1.0, first_pause_s=0.1)

        async def body():
            nonlocal second
            async with RewardClient(first.url, fast) as client:
                assert (await client.score([1, 2], "a")).status is Status.OK
                family = first.family()
                first.process.kill()
                first.process.wait()
                with pytest.raises(RewardSystemError, match="given up after"):
                    await client.score([1, 2], "a")
                await asyncio.to_thread(wait_until_gone, family)
                assert leftovers(first.process.pid)
                second = ServerProcess(tmp_path / "log2", *options, ports=first.ports)
                await asyncio.to_thread(second.wait_ready)
                assert not leftovers(first.process.pid)
                assert (await client.score([1, 2], "a")).status is Status.OK

        run(body())
        family = second.family()
        assert second.terminate(signal.SIGTERM) == 0
        wait_until_gone(family)
        assert not leftovers(second.process.pid)
    finally:
        first.close()
        if second is not None:
            second.close()


def test_ctrl_c_while_starting(tmp_path):
    server = ServerProcess(tmp_path / "log", "--worker-factory", "serving_standins:Trivial")
    try:
        deadline = time.monotonic() + 60
        while len(server.family()) < 2 and time.monotonic() < deadline:  # a worker is being started
            time.sleep(0.05)
        assert server.terminate(signal.SIGINT) == 0
        assert not leftovers(server.process.pid)
    finally:
        server.close()
