"""From prompt recordings to what the flow and the language model are conditioned on.

    audio.py     reading, checking and resampling recordings
    features.py  24 kHz log-mel, Whisper log-mel, Kaldi filter banks
    encoders.py  the two ONNX networks: speaker embedding and speech tokens
    prompt.py    one prompt: the checks, the features, the trimming rule
    cache.py     prompts on disk, found again by the content they were made from
    bank.py      many prompts, read from a folder or a JSONL file, picked by a key

Names are imported on first use: scoring reads audio and need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .audio import AudioError, load_audio, resample
    from .bank import PromptBank, PromptEntry
    from .encoders import SpeakerEncoder, SpeechTokenizer
    from .features import kaldi_fbank, log_mel_24k, whisper_log_mel
    from .prompt import Prompt, compute_prompt

_MODULES = {
    "audio": ("AudioError", "load_audio", "resample"),
    "bank": ("PromptBank", "PromptEntry"),
    "encoders": ("SpeakerEncoder", "SpeechTokenizer"),
    "features": ("kaldi_fbank", "log_mel_24k", "whisper_log_mel"),
    "prompt": ("Prompt", "compute_prompt"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "AudioError",
    "Prompt",
    "PromptBank",
    "PromptEntry",
    "SpeakerEncoder",
    "SpeechTokenizer",
    "compute_prompt",
    "kaldi_fbank",
    "load_audio",
    "log_mel_24k",
    "resample",
    "whisper_log_mel",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
