#!/usr/bin/env bash
# usage: bash scripts/compute_wer.sh DIR SPLIT [options of scripts/offline-decode-files.py]
# Error rates of the WAV files that infer_dataset.py wrote for a test set, under both protocols, with intervals.
# REWARD_PYTHON names the interpreter of the reward environment (default: .venv/reward/bin/python).
set -euo pipefail

if (($# < 2)); then
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
root=$(dirname "${BASH_SOURCE[0]}")/..
exec "${REWARD_PYTHON:-$root/.venv/reward/bin/python}" "$root/scripts/offline-decode-files.py" "$@"
