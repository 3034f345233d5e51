"""A real reward server as a child process of the tests, and raw HTTP requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class ServerProcess:
    """``token2wav_asr_server.py`` with a stand-in worker (or other options), ended with all its children."""

    def __init__(self, log: Path, *options: str, ports: list[int] | None = None) -> None:
        self.ports = ports or free_ports(4)
        self.log = log
        names = ("--http-port", "--grpc-port", "--metrics-port", "--reward-metrics-port")
        addresses = [text for name, port in zip(names, self.ports) for text in (name, str(port))]
        command = [sys.executable, str(ROOT / "token2wav_asr_server.py"), "--device", "cpu", *addresses, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True, cwd=ROOT
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def wait_ready(self, model: str = "token2wav_asr", seconds: float = 240.0) -> ServerProcess:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            if self.get(f"/v2/models/{model}/ready")[0] == 200:
                return self
            time.sleep(0.2)
        raise AssertionError(f"not ready within {seconds} s:\n{self.log.read_text()[-3000:]}")

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Status (0: no connection) and body."""
        return self._open(urllib.request.Request(f"http://127.0.0.1:{port or self.ports[0]}{path}"))

    def post(self, inputs: list[dict[str, Any]], model: str = "token2wav_asr") -> tuple[int, str]:
        body = json.dumps({"inputs": inputs}).encode()
        return self._open(urllib.request.Request(f"{self.url}/v2/models/{model}/infer", body))

    @staticmethod
    def _open(request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        """Sum of a reward metric over its labels."""
        lines = self.get("/metrics", self.ports[3])[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def family(self) -> list[psutil.Process]:
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def terminate(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Send a signal to the server alone, as a user does, and wait for it."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def close(self) -> None:
        """End whatever is left."""
        if self.process.poll() is None:
            try:
                self.terminate()
            except subprocess.TimeoutExpired:
                self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def tensors(tokens: list, lengths: list, text: list, **more: list) -> list[dict[str, Any]]:
    """Inputs of a JSON request with rows of equal width: the original recipe's three, and optional ones."""
    rows = len(tokens)
    inputs = [
        {"name": "TOKENS", "datatype": "INT32", "shape": [rows, len(tokens[0])], "data": tokens},
        {"name": "TOKEN_LENS", "datatype": "INT32", "shape": [rows, 1], "data": lengths},
        {"name": "GT_TEXT", "datatype": "BYTES", "shape": [rows, 1], "data": text},
    ]
    for name, values in more.items():
        inputs.append({"name": name, "datatype": "BYTES", "shape": [rows, 1], "data": values})
    return inputs
