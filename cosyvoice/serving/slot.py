"""One place of the pool: a thread that keeps a worker process alive and feeds it."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from cosyvoice.reward.record import Status
from cosyvoice.serving.items import BatchResult, failure
from cosyvoice.serving.jobs import Job
from cosyvoice.serving.worker import WorkerSpec, run_worker

if TYPE_CHECKING:
    from cosyvoice.serving.pool import WorkerPool

#: Starts in a row that may fail before a slot gives up.
MAX_FAILED_STARTS = 5
#: How often an idle slot looks whether its process still lives.
IDLE_CHECK_S = 0.5
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """When a worker is taken for hanging, and when it is replaced as a precaution (0: never)."""

    start_timeout_s: float = 600.0
    batch_timeout_s: float = 300.0
    recycle_after: int = 100_000
    rss_limit_bytes: int = 0


class Slot(threading.Thread):
    """Starts, watches, feeds, recycles and restarts one worker process.

    ``state`` is "starting", "ready", "busy", "given up" or "stopped".
    """

    def __init__(self, pool: WorkerPool, index: int, spec: WorkerSpec, limits: Limits) -> None:
        super().__init__(name=f"slot-{index}", daemon=True)
        self.index = index
        self.spec = spec
        self.state = "starting"
        self.pid: int | None = None
        self.last_error = ""
        self.info: dict[str, Any] = {}
        self._pool = pool
        self._limits = limits
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection = None
        self._done = 0
        self._rss = 0
        #: time after which the pool's watchdog kills the process; None while it has nothing to do
        self._deadline: float | None = None
        self._timed_out = False
        self._kill_lock = threading.Lock()
        # Slots that recycle after the same number of requests would all pause at once: spread them.
        self._recycle_after = limits.recycle_after + index * limits.recycle_after // (2 * pool.size)

    def run(self) -> None:
        try:
            while not self._pool.closing:
                if not self._alive() and not self._start_process():
                    break
                job = self._pool.queue.take(self.index, self._pool.is_only_worker(self), IDLE_CHECK_S)
                if job is not None:
                    self._handle(job)
                    self._recycle_if_due()
        finally:
            self._stop_process(grace_s=5.0)
            if self.state != "given up":
                self.state = "stopped"
            self._pool.on_slot_ended(self)

    def check_deadline(self) -> None:
        """Kill a process that overran its time.

        The pool's watchdog calls it, so that it also works while this thread is blocked on the pipe of a stopped
        process.
        """
        deadline = self._deadline
        if deadline is not None and time.monotonic() > deadline:
            self._timed_out = True
            self._deadline = None
            logger.error("worker %d (pid %s) does not answer, killing it", self.index, self.pid)
            self.kill_process()

    def kill_process(self) -> None:
        """Kill the process, from any thread; this thread then sees it die."""
        with self._kill_lock:
            if self._process is not None:
                self._process.kill()

    def _alive(self) -> bool:
        if self._process is None:
            return False
        if self._process.is_alive():
            return True
        logger.error("worker %d (pid %s) died with exit code %s", self.index, self.pid, self._process.exitcode)
        self._replace("died")
        return False

    def _start_process(self) -> bool:
        """Start until it is ready. False when the pool closes or the starts keep failing."""
        for attempt in range(MAX_FAILED_STARTS):
            if attempt and self._pool.wait_closing(min(2.0**attempt, 30.0)):
                return False
            self.state = "starting"
            began = time.monotonic()
            context = multiprocessing.get_context("spawn")
            self._connection, child = context.Pipe()
            self._process = context.Process(
                target=run_worker, args=(child, self.spec), name=f"reward-worker-{self.index}", daemon=True
            )
            self._timed_out = False
            self._deadline = began + self._limits.start_timeout_s
            self._process.start()
            child.close()
            self.pid = self._process.pid
            message = self._receive()
            if self._pool.closing:
                return False
            if isinstance(message, tuple) and message[0] == "ready":
                self.state, self.last_error, self._done = "ready", "", 0
                seconds = time.monotonic() - began
                self.info = message[1]
                logger.info(
                    "worker %d (pid %d, %s) ready in %.1f s: %s",
                    self.index,
                    self.pid,
                    self.spec.device,
                    seconds,
                    self.info.get("self_test", "no self test"),
                )
                self._pool.on_slot_ready()
                return True
            self.last_error = message[1] if isinstance(message, tuple) else self._reason()
            logger.error("worker %d did not start: %s", self.index, self.last_error)
            self._stop_process(grace_s=1.0)
            self._pool.on_start_failed(self)
        self.state = "given up"
        return False

    def _receive(self):
        """The next message of the worker; None if it died, was killed, or the pool closes during a start."""
        while True:
            ready = wait([self._connection, self._process.sentinel], timeout=IDLE_CHECK_S)
            if self._connection in ready:
                try:
                    message = self._connection.recv()
                except (EOFError, OSError):
                    message = None
                self._deadline = None
                return message
            if ready or (self._pool.closing and self.state == "starting"):
                self._deadline = None
                return None

    def _handle(self, job: Job) -> None:
        self.state = "busy"
        metrics = self._pool.metrics
        metrics.observe_phase("queue", time.monotonic() - job.queued_at)
        self._timed_out = False
        self._deadline = time.monotonic() + self._limits.batch_timeout_s
        try:
            self._connection.send(job.items)
            result = self._receive()
        except OSError:  # the process died before it had read the batch
            result = None
        self._deadline = None
        self.state = "ready"
        if isinstance(result, BatchResult):
            self._done += len(job.items)
            self._rss = result.rss_bytes
            metrics.set_rss(f"worker-{self.index}", result.rss_bytes)
            for phase, seconds in result.seconds.items():
                metrics.observe_phase(phase, seconds)
            job.fill(result.records)
            return
        reason = self._reason()
        self._replace("timeout" if self._timed_out else "died")
        self._retry(job, reason)

    def _reason(self) -> str:
        if self._timed_out:
            return f"worker {self.index} did not answer in time"
        self._process.join(1.0)
        return f"worker {self.index} died with exit code {self._process.exitcode}"

    def _retry(self, job: Job, reason: str) -> None:
        """Give the items to another worker once, then answer with the system's failure."""
        if job.attempt == 0:
            logger.warning("%s: %d items go to another worker", reason, len(job.items))
            self._pool.metrics.count_retries(len(job.items))
            if self._pool.queue.put_first(job.split_for_retry(avoid=self.index)):
                return
        status = Status.TIMEOUT if self._timed_out else Status.SERVER_ERROR
        job.fill([failure(status, reason, item) for item in job.items])

    def _recycle_if_due(self) -> None:
        limits = self._limits
        if limits.recycle_after and self._done >= self._recycle_after:
            reason = "request count"
        elif limits.rss_limit_bytes and self._rss > limits.rss_limit_bytes:
            reason = "memory"
        else:
            return
        logger.info("worker %d: recycled (%s): %d requests, %.0f MB", self.index, reason, self._done, self._rss / 1e6)
        self._replace(reason)

    def _replace(self, reason: str) -> None:
        self._pool.metrics.count_restart(reason)
        self._stop_process(grace_s=5.0)

    def _stop_process(self, grace_s: float) -> None:
        """Ask the process to end, then kill it; afterwards there is none."""
        with self._kill_lock:
            process, connection = self._process, self._connection
            self._process = self._connection = self._deadline = None
        if process is None:
            return
        if process.is_alive() and self.state in ("ready", "stopped"):
            try:
                connection.send(None)
                process.join(grace_s)
            except OSError:
                logger.debug("worker %d closed its pipe before it was told to end", self.index)
        if process.is_alive():
            process.kill()
        process.join()
        connection.close()
        process.close()
        self.state = "starting" if self.state != "given up" else self.state
