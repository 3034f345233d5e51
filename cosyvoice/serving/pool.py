"""A supervised pool of worker processes: submit a batch, get one record per item, whatever happens to a worker."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import psutil

from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving.items import Item, failure
from cosyvoice.serving.jobs import Job, JobQueue, Submission
from cosyvoice.serving.metrics import ServingMetrics
from cosyvoice.serving.slot import Limits, Slot
from cosyvoice.serving.worker import WorkerSpec

WATCH_INTERVAL_S = 0.25
logger = logging.getLogger(__name__)


class PoolError(RuntimeError):
    """The pool cannot start or has no worker left. The message says why."""


def plan_workers(base: WorkerSpec, device: str, number_of_devices: int, per_device: int) -> list[WorkerSpec]:
    """One spec per worker: GPUs get ``per_device`` workers each, CPU workers share the cores.

    OMP_NUM_THREADS, if it is set, is the most threads that a worker gets.

    Args:
        device: "cpu" or "cuda".
    """
    if number_of_devices < 1 or per_device < 1:
        raise PoolError(f"{number_of_devices} devices with {per_device} workers each: expected at least 1 of both")
    number = number_of_devices * per_device
    cores = len(os.sched_getaffinity(0))
    threads = min(max(1, cores // number), int(os.environ.get("OMP_NUM_THREADS") or cores))
    names = [f"cuda:{i}" if device == "cuda" else device for i in range(number_of_devices)] * per_device
    return [replace(base, device=name, threads=threads) for name in names]


class WorkerPool:
    """N worker processes behind one queue.

    ``submit`` may be called from any thread. A worker that dies or overruns its time is restarted and its items go,
    one by one, to another worker once; then they are answered with a system status. Nothing is lost silently.
    """

    def __init__(self, specs: Sequence[WorkerSpec], metrics: ServingMetrics, limits: Limits | None = None) -> None:
        if not specs:
            raise PoolError("no worker: expected at least one")
        self.metrics = metrics
        self.queue = JobQueue()
        self.size = len(specs)
        #: set when no worker is left: the server should end rather than answer with errors for ever
        self.broken = threading.Event()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._slots = [Slot(self, i, spec, limits or Limits()) for i, spec in enumerate(specs)]
        self._watchdog = threading.Thread(target=self._watch, name="pool-watchdog", daemon=True)

    def start(self, give_up: threading.Event | None = None) -> None:
        """Start the workers and wait until all are loaded and tested.

        Args:
            give_up: ends the wait early when somebody sets it.

        Raises:
            PoolError: a worker's first start failed. The pool is closed then.
        """
        self._watchdog.start()
        for slot in self._slots:
            slot.start()
        with self._changed:
            while not (self._first_error() or self._ready() == self.size or (give_up and give_up.is_set())):
                self._changed.wait(WATCH_INTERVAL_S)
            error = self._first_error()
        if error:
            self.close()
            raise PoolError(error)

    def submit(self, items: Sequence[Item]) -> Future[list[RewardRecord]]:
        """Hand over a batch. The future gives one record per item, in order, and never an exception."""
        submission = Submission(len(items))
        if not items:
            submission.future.set_result([])
            return submission.future
        # Equal lengths next to each other: less padding where a worker cuts the batch.
        places = sorted(range(len(items)), key=lambda i: len(items[i]))
        job = Job([items[i] for i in places], places, submission)
        if not self.queue.put(job):
            job.fill([failure(Status.SERVER_ERROR, "the server is stopping or has no worker", item) for item in items])
        return submission.future

    def close(self, grace_s: float = 10.0) -> None:
        """Stop taking work, let running batches end for ``grace_s``, then kill. Safe to call twice."""
        self._closing.set()
        self._drop_queue("the server is stopping")
        deadline = time.monotonic() + grace_s
        for slot in self._slots:
            if slot.ident is not None:
                slot.join(max(0.0, deadline - time.monotonic()))
        for slot in self._slots:
            if slot.is_alive():
                slot.kill_process()
                slot.join()
        if self._watchdog.ident is not None:
            self._watchdog.join()

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def wait_closing(self, timeout_s: float) -> bool:
        return self._closing.wait(timeout_s)

    def describe(self) -> list[dict[str, str | int | None]]:
        """Index, process id, device and state of every worker."""
        return [{"worker": s.index, "pid": s.pid, "device": s.spec.device, "state": s.state} for s in self._slots]

    def info(self) -> dict[str, Any]:
        """What the workers said about themselves when they became ready (they all say the same)."""
        return next((slot.info for slot in self._slots if slot.info), {})

    def is_only_worker(self, slot: Slot) -> bool:
        """True if no other slot is going to work (again)."""
        return all(other is slot or other.state in ("given up", "stopped") for other in self._slots)

    def on_slot_ready(self) -> None:
        with self._changed:
            self.metrics.set_ready(self._ready())
            self._changed.notify_all()

    def on_start_failed(self, slot: Slot) -> None:
        with self._changed:
            self._changed.notify_all()

    def on_slot_ended(self, slot: Slot) -> None:
        self.metrics.set_ready(self._ready())
        if self.closing or any(other.state != "given up" for other in self._slots):
            return
        logger.critical("no worker is left: %s", slot.last_error)
        self.broken.set()
        self._drop_queue(f"no worker is left: {slot.last_error}")

    def _ready(self) -> int:
        return sum(slot.state in ("ready", "busy") for slot in self._slots)

    def _first_error(self) -> str:
        return next((slot.last_error for slot in self._slots if slot.last_error), "")

    def _drop_queue(self, reason: str) -> None:
        for job in self.queue.close():
            job.fill([failure(Status.SERVER_ERROR, reason, item) for item in job.items])

    def _watch(self) -> None:
        process = psutil.Process()
        while True:
            for slot in self._slots:
                slot.check_deadline()
            self.metrics.set_queue_depth(self.queue.depth())
            self.metrics.set_rss("server", process.memory_info().rss)
            if self._closing.wait(WATCH_INTERVAL_S) and not any(slot.is_alive() for slot in self._slots):
                return
            if self.closing:
                time.sleep(WATCH_INTERVAL_S)
