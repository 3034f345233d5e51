"""The loss that veRL minimises equals TRL's, an implementation by other people, on the same numbers.

TRL's side was recorded by ``tests/data/make_trl_policy_loss.py`` (which says why). veRL's side is what its
``ppo_loss`` adds up: the registered policy loss and ``kl_penalty``.
"""

import json
from pathlib import Path

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.workers.config import FSDPActorConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/trl_policy_loss.json").read_text())
AGGREGATION = {  # what each of TRL's loss types divides by, in veRL's words
    "grpo": "seq-mean-token-mean",
    "grpo_k3_kl": "seq-mean-token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "gspo": "seq-mean-token-mean",
}


@pytest.mark.parametrize("case", AGGREGATION)
def test_loss_and_gradient_equal_trl(case):
    settings, recorded = GOLDEN["cases"][case]["settings"], GOLDEN["cases"][case]
    old, reference, advantages = (torch.tensor(GOLDEN[key]) for key in ("old", "reference", "advantages"))
    new = torch.tensor(GOLDEN["new"], requires_grad=True)
    mask = torch.arange(new.shape[1])[None] < torch.tensor(GOLDEN["lengths"])[:, None]
    config = FSDPActorConfig(
        strategy="fsdp2",
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=settings.get("high", 0.2),
        clip_ratio_c=GOLDEN["dual_clip"],
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
    )
    loss, _ = get_policy_loss_fn("gspo" if case == "gspo" else "vanilla")(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages[:, None] * mask,
        response_mask=mask,
        loss_agg_mode=AGGREGATION[case],
        config=config,
    )
    if beta := settings.get("beta"):
        loss = loss + beta * agg_loss(kl_penalty(new, reference, "low_var_kl"), mask, AGGREGATION[case])
    loss.backward()
    assert loss.item() == pytest.approx(recorded["loss"], abs=1e-6)
    torch.testing.assert_close(new.grad, torch.tensor(recorded["gradient"]), rtol=0, atol=1e-6)
    assert (new.grad[~mask] == 0).all()
    assert new.grad.abs().sum() > 0.1
