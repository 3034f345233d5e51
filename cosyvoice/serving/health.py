"""Is a reward server healthy? It is if it scores a sentence whose outcome is known."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving.client import ClientOptions, RewardClient, RewardSystemError, split_urls

#: Pause between tries while a server starts.
PAUSE_S = 1.0
ATTEMPT = ClientOptions(attempt_timeout_s=60.0, budget_s=0.0)


async def check_servers(urls: str, wait_s: float = 0.0) -> str:
    """Let every server score its known sentence.

    Args:
        urls: comma list.
        wait_s: how long a server may take to become ready.

    Returns:
        One line: what was heard, for each server.

    Raises:
        RewardSystemError: a server does not answer in time, or scores the sentence out of bounds.
    """
    logging.getLogger("cosyvoice.serving.client").setLevel(logging.ERROR)
    deadline = time.monotonic() + wait_s
    return "; ".join(await asyncio.gather(*[_wait_for(url, deadline) for url in split_urls(urls)]))


async def _wait_for(url: str, deadline: float) -> str:
    while True:
        try:
            return await check_server(url)
        except RewardSystemError as error:
            if time.monotonic() + PAUSE_S > deadline:
                raise
            if error.status in (Status.BAD_REQUEST, Status.BAD_REFERENCE):
                raise
        await asyncio.sleep(PAUSE_S)


async def check_server(url: str) -> str:
    """Score one server's known sentence once; see :func:`check_servers`."""
    async with RewardClient([url], ATTEMPT) as client:
        known = (await client.info()).get("known_sentence")
        began = time.monotonic()
        if known is None:  # a recogniser alone: it has to answer about a second of noise
            noise = 0.1 * np.random.default_rng(0).standard_normal(16000).astype(np.float32)
            record = await client.recognise(noise, "一")
            return f"{url}: ok, answers in {time.monotonic() - began:.2f} s ({record.status.value})"
        record = await client.score(known["tokens"], known["text"], prompt_key=known["prompt_key"])
        seconds = time.monotonic() - began
    _check_record(url, record, known)
    return f"{url}: ok, {known['text']!r} heard as {record.transcript!r}, score {record.score:.3f}, {seconds:.2f} s"


def _check_record(url: str, record: RewardRecord, known: dict) -> None:
    most = float(known["max_wer"])
    if not record.wer <= most or (record.status is not Status.OK and most < 1.0):
        raise RewardSystemError(
            Status.BAD_REQUEST,
            f"{url}: {known['text']!r} heard as {record.transcript!r}: status {record.status.value}, error rate "
            f"{record.wer:.3f}; expected ok and at most {most}",
        )
