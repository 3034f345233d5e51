"""The reward server: PyTriton in front of the pool. Its functions only hand over; no model code runs here."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.model_config.common import QueuePolicy, TimeoutAction
from pytriton.triton import Triton, TritonConfig

from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving import host as host_setup
from cosyvoice.serving import stub_fixes, wire
from cosyvoice.serving.items import Item, failure
from cosyvoice.serving.metrics import ServingMetrics
from cosyvoice.serving.pool import WorkerPool

WATCH_INTERVAL_S = 0.5
#: The loaded workers outlive Triton, so that its restart takes seconds; clients retry meanwhile. After so many ends in
#: a row, each within SHORT_LIFE_S of its start, the server ends.
MAX_TRITON_RESTARTS = 10
SHORT_LIFE_S = 60.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerConfig:
    """Addresses, batching and queue bounds. ``limits`` is what a row may hold."""

    models: Sequence[str] = (wire.TOKEN_MODEL,)
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    reward_metrics_port: int = 8003
    max_batch_size: int = 32
    batch_delay_ms: float = 10.0
    max_queue: int = 8192
    queue_timeout_s: float = 600.0
    limits: wire.Limits = field(default_factory=wire.Limits)

    def ports(self) -> dict[str, int]:
        """Option name -> port."""
        names = ("http_port", "grpc_port", "metrics_port", "reward_metrics_port")
        return {"--" + name.replace("_", "-"): getattr(self, name) for name in names}


def make_infer_function(
    model: str,
    submit: Callable[[Sequence[Item]], Any],
    info: Callable[[], dict[str, Any]],
    metrics: ServingMetrics,
    limits: wire.Limits,
) -> Callable:
    """A PyTriton inference function that never raises and gives every row a status.

    Args:
        submit: :meth:`WorkerPool.submit`.
        info: answers rows with ``OPTIONS {"info": true}``.
    """

    async def infer(requests: list[Any]) -> list[dict[str, np.ndarray]]:
        answers: list[list[Any]] = []
        for request in requests:
            data = request.data
            try:
                answers.append(wire.read_request(model, data, limits))
            except Exception as error:  # one request must never cost its neighbours their answers
                logger.exception("a request could not be read")
                rows = max((len(tensor) for tensor in data.values()), default=1)
                message = f"{type(error).__name__}: {error}"
                answers.append([failure(Status.BAD_REQUEST, message) for _ in range(rows)])
        places = [(i, j) for i, rows in enumerate(answers) for j, row in enumerate(rows) if isinstance(row, Item)]
        try:
            if places:
                metrics.observe_batch(len(places))
                records = await asyncio.wrap_future(submit([answers[i][j] for i, j in places]))
                for (i, j), record in zip(places, records):
                    answers[i][j] = record
        except Exception as error:
            logger.exception("a batch could not be handed over")
            for i, j in places:
                answers[i][j] = failure(Status.SERVER_ERROR, f"{type(error).__name__}: {error}", answers[i][j])
        for rows in answers:
            for j, row in enumerate(rows):
                if row == wire.INFO:
                    rows[j] = info()
                elif isinstance(row, RewardRecord):
                    metrics.count_status(Status(row.status).value)
        return [wire.write_response(rows) for rows in answers]

    return infer


def _tensors(model: str) -> tuple[list[Tensor], list[Tensor]]:
    def text(name: str, optional: bool = False) -> Tensor:
        return Tensor(name=name, dtype=bytes, shape=(-1,), optional=optional)

    if model == wire.TOKEN_MODEL:
        inputs = [
            Tensor(name="TOKENS", dtype=np.int32, shape=(-1,)),
            Tensor(name="TOKEN_LENS", dtype=np.int32, shape=(-1,)),
            text("GT_TEXT"),
            text("PROMPT_KEY", optional=True),
            text("OPTIONS", optional=True),
        ]
    else:
        inputs = [
            Tensor(name="WAV", dtype=np.float32, shape=(-1,)),
            Tensor(name="WAV_LENS", dtype=np.int32, shape=(-1,)),
            text("GT_TEXT"),
            text("OPTIONS", optional=True),
        ]
    outputs = [Tensor(name="REWARDS", dtype=np.float32, shape=(-1,))]
    return inputs, outputs + [text(name) for name in ("TRANSCRIPTS", "STATUS", "DETAILS")]


class RewardServer:
    """Pool plus Triton plus metrics endpoint, as one thing that starts and stops.

    Args:
        pool: started by :meth:`run`, closed on the way out.
        info: what clients are told about this server (JSON-able), besides limits and workers.
    """

    def __init__(
        self, config: ServerConfig, pool: WorkerPool, metrics: ServingMetrics, info: dict[str, Any] | None = None
    ) -> None:
        self._config = config
        self._pool = pool
        self._metrics = metrics
        self._info = info or {}
        self._stop = threading.Event()

    def info(self) -> dict[str, Any]:
        limits = self._config.limits
        return {
            **self._info,
            **self._pool.info(),
            "models": list(self._config.models),
            "max_tokens": limits.max_tokens,
            "max_samples": limits.max_samples,
            "workers": self._pool.describe(),
            "batch_histogram": self._metrics.batch_histogram(),
        }

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or a failure.

        Returns:
            Exit code: 0 after a signal, 1 if no worker is left or Triton died.

        Raises:
            HostError: a port is taken. PoolError: the workers do not start or fail their self test.
        """
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell's "&" makes SIGINT ignored: set both
            signal.signal(number, self._on_signal)
        config = self._config
        host_setup.check_ports(config.host, config.ports())
        host_setup.export_libpython()
        stop_metrics = self._metrics.serve(config.host, config.reward_metrics_port)
        stub_fixes.install()
        # PyTriton hands tensors to this process through shared memory blocks, each with a round trip to a manager
        # process: right for images, but for a few kilobytes of tokens it is half of the server's time per request.
        os.environ.setdefault("PYTRITON_NO_TENSORSTORE", "1")
        try:
            self._pool.start(self._stop)
            restarts = 0
            while restarts <= MAX_TRITON_RESTARTS:
                if self._stop.is_set():
                    return 0
                if restarts:
                    logger.critical("Triton has ended, starting it again (%d of %d)", restarts, MAX_TRITON_RESTARTS)
                began = time.monotonic()
                workspace = host_setup.new_workspace()
                try:
                    exit_code = self._serve(workspace)
                finally:
                    host_setup.remove_leftovers(workspace, os.getpid())
                if exit_code is not None:
                    return exit_code
                restarts = restarts + 1 if time.monotonic() - began < SHORT_LIFE_S else 1
            logger.critical("Triton keeps ending, the server ends")
            return 1
        finally:
            self._pool.close()
            stop_metrics()
            logger.info("stopped")

    def _serve(self, workspace: Path) -> int | None:
        """Run Triton until a signal (0), the loss of all workers (1), or its own end (None)."""
        triton = Triton(config=self._triton_config(), workspace=workspace)
        try:
            for model in self._config.models:
                self._bind(triton, model)
            with host_setup.large_stacks():
                triton.run()
            logger.info(
                "ready: %s on http://%s:%d", ", ".join(self._config.models), self._config.host, self._config.http_port
            )
            while not self._stop.wait(WATCH_INTERVAL_S):
                if self._pool.broken.is_set():
                    logger.critical("no worker is left, the server ends")
                    return 1
                if not triton.is_alive():
                    return None
            return 0
        finally:
            triton.stop()

    def _bind(self, triton: Triton, model: str) -> None:
        config = self._config
        inputs, outputs = _tensors(model)
        policy = QueuePolicy(
            timeout_action=TimeoutAction.REJECT,
            default_timeout_microseconds=int(config.queue_timeout_s * 1e6),
            max_queue_size=config.max_queue,
        )
        batcher = DynamicBatcher(
            max_queue_delay_microseconds=int(config.batch_delay_ms * 1000), default_queue_policy=policy
        )
        # One Triton instance per worker: with more, Triton would send small batches before a worker is free.
        functions = [
            make_infer_function(model, self._pool.submit, self.info, self._metrics, config.limits)
            for _ in range(self._pool.size)
        ]
        triton.bind(
            model_name=model,
            infer_func=functions,
            inputs=inputs,
            outputs=outputs,
            config=ModelConfig(max_batch_size=config.max_batch_size, batcher=batcher),
            strict=True,
        )

    def _triton_config(self) -> TritonConfig:
        config = self._config
        return TritonConfig(
            http_address=config.host,
            http_port=config.http_port,
            grpc_address=config.host,
            grpc_port=config.grpc_port,
            metrics_address=config.host,
            metrics_port=config.metrics_port,
            allow_gpu_metrics=False,
            exit_timeout_secs=10,
        )

    def _on_signal(self, number: int, _frame: Any) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        self._stop.set()
