# shellcheck shell=bash disable=SC2034
# --algorithm grpo: the overrides in run.sh as they stand.
algorithm_overrides=()
