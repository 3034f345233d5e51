# shellcheck shell=bash disable=SC2034,SC2016
# --algorithm dr_grpo (Liu et al. 2025, arXiv 2503.20783): no division by the group's standard deviation, and a token's
# weight does not depend on the length of its response.
algorithm_overrides=(
    algorithm.norm_adv_by_std_in_grpo=False
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
    'actor_rollout_ref.actor.loss_scale_factor=${data.max_response_length}'
)
