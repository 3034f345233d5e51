"""From prompt recordings to what the flow and the language model are conditioned on.

    audio.py     reading, checking and resampling recordings
    features.py  24 kHz log-mel, Whisper log-mel, Kaldi filter banks
    encoders.py  the two ONNX networks: speaker embedding and speech tokens
    prompt.py    one prompt: the checks, the features, the trimming rule
    cache.py     prompts on disk, found again by the content they were made from
    bank.py      many prompts, read from a folder or a JSONL file, picked by a key
"""

from .audio import AudioError, load_audio, resample
from .bank import PromptBank, PromptEntry
from .encoders import SpeakerEncoder, SpeechTokenizer
from .features import kaldi_fbank, log_mel_24k, whisper_log_mel
from .prompt import Prompt, compute_prompt

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
