"""Load the language model from either form, mapped into memory rather than read, to compare the two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import Cache, Qwen2Config, Qwen2Model

from cosyvoice.checkpoint import CheckpointError
from cosyvoice.llm import names
from cosyvoice.llm.config import CosyVoice2Config
from cosyvoice.speech_tokens import VocabLayout


class HFTensors(Mapping):
    """The tensors of a Hugging Face folder, single or sharded, each mapped when asked for and released with it.

    A file is opened anew for every tensor: an open file keeps the pages of all tensors that were read from it.

    Raises:
        CheckpointError: no weights, a missing shard, or a truncated file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if single.is_file():
            files = [single]
        elif index.is_file():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        else:
            raise CheckpointError(f"{folder}: found no model.safetensors and no index of shards, expected one of them")
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}: no such file, expected a shard named in {index.name}")
            try:
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a mapping)
                        self._file_of[name] = file
                        self._shapes[name] = tuple(opened.get_slice(name).get_shape())
            except Exception as error:  # the library raises one type for all damage, and OSError
                raise CheckpointError(f"{file}: cannot be read as safetensors: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], "pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self):
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, without reading it."""
        return dict(self._shapes)


class Parts(nn.Module):
    """A language model reduced to what both forms share: speech logits for a row of input embeddings."""

    def __init__(self, body: Qwen2Model, head_weight: torch.Tensor, head_bias: torch.Tensor | None):
        super().__init__()
        self.body, self.head_weight, self.head_bias = body, head_weight, head_bias

    @torch.inference_mode()
    def forward(self, embeddings: torch.Tensor, cache: Cache | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, hidden] -> hidden states after the final norm [1, T, hidden] and speech logits [1, T, n_head].

        With a ``cache``, the embeddings follow those that it has seen, and it grows by them.
        """
        out = self.body(inputs_embeds=embeddings, past_key_values=cache, use_cache=cache is not None)
        hidden = out.last_hidden_state
        return hidden, nn.functional.linear(hidden, self.head_weight, self.head_bias)


def embed_pretrained(tensors: Mapping[str, torch.Tensor], text: torch.Tensor, speech: torch.Tensor) -> torch.Tensor:
    """Text ids [n] and speech codes [m] -> what CosyVoice feeds its model, [1, n + m + 2, hidden] in float32."""
    control = tensors[names.CONTROL_TABLE]
    rows = [control[:1], tensors[names.TEXT_TABLE][text], control[1:], tensors[names.SPEECH_TABLE][speech]]
    return torch.cat(rows).float()[None]


def embed_hf(table: torch.Tensor, layout: VocabLayout, text: torch.Tensor, speech: torch.Tensor) -> torch.Tensor:
    """The same from the one table of Hugging Face form."""
    sos, task = torch.tensor([layout.sos_id]), torch.tensor([layout.task_id])
    return table[torch.cat([sos, text, task, speech + layout.first_speech_id])].float()[None]


def body_from(config: Qwen2Config, tensors: Mapping[str, torch.Tensor], of: Mapping[str, str]) -> Qwen2Model:
    """Qwen2 layers in float32 that use float32 tensors where they lie, without a copy; no embedding table.

    Args:
        of: name in the module -> name in ``tensors``.
    """
    with torch.device("meta"):
        body = Qwen2Model(config)
    body.embed_tokens = nn.Identity()
    body.load_state_dict({name: tensors[source].float() for name, source in of.items()}, assign=True, strict=True)
    body.rotary_emb = type(body.rotary_emb)(config)  # its table is no part of a state dict, hence still on "meta"
    return body.eval()


def parts_from_pretrained(tensors: Mapping[str, torch.Tensor], config: Qwen2Config) -> Parts:
    """Model of the tensors of a ``llm.pt``."""
    layers = [name for name in tensors if name.startswith(names.BODY) and name != names.TEXT_TABLE]
    body = body_from(config, tensors, {name.removeprefix(names.BODY): name for name in layers})
    return Parts(body, tensors[names.HEAD_WEIGHT].float(), tensors[names.HEAD_BIAS].float())


def parts_from_hf(tensors: HFTensors, config: Qwen2Config, layout: VocabLayout) -> Parts:
    """Model of a Hugging Face checkpoint with either head."""
    weight, bias = speech_head(tensors, layout)
    body = body_from(config, tensors, {name.removeprefix("model."): name for name in names.layer_names(tensors)})
    return Parts(body, weight.float(), bias.float())


def speech_head(tensors: HFTensors, layout: VocabLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [n_head, hidden] and bias [n_head] of the speech head; a stock Qwen2 head has no bias, hence zeros.

    The original recipe's converter stores a bias of the full width that transformers then ignores; where it is
    there, it is the model's own, and is used.
    """
    weight = tensors[names.HF_HEAD_WEIGHT]
    bias = tensors.get(names.HF_HEAD_BIAS)
    if weight.shape[0] != layout.n_head:
        rows = slice(layout.first_speech_id, layout.first_speech_id + layout.n_head)
        weight = weight[rows]
        bias = bias[rows] if bias is not None else None
    return weight, bias if bias is not None else torch.zeros(layout.n_head, dtype=weight.dtype)


def hf_config(folder: Path) -> Qwen2Config:
    """The configuration of a converted checkpoint (either head).

    Raises:
        CheckpointError: the folder holds none, or another model's.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, expected a converted CosyVoice2 checkpoint")
    values = json.loads(path.read_text())
    classes = {"cosyvoice2": CosyVoice2Config, "qwen2": Qwen2Config}
    if values.get("model_type") not in classes:
        raise CheckpointError(f"{path}: key 'model_type': found {values.get('model_type')!r}, expected {list(classes)}")
    return classes[values["model_type"]].from_pretrained(folder)
