"""The CosyVoice2 language model: Qwen2 with a speech head that keeps its bias.

Importing this package registers the model with transformers' ``AutoConfig`` and ``AutoModelForCausalLM``. veRL does so
through ``actor_rollout_ref.model.external_lib=cosyvoice.llm``, its merger through ``VERL_USE_EXTERNAL_MODULES``, and
vLLM through the entry point in ``vllm_plugin.py``.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from cosyvoice.llm.config import CosyVoice2Config
from cosyvoice.llm.model import CosyVoice2ForCausalLM

AutoConfig.register(CosyVoice2Config.model_type, CosyVoice2Config, exist_ok=True)
AutoModelForCausalLM.register(CosyVoice2Config, CosyVoice2ForCausalLM, exist_ok=True)

__all__ = ["CosyVoice2Config", "CosyVoice2ForCausalLM"]
