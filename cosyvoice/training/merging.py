"""A veRL checkpoint of FSDP shards to a Hugging Face folder, checked before and after.

The saving is ``verl.model_merger``'s. Its own way of putting shards together casts every weight to
bfloat16, which would throw away the last 16 bits of a float32 run; `Merger` keeps the stored values and
casts once, to the type that the run's model configuration names. It also reads the shards without running
pickled code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

import cosyvoice.llm  # noqa: F401  (registers the model class)
from cosyvoice.llm.to_huggingface import EXTRA_TENSORS, SIDECAR
from cosyvoice.training import checkpoints

PROBES = ("你好", "今天天气很好", "We read it twice.")
"""Texts whose greedy continuation must be the same before and after."""

PROBE_TOKENS = 20


class MergeError(ValueError):
    """A checkpoint that cannot be merged, or a merged model that is not what was trained."""


def load_shards(actor: Path, world: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's state dict, memory-mapped, without running pickled code."""
    shards = []
    for rank in tqdm(range(world), desc="reading shards", leave=False, disable=world < 4):
        file = actor / f"model_world_size_{world}_rank_{rank}.pt"
        try:
            shards.append(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:  # torch raises several types for damaged and foreign files
            raise MergeError(f"{file}: cannot be read as tensors: {type(error).__name__}: {error}") from error
    names = set(shards[0])
    for rank, shard in enumerate(shards):
        if set(shard) != names:
            odd = sorted(names ^ set(shard))[0]
            raise MergeError(f"{actor}: rank {rank} and rank 0 do not hold the same tensors, {odd!r} for one")
    return shards


def join(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One whole tensor from every rank's part.

    A DTensor says how it was split. veRL's FSDP2 splits each parameter along one dimension over all ranks.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        if any(not torch.equal(part, first) for part in parts[1:]):
            raise MergeError(f"{name}: the ranks hold different values of a tensor that is not sharded")
        return first
    placements = [placement for placement in first.placements if placement.is_shard()]
    if len(placements) > 1 or (placements and first.placements[-1] != placements[0]):
        raise MergeError(f"{name}: sharded as {first.placements}, expected one shard dimension")
    if not placements:
        return first.to_local()
    per_group = first.device_mesh.mesh.shape[-1]
    whole = torch.cat([part.to_local() for part in parts[:per_group]], dim=placements[0].dim)
    if whole.shape != first.shape:
        raise MergeError(f"{name}: {len(parts)} shards make {tuple(whole.shape)}, expected {tuple(first.shape)}")
    return whole.contiguous()


class Merger(FSDPModelMerger):
    """``verl.model_merger``, of which only the saving is used: the tensors were joined and checked before."""

    def __init__(self, actor: Path, base: Path, target: Path) -> None:
        super().__init__(
            ModelMergerConfig(
                operation="merge",
                backend="fsdp",
                local_dir=str(actor),
                target_dir=str(target),
                hf_model_config_path=str(base),
                trust_remote_code=False,
            )
        )


def expected_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the model class has under this configuration."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def check_weights(weights: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], where: Path) -> None:
    """Every weight is there, has its shape and is finite; nothing else is there."""
    for name in sorted(set(expected) ^ set(weights)):
        what = "missing" if name in expected else "found, but the model has no such weight"
        raise MergeError(f"{where}: {name}: {what}")
    for name, weight in weights.items():
        if tuple(weight.shape) != expected[name]:
            raise MergeError(f"{where}: {name}: found shape {tuple(weight.shape)}, expected {expected[name]}")
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise MergeError(f"{where}: {name}: holds values that are not finite")


def greedy(model: torch.nn.Module, tokenizer: object) -> list[list[int]]:
    """Token ids of the greedy continuation of each probe."""
    answers = []
    for text in PROBES:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}, {"role": "assistant", "content": ""}], tokenize=False
        )
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=PROBE_TOKENS,
                do_sample=False,
            )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def check_merged(weights: dict[str, torch.Tensor], base: Path, target: Path, dtype: torch.dtype) -> None:
    """The folder on disk gives the trained model: weights bit for bit, end ids, tokenizer, greedy decoding.

    Configuration and tokenizer are compared with ``base``, the checkpoint that the run began with.
    """
    on_disk: set[str] = set()
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                on_disk.add(name)
                if not torch.equal(tensors.get_tensor(name), weights[name]):
                    raise MergeError(f"{file}: {name}: differs from the shards")
    config = AutoConfig.from_pretrained(base)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in sorted(set(weights) - on_disk - tied):
        raise MergeError(f"{target}: {name}: was not written")
    merged = AutoConfig.from_pretrained(target)
    if (merged.model_type, merged.vocab_size) != (config.model_type, config.vocab_size):
        raise MergeError(
            f"{target / 'config.json'}: found {merged.model_type} with {merged.vocab_size} rows, "
            f"expected {config.model_type} with {config.vocab_size}"
        )
    ends = [GenerationConfig.from_pretrained(folder).eos_token_id for folder in (base, target)]
    if ends[0] != ends[1]:
        raise MergeError(f"{target / 'generation_config.json'}: end ids {ends[1]}, expected {ends[0]}")
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (base, target))
    if before.get_vocab() != after.get_vocab() or before.chat_template != after.chat_template:
        raise MergeError(f"{target}: its tokenizer or chat template is not the one of {base}")

    trained = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    trained.load_state_dict(weights)
    trained.generation_config = GenerationConfig.from_pretrained(base)
    reloaded = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    first, second = greedy(trained, before), greedy(reloaded, after)
    for text, old, new in zip(PROBES, first, second, strict=True):
        if old != new:
            raise MergeError(f"{target}: greedy decoding of {text!r} gives {new}, the trained model gives {old}")


def merge(checkpoint: Path, base: Path, target: Path) -> dict[str, object]:
    """Merge ``global_step_N`` into ``target``, which must not exist. Nothing is deleted but a half-made
    target.

    Args:
        checkpoint: veRL's folder.
        base: the Hugging Face checkpoint that the run began with. It gives the type of the weights, the
            configuration (veRL's copy has the tokenizer's end token in the place of the model's) and what
            the export needs.
        target: folder to make.

    Returns:
        what was merged: ``tensors``, ``parameters``, ``world_size``, ``dtype``.

    Raises:
        MergeError: before anything is written, or after the half-made folder was removed.
    """
    if target.exists():
        raise MergeError(f"{target}: is there already; move it away to merge again")
    problem = checkpoints.fault(checkpoint)
    if problem is not None:
        raise MergeError(f"{checkpoint}: not complete: {problem}")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if not (base / name).is_file():
            raise MergeError(f"{base / name}: no such file, expected the checkpoint that the run began with")
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    wanted = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    dtype = getattr(torch, wanted)
    actor, world = checkpoint / "actor", checkpoints.world_size(checkpoint)

    shards = load_shards(actor, world)
    weights = {name: join(name, [shard[name] for shard in shards]).to(dtype) for name in sorted(shards[0])}
    del shards
    check_weights(weights, expected_shapes(base), checkpoint)

    partial = target.with_name(target.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        Merger(actor, base, partial).save_hf_model_and_tokenizer(dict(weights))
        for name in ("config.json", "generation_config.json", SIDECAR, EXTRA_TENSORS):
            if (base / name).is_file():
                shutil.copyfile(base / name, partial / name)
        check_merged(weights, base, partial, dtype)
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {
        "tensors": len(weights),
        "parameters": sum(weight.numel() for weight in weights.values()),
        "world_size": world,
        "dtype": wanted,
    }
