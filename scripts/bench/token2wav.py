#!/usr/bin/env python3
"""How fast tokens become speech: one at a time against batches, float32 against bfloat16.

Needs torch, numpy and this repository. Without a checkpoint it makes random weights of the published
sizes: speed does not depend on their values. All numbers of one run stand against the machine's own
matrix-multiplication rate, measured in the same run, so that runs on a busy machine can be read too.

    python scripts/bench/token2wav.py --threads 1 --clock cpu --utterances 4
    python scripts/bench/token2wav.py --device cuda --batch-sizes 1 8 16 32 --utterances 64
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cosyvoice.checkpoint import CosyVoice2Folder
from cosyvoice.checkpoint_yaml import FolderConfig
from cosyvoice.flow import EncoderConfig, EstimatorConfig, Flow, FlowConfig
from cosyvoice.hift import HiFTConfig, HiFTGenerator
from cosyvoice.token2wav import DTYPES, Token2Wav

SMALL = FolderConfig(
    flow=FlowConfig(
        input_size=32,
        encoder=EncoderConfig(32, 32, 2, 64, 2, 1),
        estimator=EstimatorConfig(channels=32, attention_head_dim=16, num_heads=2, n_blocks=1, num_mid_blocks=2),
    ),
    hift=HiFTConfig(base_channels=32, f0_channels=32),
)


class RandomFolder(CosyVoice2Folder):
    """A checkpoint of random weights that exists in memory only."""

    def __init__(self, config: FolderConfig) -> None:
        self.config = config

    def load_flow(self) -> Flow:
        torch.manual_seed(0)
        return Flow(self.config.flow).eval().requires_grad_(False)

    def load_hift(self) -> HiFTGenerator:
        torch.manual_seed(1)
        hift = HiFTGenerator(self.config.hift).eval().requires_grad_(False)
        hift.f0_predictor.double()
        return hift


def flow_flop(tokens: int, n_steps: int) -> float:
    """Operations of the full-size flow for N tokens, prompt included: 5.41e9 N + 9.2e6 N^2 in ten steps, counted
    with torch's counter plus attention by formula; 2 % of it is the encoder's and does not grow with the steps."""
    return (5.41e9 * tokens + 9.2e6 * tokens**2) * (0.02 + 0.098 * n_steps)


HIFT_FLOP = 1.225e9
"""Operations of the full-size vocoder per generated token."""


def make_items(count: int, shortest: int, longest: int, prompt: int, vocab: int) -> tuple[list, list]:
    """Token sequences of evenly spread lengths in random order, all with the same prompt."""
    draw = np.random.default_rng(0)
    lengths = draw.permutation(np.linspace(shortest, longest, count).round().astype(int))
    voice = SimpleNamespace(
        tokens=draw.integers(0, vocab, prompt),
        mel=(draw.standard_normal((2 * prompt, 80)) * 2 - 5).astype(np.float32),
        embedding=draw.standard_normal(192).astype(np.float32),
    )
    return [draw.integers(0, vocab, length) for length in lengths], [voice] * count


class Clock:
    """Seconds of a piece of work on a device."""

    def __init__(self, device: torch.device, kind: str) -> None:
        self.device = device
        self.now = time.process_time if kind == "cpu" else time.perf_counter

    def __call__(self, work: Callable[[], object]) -> float:
        self.wait()
        start = self.now()
        work()
        self.wait()
        return self.now() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def matmul_rate(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """FLOP/s of a square product, the best of several."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.randn(size, size, device=device, dtype=dtype)
    a @ a
    return 2 * size**3 / min(clock(lambda: a @ a) for _ in range(10 if device.type == "cuda" else 5))


def measure(speak: Token2Wav, items: tuple[list, list], batch: int, clock: Clock) -> dict[str, float]:
    """Seconds for all items in calls of ``batch``, split into flow and vocoder."""
    spent = {"flow": 0.0, "hift": 0.0}
    padded = {"flow": 0, "hift": 0}
    valid = {"flow": 0, "hift": 0}
    generate, vocode = speak.flow.generate, speak.hift.forward

    def timed_flow(tokens, lengths, *rest):
        made = []
        spent["flow"] += clock(lambda: made.append(generate(tokens, lengths, *rest)))
        padded["flow"] += tokens.numel()
        valid["flow"] += sum(lengths)
        return made[0]

    def timed_hift(mel, noise, lengths):
        made = []
        spent["hift"] += clock(lambda: made.append(vocode(mel, noise, lengths)))
        padded["hift"] += len(mel) * mel.shape[2]
        valid["hift"] += sum(lengths)
        return made[0]

    speak.flow.generate, speak.hift.forward = timed_flow, timed_hift
    try:
        seconds = 0.0
        for start in range(0, len(items[0]), batch):
            part = [each[start : start + batch] for each in items]
            answers: list = []
            seconds += clock(lambda part=part, answers=answers: answers.extend(speak(*part)))
            assert all(answer.error is None for answer in answers), answers
    finally:
        speak.flow.generate, speak.hift.forward = generate, vocode
    waste = 1 - sum(valid.values()) / sum(padded.values())
    return {"seconds": seconds, "flow_s": spent["flow"], "hift_s": spent["hift"], "padding": waste}


@torch.inference_mode()
def mel_error(folder: CosyVoice2Folder, device: torch.device, dtype: torch.dtype, items, n_steps: int) -> float:
    """Root-mean-square difference of the mel from float32, relative to its own, on the shortest item."""
    shortest = min(range(len(items[0])), key=lambda i: len(items[0][i]))
    sequence = [np.concatenate([items[1][shortest].tokens, items[0][shortest]])]
    mels = [
        Token2Wav(folder, device, each, n_steps=n_steps)._mels(sequence, [items[1][shortest]])[0]
        for each in (torch.float32, dtype)
    ]
    return float(((mels[1] - mels[0]).square().mean() / mels[0].square().mean()).sqrt())


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model-path", help="checkpoint folder; random weights if not given")
    parser.add_argument("--small", action="store_true", help="tiny random model: a dry run")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES, help="of the flow")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8], help="utterances per call")
    parser.add_argument("--max-rows", type=int, help="most rows in a padded batch; Token2Wav's choice if not given")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="Token2Wav's memory budget")
    parser.add_argument("--compile", action="store_true", help="torch.compile the estimator")
    parser.add_argument("--utterances", type=int, default=8, help="how many, of evenly spread lengths")
    parser.add_argument("--shortest", type=int, default=100, help="tokens of the shortest")
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest")
    parser.add_argument("--prompt-tokens", type=int, default=75, help="tokens of the prompt")
    parser.add_argument("--n-steps", type=int, default=10, help="Euler steps")
    parser.add_argument("--repeats", type=int, default=1, help="measure so often and keep the fastest")
    parser.add_argument("--threads", type=int, help="torch threads; torch's choice if not given")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: of this process, CPU only")
    parser.add_argument("--json", help="write the rows there too")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    clock = Clock(device, args.clock)
    if args.model_path:
        folder: CosyVoice2Folder = CosyVoice2Folder(args.model_path)
    else:
        folder = RandomFolder(SMALL if args.small else FolderConfig())
    full_size = replace(folder.config.flow, vocab_size=6561) == FlowConfig()
    items = make_items(
        args.utterances, args.shortest, args.longest, args.prompt_tokens, folder.config.flow.vocab_size
    )
    audio = sum(map(len, items[0])) / folder.config.token_frame_rate
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {args.clock} clock; {args.utterances} "
        f"utterances of {args.shortest}-{args.longest} tokens ({audio:.0f} s), prompt {args.prompt_tokens} tokens, "
        f"{args.n_steps} steps"
    )
    rates = {each: matmul_rate(device, DTYPES[each], clock) for each in {"float32", *args.dtypes}}
    print("matmul: " + ", ".join(f"{each} {rate / 1e9:.0f} GFLOP/s" for each, rate in rates.items()))
    print("| flow | batch | utterances/s | real-time factor | flow s | hift s | of matmul bound | padding | peak GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for dtype in args.dtypes:
        options = {"max_rows": args.max_rows, "memory_gib": args.memory_gib, "compile": args.compile}
        speak = Token2Wav(folder, device, DTYPES[dtype], n_steps=args.n_steps, **options)
        for batch in args.batch_sizes:
            if device.type == "cuda":  # every shape once: kernels are chosen and, when compiling, built
                measure(speak, items, batch, clock)
                torch.cuda.reset_peak_memory_stats(device)
            else:
                speak([items[0][0][:10]], items[1][:1])
            runs = [measure(speak, items, batch, clock) for _ in range(args.repeats)]
            row = min(runs, key=lambda each: each["seconds"])
            # What the same operations would take at the rate of a large product, the vocoder in float32.
            bound = sum(flow_flop(args.prompt_tokens + len(each), args.n_steps) for each in items[0]) / rates[dtype]
            bound += HIFT_FLOP * sum(map(len, items[0])) / rates["float32"]
            peak = (
                torch.cuda.max_memory_allocated(device) / 2**30
                if device.type == "cuda"
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            )
            row |= {"dtype": dtype, "batch": batch, "peak_gib": peak, "matmul_flops": rates[dtype]}
            row["of_bound"] = bound / row["seconds"] if full_size else None
            rows.append(row)
            of_bound = "" if row["of_bound"] is None else f"{100 * row['of_bound']:.0f} %"
            print(
                f"| {dtype} | {batch} | {args.utterances / row['seconds']:.3f} | {row['seconds'] / audio:.3f} | "
                f"{row['flow_s']:.2f} | {row['hift_s']:.2f} | {of_bound} | {100 * row['padding']:.1f} % | {peak:.2f} |",
                flush=True,
            )
        del speak
        if dtype != "float32":
            error = mel_error(folder, device, DTYPES[dtype], items, args.n_steps)
            rows[-1]["mel_error"] = error
            print(f"mel in {dtype}: {100 * error:.2f} % off float32 (RMS, relative)", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
