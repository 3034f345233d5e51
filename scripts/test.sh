#!/usr/bin/env bash
# Sets up what the tests need and runs all of it that needs no GPU: ruff, shellcheck, the fast tests of both
# environments, then the slow ones (real servers, real training).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
. scripts/parse_options.sh

# options:
fast=false               # true leaves the slow tests out
setup=true               # false takes the two environments as they are
fast_limit=900           # seconds that one environment's fast tests may take
slow_limit=2100          # the same for the slow tests
# end of options

parse_options "$@"
if ((help)) || ((${#positional[@]})); then
    echo "usage: bash scripts/test.sh [options] [-- pytest arguments]"
    print_options
    exit $((help ? 0 : 2))
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONFAULTHANDLER=1
reports=exp/tests
mkdir -p "$reports"
begin_run "$reports"
results=() failures=0 passed=0 failed=0 skipped=0

# check TITLE COMMAND...: runs one part, in a session of its own whose processes all end with it.
check() {
    local title=$1 started=$SECONDS status=0
    shift
    log "$title"
    run_job - "$@" || status=$?
    ((status != 124)) || log "$title: ran into its time limit"
    results+=("$( ((status)) && echo FAILED || echo ok)  $title, $((SECONDS - started)) s")
    ((status == 0)) || failures=$((failures + 1))
}

# pytests ENVIRONMENT MARK LIMIT: adds the counts that pytest prints to ours.
pytests() {
    local report=$reports/$1.${2// /_}.xml counts
    rm -f "$report"
    check "tests/$1, $2" timeout --kill-after=30 "$3" ".venv/$1/bin/python" -m pytest "tests/$1" -q -m "$2" \
        --durations=10 --timeout=$(($3 - 30)) --junitxml="$report" "${extra[@]}"
    [[ -f $report ]] || return 0 # cut off by its limit; counted as failed above
    counts=$(".venv/$1/bin/python" - "$report" <<'PY'
import sys
from xml.etree import ElementTree

n = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
for suite in ElementTree.parse(sys.argv[1]).iter("testsuite"):
    n = {key: n[key] + int(suite.get(key)) for key in n}
bad = n["failures"] + n["errors"]
print(n["tests"] - bad - n["skipped"], bad, n["skipped"])
PY
)
    read -r p f s <<<"$counts"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

[[ $setup != true ]] || run_job - bash scripts/setup.sh --profile tiny --dev true || die "set-up failed"

check ruff .venv/train/bin/ruff check .
mapfile -t shell_files < <(git ls-files '*.sh' .ci/run)
check shellcheck .venv/train/bin/shellcheck -x "${shell_files[@]}"
pytests train "not slow" "$fast_limit"
pytests reward "not slow" "$fast_limit"
if [[ $fast != true ]]; then
    pytests train slow "$slow_limit"
    pytests reward slow "$slow_limit"
fi

printf '\n%s\n' "summary"
printf '  %s\n' "${results[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
((failures == 0))
