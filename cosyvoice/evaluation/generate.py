"""Speech tokens by the language model, in batches, with a seed per utterance.

Two back ends: vLLM (continuous batching), and a loop over transformers, which needs nothing but a CPU and is the one
that can sample with RAS. Each utterance has its own random generator, so that neither batch size nor the number of
workers decides what is drawn. The two back ends draw different numbers: a run must stay with one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..llm import ras
from ..speech_tokens import ParsedTokens, VocabLayout, parse

METHODS = ("train", "ras", "greedy")
MAX_BATCH = 64


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        method: "train": temperature, then top-k, then top-p, as the rollouts of the training; "ras": CosyVoice's own
            inference; "greedy": the most likely one.
        temperature, top_p, top_k: of "train"; top_k <= 0 keeps all.
    """

    method: str = "train"
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 25

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"sampling: found {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"sampling: found temperature {self.temperature} and top_p {self.top_p}, expected > 0 and in (0, 1]"
            )


@dataclass(frozen=True)
class Request:
    """One utterance: the prompt's ids, its seed, and between how many tokens the answer may end."""

    ids: list[int]
    seed: int
    min_tokens: int
    max_tokens: int


def utterance_seed(seed: int, name: str) -> int:
    """Seed of an utterance in [0, 2^31): a hash of the run's seed and the utterance's id."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Generator(Protocol):
    """A back end."""

    layout: VocabLayout

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, ParsedTokens]]:
        """Yield (index of the request, its answer up to the first end token), in any order."""
        ...


def draw(logits: torch.Tensor, history: Sequence[int], sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one piece.

    Args:
        logits: [n] float32 scores on the CPU; masked pieces are -inf.
        history: pieces of this answer so far.
        sampling: see ``Sampling``.
        generator: of this utterance. "train" takes one uniform number from it per piece.
    """
    if sampling.method == "ras":
        return ras.ras_sample(logits, history, generator=generator)
    if sampling.method == "greedy":
        return int(logits.argmax())
    k = min(sampling.top_k, len(logits)) if sampling.top_k > 0 else len(logits)
    scores, ids = (logits / sampling.temperature).topk(k)
    probs = scores.softmax(-1)
    kept = probs[probs.cumsum(0) - probs < sampling.top_p]
    # Inverse of the distribution function: rounding in the scores moves its steps by as much, while a draw that
    # races all pieces against each other could change at any of them.
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    mass = kept.double().cumsum(0)
    return int(ids[min(int(torch.searchsorted(mass, u * mass[-1], right=True)), len(kept) - 1)])


class TransformersGenerator:
    """Batches of similar length through the transformers class, with a key-value cache.

    Args:
        llm: Hugging Face folder of the language model.
        layout: of its vocabulary.
        sampling: how tokens are chosen.
        device: torch device.
        dtype: of the weights.
        batch_size: utterances at once.
    """

    def __init__(
        self,
        llm: str | Path,
        layout: VocabLayout,
        sampling: Sampling,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        batch_size: int = MAX_BATCH,
    ):
        from transformers import AutoModelForCausalLM

        import cosyvoice.llm  # noqa: F401  (registers the model class)

        self.layout, self.sampling, self.device, self.batch_size = layout, sampling, device, batch_size
        self.model = AutoModelForCausalLM.from_pretrained(llm, dtype=dtype, local_files_only=True).to(device).eval()

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, ParsedTokens]]:
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].ids))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for index, answer in zip(batch, self._batch([requests[i] for i in batch]), strict=True):
                yield index, parse(answer, self.layout)

    @torch.inference_mode()
    def _batch(self, requests: list[Request]) -> list[list[int]]:
        first, n_head = self.layout.first_speech_id, self.layout.n_head
        longest = max(len(r.ids) for r in requests)
        # Prompts stand at the right, so that all answers start in the same column.
        ids = torch.full((len(requests), longest), self.layout.end_ids[0])
        mask = torch.zeros(len(requests), longest, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.ids) :] = torch.tensor(request.ids)
            mask[row, longest - len(request.ids) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        generators = [torch.Generator().manual_seed(r.seed) for r in requests]
        answers: list[list[int]] = [[] for _ in requests]
        active = [r.max_tokens > 0 for r in requests]
        cache = None
        while any(active):
            out = self.model(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                position_ids=positions.to(self.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            logits = out.logits[:, -1, first : first + n_head].float().cpu()
            ids = torch.full((len(requests), 1), self.layout.end_ids[0])
            for row, request in enumerate(requests):
                if not active[row]:
                    continue
                scores = logits[row]
                if self.sampling.method == "ras" and len(answers[row]) < request.min_tokens:
                    scores[self.layout.n_speech] = -torch.inf  # only the first of the three, as CosyVoice does
                history = [piece - first for piece in answers[row]]
                piece = first + draw(scores, history, self.sampling, generators[row])
                answers[row].append(piece)
                ids[row] = piece
                active[row] = piece not in self.layout.end_ids and len(answers[row]) < request.max_tokens
            mask = torch.cat([mask, torch.ones(len(requests), 1, dtype=torch.long)], 1)
            positions = positions[:, -1:] + 1
        return answers


class VLLMGenerator:
    """vLLM's offline engine, one process.

    Args:
        llm: Hugging Face folder of the language model.
        layout: of its vocabulary.
        sampling: "train" or "greedy".
        max_model_len: longest prompt with its answer.
        dtype: of the weights, as vLLM names it.
        batch_size: most sequences at once.
        gpu_memory: share of the GPU for weights and cache; Token2Wav needs room beside it.

    Raises:
        ValueError: RAS was asked for.
    """

    def __init__(
        self,
        llm: str | Path,
        layout: VocabLayout,
        sampling: Sampling,
        max_model_len: int,
        dtype: str = "auto",
        batch_size: int = 256,
        gpu_memory: float = 0.5,
    ):
        if sampling.method == "ras":
            raise ValueError("sampling: found 'ras' with vLLM, expected the back end 'transformers'")
        # In one process: nothing is left behind when this one ends.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM
        from vllm.platforms import current_platform

        self.layout, self.sampling = layout, sampling
        on_cpu = current_platform.is_cpu()
        self.engine = LLM(
            model=str(llm),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=batch_size,
            enforce_eager=on_cpu,  # compiling for a CPU costs more than it saves
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **({} if on_cpu else {"gpu_memory_utilization": gpu_memory}),
        )

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, ParsedTokens]]:
        from vllm import SamplingParams

        greedy = self.sampling.method == "greedy"
        settings = {"temperature": 0.0} if greedy else {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": max(self.sampling.top_k, 0),
        }  # fmt: skip
        parameters = [
            SamplingParams(
                **settings,
                seed=request.seed,
                max_tokens=request.max_tokens,
                stop_token_ids=list(self.layout.end_ids),
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.ids} for request in requests]
        for index, output in enumerate(self.engine.generate(prompts, parameters)):
            answer = output.outputs[0]
            ids = list(answer.token_ids)
            if answer.finish_reason == "stop" and ids[-1:] and ids[-1] not in self.layout.end_ids:
                ids.append(int(answer.stop_reason))
            yield index, parse(ids, self.layout)
