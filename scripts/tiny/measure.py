"""Measure the checkpoint: both recognisers on natural and resynthesised audio, the language model, the speed.

Writes measurements.json beside the model card. Every rate is toned pinyin, corpus level, with a 95 % interval from
resampling utterances.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import sherpa_onnx
import torch
from resynthesise import bank
from sample_llm import sample
from settings import ASSETS, EULER_STEPS, SAMPLE_RATE, SEED, WORK
from speak import load
from train_llm import TinyLLM, load_exported

from cosyvoice.asr import SenseVoice
from cosyvoice.frontend import resample
from cosyvoice.reward.error_rate import error_rate
from cosyvoice.reward.text import normalise, to_pinyin
from cosyvoice.token2wav import Token2Wav

Recogniser = Callable[[list[np.ndarray]], list[str]]


def reward_recogniser() -> Recogniser:
    """The SenseVoice folder as the reward server uses it."""
    model = SenseVoice(ASSETS / "sensevoice", batch_size=64)
    return lambda waves: [t.text for t in model.transcribe(waves)]


def judge() -> Recogniser:
    """The held-out recogniser through sherpa-onnx."""
    model = sherpa_onnx.OfflineRecognizer.from_zipformer_ctc(
        model=str(ASSETS / "judge" / "model.onnx"), tokens=str(ASSETS / "judge" / "tokens.txt"), num_threads=1)

    def recognise(waves: list[np.ndarray]) -> list[str]:
        streams = []
        for wave in waves:
            stream = model.create_stream()
            stream.accept_waveform(16000, wave)
            streams.append(stream)
        model.decode_streams(streams)
        return [s.result.text.strip() for s in streams]

    return recognise


def scored(texts: list[str], transcripts: list[str], seed: int = SEED) -> dict:
    """Corpus pinyin error with a 95 % bootstrap interval over utterances."""
    rates = [error_rate(to_pinyin(normalise(t)), to_pinyin(normalise(h))) for t, h in zip(texts, transcripts)]
    wrong = np.array([r.substitutions + r.deletions + r.insertions for r in rates])
    total = np.array([r.n_ref for r in rates])
    picks = np.random.default_rng(seed).integers(0, len(rates), (2000, len(rates)))
    low, high = np.percentile(wrong[picks].sum(1) / total[picks].sum(1), [2.5, 97.5])
    return {"error": round(float(wrong.sum() / total.sum()), 4),
            "interval": [round(float(low), 4), round(float(high), 4)],
            "substitutions": int(sum(r.substitutions for r in rates)),
            "deletions": int(sum(r.deletions for r in rates)),
            "insertions": int(sum(r.insertions for r in rates)),
            "syllables": int(total.sum()), "utterances": len(rates)}


def waves_of(split: str, limit: int | None = None) -> tuple[list[str], list[np.ndarray]]:
    """Texts and 16 kHz waves of a split."""
    rows, waves = load(split)
    waves = [resample(np.array(w, np.float32) / 32768, SAMPLE_RATE, 16000) for w in waves[:limit]]
    return [r["text"] for r in rows[:limit]], waves


def speak_samples(
    texts: list[str], answers: list[tuple[list[int], bool]], steps: int, guidance: float | None
) -> list[np.ndarray]:
    """16 kHz audio of sampled tokens, prompts as the reward picks them: by the text."""
    prompts = bank()
    token2wav = Token2Wav(ASSETS, n_steps=steps, guidance=guidance)
    speech = token2wav([a or [0] for a, _ in answers], [prompts.pick(t) for t in texts])
    return [resample(s.wav, SAMPLE_RATE, 16000) for s in speech]


def llm_report(path: str, texts: list[str], recognisers: dict[str, Recogniser], temperature: float, steps: int) -> dict:
    """Error, ending and length of what a kept state says."""
    model = TinyLLM().eval()
    load_exported(model, {k: v.float() for k, v in torch.load(path, weights_only=True).items()})
    answers = sample(model, texts, temperature=temperature, seed=SEED)
    waves = speak_samples(texts, answers, steps, None)
    report = {name: scored(texts, r(waves)) for name, r in recognisers.items()}
    report["ended"] = float(np.mean([e for _, e in answers]))
    report["tokens"] = float(np.mean([len(a) for a, _ in answers]))
    return report


def throughput(texts: list[str], recogniser: Recogniser, steps: int) -> dict:
    """Utterances per second of tokens -> audio -> text in one process on the threads torch has now."""
    rows, _ = load("test")
    tokens = np.load(WORK / "test.tokens.npy")
    answers = [(tokens[r["start"] // 960 : r["stop"] // 960].tolist(), True) for r in rows[: len(texts)]]
    speak_samples(texts[:8], answers[:8], steps, None)
    began = time.perf_counter()
    waves = speak_samples(texts, answers, steps, None)
    spoken = time.perf_counter()
    recogniser(waves)
    ended = time.perf_counter()
    return {"utterances": len(texts), "token2wav_per_s": len(texts) / (spoken - began),
            "recogniser_per_s": len(texts) / (ended - spoken), "chain_per_s": len(texts) / (ended - began),
            "threads": torch.get_num_threads()}


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--what", nargs="+", default=["natural", "resynthesised", "llm", "speed"],
                        choices=["natural", "resynthesised", "llm", "speed"])
    parser.add_argument("--llm", nargs="+", default=[str(ASSETS / "llm.pt")], help="language model states")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8, 1.0])
    parser.add_argument("--limit", type=int, help="only the first LIMIT test sentences")
    parser.add_argument("--euler-steps", type=int, default=EULER_STEPS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["reward", "judge"], help="one recogniser only")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    recognisers = {"reward": reward_recogniser, "judge": judge}
    recognisers = {k: v() for k, v in recognisers.items() if args.only in (None, k)}
    torch.set_num_threads(args.threads)
    path = ASSETS / "measurements.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "natural" in args.what:
        texts, waves = waves_of("test", args.limit)
        report["natural"] = {name: scored(texts, r(waves)) for name, r in recognisers.items()}
    if "resynthesised" in args.what:
        texts, waves = waves_of("test_resynth", args.limit)
        report["resynthesised"] = {name: scored(texts, r(waves)) for name, r in recognisers.items()}
    texts, _ = load("test")
    texts = [r["text"] for r in texts[: args.limit]]
    if "llm" in args.what:
        report["llm"] = {}
        for state in args.llm:
            for temperature in args.temperatures:
                found = llm_report(state, texts, recognisers, temperature, args.euler_steps)
                report["llm"][f"{state.rsplit('/', 1)[-1]} temperature {temperature}"] = found
                print(state, temperature, found, flush=True)
    if "speed" in args.what:
        report["speed"] = throughput(texts[:200], recognisers["reward"], args.euler_steps)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in report.items() if k != "llm"}, indent=1))


if __name__ == "__main__":
    main()
