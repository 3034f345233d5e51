"""``llm.pt`` -> Hugging Face checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2Config

from cosyvoice.checkpoint import CheckpointError, load_tensors
from cosyvoice.llm import names
from cosyvoice.llm.config import CosyVoice2Config
from cosyvoice.llm.tokenizer import build_tokenizer
from cosyvoice.speech_tokens import VocabLayout

SIDECAR = "conversion.json"
EXTRA_TENSORS = "pretrained_extra.pt"
HEADS = ("speech", "qwen2")


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
    _check_disk(target.parent, tensors, layout, dtype)

    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        weights = _to_hf(tensors, layout, dtype, head, progress)
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        del weights
        torch.save(_extra(tensors, layout), temporary / EXTRA_TENSORS)
        _config(base_config, layout, dtype, head).save_pretrained(temporary)
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


def _to_hf(
    tensors: dict[str, torch.Tensor], layout: VocabLayout, dtype: torch.dtype, head: str, progress: bool
) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    body = [name for name in tensors if name.startswith(names.BODY) and name != names.TEXT_TABLE]
    for name in tqdm(body, desc="converting tensors", disable=not progress):
        weights["model." + name[len(names.BODY) :]] = tensors[name].to(dtype).contiguous()
    first, end = layout.first_speech_id, layout.first_speech_id + layout.n_head
    hidden = tensors[names.TEXT_TABLE].shape[1]
    table = torch.zeros(layout.padded_size, hidden, dtype=dtype)  # unused rows stay 0
    table[:first] = tensors[names.TEXT_TABLE][:first]
    table[first:end] = tensors[names.SPEECH_TABLE]
    table[layout.sos_id : layout.task_id + 1] = tensors[names.CONTROL_TABLE]
    weights[names.HF_TABLE] = table
    if head == "speech":
        weights[names.HF_HEAD_WEIGHT] = tensors[names.HEAD_WEIGHT].to(dtype)
        weights[names.HF_HEAD_BIAS] = tensors[names.HEAD_BIAS].to(dtype)
    else:
        full = torch.zeros(layout.padded_size, hidden, dtype=dtype)
        full[first:end] = tensors[names.HEAD_WEIGHT]
        weights[names.HF_HEAD_WEIGHT] = full
    return weights


def _extra(tensors: dict[str, torch.Tensor], layout: VocabLayout) -> dict[str, torch.Tensor]:
    """What Hugging Face form has no room for: unused text rows, and the text head where it is not a tied copy."""
    text, text_head = tensors[names.TEXT_TABLE], tensors[names.TEXT_HEAD]
    extra = {"unused_text_rows": text[layout.first_speech_id :].clone()}
    if not torch.equal(text, text_head):
        extra[names.TEXT_HEAD] = text_head.clone()
    return extra


def _config(base: dict, layout: VocabLayout, dtype: torch.dtype, head: str) -> Qwen2Config:
    kept = {k: v for k, v in base.items() if k not in ("architectures", "model_type", "torch_dtype", "dtype")}
    kept.update(vocab_size=layout.padded_size, tie_word_embeddings=False, dtype=dtype, eos_token_id=layout.end_ids[0])
    if head == "speech":
        return CosyVoice2Config(
            **kept,
            first_speech_id=layout.first_speech_id,
            n_speech=layout.n_speech,
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


def _check_disk(folder: Path, tensors: dict[str, torch.Tensor], layout: VocabLayout, dtype: torch.dtype) -> None:
    values = sum(t.numel() for name, t in tensors.items() if name != names.TEXT_HEAD)
    needed = int(values * dtype.itemsize * 1.1) + layout.padded_size * 512
    if (free := shutil.disk_usage(folder).free) < needed:
        raise CheckpointError(f"{folder}: found {free / 1e9:.2f} GB free, expected at least {needed / 1e9:.2f} GB")


def _dtypes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Dtype of every tensor, in the file's order (the way back writes the same)."""
    return {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}


def _sha256(path: Path, progress: bool) -> str:
    digest = hashlib.sha256()
    with (
        path.open("rb") as file,
        tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=f"hashing {path.name}", disable=not progress)
        as bar,
    ):
        while block := file.read(1 << 20):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()
