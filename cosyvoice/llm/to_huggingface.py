"""``llm.pt`` -> Hugging Face checkpoint."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2Config

from cosyvoice.checkpoint import CheckpointError, load_tensors
from cosyvoice.hashing import sha256_of
from cosyvoice.llm import names
from cosyvoice.llm.config import CosyVoice2Config
from cosyvoice.llm.safetensors_stream import Planned
from cosyvoice.llm.safetensors_stream import write as write_safetensors
from cosyvoice.llm.tokenizer import build_tokenizer
from cosyvoice.speech_tokens import VocabLayout

SIDECAR = "conversion.json"
EXTRA_TENSORS = "pretrained_extra.pt"
ROWS_AT_ONCE = 16384  # of a table, while it is written


def convert(source: Path, target: Path, dtype: torch.dtype, head: str, progress: bool = True) -> VocabLayout:
    """Write the Hugging Face form of a CosyVoice2 language model.

    Only ``llm.pt`` (mapped, not read) and ``CosyVoice-BlankEN/`` are opened. Beside the checkpoint stand
    ``conversion.json`` (sources, layout, versions) and the few tensors that Hugging Face form has no room for, so that
    the way back loses no bit.

    Args:
        source: CosyVoice2 folder.
        target: folder to write; must not exist or be empty.
        dtype: of the weights written.
        head: "speech" (compact, with bias) or "qwen2" (stock layout: full head, no bias).

    Raises:
        CheckpointError: a file is missing, of another model, truncated, or the disk is too small.
    """
    llm_path, blank_path = source / "llm.pt", source / "CosyVoice-BlankEN"
    for path in (llm_path, blank_path / "config.json"):
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file, expected in a CosyVoice2 folder")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: found a file or a folder that is not empty, expected a new folder")
    base_config = json.loads((blank_path / "config.json").read_text())
    tensors = load_tensors(llm_path)
    n_speech = names.check_pretrained(tensors, base_config, llm_path)
    tokenizer, layout = build_tokenizer(blank_path, n_speech)
    text_rows = tensors[names.TEXT_TABLE].shape[0]
    if layout.first_speech_id > text_rows:
        raise CheckpointError(
            f"{llm_path}: key {names.TEXT_TABLE!r}: found {text_rows} rows, expected at least the "
            f"{layout.first_speech_id} pieces of {blank_path}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(target.parent, tensors, layout, dtype, head)

    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        plan = _plan(tensors, layout, head)
        write_safetensors(temporary / "model.safetensors", plan, dtype, progress)
        torch.save(_extra(tensors, layout), temporary / EXTRA_TENSORS)
        _config(base_config, layout, text_rows, dtype, head).save_pretrained(temporary)
        _generation_config(layout, tokenizer).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        record = {
            "source": {str(p.name): _sha256(p, progress) for p in (llm_path, blank_path / "config.json")},
            "head": head,
            "dtype": str(dtype).removeprefix("torch."),
            "text_rows": text_rows,
            "first_speech_id": layout.first_speech_id,
            "n_speech": n_speech,
            "padded_size": layout.padded_size,
            "llm_pt_dtypes": _dtypes(tensors),
            "versions": {name: version(name) for name in ("torch", "transformers", "safetensors", "cosyvoice2-grpo")},
        }
        (temporary / SIDECAR).write_text(json.dumps(record, indent=2) + "\n")
        os.chmod(temporary, 0o755)
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return layout


def _plan(tensors: Mapping[str, torch.Tensor], layout: VocabLayout, head: str) -> dict[str, Planned]:
    """Every tensor of the Hugging Face file, put together only when it is written."""
    hidden = tensors[names.TEXT_TABLE].shape[1]

    def unused(rows: int) -> torch.Tensor:
        return torch.zeros(rows, hidden)

    table = Planned(
        (layout.padded_size, hidden),
        lambda: (
            *tensors[names.TEXT_TABLE][: layout.first_speech_id].split(ROWS_AT_ONCE),
            tensors[names.SPEECH_TABLE],
            tensors[names.CONTROL_TABLE],
            unused(layout.padded_size - layout.n_tokens),
        ),
    )
    plan = {names.HF_TABLE: table}
    for name, value in tensors.items():
        if name.startswith(names.BODY) and name != names.TEXT_TABLE:
            plan["model." + name.removeprefix(names.BODY)] = Planned(tuple(value.shape), lambda v=value: [v])
    weight, bias = tensors[names.HEAD_WEIGHT], tensors[names.HEAD_BIAS]
    if head == "speech":
        plan[names.HF_HEAD_WEIGHT] = Planned(tuple(weight.shape), lambda: [weight])
        plan[names.HF_HEAD_BIAS] = Planned(tuple(bias.shape), lambda: [bias])
    else:
        before, after = layout.first_speech_id, layout.padded_size - layout.first_speech_id - layout.n_head
        plan[names.HF_HEAD_WEIGHT] = Planned(
            (layout.padded_size, hidden), lambda: (*unused(before).split(ROWS_AT_ONCE), weight, unused(after))
        )
    return plan


def _extra(tensors: Mapping[str, torch.Tensor], layout: VocabLayout) -> dict[str, torch.Tensor]:
    """What Hugging Face form has no room for: unused text rows, and the text head where it is not a tied copy."""
    text, text_head = tensors[names.TEXT_TABLE], tensors[names.TEXT_HEAD]
    extra = {"unused_text_rows": text[layout.first_speech_id :].clone()}
    if not torch.equal(text, text_head):
        extra[names.TEXT_HEAD] = text_head.clone()
    return extra


def _config(base: dict, layout: VocabLayout, text_rows: int, dtype: torch.dtype, head: str) -> Qwen2Config:
    kept = {k: v for k, v in base.items() if k not in ("architectures", "model_type", "torch_dtype", "dtype")}
    kept.update(vocab_size=layout.padded_size, tie_word_embeddings=False, dtype=dtype, eos_token_id=layout.end_ids[0])
    if head == "speech":
        return CosyVoice2Config(
            **kept,
            first_speech_id=layout.first_speech_id,
            n_speech=layout.n_speech,
            text_rows=text_rows,
            architectures=["CosyVoice2ForCausalLM"],
        )
    return Qwen2Config(**kept, architectures=["Qwen2ForCausalLM"])


def _generation_config(layout: VocabLayout, tokenizer) -> GenerationConfig:
    return GenerationConfig(
        eos_token_id=list(layout.end_ids),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=0.8,
        top_k=25,
    )


def _check_disk(
    folder: Path, tensors: Mapping[str, torch.Tensor], layout: VocabLayout, dtype: torch.dtype, head: str
) -> None:
    plan = _plan(tensors, layout, head)
    tokenizer_bytes = layout.padded_size * 100
    needed = sum(math.prod(planned.shape) for planned in plan.values()) * dtype.itemsize + tokenizer_bytes
    if (free := shutil.disk_usage(folder).free) < needed:
        raise CheckpointError(f"{folder}: found {free / 1e9:.2f} GB free, expected at least {needed / 1e9:.2f} GB")


def _dtypes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Dtype of every tensor, in the file's order (the way back writes the same)."""
    return {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}


def _sha256(path: Path, progress: bool) -> str:
    size = path.stat().st_size
    with tqdm(total=size, unit="B", unit_scale=True, desc=f"hashing {path.name}", disable=not progress) as bar:
        return sha256_of(path, bar)
