"""Prometheus metrics of the reward server.

Triton's own endpoint (``--metrics-port``) can only show Triton's numbers; these are served by
``prometheus_client`` on ``--reward-metrics-port``.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class ServingMetrics:
    """Counters and histograms of one server. Every method may be called from any thread."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            "reward_requests", "Requests (utterances) answered, by status", ["status"], registry=registry
        )
        self._batch_sizes = Histogram(
            "reward_batch_size",
            "Utterances that Triton merged into one batch",
            buckets=BATCH_BUCKETS,
            registry=registry,
        )
        self._phases = Histogram(
            "reward_phase_seconds",
            "Seconds per batch and phase of a worker (decode, resample, asr, score), and queue for its wait",
            ["phase"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._queue = Gauge("reward_queue_depth", "Utterances waiting for a worker", registry=registry)
        self._restarts = Counter("reward_worker_restarts", "Workers replaced, by reason", ["reason"], registry=registry)
        self._retries = Counter("reward_retries", "Utterances given to another worker", registry=registry)
        self._rss = Gauge("reward_rss_bytes", "Resident memory", ["process"], registry=registry)
        self._ready = Gauge("reward_workers_ready", "Workers that are loaded and tested", registry=registry)
        self._lock = threading.Lock()
        self._batch_tally: Tally[int] = Tally()

    def count_status(self, status: str) -> None:
        self._requests.labels(status).inc()

    def observe_batch(self, size: int) -> None:
        self._batch_sizes.observe(size)
        with self._lock:
            self._batch_tally[size] += 1

    def observe_phase(self, phase: str, seconds: float) -> None:
        self._phases.labels(phase).observe(seconds)

    def set_queue_depth(self, depth: int) -> None:
        self._queue.set(depth)

    def count_restart(self, reason: str) -> None:
        self._restarts.labels(reason).inc()

    def count_retries(self, number: int) -> None:
        self._retries.inc(number)

    def set_rss(self, process: str, n_bytes: int) -> None:
        self._rss.labels(process).set(n_bytes)

    def set_ready(self, number: int) -> None:
        self._ready.set(number)

    def value(self, name: str, **labels: str) -> float:
        """A sample's present value, 0.0 if it was never touched (``name`` as Prometheus shows it)."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def batch_histogram(self) -> dict[int, int]:
        """Batch size -> number of batches, exact (Prometheus keeps buckets only)."""
        with self._lock:
            return dict(sorted(self._batch_tally.items()))

    def serve(self, host: str, port: int):
        """Serve the metrics over HTTP; returns a function that stops it."""
        server, thread = start_http_server(port, addr=host, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop
