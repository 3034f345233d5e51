"""Put trained states into the checkpoint folder, as published: yaml, flow.pt, hift.pt, llm.pt, prompts, texts."""

from __future__ import annotations

import argparse
import json
import os

import numpy as np
import soundfile
import torch
import yaml
from settings import (
    ASSETS,
    DECODER_VOICES,
    FLOW_CONFIG,
    HIFT_CONFIG,
    LLM,
    PROMPTS_PER_VOICE,
    SAMPLE_RATE,
    WORK,
)
from speak import load
from torch import Tensor


def replace(path: os.PathLike, tensors: dict[str, Tensor]) -> None:
    """torch.save under a temporary name, then rename."""
    torch.save(tensors, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def lists(value: object) -> object:
    """Tuples as lists, for yaml."""
    return [lists(v) for v in value] if isinstance(value, tuple) else value


def write_yaml() -> None:
    """cosyvoice2.yaml: the keys of the published file whose values differ here or that readers look for."""
    encoder, estimator, hift = FLOW_CONFIG["encoder"], dict(FLOW_CONFIG["estimator"]), dict(HIFT_CONFIG)
    estimator["channels"] = [estimator["channels"]]
    f0_channels, n_fft, hop = hift.pop("f0_channels"), hift.pop("n_fft"), hift.pop("hop_len")
    content = {
        "sample_rate": SAMPLE_RATE, "token_frame_rate": 25, "token_mel_ratio": 2, "spk_embed_dim": 192,
        "llm_input_size": LLM["width"], "llm_output_size": LLM["width"],
        "llm": {"speech_token_size": 6561, "sampling": {"top_p": 0.8, "top_k": 25, "win_size": 10, "tau_r": 0.1}},
        "flow": {
            "input_size": FLOW_CONFIG["input_size"], "output_size": 80, "vocab_size": 6561, "pre_lookahead_len": 3,
            "encoder": encoder,
            "decoder": {"in_channels": 240, "n_spks": 1, "spk_emb_dim": 80,
                        "cfm_params": {"sigma_min": 1e-6, "solver": "euler", "t_scheduler": "cosine",
                                       "training_cfg_rate": 0.2, "inference_cfg_rate": 0.7},
                        "estimator": {"in_channels": 320, "out_channels": 80, **estimator}},
        },
        "hift": {"in_channels": 80, "nb_harmonics": 8, "sampling_rate": SAMPLE_RATE,
                 "istft_params": {"n_fft": n_fft, "hop_len": hop},
                 **{k: lists(v) for k, v in hift.items()},
                 "f0_predictor": {"cond_channels": f0_channels}},
    }
    text = "# Sizes of the tiny checkpoint, written by scripts/tiny/package.py. Same keys as the published file.\n"
    (ASSETS / "cosyvoice2.yaml").write_text(text + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def weight_normed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """HiFT's convolutions as pairs g, v under the published names (source_downs and Linear layers stay plain)."""
    out = {}
    for name, value in state.items():
        if name.endswith(".weight") and value.dim() == 3 and "source_downs" not in name:
            stem = name.removesuffix("weight") + "parametrizations.weight.original"
            out[stem + "0"] = value.flatten(1).norm(dim=1)[:, None, None]
            out[stem + "1"] = value
        else:
            out[name] = value
    return out


def write_prompts() -> None:
    """The shortest sentences of the prompt split, some per voice, as wav files with their texts."""
    folder = ASSETS / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.wav"):
        old.unlink()
    rows, waves = load("prompt")
    lines = []
    for voice in DECODER_VOICES:
        mine = [i for i, r in enumerate(rows) if r["voice"] == voice and len(r["text"]) >= 4]
        mine.sort(key=lambda i: len(waves[i]))
        for i in mine[:PROMPTS_PER_VOICE]:
            key = f"{voice}_{i:02d}"
            soundfile.write(folder / f"{key}.wav", np.array(waves[i]), SAMPLE_RATE, subtype="PCM_16")
            lines.append(json.dumps({"key": key, "audio": f"{key}.wav", "text": rows[i]["text"]}, ensure_ascii=False))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_texts() -> None:
    """data/{train,dev,test}.jsonl; the train texts are the ones that no part was trained on."""
    folder = ASSETS / "data"
    folder.mkdir(parents=True, exist_ok=True)
    texts = json.loads((WORK / "texts.json").read_text(encoding="utf-8"))
    for name, split in (("train", "rl"), ("dev", "dev"), ("test", "test")):
        rows = [{"id": f"{name}_{i:04d}", "text": t} for i, t in enumerate(texts[split])]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--llm-step", type=int, default=LLM["shipped_step"], help="which kept state becomes llm.pt")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    write_yaml()
    write_texts()
    write_prompts()
    half = {k: v.half() for k, v in torch.load(WORK / "flow.pt", weights_only=True).items()}
    replace(ASSETS / "flow.pt", half)
    replace(ASSETS / "hift.pt", weight_normed(torch.load(WORK / "hift.pt", weights_only=True)))
    llm = WORK / f"llm.{args.llm_step:04d}.pt"
    if llm.exists():
        state = {k: v.half() for k, v in torch.load(llm, weights_only=True).items()}
        state["llm.model.lm_head.weight"] = state["llm.model.model.embed_tokens.weight"]
        replace(ASSETS / "llm.pt", state)
    print({p.name: p.stat().st_size for p in ASSETS.iterdir() if p.is_file()})


if __name__ == "__main__":
    main()
