"""infer_dataset.py as users run it, on the tiny checkpoint that ships: vLLM, transformers, ranks, a killed run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import soundfile

REPO = Path(__file__).parents[2]
TINY = REPO / "assets" / "cosyvoice2-tiny"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "hf"
    command = [sys.executable, "pretrained_to_huggingface.py", "--pretrained-cosyvoice2-path", TINY]
    subprocess.run(
        [*command, "--save-path", target, "--dtype", "float32"], cwd=REPO, env=ENVIRONMENT, check=True, timeout=300
    )
    return target


def command(llm: Path, output: Path, *options: str) -> list[str]:
    return [
        sys.executable, str(REPO / "infer_dataset.py"), "--llm", str(llm), "--model-dir", str(TINY),
        "--split", str(TINY / "data" / "test.jsonl"), "--prompts", str(TINY / "prompts"),
        "--cache-dir", str(output.parent / "cache"), "--output-dir", str(output), "--max-tokens", "60",
        "--limit", "8", "--flow-steps", "2", "--no-progress", *options,
    ]  # fmt: skip


def run(llm: Path, output: Path, *options: str) -> list[dict]:
    done = subprocess.run(
        command(llm, output, *options), cwd=output.parent, env=ENVIRONMENT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (output / "test" / "utterances.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_vllm_answers_do_not_depend_on_the_batch(llm, tmp_path):
    together = run(llm, tmp_path / "a", "--backend", "vllm")
    in_pieces = run(llm, tmp_path / "b", "--backend", "vllm", "--batch-size", "3", "--group", "3")
    assert together == in_pieces
    assert len({tuple(row["tokens"]) for row in together}) >= 7
    for row in together:
        if not row["error"]:
            info = soundfile.info(tmp_path / "a" / "test" / "wav" / f"{row['id']}.wav")
            assert (info.samplerate, info.frames) == (24_000, 960 * row["n_tokens"])


def test_ranks_and_a_killed_run_give_what_one_process_gives(llm, tmp_path):
    options = ["--backend", "transformers", "--sampling", "ras", "--group", "2"]
    whole = run(llm, tmp_path / "whole", *options)
    assert len(whole) == 8
    process = subprocess.Popen(
        command(llm, tmp_path / "cut", *options), cwd=tmp_path, env=ENVIRONMENT, start_new_session=True
    )
    try:
        parts, deadline = tmp_path / "cut" / "test" / "parts", time.monotonic() + 300
        while not list(parts.glob("*.jsonl")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert run(llm, tmp_path / "cut", *options, "--n-procs", "2", "--batch-size", "3") == whole
    for name in sorted(os.listdir(tmp_path / "whole" / "test" / "wav")):
        paths = (tmp_path / run_name / "test" / "wav" / name for run_name in ("whole", "cut"))
        one, other = (soundfile.read(path, dtype="int16")[0] for path in paths)
        assert abs(one.astype(int) - other).max() <= 33  # 1e-3 of full scale, the decoder's own bound for batches
