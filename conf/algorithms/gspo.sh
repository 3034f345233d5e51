# shellcheck shell=bash disable=SC2034
# --algorithm gspo (Zheng et al. 2025, arXiv 2507.18071): the ratio of whole sequences, normalised by length, is clipped,
# in a range that is that much narrower.
algorithm_overrides=(
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4
)
