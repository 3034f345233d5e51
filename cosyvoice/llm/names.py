"""Names and shapes of the tensors of ``llm.pt``, and how they map to the Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from cosyvoice.checkpoint import CheckpointError

BODY = "llm.model.model."  # of llm.pt; "model." in Hugging Face form
TEXT_TABLE = BODY + "embed_tokens.weight"
TEXT_HEAD = "llm.model.lm_head.weight"  # tied copy of the text table; speech does not use it
SPEECH_TABLE = "speech_embedding.weight"
CONTROL_TABLE = "llm_embedding.weight"  # row 0 <|sos|>, row 1 <|task_id|>
HEAD_WEIGHT = "llm_decoder.weight"
HEAD_BIAS = "llm_decoder.bias"

HF_TABLE = "model.embed_tokens.weight"
HF_HEAD_WEIGHT = "lm_head.weight"
HF_HEAD_BIAS = "lm_head.bias"


def layer_shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Shapes of the Qwen2 body without its embedding table; keys in Hugging Face form.

    Args:
        config: values of a Qwen2 ``config.json``.
    """
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, q)
        shapes[layer + "mlp.gate_proj.weight"] = (mlp, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (mlp, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, mlp)
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
    return shapes


def layer_names(hf_names: Iterable[str]) -> list[str]:
    """Those names of a Hugging Face checkpoint that are layers of the body: all but tables and head."""
    return [name for name in hf_names if name.startswith("model.") and name != HF_TABLE]


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: Path | str, hint: str = ""
) -> None:
    """Compare names and shapes.

    Raises:
        CheckpointError: the first missing, left-over or differing tensor, and how many there are.
    """
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(
            f"{where}: key {missing[0]!r}: found no such tensor ({len(missing)} missing), expected {len(expected)}"
            f" tensors{hint}"
        )
    if extra := [name for name in found if name not in expected]:
        raise CheckpointError(
            f"{where}: key {extra[0]!r}: found a tensor ({len(extra)} left over), expected none of that name{hint}"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise CheckpointError(f"{where}: key {name!r}: found shape {list(found[name])}, expected {list(shape)}")


def check_pretrained(tensors: Mapping[str, torch.Tensor], config: Mapping, path: Path) -> int:
    """Check a ``llm.pt`` against the configuration beside it.

    Returns:
        The number of speech codes, read from the tensors.

    Raises:
        CheckpointError: it is another model's, or a name or a shape is wrong.
    """
    if "llm.llm.model.embed_tokens.weight" in tensors or "text_embedding.weight" in tensors:
        raise CheckpointError(f"{path}: found the tensors of CosyVoice 1, expected CosyVoice2's")
    if SPEECH_TABLE in tensors and CONTROL_TABLE not in tensors and HEAD_BIAS not in tensors:
        raise CheckpointError(
            f"{path}: key {CONTROL_TABLE!r}: found no such tensor and a head without bias (CosyVoice3), "
            "expected CosyVoice2's"
        )
    if SPEECH_TABLE not in tensors:
        raise CheckpointError(f"{path}: key {SPEECH_TABLE!r}: found no such tensor, expected CosyVoice2's llm.pt")
    hidden, n_rows = config["hidden_size"], tensors[SPEECH_TABLE].shape[0]
    text_rows = tensors[TEXT_TABLE].shape[0] if TEXT_TABLE in tensors else config["vocab_size"]
    expected = {BODY + name[len("model.") :]: shape for name, shape in layer_shapes(config).items()}
    expected |= {
        TEXT_TABLE: (text_rows, hidden),
        TEXT_HEAD: (text_rows, hidden),
        SPEECH_TABLE: (n_rows, hidden),
        CONTROL_TABLE: (2, hidden),
        HEAD_WEIGHT: (n_rows, hidden),
        HEAD_BIAS: (n_rows,),
    }
    check_shapes({k: tuple(v.shape) for k, v in tensors.items()}, expected, path)
    return n_rows - 3
