"""What is optimised: veRL's registered estimators and ours on groups worked by hand."""

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from cosyvoice.training import advantages

EPS = 1e-6


def token_level(scores, lengths, width=4):
    """The score on the last token of each response, and the response mask."""
    rewards, mask = torch.zeros(len(scores), width), torch.zeros(len(scores), width)
    for i, (score, length) in enumerate(zip(scores, lengths)):
        rewards[i, length - 1] = score
        mask[i, :length] = 1
    return rewards, mask


# Two groups in mixed order, a singleton, a group without variance, lengths 1 to 4.
SCORES = [1.0, 0.2, 0.0, 0.6, 0.5, 0.7, 0.7, 2.0]
UIDS = np.array(["a", "b", "a", "b", "a", "c", "c", "d"], dtype=object)
LENGTHS = [4, 1, 2, 3, 4, 2, 1, 3]
# Group a: 1, 0, .5, mean .5, std (n - 1) sqrt((.25 + .25 + 0) / 2) = .5. Group b: .2, .6, mean .4, std sqrt(.08).
A, B = 0.5, math.sqrt(0.08)
WITH_STD = [0.5 / (A + EPS), -0.2 / (B + EPS), -0.5 / (A + EPS), 0.2 / (B + EPS), 0.0, 0.0, 0.0]
WITHOUT_STD = [0.5, -0.2, -0.5, 0.2, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
@pytest.mark.parametrize(("by_std", "expected"), [(True, WITH_STD), (False, WITHOUT_STD)])
def test_verl_grpo_on_hand_worked_groups(name, by_std, expected):
    rewards, mask = token_level(SCORES, LENGTHS)
    got, returns = get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, index=UIDS, norm_adv_by_std_in_grpo=by_std
    )
    # The singleton is left out: veRL gives it its raw score (2.0), the reason for replay_buffer's min_group.
    want = torch.tensor(expected)[:, None] * mask[:7]
    torch.testing.assert_close(got[:7], want, rtol=0, atol=1e-6)
    assert torch.equal(got, returns)


def test_verl_gives_a_lone_rollout_its_raw_score():
    rewards, mask = token_level([2.0], [3])
    got, _ = get_adv_estimator_fn("grpo")(token_level_rewards=rewards, response_mask=mask, index=np.array(["d"]))
    assert got[0, 0].item() == pytest.approx(2.0, rel=1e-5)


def test_verl_gae_with_masked_whitening():
    """gamma .9, lambda .8, one response of two tokens and one of one token, worked by hand (arXiv 1506.02438)."""
    gamma, lam = 0.9, 0.8
    rewards = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    values = torch.tensor([[0.5, 0.4], [1.0, 7.0]])  # the 7 stands behind the end and must not matter
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    last = 1.0 - 0.4
    first = (0.9 * 0.4 - 0.5) + gamma * lam * last
    other = 2.0 - 1.0
    raw = np.array([first, last, other])
    whitened = (raw - raw.mean()) / math.sqrt(raw.var(ddof=1) + 1e-8)  # over the three real tokens
    got, returns = get_adv_estimator_fn("gae")(
        token_level_rewards=rewards, values=values, response_mask=mask, gamma=gamma, lam=lam
    )
    assert got[0].tolist() == pytest.approx(whitened[:2].tolist(), abs=1e-5)
    assert got[1, 0].item() == pytest.approx(whitened[2], abs=1e-5)
    assert returns[0].tolist() == pytest.approx([first + 0.5, last + 0.4], abs=1e-6)


@pytest.mark.parametrize(("by_std", "expected"), [(True, WITH_STD), (False, WITHOUT_STD)])
def test_multi_reward_with_one_reward_is_grpo_but_for_lone_rollouts(by_std, expected):
    rewards, mask = token_level(SCORES, LENGTHS)
    got, _ = get_adv_estimator_fn("multi_reward_grpo")(
        token_level_rewards=rewards, response_mask=mask, index=UIDS, config={"norm_adv_by_std_in_grpo": by_std}
    )
    want = torch.tensor([*expected, 0.0])[:, None] * mask
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_each_reward_is_normalised_before_the_sum():
    """Scale must not matter: the second reward is the first reversed, times 1000, and they cancel at equal weights."""
    rewards = torch.tensor([[0.1, 3000.0], [0.2, 2000.0], [0.3, 1000.0]])
    groups = torch.zeros(3, dtype=torch.long)
    even = advantages.group_advantages(rewards, groups, torch.tensor([1.0, 1.0]))
    assert even.tolist() == pytest.approx([0, 0, 0], abs=2e-5)
    heavier = advantages.group_advantages(rewards, groups, torch.tensor([2.0, 1.0]))
    assert heavier.tolist() == pytest.approx([-1, 0, 1], abs=3e-5)


def test_groups_below_the_minimum_and_the_clip():
    rewards = torch.tensor([[1.0], [0.0], [0.0], [5.0], [0.0], [0.0], [0.0], [0.0]])
    groups = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2])
    got = advantages.group_advantages(rewards, groups, torch.ones(1), min_group=3, clip=1.0)
    # Groups of 2 and 1 are below 3. In the last: mean 1, std sqrt((16 + 4) / 4) = sqrt 5, so 4/sqrt5 -> clipped to 1.
    small = -1 / math.sqrt(5)
    assert got.tolist() == pytest.approx([0, 0, 0, 1, small, small, small, small], abs=1e-5)


def test_components_reach_the_estimator_by_trajectory_key():
    rows = {"u1_0_0": {"pinyin": 1.0, "pause": 0.0}, "u1_1_0": {"pinyin": 0.0, "pause": 0.5}}
    advantages.stage({key: advantages.pick(row, ["pinyin", "pause"], key) for key, row in rows.items()})
    config = {"multi_reward": {"weights": {"pinyin": 3.0, "pause": 1.0}}}
    rewards, mask = token_level([0.0, 0.0], [2, 3])
    # The trainer may hand the rows over in another order.
    index = np.array(["u1_1_0", "u1_0_0"], dtype=object)
    got, _ = get_adv_estimator_fn("multi_reward_grpo")(
        token_level_rewards=rewards, response_mask=mask, index=index, config=config
    )
    # Two rows: each reward is +-1/sqrt 2 after its normalisation; 3 - 1 = 2 for the row with the better pinyin.
    assert got[1, 0].item() == pytest.approx(2 / math.sqrt(2), abs=1e-5)
    assert got[0, 0].item() == pytest.approx(-2 / math.sqrt(2), abs=1e-5)
    # veRL fills up with rows without a response token; they change nothing.
    padded = torch.cat([mask, torch.zeros(1, 4)])
    more, _ = get_adv_estimator_fn("multi_reward_grpo")(
        token_level_rewards=torch.zeros(3, 4), response_mask=padded, index=np.array([*index, "pad1"]), config=config
    )
    assert torch.equal(more[:2], got)
    assert (more[2] == 0).all()
    with pytest.raises(KeyError, match="'u9_0_0'"):
        get_adv_estimator_fn("multi_reward_grpo")(
            token_level_rewards=rewards, response_mask=mask, index=np.array(["u9_0_0", "u1_0_0"]), config=config
        )
    assert advantages.pick({"pause": float("nan")}, ["pause"], "u1_0_0") == [0.0]  # not measured: the worst
    with pytest.raises(KeyError, match="no reward component 'similarity'"):
        advantages.pick(rows["u1_0_0"], ["similarity"], "u1_0_0")
