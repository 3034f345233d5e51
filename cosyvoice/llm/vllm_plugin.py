"""Entry point of the group ``vllm.general_plugins``: vLLM calls :func:`register` in every process that it starts."""

from __future__ import annotations


def register() -> None:
    """Make the model known to vLLM and, on a CPU, keep its weights loadable."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    import cosyvoice.llm  # noqa: F401  (registers the configuration with transformers in this process)

    ModelRegistry.register_model("CosyVoice2ForCausalLM", "cosyvoice.llm.vllm_model:CosyVoice2ForCausalLM")
    if current_platform.is_cpu():
        _keep_cpu_weights_unpacked()


def _keep_cpu_weights_unpacked() -> None:
    """Compute linear layers from the weights as loaded.

    vLLM 0.31 packs the weights of linear layers for oneDNN after the first load and drops the parameter
    (``layers/utils.py: dispatch_cpu_unquantized_gemm``). A second load, which is what veRL does after every update,
    then finds no parameter, dies and leaves the trainer waiting for ever.
    """
    import torch
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise RuntimeError(
            "vllm.model_executor.layers.utils: found no dispatch_cpu_unquantized_gemm, expected vLLM 0.31's; "
            "check whether this vLLM still packs CPU weights, and remove or adapt the workaround in "
            "cosyvoice/llm/vllm_plugin.py"
        )

    def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear
