"""Group-relative advantages for several rewards at once.

GRPO (arXiv 2402.03300) compares the total rewards of the rollouts of one prompt. When a total is a weighted
sum, the component with the largest spread decides alone. Normalising each component inside its group
*before* the weighted sum keeps the weights meaningful (the first two steps of GDPO, arXiv 2601.05242;
without its third, the whitening over the batch, which would move the mean of a group away from zero).

Registered with veRL as ``multi_reward_grpo`` on import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est

_staged: dict[str, list[float]] = {}


def pick(sample: Mapping[str, Any], keys: Sequence[str], name: str) -> list[float]:
    """The values of ``keys`` in what the reward function returned for the rollout ``name``.

    A component that was not measured (NaN: there was no audio, say) counts as 0, the worst value of a component.
    """
    missing = [key for key in keys if key not in sample]
    if missing:
        raise KeyError(f"rollout {name}: no reward component {missing[0]!r}, found {sorted(sample)}")
    values = [float(sample[key]) for key in keys]
    return [0.0 if math.isnan(value) else value for value in values]


def stage(components: Mapping[str, Sequence[float]]) -> None:
    """Leave the rewards of the coming batch for the estimator: trajectory key -> one value per component."""
    _staged.clear()
    _staged.update({key: list(values) for key, values in components.items()})


def group_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    *,
    by_std: bool = True,
    min_group: int = 2,
    clip: float | None = None,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Weighted sum of rewards that were each normalised inside their group.

    Args:
        rewards: [B, K], one column per component.
        groups: [B] integers in [0, G), the group of each row, in any order.
        weights: [K].
        by_std: divide by the group's standard deviation (n - 1, as GRPO does); False as in Dr. GRPO.
        min_group: rows of a smaller group get advantage 0. A lone rollout has nothing to be compared with,
            so it gives no gradient (veRL's own GRPO would use its raw score).
        clip: bound of the absolute advantage, None for none.
        epsilon: added to the standard deviation, as in veRL and TRL.

    Returns:
        [B] float32 advantages. A component that is constant inside a group adds 0 there.
    """
    values = rewards.to(torch.float64)
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    sizes = torch.zeros(n_groups, dtype=torch.float64).index_add_(
        0, groups, torch.ones(len(groups), dtype=torch.float64)
    )
    sums = torch.zeros(n_groups, values.shape[1], dtype=torch.float64).index_add_(0, groups, values)
    centred = values - (sums / sizes.clamp(min=1)[:, None])[groups]
    if by_std:
        squares = torch.zeros_like(sums).index_add_(0, groups, centred.square())
        std = (squares / (sizes - 1).clamp(min=1)[:, None]).sqrt()
        centred = centred / (std[groups] + epsilon)
    result = centred @ weights.to(torch.float64)
    result = torch.where(sizes[groups] >= min_group, result, torch.zeros_like(result))
    if clip is not None:
        result = result.clamp(-clip, clip)
    return result.to(torch.float32)


@register_adv_est("multi_reward_grpo")
def multi_reward_grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    index: np.ndarray | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """veRL's face of `group_advantages`.

    Settings: ``+algorithm.multi_reward.weights={component: weight, ...}`` and, optionally, ``.min_group`` and
    ``.clip``; ``algorithm.norm_adv_by_std_in_grpo`` is honoured. Without weights the total score is the
    only reward.

    Args:
        token_level_rewards: [B, T], the total score on one token of each row.
        response_mask: [B, T].
        index: [B] trajectory keys ``<group>_<session>_<output>`` where rewards were staged, else group names.

    Returns:
        advantages and returns, both [B, T]: the row's advantage on every token of its response.
    """
    settings = dict((config or {}).get("multi_reward") or {})
    weights = {str(key): float(value) for key, value in dict(settings.get("weights") or {}).items()}
    names = [str(name) for name in index]
    if weights:
        # veRL fills a batch that lost rollouts up with rows that have no response token and a name of their own
        padding = (response_mask.sum(dim=-1) == 0).tolist()
        missing = [name for name, padded in zip(names, padding) if not padded and name not in _staged]
        if missing:
            raise KeyError(
                f"multi_reward_grpo: no rewards were staged for rollout {missing[0]!r} (is SpeechReplayBuffer in use?)"
            )
        nothing = [0.0] * len(weights)
        rewards = torch.tensor([_staged.get(name, nothing) for name in names], dtype=torch.float64)
        names = [name.rsplit("_", 2)[0] for name in names]
    else:
        weights = {"total": 1.0}
        rewards = token_level_rewards.sum(dim=-1, keepdim=True)
    if rewards.shape[1] != len(weights):
        raise ValueError(f"multi_reward_grpo: {rewards.shape[1]} rewards were staged, expected {list(weights)}")
    _, groups = np.unique(np.asarray(names, dtype=str), return_inverse=True)
    with torch.no_grad():
        scalars = group_advantages(
            rewards.cpu(),
            torch.from_numpy(groups),
            torch.tensor(list(weights.values())),
            by_std=bool((config or {}).get("norm_adv_by_std_in_grpo", True)),
            min_group=int(settings.get("min_group", 2)),
            clip=None if settings.get("clip") is None else float(settings["clip"]),
        ).to(token_level_rewards.device)
        advantages = scalars[:, None] * response_mask
    return advantages, advantages
