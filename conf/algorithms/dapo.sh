# shellcheck shell=bash disable=SC2034
# --algorithm dapo
algorithm_overrides=(
)
