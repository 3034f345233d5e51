# shellcheck shell=bash disable=SC2034
# --algorithm dapo (Yu et al. 2025, arXiv 2503.14476): a wider clip upwards, groups without signal replaced by new
# ones, every token the same weight, a soft length limit. Groups are judged by the outcome, the error rate, and not by
# the shaped score. Sampling as the best published runs on this task have it.
algorithm_overrides=(
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=wer
    ++reward.prime.overlong_share=0.25
    ++reward.prime.overlong_penalty=1.0
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.n=8
)
