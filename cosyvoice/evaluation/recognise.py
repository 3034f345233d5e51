"""Transcripts by sherpa-onnx, in batches, with a status for every file that cannot be recognised."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ..frontend.audio import AudioError, load_audio
from .records import EvaluationError

if TYPE_CHECKING:
    import sherpa_onnx

HZ = 16_000
#: Below this, sherpa-onnx may find no frame, and one empty stream empties its whole batch.
MIN_SECONDS = 0.1
#: What the recipe and Seed-TTS-eval score Chinese with; fetched from the hub when no folder is given.
DEFAULT_MODEL = "csukuangfj/sherpa-onnx-paraformer-zh-2023-09-14"
KINDS = ("paraformer", "sense_voice", "zipformer_ctc", "wenet_ctc", "nemo_ctc", "whisper")
#: Metadata ``model_type`` of exported networks -> kind. Zipformer CTC models may have none.
_MODEL_TYPES = {
    "paraformer": "paraformer",
    "sense_voice_ctc": "sense_voice",
    "zipformer2_ctc": "zipformer_ctc",
    "wenet_ctc": "wenet_ctc",
    "EncDecCTCModelBPE": "nemo_ctc",
    "EncDecCTCModel": "nemo_ctc",
}


@dataclass(frozen=True)
class Recognised:
    """One file's transcript.

    Attributes:
        id: utterance.
        transcript: "" unless the status is "ok" (and possibly then).
        audio_status: "ok", "missing", "unreadable" or "empty".
        message: why the status is not "ok"; else "".
        seconds: duration, None where unknown.
    """

    id: str
    transcript: str
    audio_status: str
    message: str
    seconds: float | None

    def to_json(self) -> dict:
        return asdict(self)


def find_model(model: str | Path | None) -> Path:
    """Folder of a recogniser: the one given, or the default from the hub (230 MB, kept in the hub's cache).

    Raises:
        EvaluationError: the folder does not exist, or the download failed.
    """
    if model is not None:
        if not Path(model).is_dir():
            raise EvaluationError(
                f"{model}: no such folder, expected a sherpa-onnx recogniser (.onnx and tokens.txt)"
            )
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(DEFAULT_MODEL, allow_patterns=["*.onnx", "*tokens.txt"]))
    except Exception as error:  # the hub client raises its own, requests' and OS errors
        raise EvaluationError(
            f"{DEFAULT_MODEL}: cannot be fetched from the hub; give a folder with --judge: {error}"
        ) from error


def _one_file(folder: Path, patterns: list[str]) -> str:
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return str(found[0])
    names = sorted(p.name for p in folder.iterdir())
    raise EvaluationError(f"{folder}: found {names}, expected one file like {' or '.join(patterns)}")


def detect_kind(folder: Path) -> str:
    """Kind of recogniser by the network's metadata.

    Raises:
        EvaluationError: the metadata name no known kind; ``--recogniser`` decides then.
    """
    if list(folder.glob("*encoder*.onnx")) and list(folder.glob("*decoder*.onnx")):
        return "whisper"
    import onnxruntime

    path = _one_file(folder, ["model.onnx", "model.int8.onnx", "*.onnx"])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    names = [i.name for i in session.get_inputs()]
    kind = _MODEL_TYPES.get(metadata.get("model_type", ""))
    if kind is None and metadata.get("comment", "").startswith("paraformer"):
        kind = "paraformer"
    if kind is None and names == ["x", "x_lens"]:
        kind = "zipformer_ctc"
    if kind is None and names == ["speech", "speech_lengths"]:
        kind = "paraformer"
    if kind is None:
        raise EvaluationError(
            f"{path}: found model_type {metadata.get('model_type')!r} in the metadata and inputs {names}, "
            f"which name no known kind; say --recogniser {'|'.join(KINDS)}"
        )
    return kind


def load_recogniser(
    folder: str | Path, kind: str = "auto", language: str = "zh", num_threads: int = 1, provider: str = "cpu"
) -> sherpa_onnx.OfflineRecognizer:
    """Open a sherpa-onnx recogniser.

    Args:
        folder: with tokens.txt and the network(s); of several .onnx files model.int8.onnx is taken last.
        kind: one of ``KINDS``, or "auto" to read it from the network.
        language: for kinds that are told (SenseVoice, Whisper).
        num_threads: of onnxruntime.
        provider: "cpu" or "cuda".

    Raises:
        EvaluationError: unknown kind, or files that are not there.
    """
    import sherpa_onnx

    folder = Path(folder)
    if kind == "auto":
        kind = detect_kind(folder)
    if kind not in KINDS:
        raise EvaluationError(f"recogniser: found {kind!r}, expected one of {', '.join(KINDS)}")
    common = {
        "tokens": _one_file(folder, ["tokens.txt", "*tokens.txt"]),
        "num_threads": num_threads,
        "provider": provider,
    }
    make = getattr(sherpa_onnx.OfflineRecognizer, f"from_{kind}")
    if kind == "whisper":
        encoder = _one_file(folder, ["*encoder.onnx", "*encoder.int8.onnx"])
        decoder = _one_file(folder, ["*decoder.onnx", "*decoder.int8.onnx"])
        return make(encoder=encoder, decoder=decoder, language=language, **common)
    network = _one_file(folder, ["model.onnx", "model.int8.onnx", "*.onnx"])
    if kind == "sense_voice":
        return make(model=network, language=language, use_itn=False, **common)
    return make(**{"paraformer" if kind == "paraformer" else "model": network}, **common)


def _load(path: Path):
    """(wave at 16 kHz or None, audio_status, message)."""
    if not path.is_file():
        return None, "missing", f"{path}: no such file"
    try:
        wave, _ = load_audio(path, to_hz=HZ)
    except AudioError as error:
        return None, "empty" if "found no samples" in str(error) else "unreadable", str(error)
    if wave.size < MIN_SECONDS * HZ:
        return (
            None,
            "empty",
            f"{path}: found {wave.size / HZ:.3f} s of audio, expected at least {MIN_SECONDS} s",
        )
    return wave, "ok", ""


def recognise(
    recogniser: sherpa_onnx.OfflineRecognizer,
    ids: list[str],
    wav_dir: str | Path,
    batch_size: int = 16,
    progress: bool = True,
) -> list[Recognised]:
    """Transcribe ``<wav_dir>/<id>.wav`` for every id, in the order given.

    Files of any sampling rate are resampled. Batches hold files of similar size; what cannot be recognised is
    kept out of them.
    """
    wav_dir = Path(wav_dir)
    results: dict[str, Recognised] = {}
    paths = {name: wav_dir / f"{name}.wav" for name in ids}
    order = sorted(ids, key=lambda name: paths[name].stat().st_size if paths[name].is_file() else 0)
    with tqdm(total=len(ids), desc="recognise", unit="file", disable=not progress) as bar:
        for start in range(0, len(order), batch_size):
            names = order[start : start + batch_size]
            streams = []
            for name in names:
                wave, status, message = _load(paths[name])
                if wave is None:
                    results[name] = Recognised(name, "", status, message, 0.0 if status == "empty" else None)
                    continue
                stream = recogniser.create_stream()
                stream.accept_waveform(HZ, wave)
                streams.append((name, wave.size / HZ, stream))
            if streams:
                recogniser.decode_streams([stream for _, _, stream in streams])
            for name, seconds, stream in streams:
                results[name] = Recognised(name, stream.result.text.strip(), "ok", "", round(seconds, 4))
            bar.update(len(names))
    return [results[name] for name in ids]
