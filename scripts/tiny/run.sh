#!/usr/bin/env bash
# Make assets/cosyvoice2-tiny from nothing: texts, audio by espeak-ng, every network, measurements.
# Not needed by users: the result is in the repository. About an hour and a half on two cores.
#
#   bash scripts/tiny/run.sh START STOP        stages START..STOP, see below
#
# Needs: the reward environment (PYTHON, default .venv/reward/bin/python), espeak-ng (Debian: apt-get install espeak-ng).
# The work folder is exp/tiny_world, or $TINY_WORK. Every number stands in settings.py.
set -euo pipefail
cd "$(dirname "$0")"

if [ $# -ne 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  grep -o '^ *# stage .*' "$0"
  exit 2
fi
start=$1 stop=$2
python=${PYTHON:-../../.venv/reward/bin/python}
export OMP_NUM_THREADS=1

log() { echo "$(date '+%H:%M:%S') (run.sh:${BASH_LINENO[0]}) $*"; }
stage() { [ "$start" -le "$1" ] && [ "$stop" -ge "$1" ] && log "stage $1: $2"; }

# Two jobs at a time, one per core; both must succeed.
both() {
  # shellcheck disable=SC2086  # the arguments are command lines
  "$python" -u $1 & local first=$!
  # shellcheck disable=SC2086
  "$python" -u $2 || { kill "$first"; wait "$first"; exit 1; }
  wait "$first"
}

# stage 0: draw the sentences, speak them, compute features
if stage 0 "sentences, audio, features"; then
  command -v espeak-ng >/dev/null || { log "espeak-ng: not found, expected on the PATH"; exit 1; }
  "$python" texts.py
  "$python" speak.py
  "$python" features.py
fi
# stage 1: speech tokenizer and speaker network, then the tokens of all audio
if stage 1 "speech tokenizer, speaker network, tokens"; then
  both train_tokenizer.py train_speaker.py
  "$python" tokens.py
fi
# stage 2: flow and HiFT
if stage 2 "flow and HiFT"; then
  both train_flow.py train_hift.py
  "$python" -u train_hift.py --start --steps 650 --rate 1.5e-3
fi
# stage 3: language model (several states are kept)
if stage 3 "language model"; then
  "$python" blank.py
  "$python" -u train_llm.py
fi
# stage 4: write the checkpoint folder, speak all true tokens again
if stage 4 "checkpoint folder, resynthesis"; then
  "$python" package.py
  both "resynthesise.py main --limit 1440" "resynthesise.py judge --limit 960"
  "$python" resynthesise.py dev test
fi
# stage 5: the reward's recogniser and the held-out judge, on natural and resynthesised audio
if stage 5 "recognisers"; then
  mixed="--dev dev dev_resynth"
  both "train_recogniser.py --splits main" "train_judge.py --splits judge judge_resynth $mixed --steps 1000"
  both "train_recogniser.py --splits main main_resynth $mixed --start recogniser.pt --steps 500 --rate 1.2e-3 --name recogniser_mix" \
       "train_judge.py --splits judge judge_resynth $mixed --start judge.pt --steps 700 --rate 1.5e-3"
fi
# stage 6: measure everything, draw plots
if stage 6 "measurements and plots"; then
  "$python" measure.py
  "$python" plots.py
fi
log "done"
