# shellcheck shell=bash disable=SC2034
# --algorithm gspo
algorithm_overrides=(
)
