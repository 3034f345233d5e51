"""SenseVoice: waveforms in, transcripts out, in batches. Used by the reward, never by the held-out evaluation."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SAMPLE_RATE = 16000
#: SenseVoice's frontend needs one 25 ms window; shorter clips make the whole batch fail.
MIN_SAMPLES = 400
#: Peak (full scale 1.0) under which a clip holds nothing to hear: -60 dB.
SILENCE_PEAK = 1e-3
LANGUAGES = ("auto", "zh", "en", "yue", "ja", "ko", "nospeech")
#: Frames that SenseVoice puts in front of the speech: language, event, emotion, text normalisation.
N_QUERY_FRAMES = 4

_TAG = re.compile(r"<\|[^|<>]*\|>")
logger = logging.getLogger(__name__)


class RecogniserError(ValueError):
    """A recogniser folder or option that cannot be used. The message names what was found and expected."""


@dataclass(frozen=True)
class Transcript:
    """What was heard in one clip. ``status`` is "ok", "silent", "too_short" or "not_finite"."""

    text: str
    status: str


def strip_tags(text: str) -> str:
    """Remove SenseVoice's ``<|zh|><|NEUTRAL|>...`` tags and outer spaces.

    FunASR's own post-processing turns emotion tags into emoji, which would count as errors.
    """
    return _TAG.sub("", text).strip()


def clip_status(wave: np.ndarray) -> str:
    """Tell whether a clip can be given to the recogniser.

    Args:
        wave: [L] samples at 16 kHz, full scale 1.0.
    """
    if wave.ndim != 1:
        raise ValueError(f"waveform: found shape {list(wave.shape)}, expected one dimension [L]")
    if not np.all(np.isfinite(wave)):
        return "not_finite"
    if len(wave) < MIN_SAMPLES:
        return "too_short"
    if float(np.max(np.abs(wave))) < SILENCE_PEAK:
        return "silent"
    return "ok"


def check_folder(folder: Path) -> None:
    """Refuse a SenseVoice folder that FunASR would accept and then fill with random weights or no CMVN.

    Raises:
        RecogniserError: a file is missing or empty.
    """
    config = folder / "config.yaml"
    configuration = folder / "configuration.json"
    required = ["config.yaml", "model.pt", "am.mvn"]
    if configuration.is_file():
        meta = json.loads(configuration.read_text(encoding="utf-8")).get("file_path_metas", {})
        names = [meta.get("init_param"), meta.get("config"), meta.get("frontend_conf", {}).get("cmvn_file")]
        required = sorted({*required, *[name for name in names if name]})
    elif not config.is_file():
        raise RecogniserError(f"{folder}: found no config.yaml, expected a SenseVoice folder with {required}")
    for name in required:
        path = folder / name
        if not path.is_file() or path.stat().st_size == 0:
            raise RecogniserError(f"{path}: missing or empty, expected a SenseVoice folder with {required}")
    if not [*folder.glob("tokens.json"), *folder.glob("*.bpe.model")]:
        raise RecogniserError(f"{folder}: no tokeniser, expected tokens.json or a *.bpe.model file")


class SenseVoice:
    """A SenseVoice model behind FunASR, with every clip checked before it can spoil its batch.

    Args:
        model: a folder with ``config.yaml``, ``model.pt``, ``am.mvn`` and a tokeniser, or a hub name
            such as ``iic/SenseVoiceSmall`` (downloaded by FunASR).
        device: "cpu", "cuda" or "cuda:N".
        batch_size: clips in one forward pass; the clips of a call are sorted by length first.
        language: one of :data:`LANGUAGES`.

    Dither is switched off, so that the same audio always gives the same transcript.

    Raises:
        RecogniserError: unknown language, missing files, weights that do not fill the model.
    """

    def __init__(self, model: str | Path, device: str = "cpu", batch_size: int = 32, language: str = "zh") -> None:
        if language not in LANGUAGES:  # FunASR silently takes an unknown language for "auto"
            raise RecogniserError(f"language {language!r}: expected one of {', '.join(LANGUAGES)}")
        if batch_size < 1:
            raise RecogniserError(f"batch_size {batch_size}: expected at least 1")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise RecogniserError(f"device {device!r}: torch sees no GPU")
        folder = Path(model).expanduser()
        is_folder = folder.is_dir()
        if is_folder:
            check_folder(folder)
        elif str(model).startswith((".", "/", "~")) or str(model).count("/") != 1:
            raise RecogniserError(f"{model}: no such folder, expected a SenseVoice folder or a hub name org/name")
        self.batch_size = batch_size
        self.language = language
        self._auto = _load(str(folder) if is_folder else str(model), device)
        if is_folder:
            _check_weights(self._auto.model, folder / "model.pt")
        self._auto.kwargs["frontend"].dither = 0.0

    def transcribe(self, waves_16k: Sequence[np.ndarray]) -> list[Transcript]:
        """Transcribe clips; the result keeps their order.

        Args:
            waves_16k: float arrays [L_i] at 16 kHz, full scale 1.0.

        Returns:
            One transcript per clip; ``text`` is empty unless the status is "ok".
        """
        statuses = [clip_status(wave) for wave in waves_16k]
        texts = [""] * len(waves_16k)
        for index, text in zip(*self._generate(waves_16k, statuses)):
            texts[index] = strip_tags(text)
        return [Transcript(text, status) for text, status in zip(texts, statuses)]

    def _generate(self, waves: Sequence[np.ndarray], statuses: list[str]) -> tuple[list[int], list[str]]:
        order = [i for i in range(len(waves)) if statuses[i] == "ok"]
        order.sort(key=lambda i: len(waves[i]))
        if not order:
            return [], []
        # int16 samples would be taken as they are and give another text: always float32.
        clips = [np.asarray(waves[i], dtype=np.float32) for i in order]
        results = self._auto.generate(
            input=clips, cache={}, language=self.language, use_itn=False, batch_size=self.batch_size
        )
        if len(results) != len(order):
            raise RuntimeError(f"FunASR gave {len(results)} transcripts for {len(order)} clips")
        return order, [result["text"] for result in results]

    @torch.inference_mode()
    def reference_nll(self, waves: Sequence[np.ndarray], texts: Sequence[str]) -> list[float]:
        """Negative log-likelihood per character of reference texts under the CTC head.

        Args:
            waves: float arrays [L_i] at 16 kHz.
            texts: the reference of each clip, normalised; characters unknown to the tokeniser count as ``<unk>``.

        Returns:
            -log p(text | wave) / number of CTC labels, in nats; ``inf`` where the clip cannot be recognised or is
            too short for its text, ``nan`` where the text has no label.
        """
        if len(waves) != len(texts):
            raise ValueError(f"{len(waves)} clips and {len(texts)} texts, expected as many")
        values = [float("inf")] * len(waves)
        tokenizer = self._auto.kwargs["tokenizer"]
        labels = [list(tokenizer.encode(text)) if text else [] for text in texts]
        order = []
        for i, wave in enumerate(waves):
            if not labels[i]:
                values[i] = float("nan")
            elif clip_status(wave) == "ok":
                order.append(i)
        order.sort(key=lambda i: len(waves[i]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            log_probs, lengths = self._log_probs([waves[i] for i in batch])
            losses = torch.nn.functional.ctc_loss(
                log_probs.transpose(0, 1).float(),
                torch.tensor([label for i in batch for label in labels[i]], device=log_probs.device),
                lengths,
                torch.tensor([len(labels[i]) for i in batch], device=log_probs.device),
                blank=self._auto.model.blank_id,
                reduction="none",
            )
            for i, loss in zip(batch, losses.tolist()):
                values[i] = loss / len(labels[i])
        return values

    def _log_probs(self, waves: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [B, T, V] of the speech frames and their numbers [B]."""
        from funasr.utils.load_utils import extract_fbank

        model, kwargs = self._auto.model, self._auto.kwargs
        clips = [torch.from_numpy(np.asarray(wave, dtype=np.float32)) for wave in waves]
        feats, lengths = extract_fbank(clips, data_type="sound", frontend=kwargs["frontend"])
        feats, lengths = feats.to(kwargs["device"]), lengths.to(kwargs["device"])
        ids = [[model.lid_dict[self.language], 1, 2, model.textnorm_dict["woitn"]]]
        query = model.embed(torch.tensor(ids, device=feats.device)).expand(len(waves), -1, -1)
        encoded, encoded_lengths = model.encoder(torch.cat([query, feats], 1), lengths + N_QUERY_FRAMES)[:2]
        log_probs = model.ctc.log_softmax(encoded)
        return log_probs[:, N_QUERY_FRAMES:], encoded_lengths - N_QUERY_FRAMES


def _load(model: str, device: str):
    """Build FunASR's AutoModel without its update check, progress bar and thread setting."""
    from funasr import AutoModel

    try:
        return AutoModel(
            model=model,
            hub="hf" if model.startswith("FunAudioLLM/") else "ms",  # the same model has a name on both hubs
            device=device,
            disable_update=True,
            disable_pbar=True,
            trust_remote_code=False,
            ncpu=torch.get_num_threads(),  # its default of 4 would oversubscribe a worker's share
            log_level="WARNING",
        )
    except Exception as error:  # hub errors, missing keys of config.yaml, torch errors: many types
        raise RecogniserError(
            f"{model}: FunASR could not load it ({type(error).__name__}: {error}); expected a SenseVoice folder, "
            "or a hub name and a network"
        ) from error


def _check_weights(model: torch.nn.Module, path: Path) -> None:
    """FunASR leaves tensors that the file lacks, or holds in another shape, at random values: compare them."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for wrapper in ("state_dict", "model_state_dict", "model"):
        state = state.get(wrapper, state)
    for name, value in model.state_dict().items():
        found = state.get(name, state.get(f"module.{name}"))
        if found is None or found.shape != value.shape:
            shape = "nothing" if found is None else list(found.shape)
            raise RecogniserError(f"{path}: key {name!r}: found {shape}, expected shape {list(value.shape)}")
