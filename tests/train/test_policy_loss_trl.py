"""The loss that veRL minimises equals TRL's, an implementation by other people, on the same numbers.

TRL's own ``GRPOTrainer._compute_loss`` runs here, with a stand-in for the trainer object around it that hands over
log-probabilities. veRL's side is ``ppo_loss``'s two parts: the registered policy loss and ``kl_penalty``.
"""

import types
from collections import defaultdict

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.workers.config import FSDPActorConfig

pytestmark = pytest.mark.slow  # importing TRL takes most of the time

B, T = 6, 9
LENGTHS = [9, 1, 4, 7, 2, 5]


@pytest.fixture(scope="module")
def numbers():
    generator = torch.Generator().manual_seed(5)
    old = -3 * torch.rand(B, T, generator=generator)
    new = old + 0.5 * torch.randn(B, T, generator=generator)  # ratios well outside the clip on both sides
    new[0, 0] = old[0, 0] + 1.5  # ratio 4.5 with a negative advantage: beyond the dual clip of 3
    reference = new + 0.3 * torch.randn(B, T, generator=generator)
    advantages = torch.tensor([-1.2, 0.7, 0.3, -0.4, 1.5, -0.9])
    mask = (torch.arange(T)[None] < torch.tensor(LENGTHS)[:, None]).float()
    return types.SimpleNamespace(old=old, new=new, reference=reference, advantages=advantages, mask=mask)


def trl_loss(numbers, new, *, loss_type, level="token", beta=0.0, low=0.2, high=0.2):
    from trl import GRPOTrainer

    class Accelerator:
        num_processes = 1
        sync_gradients = True
        gather = gather_for_metrics = staticmethod(lambda x: x)
        reduce = staticmethod(lambda x, reduction: x)

    trainer = types.SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=False,
        max_completion_length=T,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=3.0, steps_per_generation=1),
        model=types.SimpleNamespace(training=True),
        accelerator=Accelerator(),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (new, torch.zeros(B, T), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": numbers.mask,
        "advantages": numbers.advantages,
        "old_per_token_logps": numbers.old,
        "ref_per_token_logps": numbers.reference,
        "num_items_in_batch": numbers.mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def verl_loss(numbers, new, *, mode="vanilla", aggregation, beta=0.0, low=0.2, high=0.2):
    config = FSDPActorConfig(
        strategy="fsdp2",
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=3.0,
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
    )
    mask = numbers.mask.bool()
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=numbers.old,
        log_prob=new,
        advantages=numbers.advantages[:, None] * numbers.mask,
        response_mask=mask,
        loss_agg_mode=aggregation,
        config=config,
    )
    if beta:
        k3 = kl_penalty(new, numbers.reference, "low_var_kl")
        loss = loss + beta * agg_loss(k3, mask, aggregation)
    return loss


CASES = {
    "grpo": (dict(loss_type="grpo"), dict(aggregation="seq-mean-token-mean")),
    "grpo with k3 KL": (dict(loss_type="grpo", beta=0.04), dict(aggregation="seq-mean-token-mean", beta=0.04)),
    "dapo": (dict(loss_type="dapo", high=0.28), dict(aggregation="token-mean", high=0.28)),
    "dr_grpo": (dict(loss_type="dr_grpo"), dict(aggregation="seq-mean-token-sum-norm")),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trl(numbers, case):
    for_trl, for_verl = CASES[case]
    ours, theirs = (numbers.new.clone().requires_grad_() for _ in range(2))
    loss = verl_loss(numbers, ours, **for_verl)
    reference = trl_loss(numbers, theirs, **for_trl)
    loss.backward()
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    assert ours.grad.abs().sum() > 0.1
    assert (ours.grad[numbers.mask == 0] == 0).all()


def test_gspo_equals_trl_at_sequence_level(numbers):
    """GSPO (arXiv 2507.18071) clips the length-normalised ratio of the whole sequence; no dual clip in either."""
    low, high = 0.2, 0.28
    ours, theirs = (numbers.new.clone().requires_grad_() for _ in range(2))
    loss = verl_loss(numbers, ours, mode="gspo", aggregation="seq-mean-token-mean", low=low, high=high)
    reference = trl_loss(numbers, theirs, loss_type="grpo", level="sequence", low=low, high=high)
    loss.backward()
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
