"""What a worker does: speech tokens -> waveform -> 16 kHz -> transcript -> score, a batch at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cosyvoice.asr import SAMPLE_RATE, SenseVoice, Transcript
from cosyvoice.checkpoint import CosyVoice2Folder
from cosyvoice.frontend import Prompt, PromptBank, SpeakerEncoder, resample
from cosyvoice.reward.components import cosine
from cosyvoice.reward.config import RewardConfig
from cosyvoice.reward.record import RewardRecord, Status
from cosyvoice.reward.score import prepare_reference, score_utterance
from cosyvoice.serving.items import Item, failure
from cosyvoice.speech_tokens import N_SPEECH
from cosyvoice.token2wav import Token2Wav

SPEECH_RATE = 24000
MIN_EMBEDDING_SAMPLES = 400
SELF_TEST_SENTENCES = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChainOptions:
    """What a worker needs to know; plain values, they travel to its process.

    Attributes:
        asr_model: SenseVoice folder or hub name.
        model_path: CosyVoice2 folder, or None for a worker that only recognises waveforms.
        prompts: folder or JSONL with prompt recordings.
        cache_dir: where computed prompts are kept, None for the default.
        self_test_max_wer: the known sentence may have this pinyin error rate at most.
    """

    asr_model: str
    model_path: str | None = None
    prompts: str | None = None
    cache_dir: str | None = None
    dtype: str = "float32"
    euler_steps: int = 10
    batch_size: int = 32
    language: str = "zh"
    self_test_max_wer: float = 0.2
    reward: RewardConfig = RewardConfig()


class SelfTestError(RuntimeError):
    """The known sentence did not come out as expected."""


class _Stopwatch:
    """Seconds per phase of one batch."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass
class _Audio:
    """An item's audio at 16 kHz (for the recogniser) and as it was made (for the pauses)."""

    wave: np.ndarray
    rate: int
    wave_16k: np.ndarray
    error: str | None = None


class RewardChain:
    """Loads the models once, then scores batches of items.

    Raises:
        CheckpointError, RecogniserError: a file is missing or does not fit.
    """

    def __init__(self, options: ChainOptions, device: str) -> None:
        self._options = options
        self._asr = SenseVoice(options.asr_model, device, options.batch_size, options.language)
        self._token2wav: Token2Wav | None = None
        if options.model_path is not None:
            folder = CosyVoice2Folder(options.model_path)
            self._bank = PromptBank.load(options.prompts, folder, options.cache_dir, progress=False)
            self._token2wav = Token2Wav(folder, device=device, dtype=DTYPES[options.dtype], n_steps=options.euler_steps)
            measure = options.reward.measures("similarity")
            self._speaker_encoder = SpeakerEncoder(folder.campplus_path) if measure else None

    def score(self, items: Sequence[Item]) -> tuple[list[RewardRecord], dict[str, float]]:
        """One record per item, in order, and the seconds of each phase."""
        watch = _Stopwatch()
        with watch.phase("decode"):
            audio = self._synthesise(items)
        with watch.phase("resample"):
            for sound in audio:
                if sound.rate != SAMPLE_RATE and len(sound.wave):
                    sound.wave_16k = resample(sound.wave, sound.rate, SAMPLE_RATE)
        with watch.phase("asr"):
            waves = [sound.wave_16k for sound in audio]
            transcripts = self._asr.transcribe(waves)
            likelihoods = self._likelihoods(items, waves)
        with watch.phase("score"):
            records = [
                self._record(item, sound, transcript, likelihood)
                for item, sound, transcript, likelihood in zip(items, audio, transcripts, likelihoods)
            ]
        return records, watch.seconds

    def self_test(self) -> dict[str, Any]:
        """Synthesise prompts' own speech tokens, hear them, and compare with the prompts' texts.

        The known sentence is the one of the shortest prompts that is heard best: one recording alone may be beyond a
        recogniser that is fine on the rest, while a broken chain understands none of them.

        Returns:
            "self_test", a line for the log, and "known_sentence" for clients that want to check the server.

        Raises:
            SelfTestError: no score, or more errors than ``self_test_max_wer`` in every sentence.
        """
        if self._token2wav is None:
            return self._test_recogniser()
        prompts = sorted(self._bank, key=lambda p: (len(p.tokens), p.key))[:SELF_TEST_SENTENCES]
        items = [Item(p.text, np.asarray(p.tokens, np.int32), prompt_key=p.key) for p in prompts]
        began = time.perf_counter()
        records = self.score(items)[0]
        seconds = time.perf_counter() - began
        # A sentence without a score (a system failure) is the worst.
        record, prompt, item = min(
            zip(records, prompts, items), key=lambda r: (r[0].status.is_system, r[0].status is Status.SILENT, r[0].wer)
        )
        most = self._options.self_test_max_wer
        line = (
            f"known sentence {prompt.text!r} (prompt {prompt.key!r}, {len(prompt.tokens)} tokens; best of "
            f"{len(prompts)}) heard as {record.transcript!r}: status {record.status.value}, "
            f"error rate {record.wer:.3f}, {seconds:.2f} s"
        )
        if record.status not in (Status.OK, Status.SILENT) or not record.wer <= most:
            raise SelfTestError(f"{line}; expected status ok and at most {most} (--self-test-max-wer)")
        if record.status is Status.SILENT and most < 1.0:
            raise SelfTestError(f"{line}; expected audible speech")
        known = {
            "text": prompt.text,
            "tokens": item.tokens.tolist(),
            "prompt_key": prompt.key,
            "max_wer": most,
        }
        return {"self_test": line, "known_sentence": known}

    def _test_recogniser(self) -> dict[str, Any]:
        wave = 0.1 * np.random.default_rng(0).standard_normal(SAMPLE_RATE).astype(np.float32)
        transcript = self._asr.transcribe([wave])[0]
        if transcript.status != "ok":
            raise SelfTestError(f"one second of noise: status {transcript.status}, expected ok")
        return {"self_test": f"one second of noise heard as {transcript.text!r}", "known_sentence": None}

    def _synthesise(self, items: Sequence[Item]) -> list[_Audio]:
        nothing = np.zeros(0, np.float32)
        audio = [_Audio(nothing, SPEECH_RATE, nothing) for _ in items]
        for place, item in enumerate(items):
            if item.wave is not None:
                audio[place] = _Audio(item.wave, SAMPLE_RATE, item.wave)
        # What cannot be spoken never reaches the decoder: nothing there, or ids outside its table.
        places = [i for i, item in enumerate(items) if item.wave is None and len(item) and not _strange(item)]
        if places:
            prompts = [self._prompt(items[i]) for i in places]
            speeches = self._token2wav([items[i].tokens for i in places], prompts)
            for place, speech in zip(places, speeches):
                audio[place].error = speech.error
                if speech.wav is not None:
                    audio[place].wave = speech.wav
        return audio

    def _prompt(self, item: Item) -> Prompt:
        """The prompt with that name, else one that the key picks: the same for the whole group."""
        return self._bank[item.prompt_key] if item.prompt_key in self._bank else self._bank.pick(item.prompt_key)

    def _likelihoods(self, items: Sequence[Item], waves: Sequence[np.ndarray]) -> list[float | None]:
        config = self._options.reward
        if not config.measures("nll"):
            return [None] * len(items)
        texts = [prepare_reference(item.reference, config.erhua).text for item in items]
        return list(self._asr.reference_nll(waves, texts))

    def _record(self, item: Item, sound: _Audio, transcript: Transcript, nll: float | None) -> RewardRecord:
        if sound.error is not None:
            return failure(Status.SERVER_ERROR, f"Token2Wav: {sound.error}", item)
        tokens = item.tokens
        return score_utterance(
            item.reference,
            transcript.text,
            n_tokens=None if tokens is None else len(tokens),
            ended=item.ended,
            seconds=len(sound.wave) / sound.rate,
            wav=sound.wave if transcript.status == "ok" else None,
            sample_rate=sound.rate,
            tokens=tokens,
            out_of_range=_strange(item),
            clip_status=transcript.status,
            similarity=self._similarity(item, sound, transcript),
            nll=nll,
            config=self._options.reward,
        )

    def _similarity(self, item: Item, sound: _Audio, transcript: Transcript) -> float | None:
        if self._token2wav is None or self._speaker_encoder is None or item.tokens is None:
            return None
        if transcript.status != "ok" or len(sound.wave_16k) < MIN_EMBEDDING_SAMPLES:
            return 0.0
        return cosine(self._speaker_encoder(sound.wave_16k), self._prompt(item).embedding)


def _strange(item: Item) -> int:
    """Number of ids that are no speech codes."""
    if item.tokens is None:
        return 0
    return int(np.count_nonzero((item.tokens < 0) | (item.tokens >= N_SPEECH))) + item.out_of_range


def make_chain(options: dict[str, Any], device: str) -> RewardChain:
    """Factory for the pool: ``cosyvoice.serving.chain:make_chain``; options are :class:`ChainOptions` fields."""
    return RewardChain(ChainOptions(**options), device)
