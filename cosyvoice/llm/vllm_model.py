"""vLLM class of the language model, equal to :class:`cosyvoice.llm.model.CosyVoice2ForCausalLM`.

Registered by ``vllm_plugin.py``. The names of its weights are those of the transformers class, so that veRL can send
updated weights at any time.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

from cosyvoice.llm.model import place_logits


class CosyVoice2ForCausalLM(Qwen2ForCausalLM):
    """Qwen2 body with a compact speech head; logits are [tokens, vocab_size] like those of any vLLM model.

    Raises:
        ValueError: tensor or pipeline parallelism above 1. The model has 0.5 B weights; more GPUs are better used as
            data-parallel replicas.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        for option, size in (
            ("tensor_parallel_size", get_tensor_model_parallel_world_size()),
            ("pipeline_parallel_size", get_pp_group().world_size),
        ):
            if size != 1:
                raise ValueError(f"CosyVoice2ForCausalLM: {option}: found {size}, expected 1 (use data parallelism)")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.layout = config.vocab_layout()
        self.lm_head = ParallelLMHead(
            self.layout.n_head,
            config.hidden_size,
            bias=True,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(self.layout.n_head)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[tokens, hidden_size] -> [tokens, vocab_size]."""
        logits = self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)
        return None if logits is None else place_logits(logits, self.layout)
