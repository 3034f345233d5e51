"""Work that waits for a worker: a submitted batch, its parts, and the queue that the workers' threads share."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from cosyvoice.reward.record import RewardRecord
from cosyvoice.serving.items import Item


class Submission:
    """A batch somebody waits for. Its future resolves to the records once every place is filled."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[RewardRecord]] = Future()
        self._records: list[RewardRecord | None] = [None] * size
        self._missing = size
        self._lock = threading.Lock()

    def fill(self, place: int, record: RewardRecord) -> None:
        with self._lock:
            if self._records[place] is not None:
                return
            self._records[place] = record
            self._missing -= 1
            done = self._missing == 0
        if done and self.future.set_running_or_notify_cancel():
            self.future.set_result(list(self._records))


@dataclass
class Job:
    """Items that go to a worker together, and the places of their records in a submission."""

    items: list[Item]
    places: list[int]
    submission: Submission
    attempt: int = 0
    #: index of the worker that failed on it, which should not get it again
    avoid: int | None = None
    queued_at: float = field(default_factory=time.monotonic)

    def fill(self, records: list[RewardRecord]) -> None:
        for place, record in zip(self.places, records):
            self.submission.fill(place, record)

    def split_for_retry(self, avoid: int) -> list[Job]:
        """One job per item, so that an item that kills its worker does not take the others along again."""
        return [
            Job([item], [place], self.submission, self.attempt + 1, avoid)
            for item, place in zip(self.items, self.places)
        ]


class JobQueue:
    """First in, first out, but retries go first, and a worker does not get back what it failed on."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job) -> bool:
        """Append a job; False if the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def put_first(self, jobs: list[Job]) -> bool:
        with self._changed:
            if self._closed:
                return False
            self._jobs.extendleft(reversed(jobs))
            self._changed.notify_all()
            return True

    def take(self, worker: int, only_worker: bool, timeout_s: float) -> Job | None:
        """The next job for this worker, or None after ``timeout_s``.

        Args:
            only_worker: nobody else could take the jobs that should avoid this worker.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for position, job in enumerate(self._jobs):
                    if job.avoid != worker or only_worker:
                        del self._jobs[position]
                        return job
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return None
                self._changed.wait(left)

    def close(self) -> list[Job]:
        """Accept nothing more, wake every waiter, return what was left."""
        with self._changed:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
            return left

    def depth(self) -> int:
        """Number of items that wait."""
        with self._changed:
            return sum(len(job.items) for job in self._jobs)
