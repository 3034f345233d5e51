# shellcheck shell=bash disable=SC2034
# --algorithm dr_grpo: GRPO without the division by the group's standard deviation (Liu et al. 2025).
algorithm_overrides=(
    algorithm.norm_adv_by_std_in_grpo=False
)
