"""Records what TRL's GRPO loss gives for a few numbers: tests/data/golden/trl_policy_loss.json.

TRL cannot be in the training environment: veRL 0.9.1 imports a class from it, where it is installed, that TRL 1.16
no longer has. So its numbers are made once, with this script, and the test compares veRL with them:

    .venv/train/bin/pip install --no-deps --target FOLDER trl==1.16.0
    PYTHONPATH=FOLDER .venv/train/bin/python tests/data/make_trl_policy_loss.py

TRL's own ``GRPOTrainer._compute_loss`` runs, with a stand-in for the trainer around it that hands over
log-probabilities.
"""

import json
import types
from collections import defaultdict
from pathlib import Path

import torch
import trl

LENGTHS = [9, 1, 4, 7, 2, 5]
B, T = len(LENGTHS), max(LENGTHS)
DUAL_CLIP = 3.0
CASES = {
    "grpo": {"loss_type": "grpo"},
    "grpo_k3_kl": {"loss_type": "grpo", "beta": 0.04},
    "dapo": {"loss_type": "dapo", "high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "level": "sequence", "high": 0.28},
}


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    old = -3 * torch.rand(B, T, generator=generator)
    new = old + 0.5 * torch.randn(B, T, generator=generator)  # ratios well outside the clip on both sides
    new[0, 0] = old[0, 0] + 1.5  # ratio 4.5 with a negative advantage: beyond the dual clip
    return {
        "old": old,
        "new": new,
        "reference": new + 0.3 * torch.randn(B, T, generator=generator),
        "advantages": torch.tensor([-1.2, 0.7, 0.3, -0.4, 1.5, -0.9]),
    }


def trl_loss(numbers, new, *, loss_type, level="token", beta=0.0, low=0.2, high=0.2):
    accelerator = types.SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
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
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=DUAL_CLIP, steps_per_generation=1),
        model=types.SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (new, torch.zeros(B, T), None),
    )
    mask = (torch.arange(T)[None] < torch.tensor(LENGTHS)[:, None]).float()
    batch = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": mask,
        "advantages": numbers["advantages"],
        "old_per_token_logps": numbers["old"],
        "ref_per_token_logps": numbers["reference"],
        "num_items_in_batch": mask.sum(),
    }
    return trl.GRPOTrainer._compute_loss(trainer, None, batch)


def main() -> None:
    numbers = inputs()
    recorded = {"trl": trl.__version__, "lengths": LENGTHS, "dual_clip": DUAL_CLIP, "cases": {}}
    recorded |= {name: value.tolist() for name, value in numbers.items()}
    for name, case in CASES.items():
        new = numbers["new"].clone().requires_grad_()
        loss = trl_loss(numbers, new, **case)
        loss.backward()
        recorded["cases"][name] = {"settings": case, "loss": loss.item(), "gradient": new.grad.tolist()}
    target = Path(__file__).parent / "golden" / "trl_policy_loss.json"
    target.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    print(target, {name: case["loss"] for name, case in recorded["cases"].items()})


if __name__ == "__main__":
    main()
