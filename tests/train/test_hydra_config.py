"""What ``run.sh`` hands to veRL, composed by the installed veRL's own Hydra configuration.

veRL renamed keys between versions and ignores some of the older ones without a word, so each setting is looked up
where veRL reads it. The argument vector is recorded from a run of the driver with a stand-in for Python.
"""

import inspect
from pathlib import Path

import pytest
import verl.trainer
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf


def composed(overrides: list[str]):
    """veRL's configuration with these overrides. Unknown keys without a plus are errors here, as they are there."""
    folder = Path(inspect.getfile(verl.trainer)).parent / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        config = compose(config_name="ppo_trainer", overrides=overrides)
    OmegaConf.resolve(config)
    return config


def settings(config, expected: dict[str, object]) -> dict[str, object]:
    """The same keys as ``expected`` with the values that stand in ``config``."""
    found = {key: OmegaConf.select(config, key, default="not there") for key in expected}
    return {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in found.items()}


RECIPE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 32,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 512,
    "data.truncation": "error",
    "data.filter_overlong_prompts": True,
    "actor_rollout_ref.model.external_lib": "cosyvoice.llm",
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.use_remove_padding": False,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    "actor_rollout_ref.rollout.do_sample": True,
    "actor_rollout_ref.rollout.temperature": 0.8,
    "actor_rollout_ref.rollout.top_p": 0.95,
    "actor_rollout_ref.rollout.top_k": 25,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0.8,
    "actor_rollout_ref.rollout.val_kwargs.top_p": 0.95,
    "actor_rollout_ref.rollout.val_kwargs.top_k": 25,
    "actor_rollout_ref.rollout.val_kwargs.n": 4,
    "reward.custom_reward_function.name": "compute_score",
    "reward.custom_reward_function.reward_kwargs": {"urls": "http://a:8000,http://b:8000"},
    "reward.reward_manager.source": "importlib",
    "reward.reward_manager.module.path": "pkg://cosyvoice.training.reward_manager",
    "reward.reward_manager.name": "PrimeRewardManager",
    "reward.prime": {"max_in_flight": 64, "timeout_s": 360, "patience_s": 600},
    "trainer.v1.trainer_mode": "sync",
    "trainer.v1.sampler.custom_sampler.path": "pkg://cosyvoice.training.replay_buffer",
    "trainer.v1.sampler.custom_sampler.name": "SpeechReplayBuffer",
    "trainer.v1.sampler.sampler_kwargs.train_batch_size": 32,
    "trainer.v1.sampler.sampler_kwargs.save_freq": 100,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 2,
    "trainer.logger": ["console", "tensorboard"],
    "trainer.save_freq": 100,
    "trainer.test_freq": 100,
    "trainer.total_epochs": 1,
    "trainer.val_before_train": False,
    "trainer.resume_mode": "auto",
    "trainer.device": "cuda",
    "ray_kwargs.ray_init.address": "10.0.0.1:6379",
}
"""The settings of the original recipe, in the keys of the installed version."""


def test_8gpu_is_the_original_recipe_on_two_nodes(tmp_path, record_driver):
    options = ("--profile", "8gpu", "--n-gpus", "8", "--nnodes", "2", "--ray-address", "10.0.0.1:6379")
    calls = record_driver(tmp_path, *options, "--server-urls", "http://a:8000,http://b:8000")
    overrides, _ = calls["verl.trainer.main_ppo"]
    config = composed(overrides)
    assert settings(config, RECIPE) == RECIPE
    run = tmp_path / "exp/run"
    assert config.data.train_files == str(run / "data/train.parquet")
    assert config.data.val_files == str(run / "data/test.parquet")
    assert config.actor_rollout_ref.model.path == str(run / "hf")
    assert config.trainer.default_local_dir == str(run / "train")
    assert config.trainer.v1.sampler.sampler_kwargs.metrics_file == str(run / "train/metrics.jsonl")
    assert config.reward.custom_reward_function.path == str(tmp_path / "reward_tts.py")
    # An existing cluster refuses what only a new one can be given.
    assert "num_gpus" not in config.ray_kwargs.ray_init
    assert "_temp_dir" not in config.ray_kwargs.ray_init
    assert set(calls["cosyvoice.training.preflight"][0]) <= set(overrides)


def test_the_older_reward_keys_are_still_ignored_silently():
    """The reason for looking settings up: these compose, and nothing reads them where the reward loop looks."""
    config = composed(["actor_rollout_ref.rollout.name=vllm", "reward_model.reward_manager=prime"])
    assert config.reward.reward_manager.name == "naive"


def test_tiny_keeps_the_recipe_but_for_sizes_and_the_cpu(tmp_path, record_driver):
    overrides, environment = record_driver(tmp_path, "--profile", "tiny")["verl.trainer.main_ppo"]
    assert environment["VERL_PLATFORM"] == "cpu"
    config = composed(overrides)
    same = {key: value for key, value in RECIPE.items() if key.split(".")[0] == "reward" or ".v1." in key}
    for key in (
        "reward.custom_reward_function.reward_kwargs",
        "trainer.v1.sampler.sampler_kwargs.train_batch_size",
        "trainer.v1.sampler.sampler_kwargs.save_freq",
    ):
        del same[key]
    assert settings(config, same) == same
    expected = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.enable_sleep_mode": False,
        "actor_rollout_ref.rollout.enforce_eager": True,
        "ray_kwargs.ray_init.address": "local",
        "ray_kwargs.ray_init.num_gpus": 1,
        "reward.num_workers": 1,
    }
    assert settings(config, expected) == expected
    sizes = config.trainer.v1.sampler.sampler_kwargs
    assert sizes.train_batch_size == config.data.train_batch_size
    assert sizes.save_freq == config.trainer.save_freq
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.rollout.max_model_len == longest


VARIANTS = {
    "grpo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.filter_groups.enable": False,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
        "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    },
    "dr_grpo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.loss_scale_factor": 512,
    },
    "dapo": {
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "wer",
        "trainer.v1.sampler.sampler_kwargs.filter_groups.enable": True,
        "trainer.v1.sampler.sampler_kwargs.filter_groups.metric": "wer",
        "reward.prime.overlong_share": 0.25,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.rollout.top_p": 1.0,
        "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.use_kl_loss": False,
    },
    "multi_reward": {
        "algorithm.adv_estimator": "multi_reward_grpo",
        "algorithm.multi_reward.weights": {
            "component_pinyin": 1.0, "component_duration": 0.2, "component_pause": 0.2
        },
        "trainer.v1.sampler.sampler_kwargs.reward_keys": ["component_pinyin", "component_duration", "component_pause"],
    },
    "gspo": {
        "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref.actor.clip_ratio_low": 3e-4,
        "actor_rollout_ref.actor.clip_ratio_high": 4e-4,
    },
}


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_variants_land_where_they_are_read(tmp_path, record_driver, algorithm):
    options = ("--profile", "8gpu", "--n-gpus", "8", "--algorithm", algorithm)
    overrides, _ = record_driver(tmp_path, *options)["verl.trainer.main_ppo"]
    assert settings(composed(overrides), VARIANTS[algorithm]) == VARIANTS[algorithm]


def test_what_the_user_adds_comes_last(tmp_path, record_driver):
    options = ("--profile", "8gpu", "--n-gpus", "8", "--logger", "console,wandb", "--", "trainer.save_freq=7")
    overrides, _ = record_driver(tmp_path, *options)["verl.trainer.main_ppo"]
    config = composed(overrides)
    assert config.trainer.save_freq == 7
    assert list(config.trainer.logger) == ["console", "wandb"]
