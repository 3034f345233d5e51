"""Measures beside the error rate, where their models are at hand: speaker similarity and a MOS predictor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..frontend.audio import load_audio
from ..frontend.encoders import SpeakerEncoder
from ..frontend.features import FBANK_WIN
from .records import EvaluationError

HZ = 16_000


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of the angle between two vectors; 0 if one is zero."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def speaker_similarity(model: Path) -> Callable[[Path, Path], float | None]:
    """A function of (recording, its prompt) -> cosine of their speaker vectors; None for under 25 ms.

    Args:
        model: the checkpoint's ``campplus.onnx``.

    Raises:
        CheckpointError: the model cannot be opened.
    """
    encoder = SpeakerEncoder(model)
    known: dict[Path, np.ndarray] = {}

    def vector(path: Path) -> np.ndarray | None:
        wave, _ = load_audio(path, HZ)
        return encoder(wave) if wave.size >= FBANK_WIN else None

    def similarity(recording: Path, prompt: Path) -> float | None:
        if prompt not in known:
            if (found := vector(prompt)) is None:
                raise EvaluationError(f"{prompt}: found under 25 ms of audio, expected a prompt recording")
            known[prompt] = found
        found = vector(recording)
        return None if found is None else cosine(found, known[prompt])

    return similarity


def mos_predictor(path: Path) -> Callable[[Path], float]:
    """A MOS network as ONNX: one input, a 16 kHz wave [1, L]; its first output's last number is the score.

    Fits DNSMOS P.835 (fixed L, outputs signal, background, overall; the raw network without its published
    polynomial) and exports of UTMOS. Where L is fixed, the wave is repeated to fill one window, or the scores
    of consecutive windows are averaged.

    Raises:
        EvaluationError: the file cannot be opened, or has another number of inputs.
    """
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class below Exception
        raise EvaluationError(f"{path}: cannot be opened as an ONNX network: {error}") from error
    inputs = session.get_inputs()
    if len(inputs) != 1 or len(inputs[0].shape) != 2:
        found = [f"{i.name} {i.shape}" for i in inputs]
        raise EvaluationError(f"{path}: found the inputs {found}, expected one of shape [1, samples]")
    length = inputs[0].shape[1]

    def score(recording: Path) -> float:
        wave, _ = load_audio(recording, HZ)
        windows = [wave]
        if isinstance(length, int):
            whole = max(1, wave.size // length)
            windows = np.resize(wave, (whole, length)) if wave.size < length else wave[: whole * length]
            windows = np.reshape(windows, (whole, length))
        answers = [session.run(None, {inputs[0].name: window[None]})[0] for window in windows]
        return float(np.mean([np.ravel(answer)[-1] for answer in answers]))

    return score


def measure(
    rows: list[dict],
    wav_dir: Path,
    similarity: Callable[[Path, Path], float | None] | None = None,
    mos: Callable[[Path], float] | None = None,
    progress: bool = True,
) -> dict[str, dict[str, float]]:
    """Measure the utterances that have audio.

    Args:
        rows: utterances.jsonl.
        wav_dir: with ``<id>.wav``.
        similarity: needs ``prompt_audio`` in the row; rows without are left out.
        mos: any MOS predictor.

    Returns:
        id -> {"speaker_similarity", "mos"}, what could be measured.
    """
    results: dict[str, dict[str, float]] = {}
    for row in tqdm(rows, desc="measure", unit="file", disable=not progress):
        path = wav_dir / f"{row['id']}.wav"
        if not path.is_file():
            continue
        found = {}
        if similarity and row.get("prompt_audio"):
            found["speaker_similarity"] = similarity(path, Path(row["prompt_audio"]))
        if mos:
            found["mos"] = mos(path)
        results[row["id"]] = {name: value for name, value in found.items() if value is not None}
    return results
