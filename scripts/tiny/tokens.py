"""Speech tokens and x-vectors of the spoken splits, from the two exported ONNX networks."""

from __future__ import annotations

import argparse

import numpy as np
import onnxruntime
from features import Features
from settings import ASSETS, SAMPLE_RATE, SPOKEN, WORK
from tqdm import tqdm

from cosyvoice.frontend import kaldi_fbank, resample

EMBEDDED = 300  # utterances per split whose x-vector is kept


def session(name: str) -> onnxruntime.InferenceSession:
    """A network of the checkpoint on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(ASSETS / name), options, providers=["CPUExecutionProvider"])


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", nargs="+", default=list(SPOKEN), help="which splits (default: all)")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    tokenizer, speaker = session("speech_tokenizer_v2.onnx"), session("campplus.onnx")
    mel_name, length_name = (i.name for i in tokenizer.get_inputs())
    for split in args.splits:
        data, tokens, vectors = Features(split), [], []
        for i in tqdm(range(len(data)), desc=split, mininterval=5):
            mel = np.ascontiguousarray(data.whisper_of(i).T[None])
            feed = {mel_name: mel, length_name: np.array([mel.shape[2]], np.int32)}
            tokens.append(tokenizer.run(None, feed)[0][0].astype(np.int16))
            if i < EMBEDDED:
                wave = resample(data.waves[i].astype(np.float32) / 32768, SAMPLE_RATE, 16000)
                fbank = np.asarray(kaldi_fbank(wave), np.float32)[None]
                vectors.append(speaker.run(None, {speaker.get_inputs()[0].name: fbank})[0][0])
        if sum(map(len, tokens)) * 4 != len(data.whisper):
            raise ValueError(f"{split}: {sum(map(len, tokens))} tokens for {len(data.whisper)} Whisper frames")
        np.save(WORK / f"{split}.tokens.npy", np.concatenate(tokens))
        np.save(WORK / f"{split}.speaker.npy", np.stack(vectors).astype(np.float32))
        used = len(np.unique(np.concatenate(tokens)))
        print(split, "codes", used, flush=True)


if __name__ == "__main__":
    main()
