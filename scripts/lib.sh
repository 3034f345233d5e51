# shellcheck shell=bash
# What the shell scripts share: log lines, done-markers, and child processes that never outlive their script.

# Lines name the place in the main script, not in the helpers between.
log() { printf '%(%F %T)T %s:%d %s\n' -1 "${0##*/}" "${BASH_LINENO[-2]}" "$*"; }

die() {
    printf '%(%F %T)T %s:%d error: %s\n' -1 "${0##*/}" "${BASH_LINENO[-2]}" "$*" >&2
    exit 1
}

need_file() { [[ -e $1 ]] || die "$1 is not there${2:+; $2}"; }

# count_gpus: NVIDIA GPUs that this machine shows, 0 without a driver.
count_gpus() {
    local n
    n=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c '^[0-9]') || true
    echo "${n:-0}"
}

# --- done-markers ----------------------------------------------------------------------------------------------

# fingerprint PATH_OR_WORD...: hash of the words, and of name, size and time of every file below a path that exists.
fingerprint() {
    local word
    for word in "$@"; do
        printf '%s\n' "$word"
        if [[ -e $word ]]; then find -L "$word" -type f -printf '%p %s %T@\n' | sort; fi
    done | sha256sum | cut -d' ' -f1
}

# is_done MARKER KEY OUTPUT...: the marker holds this key and every output is still there.
is_done() {
    local marker=$1 key=$2 output
    shift 2
    [[ -f $marker && $(<"$marker") == "$key" ]] || return 1
    for output in "$@"; do [[ -e $output ]] || return 1; done
}

mark_done() {
    mkdir -p "${1%/*}"
    printf '%s\n' "$2" >"$1.new"
    mv "$1.new" "$1"
}

# --- child processes -------------------------------------------------------------------------------------------
# A child runs in a session of its own (Ctrl-C reaches this script alone, which then ends its children in order) and
# carries COSYVOICE_RUN_ID. Ray and vLLM start processes that outlive their parent or leave its session; they inherit
# the id, so it finds all of them, also those that a killed driver left behind. SPT_NOENV keeps the process titles
# that Ray sets from overwriting the environment in /proc.

export SPT_NOENV=1
job_pids=()
run_id=$HOSTNAME.$$.${EPOCHREALTIME//[^0-9]/}

start_of() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# pids_of ID: the processes of a run, or of one job of it (its id is the run's with a number behind it).
pids_of() { grep -lzs "^COSYVOICE_RUN_ID=$1\\(\\.\\|\$\\)" /proc/[0-9]*/environ | tr -cd '0-9\n' || true; }

# end_pids_of ID: ends every process that carries the id.
end_pids_of() {
    local signal pids i
    for signal in TERM KILL; do
        for ((i = 0; i < 30; i++)); do
            mapfile -t pids < <(pids_of "$1")
            ((${#pids[@]})) || return 0
            ((i)) || kill "-$signal" "${pids[@]}" 2>/dev/null || true
            sleep 0.1
        done
    done
    log "these processes could not be ended: ${pids[*]}"
}

# begin_run FOLDER: notes this run in FOLDER/.run, ends what killed runs on this host left, sets the traps.
begin_run() {
    local file id pid start left
    mkdir -p "$1/.run"
    for file in "$1/.run/$HOSTNAME".*; do
        [[ -f $file ]] || continue
        read -r id pid start <"$file" || continue
        [[ $(start_of "$pid") != "$start" ]] || continue # that run is still at work
        left=$(pids_of "$id" | xargs)
        if [[ $left ]]; then
            log "ending processes that an earlier run (pid $pid) left behind: $left"
            end_pids_of "$id"
        fi
        rm -f "$file"
    done
    run_note=$1/.run/$HOSTNAME.$$
    printf '%s %s %s\n' "$run_id" "$$" "$(start_of $$)" >"$run_note"
    trap end_run EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

# start_job LOG COMMAND...: starts the command, output appended to LOG ("-": shown); sets job_pid and job_id.
start_job() {
    local log_file=$1
    shift
    job_id=$run_id.$((++job_count))
    if [[ $log_file == - ]]; then
        COSYVOICE_RUN_ID=$job_id setsid "$@" </dev/null &
    else
        COSYVOICE_RUN_ID=$job_id setsid "$@" </dev/null >>"$log_file" 2>&1 &
    fi
    job_pid=$!
    job_pids+=("$job_pid:$job_id")
}
job_count=0

# run_job LOG COMMAND...: the same, waited for; returns the command's status. A signal ends the wait at once.
run_job() {
    local status=0
    start_job "$@"
    wait "$job_pid" || status=$?
    end_job "$job_pid:$job_id"
    return "$status"
}

# running PID: whether this child is still at work. Asked of the shell: its number may belong to another by now.
running() { jobs -pr | grep -qx "$1"; }

# end_job PID:ID: asks the leader to stop, which lets a server stop its workers in order, then ends what is left.
end_job() {
    local pid=${1%%:*} i entry kept=()
    if running "$pid"; then
        kill -TERM "$pid" || true
        for ((i = 0; i < 200; i++)); do
            running "$pid" || break
            sleep 0.1
        done
    fi
    end_pids_of "${1#*:}"
    for entry in "${job_pids[@]}"; do [[ $entry == "$1" ]] || kept+=("$entry"); done
    job_pids=("${kept[@]}")
}

# end_run: the EXIT trap. A second Ctrl-C must not cut it short.
end_run() {
    local status=$? job
    set +e
    trap '' INT TERM HUP
    trap - EXIT
    for job in "${job_pids[@]}"; do end_job "$job"; done
    [[ ! ${run_tmp:-} ]] || rm -rf -- "$run_tmp"
    rm -f -- "$run_note"
    exit "$status"
}
