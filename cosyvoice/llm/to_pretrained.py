"""Hugging Face checkpoint -> ``llm.pt``, checked by loading what was written."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from cosyvoice.checkpoint import CheckpointError, load_tensors
from cosyvoice.llm import names
from cosyvoice.llm.config import QWEN2_TEXT_ROWS
from cosyvoice.llm.load import (
    HFTensors,
    embed_hf,
    embed_pretrained,
    hf_config,
    parts_from_hf,
    parts_from_pretrained,
    speech_head,
)
from cosyvoice.llm.to_huggingface import EXTRA_TENSORS, SIDECAR
from cosyvoice.llm.tokenizer import load_tokenizer
from cosyvoice.speech_tokens import VocabLayout

# Float32 rounding of two forwards over the same numbers; a wrong row or a lost bias shows as 0.1 and more.
MAX_LOGIT_DIFFERENCE = 1e-4
SAMPLE_TEXTS = ("你好，很高兴认识你。", "今天天气不错", "Hello world 123")


@dataclass(frozen=True)
class Written:
    """What :func:`convert` wrote: number of tensors, and the largest difference of logits against the source."""

    n_tensors: int
    max_logit_difference: float


def convert(
    source: Path, output: Path, text_rows: int | None = None, force: bool = False, progress: bool = True
) -> Written:
    """Write the tensors of CosyVoice2's ``llm.pt``, names, shapes and, where it holds the values, dtypes.

    Args:
        source: Hugging Face folder with a compact or a stock head; one file or shards.
        output: file to write; its folder is made.
        text_rows: rows of the text table; else what ``conversion.json`` or ``config.json`` says, else the published
            151,936.
        force: overwrite ``output``.

    Raises:
        CheckpointError: a tensor is missing, left over or misshapen; the tokenizer lacks pieces; the disk is too small;
            ``output`` exists; or the written file does not give the logits of the source (it is then removed).
    """
    if output.exists() and not force:
        raise CheckpointError(f"{output}: found a file, expected none (give --force to overwrite it)")
    config = hf_config(source)
    _, layout = load_tokenizer(source)
    tensors = HFTensors(source)
    _check(tensors, config, layout, source)
    record = json.loads((source / SIDECAR).read_text()) if (source / SIDECAR).is_file() else {}
    rows = text_rows or record.get("text_rows") or getattr(config, "text_rows", QWEN2_TEXT_ROWS)
    if not layout.first_speech_id <= rows <= max(layout.padded_size, QWEN2_TEXT_ROWS):
        raise CheckpointError(
            f"{source}: found {rows} text rows, expected {layout.first_speech_id} to {layout.padded_size}"
            " (give --text-rows)"
        )
    extra = load_tensors(source / EXTRA_TENSORS) if (source / EXTRA_TENSORS).is_file() else {}
    result = _to_pretrained(tensors, layout, rows, extra, record.get("llm_pt_dtypes", {}), progress)

    output.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(t.numel() * t.element_size() for name, t in result.items() if name != names.TEXT_HEAD)
    if (free := shutil.disk_usage(output.parent).free) < needed:
        raise CheckpointError(f"{output.parent}: found {free / 1e9:.2f} GB free, expected {needed / 1e9:.2f} GB")
    handle, temporary = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
    os.close(handle)
    try:
        torch.save(result, temporary)
        n_tensors = len(result)
        del result, extra
        release_memory()
        difference = compare(source, Path(temporary))
        if not difference <= MAX_LOGIT_DIFFERENCE:
            raise CheckpointError(
                f"{output}: found logits that differ by {difference:.3g} from {source}, "
                f"expected at most {MAX_LOGIT_DIFFERENCE:g}"
            )
        os.chmod(temporary, 0o644)
        os.replace(temporary, output)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return Written(n_tensors, difference)


def _check(tensors: HFTensors, config, layout: VocabLayout, source: Path) -> None:
    hidden = config.hidden_size
    head_rows = layout.n_head if config.model_type == "cosyvoice2" else layout.padded_size
    expected = names.layer_shapes(config.to_dict())
    expected |= {names.HF_TABLE: (layout.padded_size, hidden), names.HF_HEAD_WEIGHT: (head_rows, hidden)}
    # The original recipe's converter stores a full-width bias; a trained stock checkpoint has none.
    if config.model_type == "cosyvoice2" or names.HF_HEAD_BIAS in tensors:
        expected[names.HF_HEAD_BIAS] = (head_rows,)
    names.check_shapes(tensors.shapes, expected, source)


def _to_pretrained(
    tensors: HFTensors,
    layout: VocabLayout,
    rows: int,
    extra: dict[str, torch.Tensor],
    dtypes: dict[str, str],
    progress: bool,
) -> dict[str, torch.Tensor]:
    def typed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        # The original file's dtype, unless that would round training away (a float16 file trained in float32).
        cast = tensor.to(getattr(torch, dtypes.get(name, "float32")))
        return (cast if torch.equal(cast.to(tensor.dtype), tensor) else tensor).contiguous()

    result = _tables(tensors[names.HF_TABLE], layout, rows, extra)
    result = {name: typed(name, value) for name, value in result.items()}
    # The same storage, as a tied model saves it: the file holds the table once.
    text_head = extra.get(names.TEXT_HEAD)
    result[names.TEXT_HEAD] = result[names.TEXT_TABLE] if text_head is None else typed(names.TEXT_HEAD, text_head)
    for name, value in zip((names.HEAD_WEIGHT, names.HEAD_BIAS), speech_head(tensors, layout)):
        result[name] = typed(name, value.clone())
    # Cast one by one: what was mapped for one tensor is released before the next.
    for name in tqdm(names.layer_names(tensors), desc="converting tensors", disable=not progress):
        target = names.BODY + name.removeprefix("model.")
        result[target] = typed(target, tensors[name])
    order = {name: i for i, name in enumerate(dtypes)}  # the original file's order, where it is known
    return {name: result[name] for name in sorted(result, key=lambda n: order.get(n, len(order)))}


def _tables(
    table: torch.Tensor, layout: VocabLayout, rows: int, extra: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The three embedding tables of ``llm.pt``, copied out of the one of Hugging Face form."""
    first = layout.first_speech_id
    if "unused_text_rows" in extra:
        text = torch.cat([table[:first], extra["unused_text_rows"]])  # in the wider dtype of the two
    else:
        # As the original recipe's converter: the unused rows behind the text pieces hold whatever stands there.
        text = torch.zeros(rows, table.shape[1], dtype=table.dtype)
        text[: min(rows, len(table))] = table[:rows]
    return {
        names.TEXT_TABLE: text,
        names.SPEECH_TABLE: table[first : first + layout.n_head].clone(),
        names.CONTROL_TABLE: table[layout.sos_id : layout.task_id + 1].clone(),
    }


def release_memory() -> None:
    """Give back what was freed: a transformers model refers to itself, and glibc keeps freed blocks of under 32 MB."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def compare(hf_folder: Path, llm_pt: Path) -> float:
    """Largest absolute difference of the speech logits of the two forms on sample texts, in float32.

    One model is in memory at a time. The inputs are looked up in each form's own tables, so that a misplaced row
    shows as well.
    """
    config = hf_config(hf_folder)
    tokenizer, layout = load_tokenizer(hf_folder)
    generator = torch.Generator().manual_seed(0)
    cases = []
    for text in SAMPLE_TEXTS:
        text_ids = tokenizer(text, add_special_tokens=False).input_ids
        speech = torch.randint(0, layout.n_speech, (8,), generator=generator)
        cases.append((torch.tensor(text_ids), speech))

    def hf_logits() -> list[torch.Tensor]:
        tensors = HFTensors(hf_folder)
        parts, table = parts_from_hf(tensors, config, layout), tensors[names.HF_TABLE]
        return [parts(embed_hf(table, layout, text, speech))[1] for text, speech in cases]

    def pretrained_logits() -> list[torch.Tensor]:
        tensors = load_tensors(llm_pt)
        parts = parts_from_pretrained(tensors, config)
        return [parts(embed_pretrained(tensors, text, speech))[1] for text, speech in cases]

    expected = hf_logits()
    release_memory()
    return max(float((a - b).abs().max()) for a, b in zip(expected, pretrained_logits()))
