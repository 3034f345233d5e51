"""A reward function without a server, steered by a file, for the tests of the training loop.

The file holds one word: ``ok``; ``picky`` (one answer in six cannot be scored for a reason that waiting does not
cure); ``away`` (nothing can be scored, as if the server were gone).
"""

import random
from pathlib import Path


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, control, server):
    mode = Path(control).read_text().strip()
    if mode == "away":
        raise ConnectionError(f"{server}: connection refused")
    if mode == "picky" and random.random() < 1 / 6:
        error = ValueError("the reference text is empty")
        error.status = "bad_reference"
        raise error
    codes = [int(piece.split("|>")[0]) for piece in solution_str.split("<|s_")[1:]]
    share = sum(code < 100 for code in codes) / max(1, len(codes))
    ended = "<|eos" in solution_str
    return {
        "score": share,
        "wer": 1 - share,
        "n_tokens": float(len(codes)),
        "brevity": -len(codes) / 100,
        "status": "ok" if ended else "no_end",
    }
