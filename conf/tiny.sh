# shellcheck shell=bash disable=SC2034,SC2154
# Profile tiny: no GPU; the trained tiny checkpoint that ships with the repository. Sourced by run.sh after the
# command line was read, so ": ${x:=value}" gives an option its value only where the user did not.

# --- models and data -------------------------------------------------------------------------------------------
: "${model_dir:=assets/cosyvoice2-tiny}"
: "${dtype:=float32}"                              # a bfloat16 vLLM worker was seen to die on the CPU
if [[ ! $data_jsonl ]]; then
    : "${train_jsonl:=$model_dir/data/train.jsonl}"
    : "${test_jsonl:=$model_dir/data/dev.jsonl}"
fi
: "${asr_model:=$model_dir/sensevoice}"
: "${prompts:=$model_dir/prompts/prompts.jsonl}"
: "${judge:=$model_dir/judge}"
: "${eval_sets:=$model_dir/data/test.jsonl}"

# --- devices ---------------------------------------------------------------------------------------------------
: "${n_gpus:=1}"                                   # one training process; Ray is told of one logical GPU
: "${server_devices:=1}"
: "${server_instances:=2}"                           # one per core: training rests while the last rewards are measured
# The tiny flow was made for 3 Euler steps (scripts/tiny/settings.py).
profile_server_args=(--device cpu --euler-steps 3 --max-tokens 256)
profile_infer_args=(--flow-steps 3 --max-tokens 128 --temperature 1.0 --top-p 1.0 --top-k 0) # as stage 2 samples

# --- stage 2: how veRL and vLLM run without a GPU ----------------------------------------------------------------
profile_env=(
    VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda      # cosyvoice/training/cpu_platform.py says why "cuda"
    VLLM_CPU_KVCACHE_SPACE=1
    HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
    OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
    RAY_worker_niceness=0                          # Ray would put its workers behind the reward server (nice 15)
    RAY_worker_register_timeout_seconds=600        # two busy cores take minutes to import vLLM in several processes
)
profile_overrides=(
    trainer.device=cpu
    ray_kwargs.ray_init.num_cpus=16                # logical: veRL asks for more than a laptop has
    +ray_kwargs.ray_init.num_gpus=1
    +ray_kwargs.ray_init.object_store_memory=500000000
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.ref.strategy=fsdp2
    actor_rollout_ref.actor.use_torch_compile=False
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    actor_rollout_ref.ref.fsdp_config.use_torch_compile=False
    # float32 throughout: without it veRL computes in bfloat16 and samples in float32
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    +actor_rollout_ref.model.override_config.attn_implementation=eager
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.enforce_eager=True
    actor_rollout_ref.rollout.free_cache_engine=False
    +actor_rollout_ref.rollout.enable_sleep_mode=False
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
    data.dataloader_num_workers=0
    reward.num_workers=1

    # --- sizes and training values of the tiny model -------------------------------------------------------------
    ++trainer.v1.sampler.sampler_kwargs.poll_s=0.1
    data.max_prompt_length=24                      # rows are padded to both lengths: keep them near the truth
    data.max_response_length=104
    data.train_batch_size=8
    data.val_max_samples=64
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.max_num_seqs=64
    actor_rollout_ref.rollout.max_model_len=128
    actor_rollout_ref.rollout.max_num_batched_tokens=1024
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.temperature=1.0      # the whole distribution: what is trained is what is sampled
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.val_kwargs.n=1
    # 1e-4 once per step hardly learned in 100 steps, 2e-3 fell apart after 10 (the model card has the curves)
    actor_rollout_ref.actor.optim.lr=5e-4
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.ppo_epochs=2           # an update costs a fifth of a step's rollouts and rewards
    trainer.total_epochs=100                       # bounded by the number of steps
    trainer.total_training_steps=80
    trainer.save_freq=40
    trainer.test_freq=40
)
