"""Asks reward servers: spreads requests, keeps connections, retries what may pass, raises what does not.

A server's *model* failures (no speech, does not stop) are answers with a score. Its *system* failures never become
a score: transport errors, 404 (not loaded yet), 429 and 5xx are retried within a budget and then raised, statuses
such as "bad_reference" are raised at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import tritonclient.http.aio as triton_http
from tritonclient.utils import InferenceServerException

from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving.tensors import read_answer, token_inputs, wave_inputs
from cosyvoice.serving.wire import TOKEN_MODEL, WAVE_MODEL

#: HTTP statuses worth another try. 404: Triton is up before the model is loaded.
RETRIED = frozenset({404, 429, *range(500, 600)})
#: aiohttp would offer gzip, and Triton takes it up: both ends would spend more on that than on the rest of an answer.
_PLAIN = {"Accept-Encoding": "identity"}
logger = logging.getLogger(__name__)


class RewardSystemError(RuntimeError):
    """No score, and the model is not to blame. ``status`` is one of the system's statuses."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class CircuitOpenError(RewardSystemError):
    """So many requests failed in a row that asking on makes no sense for a while."""


@dataclass(frozen=True)
class ClientOptions:
    """Time limits and bounds.

    Attributes:
        attempt_timeout_s: one try of one request.
        budget_s: all tries of one request with the pauses between them.
        first_pause_s, longest_pause_s: back-off between tries, doubled each time, with jitter.
        connections: kept open to each server; more requests wait for one.
        breaker_failures: raised failures in a row after which the circuit breaker opens.
        breaker_rest_s: how long it stays open before one request may try again.
    """

    attempt_timeout_s: float = 120.0
    budget_s: float = 300.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0
    connections: int = 64
    breaker_failures: int = 32
    breaker_rest_s: float = 30.0


@dataclass
class _Server:
    """One server as this client sees it."""

    url: str
    http: triton_http.InferenceServerClient
    slots: asyncio.Semaphore
    in_flight: int = 0
    failures: int = 0
    down_until: float = 0.0
    info: dict[str, Any] | None = field(default=None, repr=False)


class _Breaker:
    """Opens after N failures in a row, lets one request through after a rest."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._failures = 0
        self._opened_at: float | None = None
        self._last = ""

    def check(self) -> None:
        if self._opened_at is None:
            return
        now = time.monotonic()
        if now - self._opened_at >= self._options.breaker_rest_s:
            self._opened_at = now  # this one tries; the others rest on
            return
        raise CircuitOpenError(
            Status.SERVER_ERROR,
            f"{self._failures} reward requests failed in a row, the last with: {self._last}; "
            "see the server's log, or ask it with reward_tts.py --check",
        )

    def success(self) -> None:
        self._failures, self._opened_at = 0, None

    def failure(self, message: str) -> None:
        self._failures, self._last = self._failures + 1, message
        if self._failures >= self._options.breaker_failures and self._opened_at is None:
            self._opened_at = time.monotonic()


class RewardClient:
    """Asynchronous client of one or more reward servers. Belongs to the event loop it is made in.

    Args:
        urls: addresses such as ``http://127.0.0.1:8000``, a list or one string with commas.
        options: time limits and bounds.

    Raises:
        ValueError: no address, or one of another form.
    """

    def __init__(self, urls: str | Sequence[str], options: ClientOptions | None = None) -> None:
        self.options = options or ClientOptions()
        self._servers = [self._server(url) for url in split_urls(urls)]
        self._breaker = _Breaker(self.options)

    def _server(self, url: str) -> _Server:
        http = triton_http.InferenceServerClient(
            urlsplit(url).netloc, conn_limit=self.options.connections, conn_timeout=self.options.attempt_timeout_s
        )
        return _Server(url, http, asyncio.Semaphore(self.options.connections))

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers:
            await server.http.close()

    async def info(self, url: str | None = None) -> dict[str, Any]:
        """What a server says about itself: ``max_tokens``, ``known_sentence``, ``workers`` ...

        Args:
            url: which server; the first by default.

        Raises:
            RewardSystemError: no answer in one try.
        """
        server = next(s for s in self._servers if url in (None, s.url))
        errors = []
        for model, inputs in (
            (TOKEN_MODEL, token_inputs([0], "", width=1, options={"info": True})),
            (WAVE_MODEL, wave_inputs(np.zeros(1, np.float32), "", options={"info": True})),
        ):
            try:
                server.info = await self._infer(server, model, inputs)
                return server.info
            except _Transient as error:
                errors.append(str(error))
        raise RewardSystemError(Status.SERVER_ERROR, errors[0])

    async def score(
        self,
        tokens: Sequence[int],
        reference: str,
        *,
        prompt_key: str = "",
        ended: bool = True,
        out_of_range: int = 0,
    ) -> RewardRecord:
        """Score speech tokens against a text.

        Args:
            tokens: speech codes; more than the server takes are cut off and count as not ended.
            reference: the text that should be heard.
            prompt_key: chooses the speaker prompt; the text chooses if it is empty.
            ended: the language model stopped by itself.
            out_of_range: ids of the answer that are no speech codes.

        Returns:
            The record, with a score; its status is the model's doing.

        Raises:
            RewardSystemError: no score within the budget, or a request that no server can answer.
        """

        async def inputs(server: _Server) -> list[triton_http.InferInput]:
            width = await self._width(server)
            options: dict[str, Any] = {"ended": ended and len(tokens) <= width}
            if out_of_range:
                options["out_of_range"] = out_of_range
            return token_inputs(tokens[:width], reference, width=width, prompt_key=prompt_key, options=options)

        return await self._ask(TOKEN_MODEL, inputs)

    async def recognise(self, wave_16k: np.ndarray, reference: str) -> RewardRecord:
        """Score a waveform, float32 [L] at 16 kHz, against a text. The server must serve ``sensevoice``."""

        async def inputs(server: _Server) -> list[triton_http.InferInput]:
            return wave_inputs(wave_16k, reference)

        return await self._ask(WAVE_MODEL, inputs)

    async def _width(self, server: _Server) -> int:
        """Row width of a server: requests of equal width are merged into batches."""
        if server.info is None:
            model, inputs = TOKEN_MODEL, token_inputs([0], "", width=1, options={"info": True})
            server.info = await self._infer(server, model, inputs)
        return int(server.info["max_tokens"])

    async def _ask(self, model: str, inputs_for) -> RewardRecord:
        self._breaker.check()
        began = time.monotonic()
        pause = self.options.first_pause_s
        tries = 0
        while True:
            server = self._choose()
            tries += 1
            try:
                server.in_flight += 1
                async with server.slots:
                    inputs = await inputs_for(server)
                    record = await self._infer(server, model, inputs)
            except _Transient as error:
                self._mark_down(server, error)
                spent = time.monotonic() - began
                if spent + pause > self.options.budget_s:
                    message = f"{error}; given up after {tries} tries in {spent:.1f} s"
                    self._breaker.failure(message)
                    raise RewardSystemError(error.status, message) from error
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, self.options.longest_pause_s)
                continue
            except RewardSystemError as error:
                self._breaker.failure(str(error))
                raise
            finally:
                server.in_flight -= 1
            self._mark_up(server)
            if record.status.is_system:
                message = f"{server.url}: {record.status.value}: {record.message}"
                self._breaker.failure(message)
                raise RewardSystemError(record.status, message)
            self._breaker.success()
            return record

    def _choose(self) -> _Server:
        """The healthy server with the fewest requests in flight; if none is healthy, the one down longest."""
        now = time.monotonic()
        up = [server for server in self._servers if server.down_until <= now]
        if up:
            return min(up, key=lambda server: (server.in_flight, random.random()))
        return min(self._servers, key=lambda server: server.down_until)

    def _mark_up(self, server: _Server) -> None:
        if server.failures:
            logger.warning("%s answers again", server.url)
        server.failures, server.down_until = 0, 0.0

    def _mark_down(self, server: _Server, error: Exception) -> None:
        if not server.failures:  # once, not for each of the requests in flight
            logger.warning("%s; trying again for up to %g s", error, self.options.budget_s)
        server.failures += 1
        server.info = None  # it may come back with another width
        server.down_until = time.monotonic() + min(0.5 * 2**server.failures, self.options.longest_pause_s)

    async def _infer(self, server: _Server, model: str, inputs: list) -> RewardRecord | dict[str, Any]:
        try:
            answer = await server.http.infer(model, inputs, headers=_PLAIN)
        except asyncio.TimeoutError as error:
            limit = self.options.attempt_timeout_s
            raise _Transient(Status.TIMEOUT, f"{server.url}: no answer within {limit:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Transient(Status.SERVER_ERROR, f"{server.url}: {type(error).__name__}: {error}") from error
        except InferenceServerException as error:
            code, message = error.status() or "", _last_words(error.message() or "")
            if code.isdigit() and int(code) in RETRIED:
                raise _Transient(Status.SERVER_ERROR, f"{server.url}: HTTP {code}: {message}") from error
            raise RewardSystemError(Status.BAD_REQUEST, f"{server.url}: HTTP {code}: {message}") from error
        return read_answer(answer)


class _Transient(Exception):
    """Something that may pass."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def _last_words(message: str) -> str:
    """The end of a message: Triton sends whole tracebacks, in which the reason comes last."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.strip().startswith("At:")]
    lines = [line for line in lines if "model.py(" not in line]
    return lines[-1][:300] if lines else ""


def split_urls(urls: str | Sequence[str]) -> list[str]:
    """``"http://a:8000, http://b:8000"`` or a list -> clean addresses.

    Raises:
        ValueError: no address, or one without host and port, or with another scheme than http.
    """
    parts = urls.split(",") if isinstance(urls, str) else list(urls)
    cleaned = [part.strip().rstrip("/") for part in parts if part.strip()]
    if not cleaned:
        raise ValueError(f"reward servers {urls!r}: expected at least one address such as http://127.0.0.1:8000")
    for url in cleaned:
        parsed = urlsplit(url)
        if parsed.scheme != "http" or not parsed.hostname or parsed.port is None or parsed.path:
            raise ValueError(f"reward server {url!r}: expected http://HOST:PORT")
    return cleaned
