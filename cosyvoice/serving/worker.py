"""The worker process: owns one device and one scorer, reads batches from a pipe, writes records back.

A scorer is whatever a factory ``module:function`` returns for ``(options, device)``. It has

* ``score(items) -> (records, seconds)``: one record per item, in order, and seconds per phase;
* ``self_test() -> dict`` (optional): proves that the scorer works and raises if it does not. Clients are told what it
  returns; the log shows its key "self_test".
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving.items import BatchResult, Item, failure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """How to build a worker: factory by dotted name, its options, its device, its share of CPU threads."""

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    log_level: int = logging.INFO


def resolve_factory(name: str) -> Callable[[dict[str, Any], str], Any]:
    """Find ``module:function``.

    Raises:
        ValueError: the name has another form, or the module has no such function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"worker factory {name!r}: expected module:function")
    function = getattr(importlib.import_module(module_name), function_name, None)
    if function is None:
        raise ValueError(f"worker factory {name!r}: module {module_name} has no {function_name}")
    return function


def score_isolated(scorer: Any, items: list[Item]) -> BatchResult:
    """Score a batch so that an item that makes the scorer raise fails alone.

    A failing batch is halved until the item stands alone, which also gets a batch that is too large for
    the device's memory through.
    """
    try:
        records, seconds = scorer.score(items)
        if len(records) != len(items):
            raise RuntimeError(f"the scorer gave {len(records)} records for {len(items)} items")
        return BatchResult(list(records), dict(seconds))
    except Exception as error:  # whatever model code raises: it becomes a status
        if len(items) == 1:
            logger.error("an item failed:\n%s", traceback.format_exc())
            message = f"{type(error).__name__}: {error}"
            return BatchResult([failure(Status.SERVER_ERROR, message, items[0])])
        logger.warning("a batch of %d failed (%s: %s), halving it", len(items), type(error).__name__, error)
    half = len(items) // 2
    return _join(score_isolated(scorer, items[:half]), score_isolated(scorer, items[half:]))


def _join(left: BatchResult, right: BatchResult) -> BatchResult:
    records: list[RewardRecord] = left.records + right.records
    phases = {**left.seconds, **right.seconds}
    return BatchResult(records, {name: left.seconds.get(name, 0.0) + right.seconds.get(name, 0.0) for name in phases})


def run_worker(connection: Connection, spec: WorkerSpec) -> None:
    """Entry point of the process. Sends ("ready", info) or ("failed", reason), then a BatchResult per batch.

    Ends when the pipe closes, be it that the server stops or that it was killed.
    """
    # Ctrl-C reaches the whole process group; the server decides when its workers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)  # before torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin cost a busy machine more than they give
    # FunASR logs through the root logger: its chatter stays out.
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s %(levelname)s worker[{os.getpid()}] %(name)s %(message)s"
    )
    logging.getLogger("cosyvoice").setLevel(spec.log_level)
    try:
        scorer = resolve_factory(spec.factory)(spec.options, spec.device)
        self_test = getattr(scorer, "self_test", None)
        info = self_test() if self_test else {}
    except Exception as error:  # a bad checkpoint, no memory, a failed self test: the pool reports it
        logger.error("start failed:\n%s", traceback.format_exc())
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", info))
    process = psutil.Process()
    while True:
        try:
            items = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if items is None:
            return
        result = score_isolated(scorer, items)
        result.rss_bytes = process.memory_info().rss
        try:
            connection.send(result)
        except (BrokenPipeError, ConnectionResetError):
            return
