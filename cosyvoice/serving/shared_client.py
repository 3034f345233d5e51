"""One client per process and server list, on an event loop of its own: usable from any thread and any loop.

veRL calls the reward function from its loop, other trainers from threads; all share the same connections.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from cosyvoice.serving.client import ClientOptions, RewardClient, split_urls

T = TypeVar("T")
_clients: dict[tuple, SharedClient] = {}
_lock = threading.Lock()


class SharedClient:
    """A :class:`RewardClient` whose coroutines run in a background thread."""

    def __init__(self, urls: Sequence[str], options: ClientOptions) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="reward-client", daemon=True)
        thread.start()

        async def make() -> RewardClient:
            return RewardClient(urls, options)

        self.client = self.submit(make()).result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of :attr:`client`; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it."""
        return self.submit(coroutine).result()

    async def acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine from whatever event loop this is called in."""
        return await asyncio.wrap_future(self.submit(coroutine))


def shared_client(urls: str | Sequence[str], options: ClientOptions | None = None) -> SharedClient:
    """The process' client for these servers and options, made on first use."""
    key = (os.getpid(), tuple(split_urls(urls)), options or ClientOptions())
    with _lock:
        if key not in _clients:
            _clients[key] = SharedClient(key[1], key[2])
        return _clients[key]
