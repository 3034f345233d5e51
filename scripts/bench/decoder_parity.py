#!/usr/bin/env python3
"""The decoder against the recorded tensors, on any device: golden parity, and batches against singles.

Needs torch, numpy, safetensors and this repository. Exit status 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cosyvoice.checkpoint import fold_weight_norm  # noqa: E402
from cosyvoice.flow import EncoderConfig, EstimatorConfig, Flow, FlowConfig, noise_table  # noqa: E402
from cosyvoice.hift import HiFTConfig, HiFTGenerator  # noqa: E402

# The recorded checkpoint's sizes; see tests/data/golden/flow_tiny_config.json.
FLOW = FlowConfig(
    input_size=32,
    vocab_size=256,
    encoder=EncoderConfig(32, 32, 2, 64, 2, 2, 4),
    estimator=EstimatorConfig(
        channels=32, attention_head_dim=32, num_heads=2, n_blocks=1, num_mid_blocks=2, static_chunk_size=8
    ),
)
HIFT = HiFTConfig(base_channels=32, f0_channels=32)


class Report:
    """Prints each comparison and remembers whether one failed."""

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, what: str, error: float, bound: float) -> None:
        good = error <= bound
        self.failed |= not good
        print(f"{'ok  ' if good else 'FAIL'} {what}: {error:.2e} (bound {bound:.0e})", flush=True)


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    expected = expected.to(found.device)
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


@torch.inference_mode()
def check_flow(golden: Path, device: str, dtype: torch.dtype, report: Report) -> None:
    flow = Flow(FLOW).eval()
    flow.load_state_dict(load_file(golden / "flow_tiny_weights.safetensors"))
    flow.to(device, dtype)
    noise = noise_table(0).to(device)
    bound = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    items = []
    for case in json.loads((golden / "flow_cases.json").read_text()):
        tensors = {k: v.to(device) for k, v in load_file(golden / f"flow_case_{case['name']}.safetensors").items()}
        tokens = torch.cat([tensors["in.prompt_token"], tensors["in.token"]], dim=1).long()
        item = (tokens[0], tensors["in.prompt_feat"][0], tensors["in.embedding"][0])
        modes = {"streaming": case["streaming"], "finalize": case["finalize"]}
        mel = flow.generate(tokens, [tokens.shape[1]], [item[1]], item[2][None], noise, **modes)[0]
        report(f"flow {case['name']} {dtype}", worst(mel, tensors["out.mel"][0]), bound)
        if not case["streaming"] and case["finalize"]:
            items.append((*item, mel))
    lengths = [len(item[0]) for item in items]
    size = -(-max(lengths) // 8) * 8
    batch = torch.stack([torch.nn.functional.pad(item[0], (0, size - len(item[0])), value=9) for item in items])
    voices = torch.stack([item[2] for item in items])
    together = flow.generate(batch, lengths, [item[1] for item in items], voices, noise)
    error = max(worst(mel, item[3]) for mel, item in zip(together, items))
    report(f"flow batch against singles {dtype}", error, 1e-5 if dtype == torch.float32 else bound)


@torch.inference_mode()
def check_hift(golden: Path, device: str, report: Report) -> None:
    hift = HiFTGenerator(HIFT).eval()
    hift.load_state_dict(fold_weight_norm(load_file(golden / "hift_tiny_weights.safetensors")))
    hift.to(device)
    hift.f0_predictor.double()
    mels, noises, alone = [], [], []
    for case in json.loads((golden / "hift_cases.json").read_text()):
        tensors = {k: v.to(device) for k, v in load_file(golden / f"hift_case_{case['name']}.safetensors").items()}
        wav = hift.decode(tensors["in.mel"], tensors["out.source"])
        report(f"hift {case['name']} from the recorded source", worst(wav, tensors["out.wav"]), 1e-4)
        noise = tensors["out.draw1_sine_noise"].transpose(1, 2)
        mels.append(tensors["in.mel"])
        noises.append(noise)
        alone.append(hift(tensors["in.mel"], noise)[0])
        if not case["cache"]:
            report(f"hift {case['name']} from mel", worst(alone[-1], tensors["out.wav"]), 2e-3)
    lengths = [mel.shape[2] for mel in mels]
    pad = torch.nn.functional.pad
    batch = torch.cat([pad(mel, (0, max(lengths) - mel.shape[2]), value=7.0) for mel in mels])
    noise = torch.cat([pad(each, (0, 480 * max(lengths) - each.shape[2])) for each in noises])
    together = hift(batch, noise, lengths)
    error = max(worst(wav[: len(single)], single) for wav, single in zip(together, alone))
    report("hift batch against singles", error, 1e-3)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--golden", type=Path, default=ROOT / "tests/data/golden", help="recorded tensors")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the recordings are float32
    report = Report()
    for dtype in (torch.float32, torch.bfloat16):
        check_flow(args.golden, args.device, dtype, report)
    check_hift(args.golden, args.device, report)
    raise SystemExit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
