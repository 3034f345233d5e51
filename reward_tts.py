"""Stage 2: the reward function that veRL calls, and a command line to see whether a reward server is healthy.

    python reward_tts.py --check --urls http://127.0.0.1:8000          # score the server's known sentence
    python reward_tts.py --urls http://a:8000,http://b:8000 data.jsonl # score speech tokens or waveforms

Lines of the JSONL hold ``text`` and ``code`` (a list of ids, or "<|s_1|><|s_2|>...") or ``audio`` (a file, relative to
the JSONL; the server must serve ``sensevoice``), and optionally ``id``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosyvoice.reward.record import RewardRecord
from cosyvoice.serving.client import ClientOptions, RewardSystemError
from cosyvoice.serving.health import check_servers
from cosyvoice.serving.shared_client import SharedClient, shared_client
from cosyvoice.speech_tokens import parse

URLS_VARIABLE = "REWARD_SERVER_URLS"
DEFAULT_URLS = "http://127.0.0.1:8000"


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    urls: str | Sequence[str] | None = None,
    require_end: bool = True,
    attempt_timeout_s: float = 120.0,
    budget_s: float = 300.0,
    **_: Any,
) -> dict[str, float | str]:
    """Score one answer of the language model (veRL's custom reward function).

    Args:
        data_source: name of the data set; not used.
        solution_str: the answer, decoded **with** special tokens, so that its end token shows.
        ground_truth: the text that should be heard.
        extra_info: ``prompt_key``, ``id`` or ``index`` chooses the speaker prompt, so that a group shares one; the
            text chooses if none is there.
        urls: reward servers; else the environment variable REWARD_SERVER_URLS, else this machine's port 8000.
        require_end: False where a trainer strips special tokens: every answer then counts as ended.
        attempt_timeout_s: seconds for one try.
        budget_s: seconds for all tries.

    Returns:
        ``score`` first, then the record's numbers, then ``status`` and ``transcript``; always the same keys.

    Raises:
        RewardSystemError: no score, for a reason that is not the model's.
    """
    client = _client(urls, attempt_timeout_s, budget_s)
    record = await client.acall(_score(client, solution_str, ground_truth, extra_info, require_end))
    return as_result(record)


def compute_score_sync(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    urls: str | Sequence[str] | None = None,
    require_end: bool = True,
    attempt_timeout_s: float = 120.0,
    budget_s: float = 300.0,
    **_: Any,
) -> dict[str, float | str]:
    """:func:`compute_score` for trainers that call from threads; arguments and result are the same."""
    client = _client(urls, attempt_timeout_s, budget_s)
    return as_result(client.call(_score(client, solution_str, ground_truth, extra_info, require_end)))


def as_result(record: RewardRecord) -> dict[str, float | str]:
    """A record as veRL takes it: numbers are averaged, strings are written to the rollout files."""
    return {
        "score": float(record.score),
        **record.numeric_metrics(),
        "status": record.status.value,
        "transcript": record.transcript,
    }


def _client(urls: str | Sequence[str] | None, attempt_timeout_s: float, budget_s: float) -> SharedClient:
    urls = urls or os.environ.get(URLS_VARIABLE) or DEFAULT_URLS
    return shared_client(urls, ClientOptions(attempt_timeout_s=attempt_timeout_s, budget_s=budget_s))


async def _score(
    client: SharedClient, answer: str, text: str, extra_info: Mapping[str, Any] | None, require_end: bool
) -> RewardRecord:
    parsed = parse(answer)
    return await client.client.score(
        parsed.ids,
        text,
        prompt_key=prompt_key(extra_info or {}),
        ended=parsed.ended or not require_end,
        out_of_range=len(parsed.out_of_range) + len(parsed.unknown),
    )


def prompt_key(extra_info: Mapping[str, Any]) -> str:
    """What identifies a sample's text, equal for all answers of its group and in every epoch."""
    for name in ("prompt_key", "id", "index"):
        value = extra_info.get(name)
        if value is not None and str(value):
            return str(value)
    return ""


def get_parser() -> argparse.ArgumentParser:
    """The command line; defaults are shown in the help."""
    parser = argparse.ArgumentParser(
        description="Score a JSONL with a reward server, or check that a server works.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("input", nargs="?", type=Path, help="JSONL with text and code, or text and audio")
    parser.add_argument(
        "--urls", "--server-url", dest="urls", default=os.environ.get(URLS_VARIABLE, DEFAULT_URLS), help="comma list"
    )
    parser.add_argument("--check", action="store_true", help="score every server's known sentence, print one line")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for the servers to be ready")
    parser.add_argument("--output", type=Path, help="write one record per line to this JSONL")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    parser.add_argument("--attempt-timeout-s", type=float, default=120.0)
    parser.add_argument("--budget-s", type=float, default=300.0, help="seconds for all tries of a request")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns 0 if every request got a score."""
    parser = get_parser()
    args = parser.parse_args(argv)
    if args.check == (args.input is not None):
        parser.error("expected either --check or a JSONL to score")
    options = ClientOptions(attempt_timeout_s=args.attempt_timeout_s, budget_s=args.budget_s)
    try:
        if args.check:
            print(asyncio.run(check_servers(args.urls, args.wait)))
            return 0
        from cosyvoice.serving.scoring import score_file

        return asyncio.run(score_file(args.input, args.urls, options, args.concurrency, args.output))
    except (RewardSystemError, OSError, ValueError) as error:
        print(f"reward_tts.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
