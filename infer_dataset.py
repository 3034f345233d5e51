"""Stage 4: synthesise a test set with a language model and the frozen decoder of a CosyVoice2 folder.

    python infer_dataset.py --llm exp/tiny/merged/global_step_20 --model-dir assets/cosyvoice2-tiny \
        --split assets/cosyvoice2-tiny/data/test.jsonl --prompts assets/cosyvoice2-tiny/prompts \
        --output-dir exp/tiny/eval/step_20
    torchrun --nproc-per-node 8 infer_dataset.py --split zero_shot_zh ...      # or: --n-procs 8

Writes <output-dir>/<split>/utterances.jsonl and wav/ (cosyvoice/evaluation/records.py says what is in them). A run
that was stopped goes on where it was. Test sets: cosyvoice/evaluation/testsets.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from cosyvoice.evaluation.records import split_name


def get_parser() -> argparse.ArgumentParser:
    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    group = parser.add_argument_group("models and data")
    group.add_argument("--llm", required=True, help="language model: Hugging Face folder (converted or merged)")
    group.add_argument("--model-dir", required=True, help="CosyVoice2 folder: decoder and prompt networks")
    group.add_argument("--split", required=True, help="test set: a published name, or a JSONL file or folder")
    group.add_argument("--data", help="local copy of the published set (default: from the hub)")
    group.add_argument("--language", default="zh", help="of a JSONL test set whose rows do not say")
    group.add_argument("--prompts", help="prompt recordings for utterances without their own: folder or JSONL")
    group.add_argument(
        "--prompting",
        choices=("auto", "zero-shot", "text-only"),
        default="auto",
        help="whether the language model sees the prompt; auto: where the utterance has a prompt of its own",
    )
    group.add_argument("--limit", type=int, default=0, help="first N utterances only; 0: all")
    group.add_argument("--output-dir", required=True, help="the system's result folder")
    group.add_argument("--overwrite", action="store_true", help="start anew instead of going on")
    group.add_argument("--cache-dir", help="features of prompts (default: the user's cache)")
    group.add_argument("--downloads", default="downloads", help="test sets from the hub")

    group = parser.add_argument_group("sampling")
    group.add_argument("--sampling", choices=("train", "ras", "greedy"), default="train", help="how tokens are chosen")
    group.add_argument("--temperature", type=float, default=0.8, help="of --sampling train")
    group.add_argument("--top-p", type=float, default=0.95, help="of --sampling train")
    group.add_argument("--top-k", type=int, default=25, help="of --sampling train; 0: all")
    group.add_argument("--max-tokens", type=int, help="longest answer (default: 20 per text token)")
    group.add_argument("--seed", type=int, default=0, help="of the run; every utterance's seed follows from it")

    group = parser.add_argument_group("computation")
    group.add_argument("--backend", choices=("auto", "vllm", "transformers"), default="auto",
                       help="language model; auto: vllm where it is installed and can sample so")  # fmt: skip
    group.add_argument("--device", default="auto", help="auto, cpu, or cuda (torchrun's local rank chooses which)")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
                       help="of the language model")  # fmt: skip
    group.add_argument("--flow-dtype", choices=("float32", "bfloat16", "float16"), default="float32",
                       help="of the flow")  # fmt: skip
    group.add_argument("--flow-steps", type=int, default=10, help="Euler steps of the flow")
    group.add_argument("--batch-size", type=int, default=64, help="sequences of the language model at once")
    group.add_argument("--group", type=int, default=128, help="utterances between two stores on disk")
    group.add_argument("--gpu-memory", type=float, default=0.5, help="share of a GPU for vLLM")
    group.add_argument("--n-procs", type=int, default=1, help="processes that share the set; torchrun's ranks win")
    group.add_argument("--no-progress", action="store_true", help="no progress bars")
    return parser


def run_processes(n: int, argv: list[str]) -> int:
    """Run this script once per rank; the first failure ends all."""
    threads = str(max(1, (os.cpu_count() or 1) // n))
    children = []
    for rank in range(n):
        environment = {"OMP_NUM_THREADS": threads, **os.environ}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
        command = [sys.executable, str(Path(__file__).resolve()), *argv]
        children.append(subprocess.Popen(command, env=environment, start_new_session=True))

    def end_all(*_: object) -> None:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
        for child in children:
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, end_all)
    try:
        waiting = list(children)
        while waiting:
            for child in list(waiting):
                try:
                    code = child.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
                waiting.remove(child)
                if code:
                    print(f"error: rank {children.index(child)} ended with status {code}", file=sys.stderr)
                    end_all()
    except KeyboardInterrupt:
        end_all()
    return 0


def settings_of(args: argparse.Namespace, backend: str) -> dict:
    """What decides the result, as stored beside it."""
    names = ("split", "data", "language", "prompts", "prompting", "limit", "sampling", "max_tokens", "seed", "dtype")
    settings = {name: getattr(args, name) for name in (*names, "flow_dtype", "flow_steps")}
    if args.sampling == "train":
        settings |= {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    return {**settings, "llm": str(args.llm), "model_dir": str(args.model_dir), "backend": backend}


def pick_backend(args: argparse.Namespace) -> str:
    """vLLM where it is installed and not asked for RAS.

    Raises:
        ValueError: vLLM was asked for RAS.
    """
    if args.backend == "vllm" and args.sampling == "ras":
        raise ValueError("--sampling: found ras with --backend vllm, expected --backend transformers")
    if args.backend != "auto":
        return args.backend
    from importlib.util import find_spec

    return "vllm" if args.sampling != "ras" and find_spec("vllm") else "transformers"


def run_rank(args: argparse.Namespace, rank: int, world_size: int) -> None:
    """Synthesise every ``world_size``-th utterance of the set, beginning with number ``rank``."""
    backend, progress = pick_backend(args), not args.no_progress
    import torch

    from cosyvoice.checkpoint import CosyVoice2Folder
    from cosyvoice.evaluation import generate, synthesis
    from cosyvoice.evaluation.testsets import load_test_set
    from cosyvoice.llm.tokenizer import load_tokenizer
    from cosyvoice.token2wav import Token2Wav

    utterances = load_test_set(args.split, args.data, args.language, args.downloads)
    utterances = utterances[: args.limit or None]
    folder = CosyVoice2Folder(args.model_dir)
    inputs = {
        "llm": synthesis.content_hash(sorted(Path(args.llm).glob("*.safetensors"))),
        "decoder": synthesis.content_hash([folder.path / "flow.pt", folder.path / "hift.pt"]),
        "test set": synthesis.content_hash([], repr(utterances)),
    }
    output = synthesis.Output(
        Path(args.output_dir) / split_name(args.split), settings_of(args, backend), inputs
    )
    done = output.done()
    todo = [u for u in utterances[rank::world_size] if u.id not in done]
    if todo:
        plans = synthesis.choose_prompts(todo, folder, args.prompts, args.prompting, args.cache_dir, progress)
        tokenizer, layout = load_tokenizer(Path(args.llm))

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        speakable = [plan for plan in plans if not plan.error]
        requests = [synthesis.make_request(plan, encode, args.seed, args.max_tokens) for plan in speakable]
        sampling = generate.Sampling(args.sampling, args.temperature, args.top_p, args.top_k)
        device = args.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if backend == "vllm":
            longest = max((len(r.ids) + r.max_tokens for r in requests), default=1)
            llm = generate.VLLMGenerator(
                args.llm, layout, sampling, longest, args.dtype, args.batch_size, args.gpu_memory
            )
        else:
            dtype = getattr(torch, args.dtype)
            llm = generate.TransformersGenerator(args.llm, layout, sampling, device, dtype, args.batch_size)
        decoder = Token2Wav(folder, device, getattr(torch, args.flow_dtype), n_steps=args.flow_steps)
        synthesis.synthesise(plans, llm, decoder, requests, output, args.seed, rank, args.group, progress)
    if output.finish([u.id for u in utterances]):
        rows = output.done().values()
        failed = [row for row in rows if row["error"]]
        ended = sum(row["ended"] for row in rows)
        print(f"{output.list}: {len(rows)} utterances, {ended} ended by themselves, {len(failed)} without audio")
        for row in failed[:10]:
            print(f"  {row['id']}: {row['error']}")


def main(argv: list[str] | None = None) -> int:
    args = get_parser().parse_args(argv)
    ranked = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    # vLLM and torch must not take torchrun's variables for their own: every rank works alone.
    rank, local = (int(os.environ.pop(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    world_size = int(os.environ.pop("WORLD_SIZE", 1))
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    if world_size > 1 and args.device != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local] if visible else str(local)
    if args.overwrite and not ranked:
        shutil.rmtree(Path(args.output_dir) / split_name(args.split), ignore_errors=True)
    try:
        if args.n_procs > 1 and not ranked:
            passed = [a for a in (sys.argv[1:] if argv is None else argv) if a != "--overwrite"]
            return run_processes(args.n_procs, passed)
        run_rank(args, rank, world_size)
    except ValueError as error:  # EvaluationError, AudioError, CheckpointError: what the user gave is at fault
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
