# shellcheck shell=bash disable=SC2034
# --algorithm multi_reward: several components of the reward, each normalised inside its group before the weighted sum
# (cosyvoice/training/advantages.py), so that the weights mean what they say whatever the components' spreads are.
algorithm_overrides=(
    algorithm.adv_estimator=multi_reward_grpo
    '++algorithm.multi_reward.weights={component_pinyin:1.0,component_duration:0.2,component_pause:0.2}'
    ++algorithm.multi_reward.min_group=2
    ++algorithm.multi_reward.clip=5.0
    '++trainer.v1.sampler.sampler_kwargs.reward_keys=[component_pinyin,component_duration,component_pause]'
)
