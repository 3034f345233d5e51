#!/usr/bin/env bash
# GRPO for the CosyVoice2 language model, in stages. "bash run.sh" prints the help.
set -euo pipefail
cd "$(dirname "$0")"
. scripts/lib.sh
. scripts/parse_options.sh

# options:
profile=                 # tiny (no GPU) or 8gpu; empty: 8gpu where nvidia-smi shows a GPU
stage=                   # first stage, the same as the first positional argument
stop_stage=              # last stage, the same as the second
name=                    # name of the experiment, its folder below exp/; empty: the profile's name
force=false              # true runs stages again that are done
model_dir=               # CosyVoice2 folder as published
dtype=                   # of the converted checkpoint: float32 or bfloat16
data_jsonl=              # one JSONL to split into train and test; empty: the profile's data
train_jsonl=             # training texts; with --test-jsonl instead of --data-jsonl
test_jsonl=              # texts of the validation during training
n_train=80000            # lines of --data-jsonl to train on (from its start)
n_test=100               # lines of --data-jsonl to validate on (from its end)
on_bad_row=error         # error stops at a text that cannot be trained on, skip leaves it out and counts it
shuffle_seed=            # shuffle --data-jsonl before the split; empty: keep its order (sorted by speaker)
n_gpus=                  # GPUs for training on each node; empty: all that nvidia-smi shows
nnodes=1                 # nodes that train
ray_address=             # address of a running Ray cluster; empty: start one here
server_devices=          # devices of the reward server
server_instances=        # its workers on each device
asr_model=               # recogniser of the reward: SenseVoice folder or hub name
prompts=                 # prompt audio of the reward: folder or JSONL (key, audio, text)
host=127.0.0.1           # address the reward server listens on
http_port=8000           # its HTTP port
grpc_port=8001           # its gRPC port
metrics_port=8002        # its metrics port
server_urls=             # reward servers to ask, comma list; empty: http://HOST:HTTP_PORT
server_wait=900          # seconds to wait for the reward server to score a known sentence
algorithm=grpo           # a file of conf/algorithms: grpo, dr_grpo, dapo, gspo, multi_reward
logger=console,tensorboard  # of veRL, comma list; also wandb, swanlab
step=latest              # checkpoint for stages 3 to 5: a number, latest or all
eval_sets=               # test sets, comma list: JSONL files or known splits
eval_sampling=train,greedy  # of stage 4, comma list: train, ras, greedy; the report plays the first
judge=                   # sherpa-onnx recogniser of stage 4, folder
train_python=.venv/train/bin/python    # interpreter with veRL and vLLM
reward_python=.venv/reward/bin/python  # interpreter with PyTriton and FunASR
# end of options

usage() {
    cat <<'HELP'
usage: bash run.sh START [STOP] [--option value ...] [-- hydra.override=value ...]

stages
  -2  set-up      two virtual environments from the pinned requirement files
  -1  convert     CosyVoice2 llm.pt to a Hugging Face checkpoint
   0  data        JSONL texts to veRL's parquet
   1  server      the reward server; alone: in the foreground until Ctrl-C; in a range: in the background
   2  train       GRPO with veRL and vLLM
   3  merge       veRL checkpoint to a Hugging Face checkpoint
   4  evaluate    test sets before and after training, and the report
   5  export      Hugging Face checkpoint to llm.pt

"bash run.sh -2 5" does everything. One number runs one stage. What stands behind -- goes to veRL as it is
and comes last. A stage that is done with the same inputs is skipped.

options [value that holds]
HELP
    print_options
}

parse_options "$@"
((help)) && usage && exit 0
if ! ((${#positional[@]})) && [[ ! $stage$stop_stage ]]; then
    (($# == 0)) || die "which stages? Say for example \"bash run.sh 0 2\"; \"bash run.sh --help\" lists them"
    usage
    exit 0
fi
((${#positional[@]} <= 2)) || die "expected START and STOP, found: ${positional[*]}"
: "${stage:=${positional[0]:-$stop_stage}}"
: "${stop_stage:=${positional[1]:-$stage}}"
for number in "$stage" "$stop_stage"; do
    [[ $number =~ ^(-[12]|[0-5])$ ]] || die "stage $number: expected a number from -2 to 5"
done
((stage <= stop_stage)) || die "START $stage is behind STOP $stop_stage"
[[ $step =~ ^([0-9]+|latest|all)$ ]] || die "--step $step: expected a number, latest or all"
: "${profile:=$( (($(count_gpus))) && echo 8gpu || echo tiny)}"
need_file "conf/$profile.sh" "--profile is one of: $(basename -s .sh -a conf/*.sh | xargs)"
need_file "conf/algorithms/$algorithm.sh" "--algorithm is one of: $(basename -s .sh -a conf/algorithms/*.sh | xargs)"
# shellcheck source=conf/tiny.sh
. "conf/$profile.sh"
# shellcheck source=conf/algorithms/grpo.sh
. "conf/algorithms/$algorithm.sh"
[[ $n_gpus =~ ^[1-9][0-9]*$ ]] || die "profile $profile needs a GPU: nvidia-smi shows ${n_gpus:-none} (--n-gpus overrules)"
: "${name:=$profile}"
: "${server_urls:=http://$host:$http_port}"
export REWARD_PYTHON=$reward_python # for scripts/compute_wer.sh
exp=exp/$name
run_dir=$PWD/$exp
mkdir -p "$exp"
begin_run "$exp"

wants() { ((stage <= $1 && $1 <= stop_stage)); }

# Said now rather than after the downloads and the set-up.
! wants 1 || [[ $prompts || -e $model_dir/prompts ]] ||
    die "the reward server needs voices: --prompts names a folder or a JSONL (key, audio, text) of recordings of a few seconds"

# need_script FILE: a part of the recipe that this checkout may not have yet.
need_script() { [[ -f $1 ]] || die "stage $current: $1 is not there yet"; }

# begin STAGE TITLE: first line of every stage.
begin() {
    current=$1
    log "stage $1: $2"
}

# done_already KEY OUTPUT...: whether to skip the current stage.
done_already() {
    [[ $force != true ]] && is_done "$exp/.done/$current" "$@" || return 1
    log "stage $current: done with the same inputs, skipped (--force repeats it)"
}

# report: after a stage that is not the last to add to it, a report that fails is no reason to stop.
report() {
    wants 4 || run_job - "$reward_python" -m cosyvoice.evaluation.report "$exp" ||
        log "the report could not be written; stage $current itself is done"
}

failed() { die "stage $current failed with status $?: ${1:-its words are above}"; }

# steps_wanted FOLDER: the steps that --step means among the global_step_N folders in FOLDER.
steps_wanted() {
    local marker=$exp/train/latest_checkpointed_iteration.txt
    case $step in
    latest)
        need_file "$marker" "train first (stage 2)"
        tr -d '[:space:]' <"$marker"
        ;;
    all)
        find "$1" -maxdepth 1 -name 'global_step_*' 2>/dev/null | sed 's/.*global_step_//' | sort -n
        ;;
    *) echo "$step" ;;
    esac
}

# check_checkpoint FOLDER: veRL wrote every rank's shard and the configuration beside them.
check_checkpoint() {
    local shards world
    need_file "$1/actor" "the checkpoint is not complete"
    shards=("$1"/actor/model_world_size_*_rank_*.pt)
    need_file "${shards[0]}" "the checkpoint is not complete"
    world=${shards[0]##*world_size_}
    world=${world%%_*}
    ((${#shards[@]} == world)) || die "$1/actor has ${#shards[@]} model shards, expected $world"
    need_file "$1/actor/huggingface/config.json" "the checkpoint is not complete"
}

if wants -2; then
    begin -2 "set-up of .venv/train and .venv/reward for profile $profile"
    run_job - bash scripts/setup.sh --profile "$profile" || failed
fi

if wants -1; then
    begin -1 "$model_dir/llm.pt to a Hugging Face checkpoint in $exp/hf ($dtype)"
    need_script pretrained_to_huggingface.py
    if [[ $profile != tiny && ! -e $model_dir ]]; then
        log "fetching CosyVoice2-0.5B from the Hugging Face hub to $model_dir (goes on where it stopped)"
        run_job - "${train_python%/*}/hf" download FunAudioLLM/CosyVoice2-0.5B --local-dir "$model_dir.part" || failed
        mv "$model_dir.part" "$model_dir"
    fi
    need_file "$model_dir/llm.pt" "--model-dir names the folder of a CosyVoice2 checkpoint"
    need_file "$model_dir/CosyVoice-BlankEN" "--model-dir names the folder of a CosyVoice2 checkpoint"
    key=$(fingerprint "$model_dir/llm.pt" "$model_dir/CosyVoice-BlankEN" "$dtype")
    if ! done_already "$key" "$exp/hf/config.json"; then
        rm -rf "$exp/hf"
        run_job - "$train_python" pretrained_to_huggingface.py \
            --pretrained-cosyvoice2-path "$model_dir" --save-path "$exp/hf" --dtype "$dtype" || failed
        need_file "$exp/hf/config.json"
        mark_done "$exp/.done/$current" "$key"
    fi
fi

if wants 0; then
    begin 0 "texts to parquet in $exp/data"
    need_script prepare_data.py
    if [[ $train_jsonl || $test_jsonl ]]; then
        [[ ! $data_jsonl ]] || die "--data-jsonl stands for --train-jsonl and --test-jsonl; name it or those two"
        need_file "$train_jsonl" "--train-jsonl names the training texts"
        need_file "$test_jsonl" "--test-jsonl names the validation texts"
        key=$(fingerprint "$train_jsonl" "$test_jsonl" "$on_bad_row")
    else
        if [[ ! $data_jsonl ]]; then
            data_jsonl=data/voxbox/metadata/aishell-3.jsonl
            if [[ ! -e $data_jsonl ]]; then
                log "fetching AISHELL-3's texts from the Hugging Face hub (goes on where it stopped)"
                run_job - "${train_python%/*}/hf" download SparkAudio/voxbox metadata/aishell-3.jsonl \
                    --repo-type dataset --local-dir data/voxbox || failed
            fi
        fi
        need_file "$data_jsonl" "--data-jsonl names a JSONL with a field \"text\""
        key=$(fingerprint "$data_jsonl" "$n_train" "$n_test" "$shuffle_seed" "$on_bad_row")
        train_jsonl=$exp/data/train.jsonl test_jsonl=$exp/data/test.jsonl
    fi
    if ! done_already "$key" "$exp/data/train.parquet" "$exp/data/test.parquet"; then
        [[ ! $data_jsonl ]] ||
            run_job - "$train_python" scripts/split_jsonl.py --input "$data_jsonl" --train-file "$train_jsonl" \
                --test-file "$test_jsonl" --n-train "$n_train" --n-test "$n_test" \
                ${shuffle_seed:+--shuffle-seed "$shuffle_seed"} || failed
        run_job - "$train_python" prepare_data.py --train_file "$train_jsonl" --test_file "$test_jsonl" \
            --local_dir "$exp/data" --on_bad_row "$on_bad_row" || failed
        need_file "$exp/data/train.parquet"
        need_file "$exp/data/test.parquet"
        mark_done "$exp/.done/$current" "$key"
    fi
fi

if wants 1; then
    begin 1 "reward server on $server_devices device(s), HTTP port $http_port, log in $exp/server"
    need_script token2wav_asr_server.py
    need_file "$model_dir" "--model-dir names the folder of a CosyVoice2 checkpoint"
    [[ ! $prompts ]] || need_file "$prompts" "--prompts names a folder or a JSONL"
    mkdir -p "$exp/server"
    server_command=("$reward_python" token2wav_asr_server.py
        --model-dir "$model_dir" --asr-model "$asr_model" ${prompts:+--prompts "$prompts"}
        --number-of-devices "$server_devices" --number-of-instances-per-device "$server_instances"
        --host "$host" --http-port "$http_port" --grpc-port "$grpc_port" --metrics-port "$metrics_port"
        "${profile_server_args[@]}")
    if ((stop_stage == 1)); then
        log "serving until Ctrl-C"
        run_job - "${server_command[@]}" || failed
    else
        start_job "$exp/server/server.log" "${server_command[@]}"
        server_pid=$job_pid
        log "waiting for the server (pid $server_pid) to score a known sentence"
        start_job "$exp/server/check.log" "$train_python" reward_tts.py --check --urls "$server_urls" --wait "$server_wait"
        check=$job_pid check_id=$job_id status=0
        wait -n -p first "$server_pid" "$check" || status=$?
        if [[ $first == "$server_pid" ]]; then
            tail -n 20 "$exp/server/server.log" >&2
            die "the reward server ended with status $status before it was ready (all of its words: $exp/server/server.log)"
        elif ((status)); then
            tail -n 5 "$exp/server/check.log" >&2
            die "the reward server did not score the known sentence (its words: $exp/server/server.log)"
        fi
        end_job "$check:$check_id"
        log "the reward server is ready"
    fi
fi

if wants 2; then
    begin 2 "GRPO ($algorithm) on $n_gpus device(s) of $nnodes node(s), checkpoints in $exp/train"
    need_script reward_tts.py
    need_file "$exp/hf/config.json" "convert first (stage -1)"
    need_file "$exp/data/train.parquet" "prepare the data first (stage 0)"
    need_file "$exp/data/test.parquet" "prepare the data first (stage 0)"
    mkdir -p "$exp/train"
    # Ray's sockets live below its temporary folder, and a socket's path may have 107 characters: keep it short.
    run_tmp=${TMPDIR:-/tmp}
    ((${#run_tmp} <= 32)) || run_tmp=/tmp
    run_tmp=$(mktemp -d "$run_tmp/cv2.XXXXXX")
    ray_overrides=(+ray_kwargs.ray_init.address=local +ray_kwargs.ray_init.include_dashboard=False
        "+ray_kwargs.ray_init._temp_dir=$run_tmp")
    run_env=("VLLM_RPC_BASE_PATH=$run_tmp")
    # a cluster that runs already has folders of its own, on machines that lack this one
    [[ ! $ray_address ]] || run_env=() ray_overrides=("+ray_kwargs.ray_init.address=$ray_address")

    # shellcheck disable=SC2016
    overrides=(
        # data
        "data.train_files=$run_dir/data/train.parquet"
        "data.val_files=$run_dir/data/test.parquet"
        data.train_batch_size=32
        data.max_prompt_length=1024
        data.max_response_length=512
        data.truncation=error
        data.filter_overlong_prompts=True

        # model
        "actor_rollout_ref.model.path=$run_dir/hf"
        actor_rollout_ref.model.external_lib=cosyvoice.llm
        actor_rollout_ref.model.use_remove_padding=False
        actor_rollout_ref.model.enable_gradient_checkpointing=True

        # update
        algorithm.adv_estimator=grpo
        actor_rollout_ref.actor.optim.lr=1e-6
        actor_rollout_ref.actor.ppo_mini_batch_size=32
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
        actor_rollout_ref.actor.use_kl_loss=False
        actor_rollout_ref.actor.fsdp_config.param_offload=False
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False

        # rollout
        actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.gpu_memory_utilization=0.6
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
        actor_rollout_ref.rollout.n=4
        actor_rollout_ref.rollout.do_sample=True
        actor_rollout_ref.rollout.temperature=0.8
        actor_rollout_ref.rollout.top_p=0.95
        actor_rollout_ref.rollout.top_k=25
        actor_rollout_ref.rollout.val_kwargs.n=4
        actor_rollout_ref.rollout.val_kwargs.do_sample=True
        actor_rollout_ref.rollout.val_kwargs.temperature=0.8
        actor_rollout_ref.rollout.val_kwargs.top_p=0.95
        actor_rollout_ref.rollout.val_kwargs.top_k=25

        # reward
        "reward.custom_reward_function.path=$PWD/reward_tts.py"
        reward.custom_reward_function.name=compute_score
        "+reward.custom_reward_function.reward_kwargs.urls='$server_urls'"
        reward.reward_manager.source=importlib
        reward.reward_manager.module.path=pkg://cosyvoice.training.reward_manager
        reward.reward_manager.name=PrimeRewardManager
        ++reward.prime.max_in_flight=64
        ++reward.prime.timeout_s=360
        ++reward.prime.patience_s=600

        # what becomes a training batch, and the step's reward metrics (Hydra fills the ${...} in, not the shell)
        trainer.v1.sampler.custom_sampler.path=pkg://cosyvoice.training.replay_buffer
        trainer.v1.sampler.custom_sampler.name=SpeechReplayBuffer
        "++trainer.v1.sampler.sampler_kwargs.metrics_file=$run_dir/train/metrics.jsonl"
        '++trainer.v1.sampler.sampler_kwargs.train_batch_size=${data.train_batch_size}'
        '++trainer.v1.sampler.sampler_kwargs.filter_groups=${algorithm.filter_groups}'
        '++trainer.v1.sampler.sampler_kwargs.checkpoints=${trainer.default_local_dir}'
        '++trainer.v1.sampler.sampler_kwargs.save_freq=${trainer.save_freq}'

        # trainer
        trainer.project_name=cosyvoice2_grpo
        "trainer.experiment_name=$name"
        "trainer.logger=[${logger}]"
        "trainer.n_gpus_per_node=$n_gpus"
        "trainer.nnodes=$nnodes"
        "trainer.default_local_dir=$run_dir/train"
        "trainer.rollout_data_dir=$run_dir/train/rollouts"
        trainer.save_freq=100
        trainer.test_freq=100
        trainer.total_epochs=1
        trainer.val_before_train=False
        trainer.resume_mode=auto
        "hydra.run.dir=$run_dir/train/hydra"
    )
    train_command=("$train_python" -m verl.trainer.main_ppo "${overrides[@]}" "${profile_overrides[@]}"
        "${algorithm_overrides[@]}" "${extra[@]}")
    key=$(fingerprint "${train_command[@]}" "$exp/hf" "$exp/data/train.parquet" "$exp/data/test.parquet")
    if ! done_already "$key" "$exp/train/latest_checkpointed_iteration.txt"; then
        if ! wants 1; then
            run_job - "$train_python" reward_tts.py --check --urls "$server_urls" --wait 30 ||
                die "no reward server at $server_urls: start it with \"bash run.sh 1\" or name it with --server-urls"
        fi
        run_job - "$train_python" -m cosyvoice.training.preflight "${train_command[@]:3}" || failed
        run_job - env "TENSORBOARD_DIR=$run_dir/train/tensorboard" RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 \
            HYDRA_FULL_ERROR=1 "${run_env[@]}" "${profile_env[@]}" "${train_command[@]}" "${ray_overrides[@]}" || failed
        need_file "$exp/train/latest_checkpointed_iteration.txt"
        mark_done "$exp/.done/$current" "$key"
        report
    fi
fi

# The server has no part in what follows; its memory may be needed.
if [[ ${server_pid:-} ]] && ((stop_stage > 2)); then
    log "stopping the reward server"
    end_job "${job_pids[0]}"
fi

if wants 3; then
    begin 3 "merging veRL's checkpoint to Hugging Face ones in $exp/merged"
    need_script cosyvoice/training/merge.py
    steps=$(steps_wanted "$exp/train")
    [[ $steps ]] || die "no global_step_N in $exp/train: train first (stage 2)"
    for n in $steps; do
        source=$exp/train/global_step_$n target=$exp/merged/global_step_$n
        check_checkpoint "$source"
        key=$(fingerprint "$source/actor")
        current=3.$n
        if ! done_already "$key" "$target/config.json"; then
            run_job - env "${profile_env[@]}" "$train_python" -m cosyvoice.training.merge \
                --checkpoint "$source" --base "$exp/hf" --target "$target" || failed
            need_file "$target/config.json"
            mark_done "$exp/.done/$current" "$key"
        fi
    done
    report
fi

if wants 4; then
    begin 4 "evaluation before and after training on $eval_sets"
    need_script infer_dataset.py
    need_script scripts/compute_wer.sh
    steps=$(steps_wanted "$exp/merged")
    [[ $steps ]] || die "no global_step_N in $exp/merged: merge first (stage 3)"
    need_file "$exp/hf/config.json" "convert first (stage -1)"
    systems=("before:$exp/hf") overwrite=()
    [[ $force != true ]] || overwrite=(--overwrite)
    for n in $steps; do
        need_file "$exp/merged/global_step_$n/config.json" "merge first (stage 3)"
        systems+=("step_$n:$exp/merged/global_step_$n")
    done
    for split in ${eval_sets//,/ }; do
        set_name=$(basename "$split" .jsonl)
        for sampling in ${eval_sampling//,/ }; do
            suffix=$([[ $sampling == "${eval_sampling%%,*}" ]] || echo "_$sampling")
            for system in "${systems[@]}"; do
                llm=${system#*:} output=$exp/eval/${system%%:*}$suffix
                current=4.${system%%:*}$suffix.$set_name
                key=$(fingerprint "$llm" "$split" "$model_dir" "$prompts" "$judge" "$sampling" "${profile_infer_args[@]}")
                done_already "$key" "$output/$set_name/summary.json" && continue
                log "speaking $split with $llm, sampling $sampling"
                run_job - env "${profile_env[@]}" "$train_python" infer_dataset.py --llm "$llm" --model-dir "$model_dir" \
                    --split "$split" --output-dir "$output" ${prompts:+--prompts "$prompts"} --sampling "$sampling" \
                    "${profile_infer_args[@]}" "${overwrite[@]}" || failed
                run_job - bash scripts/compute_wer.sh "$output" "$split" ${judge:+--judge "$judge"} || failed
                need_file "$output/$set_name/summary.json"
                mark_done "$exp/.done/$current" "$key"
            done
            for n in $steps; do
                log "$split, sampling $sampling: before against step $n"
                run_job - "$reward_python" -m cosyvoice.evaluation.compare --before "$exp/eval/before$suffix" \
                    --after "$exp/eval/step_$n$suffix" --split "$split" \
                    --output "$exp/eval/step_$n$suffix/$set_name/compare.json" || failed
            done
        done
    done
    current=4
    run_job - "$reward_python" -m cosyvoice.evaluation.report "$exp" || failed "the report"
    log "report: $exp/report.html"
fi

if wants 5; then
    begin 5 "export to llm.pt"
    need_script huggingface_to_pretrained.py
    steps=$(steps_wanted "$exp/merged")
    n=$(tail -n 1 <<<"$steps")
    merged=$exp/merged/global_step_$n
    need_file "$merged/config.json" "merge first (stage 3)"
    key=$(fingerprint "$merged")
    if ! done_already "$key" "$exp/export/llm.pt"; then
        mkdir -p "$exp/export"
        run_job - "$train_python" huggingface_to_pretrained.py \
            --hf-cosyvoice2-llm-path "$merged" --output-path "$exp/export/llm.pt" --force || failed
        need_file "$exp/export/llm.pt"
        run_job - "$train_python" scripts/check_export.py --merged "$merged" --llm-pt "$exp/export/llm.pt" || failed
        mark_done "$exp/.done/$current" "$key"
    fi
    log "$exp/export/llm.pt is step $n; copy it over llm.pt of a CosyVoice2 folder to use it"
fi
