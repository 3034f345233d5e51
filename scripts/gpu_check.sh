#!/usr/bin/env bash
# Decoder check on one GPU: golden parity in float32 and bfloat16, then the speed of batches.
# Needs torch, numpy, safetensors and this repository; takes a few minutes (each part has a time limit, 8 minutes in all).
#
#   bash scripts/gpu_check.sh                 on the first GPU
#   bash scripts/gpu_check.sh --device cpu    dry run at small size, without a GPU
set -euo pipefail

device=cuda
python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
  case "$1" in
    --device) device=${2:?--device needs a value}; shift 2 ;;
    --python) python=${2:?--python needs a value}; shift 2 ;;
    -h|--help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "$0: unknown option $1" >&2; exit 2 ;;
  esac
done
cd "$(dirname "$0")/.."

if [ "$device" = cpu ]; then
  run=(--device cpu --small --utterances 4 --shortest 10 --longest 40 --prompt-tokens 10 --n-steps 2)
  batches=(--batch-sizes 1 4 --max-rows 4)
else
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    { echo "$0: torch sees no GPU" >&2; exit 1; }
  run=(--device "$device" --utterances 64 --repeats 2 --memory-gib 32)
  batches=(--batch-sizes 1 8 16 32)
fi

failed=0
echo "== parity =="
timeout 90 "$python" scripts/bench/decoder_parity.py --device "$device" || failed=1
echo "== speed, eager =="
timeout 210 "$python" scripts/bench/token2wav.py "${run[@]}" "${batches[@]}" || failed=1
if [ "$device" != cpu ]; then
  echo "== speed, compiled estimator =="
  timeout 180 "$python" scripts/bench/token2wav.py "${run[@]}" --batch-sizes 8 32 --dtypes bfloat16 --compile || failed=1
fi
[ "$failed" = 0 ] && echo "gpu_check: all parts passed" || echo "gpu_check: a part failed, see above" >&2
exit "$failed"
