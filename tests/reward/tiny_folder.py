"""Folders with random tiny models for the serving tests: a CosyVoice2 checkpoint and a SenseVoice.

The flow and the vocoder are the golden tiny ones; the two ONNX networks, the recogniser and the prompt recording are
random. What such a chain "says" is noise: tests look at the machinery, not at the sound.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import soundfile
import torch
import yaml
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TAGS = ["<|zh|>", "<|en|>", "<|yue|>", "<|ja|>", "<|ko|>", "<|nospeech|>", "<|NEUTRAL|>", "<|EMO_UNKNOWN|>"]
TAGS += ["<|Speech|>", "<|Event_UNK|>", "<|withitn|>", "<|woitn|>"]
CHARACTERS = "今天气很好我们去公园玩一二三四五六七八九十你在哪里说话大小多少东西南北风雨山水人"


def write_cosyvoice(folder: Path) -> Path:
    """``cosyvoice2.yaml``, ``flow.pt``, ``hift.pt``, both ONNX networks and ``prompts/``."""
    folder.mkdir(parents=True)
    flow = json.loads((GOLDEN / "flow_tiny_config.json").read_text())
    hift = json.loads((GOLDEN / "hift_tiny_config.json").read_text())
    flow["decoder"]["estimator"] = flow.pop("estimator")
    (folder / "cosyvoice2.yaml").write_text(yaml.safe_dump({"sample_rate": 24000, "flow": flow, "hift": hift}))
    torch.save(load_file(GOLDEN / "flow_tiny_weights.safetensors"), folder / "flow.pt")
    torch.save(load_file(GOLDEN / "hift_tiny_weights.safetensors"), folder / "hift.pt")
    _write_speaker(folder / "campplus.onnx")
    _write_tokenizer(folder / "speech_tokenizer_v2.onnx", flow["vocab_size"])
    write_prompts(folder / "prompts")
    return folder


def write_prompts(folder: Path, number: int = 2) -> None:
    folder.mkdir()
    lines = []
    for i in range(number):
        time = np.arange(int(24000 * (0.8 + 0.4 * i))) / 24000
        wave = 0.2 * np.sin(2 * np.pi * (150 + 40 * i) * time) * (1 + np.sin(2 * np.pi * 3 * time))
        soundfile.write(folder / f"p{i}.wav", wave.astype(np.float32), 24000)
        lines.append(json.dumps({"key": f"p{i}", "audio": f"p{i}.wav", "text": "今天天气很好"}, ensure_ascii=False))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_sensevoice(folder: Path) -> Path:
    """A SenseVoice of 64 channels and 5 blocks with a character tokeniser, in FunASR's folder layout."""
    from funasr.models.sense_voice.model import SenseVoiceSmall

    folder.mkdir(parents=True)
    tokens = list(dict.fromkeys(["<unk>", "<s>", "</s>", *TAGS, *CHARACTERS]))
    config = {
        "encoder": "SenseVoiceEncoderSmall",
        "encoder_conf": {
            "output_size": 64,
            "attention_heads": 4,
            "linear_units": 128,
            "num_blocks": 3,
            "tp_blocks": 2,
            "input_layer": "pe",
            "pos_enc_class": "SinusoidalPositionEncoder",
            "normalize_before": True,
            "kernel_size": 11,
            "sanm_shfit": 0,
            "selfattention_layer_type": "sanm",
        },
        "model": "SenseVoiceSmall",
        "model_conf": {"length_normalized_loss": True, "sos": 1, "eos": 2, "ignore_id": -1},
        "tokenizer": "CharTokenizer",
        "tokenizer_conf": {"unk_symbol": "<unk>", "split_with_space": True},
        "frontend": "WavFrontend",
        "frontend_conf": {
            "fs": 16000,
            "window": "hamming",
            "n_mels": 80,
            "frame_length": 25,
            "frame_shift": 10,
            "lfr_m": 7,
            "lfr_n": 6,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "tokens.json").write_text(json.dumps(tokens, ensure_ascii=False), encoding="utf-8")
    shift, scale = " ".join(["-8.0"] * 560), " ".join(["0.2"] * 560)
    (folder / "am.mvn").write_text(
        f"<Nnet>\n<Splice> 560 560\n[ 0 ]\n<AddShift> 560 560\n<LearnRateCoef> 0 [ {shift} ]\n"
        f"<Rescale> 560 560\n<LearnRateCoef> 0 [ {scale} ]\n</Nnet>\n"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SenseVoiceSmall(
            **config["model_conf"],
            encoder=config["encoder"],
            encoder_conf=config["encoder_conf"],
            input_size=560,
            vocab_size=len(tokens),
        )
    with torch.no_grad():
        model.ctc.ctc_lo.weight.mul_(20)  # decided frames: some text comes out, and not the same for all audio
    torch.save({"state_dict": model.state_dict()}, folder / "model.pt")
    return folder


def _write(path: Path, nodes: list, inputs: list, outputs: list, constants: dict[str, np.ndarray]) -> None:
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


def _write_speaker(path: Path) -> None:
    """Mean filter bank times a random matrix."""
    matrix = np.random.default_rng(0).standard_normal((80, 192)).astype(np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["fbank"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "matrix"], ["embedding"]),
    ]
    inputs = [helper.make_tensor_value_info("fbank", TensorProto.FLOAT, [1, "frames", 80])]
    outputs = [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [1, 192])]
    _write(path, nodes, inputs, outputs, {"matrix": matrix})


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Means over four frames, scaled and folded into the code book."""
    nodes = [
        helper.make_node("AveragePool", ["mel"], ["pooled"], kernel_shape=[4], strides=[4]),
        helper.make_node("ReduceMean", ["pooled"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["mean", "scale"], ["scaled"]),
        helper.make_node("Abs", ["scaled"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["whole"], to=TensorProto.INT32),
        helper.make_node("Mod", ["whole", "size"], ["folded"]),
        helper.make_node("Mul", ["length", "zero"], ["nothing"]),
        helper.make_node("Add", ["folded", "nothing"], ["ids"]),
    ]
    inputs = [
        helper.make_tensor_value_info("mel", TensorProto.FLOAT, [1, 128, "frames"]),
        helper.make_tensor_value_info("length", TensorProto.INT32, [1]),
    ]
    outputs = [helper.make_tensor_value_info("ids", TensorProto.INT32, [1, "tokens"])]
    constants = {
        "scale": np.array(1000, np.float32),
        "size": np.array(vocab_size, np.int32),
        "zero": np.array(0, np.int32),
    }
    _write(path, nodes, inputs, outputs, constants)
