# shellcheck shell=bash disable=SC2034,SC2154
# Profile 8gpu: one node with NVIDIA GPUs, CosyVoice2-0.5B, AISHELL-3. Sourced by run.sh after the command line
# was read, so ": ${x:=value}" gives an option its value only where the user did not.

# --- models and data -------------------------------------------------------------------------------------------
: "${model_dir:=pretrained/CosyVoice2-0.5B}"       # fetched from the hub by stage -1 if it is not there
: "${dtype:=bfloat16}"
: "${asr_model:=FunAudioLLM/SenseVoiceSmall}"      # a folder or a hub name
: "${prompts:=}"                                   # prompt audio of the reward server: folder or JSONL
: "${judge:=}"                                     # sherpa-onnx recogniser; empty: the scorer's own default
: "${eval_sets:=zero_shot_zh}"                     # splits or JSONL files, comma list

# --- devices ---------------------------------------------------------------------------------------------------
: "${n_gpus:=$(count_gpus)}"
: "${server_devices:=$n_gpus}"
: "${server_instances:=1}"
profile_server_args=()
profile_infer_args=(--max-tokens 512 --dtype bfloat16 --n-procs "$n_gpus") # temperature and the like: as stage 2

# --- stage 2: on top of the overrides in run.sh, which are the recipe's own settings for this machine ------------
profile_env=()
profile_overrides=()
