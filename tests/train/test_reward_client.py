"""The client that runs inside veRL, against servers that speak Triton's protocol and misbehave on purpose."""

import asyncio
import json
import struct
import threading

import numpy as np
import pytest
from aiohttp import web

import reward_tts
from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving.client import CircuitOpenError, ClientOptions, RewardClient, RewardSystemError, split_urls
from cosyvoice.serving.health import check_servers
from cosyvoice.serving.scoring import format_table, read_rows
from cosyvoice.serving.tensors import token_inputs

FAST = ClientOptions(attempt_timeout_s=20.0, budget_s=40.0, first_pause_s=0.01, longest_pause_s=0.05)
KNOWN = {"text": "你好", "tokens": [1, 2], "prompt_key": "p", "max_wer": 0.1}


class FakeServer:
    """Parses KServe's binary requests and answers what ``script`` says: statuses one by one, then "ok"."""

    def __init__(self, *script, max_tokens=8, wer=0.0):
        self.script = list(script)
        self.info = {"max_tokens": max_tokens, "known_sentence": KNOWN}
        self.wer = wer
        self.requests = []
        self.connections = set()

    async def __aenter__(self):
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v2/models/{model}/infer", self.infer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def infer(self, request):
        self.connections.add(request.transport.get_extra_info("peername"))
        inputs = self.parse(await request.read(), int(request.headers["Inference-Header-Content-Length"]))
        if json.loads(inputs.get("OPTIONS") or "{}").get("info"):
            return self.answer("info", json.dumps(self.info))
        self.requests.append(inputs)
        say = self.script.pop(0) if self.script else "ok"
        if isinstance(say, int):
            return web.json_response({"error": f"told to say {say}"}, status=say)
        if say == "hang":
            await asyncio.sleep(1)
        record = RewardRecord(score=0.5, status=Status(say), wer=self.wer, transcript=inputs["GT_TEXT"])
        if record.status.is_system:
            record.score = float("nan")
        return self.answer(say, record.to_json())

    @staticmethod
    def answer(status, details):
        outputs, raw = [], b""
        for name, text in {"TRANSCRIPTS": "", "STATUS": status, "DETAILS": details}.items():
            value = struct.pack("<I", len(text.encode())) + text.encode()
            size = {"binary_data_size": len(value)}
            outputs.append({"name": name, "datatype": "BYTES", "shape": [1, 1], "parameters": size})
            raw += value
        header = json.dumps({"model_name": "m", "model_version": "1", "outputs": outputs}).encode()
        return web.Response(body=header + raw, headers={"Inference-Header-Content-Length": str(len(header))})

    @staticmethod
    def parse(body, header_size):
        """https://kserve.github.io/website: JSON, then each tensor's bytes; BYTES elements have 4 bytes of length."""
        values, position = {}, header_size
        for tensor in json.loads(body[:header_size])["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            raw = body[position : position + size]
            position += size
            if tensor["datatype"] == "BYTES":
                values[tensor["name"]] = raw[4 : 4 + struct.unpack("<I", raw[:4])[0]].decode()
            else:
                values[tensor["name"]] = np.frombuffer(raw, "<i4" if tensor["datatype"] == "INT32" else "<f4")
        assert position == len(body)
        return values


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_what_is_sent():
    async def body():
        async with FakeServer(max_tokens=5) as server, RewardClient(server.url, FAST) as client:
            record = await client.score([7, 8, 9], "你好", prompt_key="42", ended=False, out_of_range=3)
            assert record.score == 0.5
            assert record.transcript == "你好"
            (sent,) = server.requests
            assert sent["TOKENS"].tolist() == [7, 8, 9, 0, 0]
            assert sent["TOKEN_LENS"].tolist() == [3]
            assert (sent["GT_TEXT"], sent["PROMPT_KEY"]) == ("你好", "42")
            assert json.loads(sent["OPTIONS"]) == {"ended": False, "out_of_range": 3}

    run(body())


def test_more_tokens_than_the_server_takes_count_as_not_ended():
    async def body():
        async with FakeServer(max_tokens=2) as server, RewardClient(server.url, FAST) as client:
            await client.score([7, 8, 9], "你好", ended=True)
            assert server.requests[0]["TOKENS"].tolist() == [7, 8]
            assert json.loads(server.requests[0]["OPTIONS"]) == {"ended": False}

    run(body())


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_what_may_pass_is_tried_again(status):
    async def body():
        async with FakeServer(status, status) as server, RewardClient(server.url, FAST) as client:
            assert (await client.score([1], "a")).status is Status.OK
            assert len(server.requests) == 3

    run(body())


def test_a_slow_answer_is_tried_again():
    async def body():
        options = ClientOptions(attempt_timeout_s=0.5, budget_s=40.0)
        async with FakeServer("hang") as server, RewardClient(server.url, options) as client:
            assert (await client.score([1], "a")).status is Status.OK
            assert len(server.requests) >= 2

    run(body())


def test_a_wrong_request_is_not():
    async def body():
        async with FakeServer(400) as server, RewardClient(server.url, FAST) as client:
            with pytest.raises(RewardSystemError, match="HTTP 400: told to say 400") as error:
                await client.score([1], "a")
            assert error.value.status is Status.BAD_REQUEST
            assert len(server.requests) == 1

    run(body())


@pytest.mark.parametrize("status", ["server_error", "timeout", "bad_reference", "bad_request"])
def test_a_failure_of_the_system_is_raised_not_scored(status):
    async def body():
        async with FakeServer(status) as server, RewardClient(server.url, FAST) as client:
            with pytest.raises(RewardSystemError) as error:
                await client.score([1], "a")
            assert error.value.status.value == status

    run(body())


@pytest.mark.parametrize("status", ["empty", "no_end", "out_of_range", "silent"])
def test_a_failure_of_the_model_has_a_score(status):
    async def body():
        async with FakeServer(status) as server, RewardClient(server.url, FAST) as client:
            assert (await client.score([1], "a")).status.value == status

    run(body())


def test_the_budget_ends():
    async def body():
        async with FakeServer(*[503] * 1000) as server:
            options = ClientOptions(budget_s=0.2, first_pause_s=0.05, longest_pause_s=0.05)
            async with RewardClient(server.url, options) as client:
                with pytest.raises(RewardSystemError, match="given up after") as error:
                    await client.score([1], "a")
                assert error.value.status is Status.SERVER_ERROR
                assert 2 <= len(server.requests) <= 12

    run(body())


def test_nobody_there():
    async def body():
        options = ClientOptions(budget_s=0.2, first_pause_s=0.05)
        async with RewardClient("http://127.0.0.1:9", options) as client:
            with pytest.raises(RewardSystemError, match="127.0.0.1:9"):
                await client.score([1], "a")

    run(body())


def test_the_breaker_opens_and_lets_one_through_after_a_rest():
    async def body():
        options = ClientOptions(breaker_failures=2, breaker_rest_s=0.3)
        async with FakeServer(400, 400) as server, RewardClient(server.url, options) as client:
            for _ in range(2):
                with pytest.raises(RewardSystemError):
                    await client.score([1], "a")
            with pytest.raises(CircuitOpenError, match="2 reward requests failed in a row, the last with: .*400"):
                await client.score([1], "a")
            assert len(server.requests) == 2  # not even asked
            await asyncio.sleep(0.35)
            assert (await client.score([1], "a")).status is Status.OK
            assert (await client.score([1], "a")).status is Status.OK

    run(body())


def test_requests_go_to_healthy_servers():
    async def body():
        async with FakeServer() as one, FakeServer() as two:
            async with RewardClient(f"{one.url}, {two.url},http://127.0.0.1:9", FAST) as client:
                await asyncio.gather(*[client.score([i], "a") for i in range(40)])
            assert len(one.requests) + len(two.requests) == 40
            assert min(len(one.requests), len(two.requests)) >= 10

    run(body())


def test_connections_are_kept():
    async def body():
        async with FakeServer() as server:
            async with RewardClient(server.url, ClientOptions(connections=4)) as client:
                await asyncio.gather(*[client.score([i], "a") for i in range(100)])
            assert len(server.connections) <= 4

    run(body())


def test_compute_score_from_a_loop_and_from_threads():
    async def body():
        async with FakeServer("ok", "empty", max_tokens=8) as server:
            answer = "<|s_3|><|s_4|><|eos1|><|s_5|>"
            kwargs = {"urls": server.url, "budget_s": 40.0, "attempt_timeout_s": 20.0}
            one = await reward_tts.compute_score("tts", answer, "你好", {"index": 7}, num_turns=1, **kwargs)
            two = await asyncio.to_thread(
                reward_tts.compute_score_sync, data_source="tts", solution_str="", ground_truth="你好", **kwargs
            )
            assert list(one) == list(two)
            assert list(one)[0] == "score"
            assert (one["score"], one["status"], two["status"]) == (0.5, "ok", "empty")
            assert all(isinstance(value, float | str) for value in one.values())
            first, second = server.requests
            assert first["TOKENS"].tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
            assert first["PROMPT_KEY"] == "7"
            assert json.loads(first["OPTIONS"])["ended"] is True
            assert second["TOKEN_LENS"].tolist() == [0]
            assert json.loads(second["OPTIONS"])["ended"] is False

    run(body())


def test_compute_score_counts_what_is_no_speech():
    async def body():
        async with FakeServer() as server:
            answer = "<|s_3|><|s_6561|>hello<|eos1|>"
            await reward_tts.compute_score("tts", answer, "你好", None, urls=server.url, budget_s=40.0)
            assert server.requests[0]["TOKENS"][:1].tolist() == [3]
            assert json.loads(server.requests[0]["OPTIONS"])["out_of_range"] == 2

    run(body())


def test_one_client_per_process_and_servers():
    from cosyvoice.serving.shared_client import shared_client

    made = []
    threads = [threading.Thread(target=lambda: made.append(shared_client("http://127.0.0.1:9"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, made))) == 1
    assert shared_client("http://127.0.0.1:10") is not made[0]


@pytest.mark.parametrize(
    ("extra", "key"),
    [({"prompt_key": "a", "id": "b"}, "a"), ({"id": "b", "index": 3}, "b"), ({"index": 0}, "0"), ({}, "")],
)
def test_prompt_key(extra, key):
    assert reward_tts.prompt_key(extra) == key


@pytest.mark.parametrize("urls", ["", " , ", "127.0.0.1:8000", "https://a:1", "http://a", "http://a:1/v2"])
def test_addresses_of_another_form(urls):
    with pytest.raises(ValueError, match=r"expected (at least one address|http://HOST:PORT)"):
        split_urls(urls)


def test_a_token_that_no_int32_holds():
    with pytest.raises(ValueError, match=str(2**40)):
        token_inputs([1, 2**40], "a", width=4, options={})


def test_check(capsys):
    async def body():
        async with FakeServer() as server:
            assert "ok, '你好' heard as '你好'" in await check_servers(server.url)
        async with FakeServer(wer=0.5) as server:
            with pytest.raises(RewardSystemError, match=r"error rate 0.500; expected ok and at most 0.1"):
                await check_servers(server.url)
        async with FakeServer("silent") as server:
            with pytest.raises(RewardSystemError, match="status silent"):
                await check_servers(server.url)

    run(body())
    assert reward_tts.main(["--check", "--urls", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_scoring_a_file(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    rows = [{"id": "a", "text": "你好", "code": [1, 2]}, {"text": "再见", "code": "<|s_3|>"}, {"text": "", "code": []}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert [(row.id, row.tokens) for row in read_rows(path)] == [("a", [1, 2]), ("2", [3]), ("3", [])]

    async def body():
        async with FakeServer("ok", "ok", "bad_reference") as server:
            arguments = [str(path), "--urls", server.url, "--output", str(tmp_path / "out.jsonl"), "--concurrency", "1"]
            return await asyncio.to_thread(reward_tts.main, arguments)

    assert run(body()) == 1  # one line has no score
    table = capsys.readouterr().out
    assert "bad_reference" in table
    assert "utterances/s" in table
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["status"], row["score"]) for row in written] == [
        ("a", "ok", 0.5),
        ("2", "ok", 0.5),
        ("3", "bad_reference", None),
    ]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": 1, "code": []}', '{"text": "a"}', '{"text": "a", "code": 3}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a", "code": [1]}\n' + line + "\n")
    with pytest.raises(ValueError, match="data.jsonl line 2: "):
        read_rows(path)


def test_means_leave_out_what_has_no_score():
    good = RewardRecord(score=0.5, status=Status.OK, wer=0.25, wer_toneless=0.25, cer=0.25, seconds=2.0)
    bad = RewardRecord(score=float("nan"), status=Status.TIMEOUT, message="too late")
    table = format_table([good, good, bad], 2.0)
    assert [line.split() for line in table.splitlines()[1:4]] == [
        ["ok", "2", "0.500", "0.250", "0.250", "0.250", "2.000"],
        ["timeout", "1", "nan", "nan", "nan", "nan", "0.000"],
        ["all", "3", "0.500", "0.250", "0.250", "0.250", "2.000"],
    ]
    assert "1.5 utterances/s, 2.0 s of audio per second" in table
    assert table.endswith("first failure: too late")
