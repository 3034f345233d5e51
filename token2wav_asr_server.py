"""Stage 1: the reward server. Speech tokens and a text in; a reward, the transcript and a record out.

    python token2wav_asr_server.py --model-dir pretrained/CosyVoice2-0.5B --asr-model FunAudioLLM/SenseVoiceSmall \
        --prompts prompts.jsonl --number-of-devices 8

It is ready (``GET /v2/models/token2wav_asr/ready`` gives 200) only after every worker has synthesised, heard and
scored a known sentence. ``python reward_tts.py --check`` asks it to score that sentence over the network.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

from cosyvoice.reward.config import RewardConfig, add_reward_options
from cosyvoice.serving import wire
from cosyvoice.serving.host import HostError
from cosyvoice.serving.metrics import ServingMetrics
from cosyvoice.serving.pool import PoolError, WorkerPool, plan_workers
from cosyvoice.serving.server import RewardServer, ServerConfig
from cosyvoice.serving.slot import Limits
from cosyvoice.serving.worker import WorkerSpec

CHAIN_FACTORY = "cosyvoice.serving.chain:make_chain"
logger = logging.getLogger("token2wav_asr_server")


def get_parser() -> argparse.ArgumentParser:
    """The command line; defaults are shown in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    models = parser.add_argument_group("models")
    models.add_argument("--model-dir", "--model-path", dest="model_dir", help="CosyVoice2 folder")
    models.add_argument("--asr-model", default="iic/SenseVoiceSmall", help="SenseVoice folder or hub name")
    models.add_argument("--prompts", help="folder or JSONL with prompt recordings; default: MODEL_DIR/prompts")
    models.add_argument("--prompt-cache", help="where computed prompts are kept; default: the user's cache folder")
    models.add_argument(
        "--model-name",
        nargs="+",
        choices=(wire.TOKEN_MODEL, wire.WAVE_MODEL),
        default=[wire.TOKEN_MODEL],
        help=f"what is served: {wire.TOKEN_MODEL} (speech tokens), {wire.WAVE_MODEL} (waveforms), or both",
    )
    models.add_argument("--language", default="zh", help="what SenseVoice is told to expect")
    models.add_argument(
        "--self-test-max-wer",
        type=float,
        default=0.2,
        help="pinyin error rate that the known sentence may have: one prompt's own speech tokens, synthesised and "
        "transcribed; above it the server does not start",
    )

    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any"
    )
    workers.add_argument("--number-of-devices", type=int, default=1, help="GPUs; on the CPU just a number of workers")
    workers.add_argument("--number-of-instances-per-device", type=int, default=1, help="workers on each device")
    workers.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of Token2Wav")
    workers.add_argument("--euler-steps", type=int, default=10, help="steps of the flow's solver")
    workers.add_argument(
        "--start-timeout-s", type=float, default=900.0, help="a worker that takes longer to load hangs"
    )
    workers.add_argument("--batch-timeout-s", type=float, default=300.0, help="a batch that takes longer hangs")
    workers.add_argument(
        "--recycle-after", type=int, default=100_000, help="requests after which a worker is replaced; 0: never"
    )
    workers.add_argument(
        "--worker-rss-gb", type=float, default=0.0, help="resident memory at which a worker is replaced; 0: no bound"
    )

    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for other nodes")
    network.add_argument("--http-port", type=int, default=8000)
    network.add_argument("--grpc-port", type=int, default=8001)
    network.add_argument("--metrics-port", type=int, default=8002, help="Triton's own metrics")
    network.add_argument(
        "--reward-metrics-port", type=int, help="statuses, phases, workers; default: the metrics port + 1"
    )

    batching = parser.add_argument_group("batching")
    batching.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        help="longest answer; clients pad to it, Triton merges equal widths only",
    )
    batching.add_argument("--max-batch-size", type=int, default=32)
    batching.add_argument("--batch-delay-ms", type=float, default=10.0, help="wait for a batch to fill")
    batching.add_argument("--max-queue", type=int, default=8192, help="requests that wait at most; more get 503")
    batching.add_argument("--queue-timeout-s", type=float, default=600.0, help="a request that waits longer gets 503")

    add_reward_options(parser)
    testing = parser.add_argument_group("development")
    testing.add_argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO")
    testing.add_argument(
        "--worker-factory", default=CHAIN_FACTORY, help="module:function that builds a worker's scorer"
    )
    testing.add_argument("--worker-option", nargs="*", default=[], metavar="KEY=VALUE", help="for another factory")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit code."""
    args = get_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        options = _worker_options(args)
        spec = WorkerSpec(args.worker_factory, options, log_level=logging.getLevelName(args.log_level))
        device = _device(args.device, args.number_of_devices)
        specs = plan_workers(spec, device, args.number_of_devices, args.number_of_instances_per_device)
        metrics = ServingMetrics()
        limits = Limits(
            start_timeout_s=args.start_timeout_s,
            batch_timeout_s=args.batch_timeout_s,
            recycle_after=args.recycle_after,
            rss_limit_bytes=int(args.worker_rss_gb * 1e9),
        )
        reward = dataclasses.asdict(RewardConfig.from_args(args))
        info = {"model_dir": args.model_dir, "asr_model": args.asr_model, "reward": reward}
        server = RewardServer(_server_config(args), WorkerPool(specs, metrics, limits), metrics, info)
        return server.run()
    except (HostError, PoolError, ValueError) as error:
        print(f"token2wav_asr_server.py: {error}", file=sys.stderr)
        return 1


def _worker_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the worker factory: for the chain those of ``ChainOptions``."""
    if args.worker_factory != CHAIN_FACTORY:
        return dict(pair.partition("=")[::2] for pair in args.worker_option)
    options = {
        "asr_model": args.asr_model,
        "batch_size": args.max_batch_size,
        "language": args.language,
        "reward": RewardConfig.from_args(args),
    }
    if wire.TOKEN_MODEL not in args.model_name:
        return options
    if args.model_dir is None:
        raise ValueError(f"--model-dir is missing: {wire.TOKEN_MODEL} needs a CosyVoice2 folder")
    prompts = args.prompts or str(Path(args.model_dir) / "prompts")
    if not Path(prompts).exists():
        raise ValueError(f"--prompts {prompts}: no such folder or file, expected prompt recordings with their texts")
    return options | {
        "model_path": args.model_dir,
        "prompts": prompts,
        "cache_dir": args.prompt_cache,
        "dtype": args.dtype,
        "euler_steps": args.euler_steps,
        "self_test_max_wer": args.self_test_max_wer,
    }


def _device(wanted: str, number: int) -> str:
    """Resolve "auto", and refuse GPUs that are not there."""
    if wanted == "cpu":
        return "cpu"
    import torch  # only here: this process holds no model, and its workers import torch with their own settings

    found = torch.cuda.device_count()
    if wanted == "auto" and found == 0:
        logger.info("no GPU found: the workers run on the CPU")
        return "cpu"
    if found < number:
        raise ValueError(f"--number-of-devices {number}: torch sees {found} GPUs")
    return "cuda"


def _server_config(args: argparse.Namespace) -> ServerConfig:
    names = {field.name for field in dataclasses.fields(ServerConfig)} & set(vars(args))
    values = {name: getattr(args, name) for name in names}
    if values["reward_metrics_port"] is None:
        values["reward_metrics_port"] = args.metrics_port + 1
    return ServerConfig(models=args.model_name, limits=wire.Limits(max_tokens=args.max_tokens), **values)


if __name__ == "__main__":
    sys.exit(main())
