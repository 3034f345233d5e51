"""Reinforcement learning (GRPO) for the CosyVoice2 speech-token language model.

Importing this package is cheap on purpose: it pulls in no torch, so that command
lines can print their help at once. See README.md for the map of the modules.
"""
