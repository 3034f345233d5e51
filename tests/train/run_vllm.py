"""Run by test_llm_vllm.py in a process of its own: what vLLM computes, as tensors and JSON.

    python run_vllm.py CHECKPOINT OTHER_CHECKPOINT PROMPTS.json OUTPUT.pt
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the model in this process, where it can be reached
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    TOKENIZERS_PARALLELISM="false",
)

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams


def full_rows(logprobs, n):
    """vLLM's dictionaries of all pieces -> [positions, n] (the first position of a prompt has none)."""
    return torch.tensor([[row[i].logprob for i in range(n)] for row in logprobs if row is not None])


def main(checkpoint, other, prompts, output):
    prompts = json.loads(Path(prompts).read_text())
    size = json.loads(Path(checkpoint, "config.json").read_text())["vocab_size"]
    llm = LLM(
        model=checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        seed=0,
        enable_prefix_caching=False,
    )

    def prompt_logits():
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=size, detokenize=False)
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [full_rows(o.prompt_logprobs, size) for o in outs]

    result = {"first": prompt_logits()}
    params = SamplingParams(max_tokens=40, temperature=1.0, top_p=1.0, top_k=-1, logprobs=size, detokenize=False, n=4)
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    result["sampled"] = [[list(c.token_ids) for c in o.outputs] for o in outs]
    result["sampled_logits"] = [[full_rows(c.logprobs, size) for c in o.outputs] for o in outs]
    result["finish"] = [[(c.finish_reason, c.stop_reason) for c in o.outputs] for o in outs]
    # As veRL does after an update, several times: names and tensors of the transformers class, in pieces.
    for name, folder in (("second", other), ("third", checkpoint), ("fourth", other)):
        weights = list(load_file(f"{folder}/model.safetensors").items())
        for piece in (weights[:3], weights[3:]):
            llm.apply_model(lambda model, piece=piece: sorted(model.load_weights(piece)))
        result[name] = prompt_logits()
    torch.save(result, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
