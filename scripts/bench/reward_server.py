"""Requests per second of the reward server, against the original recipe's pattern, in one run.

    M=assets/cosyvoice2-tiny; python scripts/bench/reward_server.py --model-dir $M --asr-model $M/sensevoice

Three parts: the serving layer alone (workers that do nothing), the server with its models, and the original pattern:
the same models in one process whose instances are threads under one interpreter lock, one utterance at a time, the
prompt's features computed again for each, one connection per request. Ratios of one run can be compared; absolute
numbers belong to the machine and to what else runs on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.serving.client import ClientOptions, RewardClient

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 64
TEXT = "今天天气很好"


class Nothing:
    """A worker's scorer that does nothing."""

    def score(self, items):
        return [RewardRecord(score=0.5, status=Status.OK) for _ in items], {}


def make_nothing(options: dict[str, Any], device: str) -> Nothing:
    """Worker factory ``reward_server:make_nothing``."""
    return Nothing()


def start_server(folder: Path, port: int, options: list[str]) -> subprocess.Popen:
    ports = [("--http-port", port), ("--grpc-port", port + 1), ("--metrics-port", port + 2)]
    command = [sys.executable, str(ROOT / "token2wav_asr_server.py"), "--device", "cpu", *options]
    command += [text for name, number in ports for text in (name, str(number))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with (folder / f"server_{port}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def wait_ready(process: subprocess.Popen, port: int, log: Path) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/token2wav_asr/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"the server ended with {process.returncode}:\n{log.read_text()[-2000:]}")


def phase_seconds(port: int) -> dict[str, float]:
    """Seconds per phase so far, from the server's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port + 3}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("reward_phase_seconds_sum"):
            name, value = line.rsplit(" ", 1)
            found[name.split('"')[1]] = float(value)
    return found


def make_jobs(number: int, shortest: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 200, rng.integers(shortest, longest + 1)).tolist() for _ in range(number)]


async def ask_server(port: int, jobs: list[list[int]]) -> tuple[float, list[float]]:
    """Seconds in all and per request, 64 clients."""
    waits: list[float] = []
    todo = iter(enumerate(jobs))
    async with RewardClient(f"http://127.0.0.1:{port}", ClientOptions(connections=CLIENTS)) as client:
        await client.score(jobs[0], TEXT)

        async def one_client() -> None:
            for index, tokens in todo:
                began = time.perf_counter()
                await client.score(tokens, TEXT, prompt_key=str(index))
                waits.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*[one_client() for _ in range(CLIENTS)])
        return time.perf_counter() - began, waits


def serve_original(port: int, args: argparse.Namespace) -> None:
    """The original pattern, as a child process: threads, one utterance at a time, nothing cached."""
    from cosyvoice.asr import SenseVoice
    from cosyvoice.checkpoint import CosyVoice2Folder
    from cosyvoice.frontend import PromptEntry, SpeakerEncoder, SpeechTokenizer, compute_prompt, load_audio, resample
    from cosyvoice.frontend.bank import read_folder, read_jsonl
    from cosyvoice.reward.score import score_utterance
    from cosyvoice.token2wav import Token2Wav

    folder = CosyVoice2Folder(args.model_dir)
    source = Path(args.prompts or Path(args.model_dir) / "prompts")
    entries: list[PromptEntry] = read_folder(source) if source.is_dir() else read_jsonl(source)
    networks = SpeakerEncoder(folder.campplus_path), SpeechTokenizer(folder.speech_tokenizer_path)
    token2wav = Token2Wav(folder, n_steps=args.euler_steps)
    recogniser = SenseVoice(args.asr_model, batch_size=1)
    instances = threading.Semaphore(args.workers)

    def score(number: int, tokens: list[int], text: str) -> RewardRecord:
        entry = entries[number % len(entries)]
        wave, hz = load_audio(entry.audio)
        prompt = compute_prompt(entry.key, entry.text, wave, hz, *networks)
        speech = token2wav([tokens], [prompt])[0].wav
        heard = recogniser.transcribe([resample(speech, 24000, 16000)])[0].text
        return score_utterance(text, heard, n_tokens=len(tokens), ended=True, seconds=len(tokens) / 25)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with instances:
                record = score(**asked)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(record.to_json().encode())

        def log_message(self, *_: object) -> None:
            """One line per request would be part of what is measured."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 2 * CLIENTS

    Server(("127.0.0.1", port), Handler).serve_forever()


def post_original(port: int, number: int, tokens: list[int]) -> None:
    body = json.dumps({"number": number, "tokens": tokens, "text": TEXT}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", body, timeout=600) as answer:
        answer.read()


def ask_original(port: int, jobs: list[list[int]]) -> tuple[float, list[float]]:
    """64 threads, one connection per request."""
    waits: list[float] = []
    todo = iter(list(enumerate(jobs)))
    lock = threading.Lock()

    def one_client() -> None:
        while True:
            with lock:
                index, tokens = next(todo, (None, None))
            if tokens is None:
                return
            began = time.perf_counter()
            post_original(port, index, tokens)
            waits.append(time.perf_counter() - began)

    threads = [threading.Thread(target=one_client) for _ in range(CLIENTS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, waits


def cpu_seconds(process: subprocess.Popen) -> float:
    """Processor time of a server, its children and this process so far: does not depend on what else runs."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True), psutil.Process()]
    return sum(times.user + times.system for times in (each.cpu_times() for each in family))


def report(name: str, seconds: float, waits: list[float]) -> float:
    p50, p99 = np.percentile(waits, [50, 99]) * 1000
    rate = len(waits) / seconds
    print(f"{name:<44}{rate:>9.1f} requests/s   p50 {p50:>8.1f} ms   p99 {p99:>8.1f} ms", flush=True)
    return rate


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model-dir", help="CosyVoice2 folder; without it only the serving layer is measured")
    parser.add_argument("--asr-model", help="SenseVoice folder")
    parser.add_argument("--prompts", help="prompt recordings; default: MODEL_DIR/prompts")
    parser.add_argument("--euler-steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="worker processes")
    parser.add_argument("--requests", type=int, default=256, help="with models")
    parser.add_argument("--idle-requests", type=int, default=4000, help="to the serving layer alone")
    parser.add_argument("--lengths", type=int, nargs=2, default=(25, 100), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--port", type=int, default=18100, help="first of a dozen ports")
    parser.add_argument("--serve-original", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = get_parser().parse_args()
    if args.serve_original:
        serve_original(args.serve_original, args)
    print(f"{CLIENTS} clients, {args.workers} workers, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure_layer(folder, args)
        if args.model_dir:
            ratio = measure_server(folder, args) / measure_original(folder, args)
            print(f"server / original pattern: {ratio:.2f}")


def measure_layer(folder: Path, args: argparse.Namespace) -> None:
    options = ["--worker-factory", "reward_server:make_nothing", "--number-of-devices", str(args.workers)]
    options += ["--max-tokens", "512"]  # the recipe's longest answer
    process = start_server(folder, args.port, options)
    try:
        wait_ready(process, args.port, folder / f"server_{args.port}.log")
        jobs = make_jobs(args.idle_requests, 50, 500)
        before = cpu_seconds(process)
        report("serving layer, workers do nothing", *asyncio.run(ask_server(args.port, jobs)))
        spent = (cpu_seconds(process) - before) / len(jobs)
        print(f"  processor time: {spent * 1000:.2f} ms per request, client included")
    finally:
        process.terminate()
        process.wait()


def measure_server(folder: Path, args: argparse.Namespace) -> float:
    port = args.port + 4
    options = ["--model-dir", args.model_dir, "--asr-model", args.asr_model, "--self-test-max-wer", "1e9"]
    options += ["--prompts", args.prompts] if args.prompts else []
    options += ["--euler-steps", str(args.euler_steps), "--number-of-devices", str(args.workers)]
    process = start_server(folder, port, options)
    try:
        wait_ready(process, port, folder / f"server_{port}.log")
        before, cpu = phase_seconds(port), cpu_seconds(process)
        rate = report("server with models", *asyncio.run(ask_server(port, make_jobs(args.requests, *args.lengths))))
        print(f"  processor time: {(cpu_seconds(process) - cpu) / args.requests * 1000:.1f} ms per request")
        spent = {name: value - before.get(name, 0.0) for name, value in phase_seconds(port).items() if name != "queue"}
        total = sum(spent.values())
        print("  phases: " + ", ".join(f"{name} {value / total:.1%}" for name, value in spent.items()))
        return rate
    finally:
        process.terminate()
        process.wait()


def measure_original(folder: Path, args: argparse.Namespace) -> float:
    port = args.port + 9
    command = [sys.executable, __file__, "--serve-original", str(port), "--model-dir", args.model_dir]
    command += ["--asr-model", args.asr_model, "--euler-steps", str(args.euler_steps), "--workers", str(args.workers)]
    command += ["--prompts", args.prompts] if args.prompts else []
    with (folder / "original.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        jobs = make_jobs(args.requests, *args.lengths)
        while True:
            try:
                post_original(port, 0, jobs[0])  # also the warm-up
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit((folder / "original.log").read_text()[-2000:]) from None
                time.sleep(0.5)
        cpu = cpu_seconds(process)
        rate = report("original pattern", *ask_original(port, jobs))
        print(f"  processor time: {(cpu_seconds(process) - cpu) / len(jobs) * 1000:.1f} ms per request")
        return rate
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
