"""The two frozen ONNX networks of the front end: speaker embedding and speech tokens.

Their inputs and outputs are used by position, never by name: published exports name them differently.
Both run on the CPU with one thread, so that results do not depend on the machine and several workers can
share it. A session may be called from several threads at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoint import CheckpointError
from .features import WHISPER_HZ, Wave, kaldi_fbank, whisper_log_mel

if TYPE_CHECKING:
    import onnxruntime

MAX_TOKENIZER_SECONDS = 30.0
EMBEDDING_SIZE = 192


def _open(path: str | Path, n_inputs: int) -> onnxruntime.InferenceSession:
    import onnxruntime  # half a second that importing the features should not cost

    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, expected an ONNX network")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class below Exception
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes): cannot be opened as an ONNX network: {error}"
        ) from error
    found = [f"{i.name} {i.type} {i.shape}" for i in session.get_inputs()]
    if len(found) != n_inputs:
        raise CheckpointError(f"{path}: found {len(found)} inputs {found}, expected {n_inputs}")
    return session


class SpeakerEncoder:
    """``campplus.onnx``: a 16 kHz wave to one speaker vector.

    Args:
        path: network with one input, float [1, frames, 80], and the embedding as first output.

    Raises:
        CheckpointError: the file is missing, is not ONNX, or has another number of inputs.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._session = _open(path, n_inputs=1)
        self._input = self._session.get_inputs()[0].name
        self._output = self._session.get_outputs()[0].name

    def __call__(self, wave: Wave) -> np.ndarray:
        """Embed a whole wave [L] at 16 kHz (L >= 400): float32 [192], not normalised."""
        fbank = kaldi_fbank(wave)[None].numpy()
        vector = self._session.run([self._output], {self._input: fbank})[0]
        if vector.size != EMBEDDING_SIZE or not np.isfinite(vector).all():
            raise CheckpointError(
                f"{self.path}: first output has shape {list(vector.shape)} "
                f"(finite: {bool(np.isfinite(vector).all())}), expected {EMBEDDING_SIZE} finite numbers"
            )
        return vector.reshape(-1).astype(np.float32)


class SpeechTokenizer:
    """``speech_tokenizer_v2.onnx``: a 16 kHz wave to speech tokens at 25 Hz.

    Args:
        path: network with two inputs, float [1, 128, frames] and int32 [1], and token ids as first output.

    Raises:
        CheckpointError: the file is missing, is not ONNX, or has another number of inputs.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._session = _open(path, n_inputs=2)
        self._inputs = [i.name for i in self._session.get_inputs()]
        self._output = self._session.get_outputs()[0].name

    def __call__(self, wave: Wave) -> np.ndarray:
        """Tokenise a wave [L] at 16 kHz, at most 30 s: int64 ids [about L / 640].

        Raises:
            ValueError: the wave is longer than 30 s.
            CheckpointError: the network answers with negative ids.
        """
        seconds = len(wave) / WHISPER_HZ
        if seconds > MAX_TOKENIZER_SECONDS:
            raise ValueError(
                f"speech tokenizer: found {seconds:.1f} s of audio, expected at most {MAX_TOKENIZER_SECONDS}"
            )
        features = whisper_log_mel(wave).T.contiguous()[None].numpy()
        frames = np.array([features.shape[2]], dtype=np.int32)
        ids = self._session.run([self._output], dict(zip(self._inputs, (features, frames), strict=True)))[0]
        ids = ids.reshape(-1).astype(np.int64)
        if ids.size and ids.min() < 0:
            raise CheckpointError(f"{self.path}: first output holds the id {ids.min()}, expected ids >= 0")
        return ids
