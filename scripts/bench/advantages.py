"""Group-relative advantages at the size of a large step: ours against veRL's loop over samples.

    .venv/train/bin/python scripts/bench/advantages.py --responses 4096 --group 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--responses", type=int, default=4096, help="rollouts in the step")
    parser.add_argument("--group", type=int, default=8, help="rollouts of one prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the longest response")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls of each; the median is shown")
    return parser


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))


def main() -> None:
    args = get_parser().parse_args()
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    import cosyvoice.training.advantages  # noqa: F401  (registers the estimator)

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, args.tokens + 1, (args.responses,), generator=generator)
    mask = (torch.arange(args.tokens)[None] < lengths[:, None]).float()
    rewards = torch.zeros(args.responses, args.tokens)
    rewards[torch.arange(args.responses), lengths - 1] = torch.rand(args.responses, generator=generator)
    index = np.array([f"prompt-{i // args.group}" for i in range(args.responses)], dtype=object)

    def estimate(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return get_adv_estimator_fn(name)(
            token_level_rewards=rewards, response_mask=mask, index=index, config={"norm_adv_by_std_in_grpo": True}
        )

    gap = (estimate("grpo")[0] - estimate("multi_reward_grpo")[0]).abs().max().item()
    seconds = {
        name: median_seconds(lambda name=name: estimate(name), args.repeats)
        for name in ("grpo", "grpo_vectorized", "multi_reward_grpo")
    }
    print(f"{args.responses} responses in groups of {args.group}, {args.tokens} tokens; largest difference {gap:.1e}")
    for name, value in seconds.items():
        print(f"{name:20s} {1e3 * value:9.2f} ms   {seconds['grpo'] / value:6.1f} x")


if __name__ == "__main__":
    main()
