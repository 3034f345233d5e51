"""Speech tokens to waveforms: the frozen half of CosyVoice2, in exact batches.

What an utterance sounds like depends on its tokens, its prompt and ``noise_seed``, and on nothing that
stands beside it: rows are masked where padding would leak, and the noise of the flow and of the vocoder
comes from tables that every utterance reads from the start.

As a command it speaks a file of tokens: ``python -m cosyvoice.token2wav --help``.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from cosyvoice.checkpoint import CosyVoice2Folder
from cosyvoice.flow.config import FlowConfig
from cosyvoice.flow.solver import MAX_FRAMES, noise_table
from cosyvoice.grouping import plan_groups
from cosyvoice.hift.config import HiFTConfig
from cosyvoice.hift.source import SourceNoise

if TYPE_CHECKING:
    from cosyvoice.frontend import Prompt

log = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True)
class Speech:
    """One answer: either a waveform or the reason why there is none.

    Attributes:
        wav: float32 [960 * N] at 24 kHz for N tokens, within +-0.99; None on error.
        error: one sentence; None on success.
    """

    wav: np.ndarray | None
    error: str | None = None


def flow_bytes(config: FlowConfig, rows: int, frames: int, itemsize: int) -> float:
    """Rough peak of the flow's activations for a padded batch.

    Per frame: the widest layers of the estimator for the conditional and the unconditional half; per
    pair of frames: the relative-position scores of one encoder block.
    """
    estimator = config.estimator
    inner = estimator.num_heads * estimator.attention_head_dim
    linear = 2 * (estimator.in_channels + 24 * estimator.channels + 4 * inner)
    quadratic = 4 * config.encoder.attention_heads
    return itemsize * rows * (linear * frames + quadratic * frames**2)


def hift_bytes(config: HiFTConfig, rows: int, frames: int) -> float:
    """Rough peak of the vocoder's activations: some twenty copies of its widest layer, and the source."""
    rate, widest = 1, 0
    for stage, factor in enumerate(config.upsample_rates):
        rate *= factor
        widest = max(widest, rate * config.base_channels // 2 ** (stage + 1))
    return 4.0 * rows * frames * (20 * widest + 3 * config.hop * (config.nb_harmonics + 1))


class Token2Wav:
    """The flow and the vocoder of one checkpoint on one device.

    Args:
        folder: checkpoint folder, as a path or opened.
        device: torch device.
        dtype: of the flow's weights and activations; its state and the vocoder stay float32.
        n_steps: Euler steps.
        guidance: classifier-free guidance rate; None takes the checkpoint's (0.7).
        noise_seed: seed of both noise tables; 0 is the published table of the flow.
        memory_gib: activations of one batch stay under this, as far as one utterance does.
        max_rows: most utterances in a batch; None: no limit on a GPU, and 1 on a CPU, where one
            utterance already keeps the arithmetic busy and a batch only adds padding and cache misses.
        max_padding: highest fraction of a batch that may be padding.
        compile: run the estimator through ``torch.compile`` (minutes at the first calls; lengths are
            rounded up so that few shapes occur).

    Raises:
        CheckpointError: a file is missing or does not fit.
    """

    def __init__(
        self,
        folder: str | Path | CosyVoice2Folder,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        n_steps: int = 10,
        guidance: float | None = None,
        noise_seed: int = 0,
        memory_gib: float = 8.0,
        max_rows: int | None = None,
        max_padding: float = 0.1,
        compile: bool = False,
    ) -> None:
        folder = folder if isinstance(folder, CosyVoice2Folder) else CosyVoice2Folder(folder)
        self.config = folder.config
        self.device, self.dtype = torch.device(device), dtype
        self.n_steps, self.max_padding = n_steps, max_padding
        self.guidance = self.config.flow.inference_cfg_rate if guidance is None else guidance
        self.sample_rate = self.config.sample_rate
        self.flow = folder.load_flow().to(self.device, dtype)
        self.hift = folder.load_hift().to(self.device)
        self._noise = noise_table(noise_seed, self.config.flow.output_size).to(self.device)
        self._source_noise = SourceNoise(self.config.hift.nb_harmonics + 1, noise_seed)
        on_cpu = self.device.type == "cpu"
        self._budget = memory_gib * GIB
        self._max_rows = max_rows if max_rows is not None else 1 if on_cpu else 2**30
        # GPU attention kernels want masks aligned; compiled code wants few shapes.
        self._multiple = 32 if compile else 1 if on_cpu else 8
        if compile:
            mode = None if on_cpu else "reduce-overhead"
            self.flow.decoder.estimator.compile(dynamic=True, mode=mode)
        plain_cpu = on_cpu and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
        if plain_cpu and dtype != torch.float32:
            log.warning("%s on a CPU without AVX-512: expect it to be far slower than float32", dtype)

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[Sequence[int]], prompts: Sequence[Prompt]) -> list[Speech]:
        """Speak each token sequence in the voice of its prompt.

        Args:
            tokens: speech codes in [0, vocab_size), without end tokens.
            prompts: one per sequence.

        Returns:
            one ``Speech`` per sequence, in order. An item that cannot be spoken carries its error and
            harms no other.
        """
        if len(tokens) != len(prompts):
            raise ValueError(f"{len(tokens)} token sequences: found {len(prompts)} prompts, expected as many")
        speeches: list[Speech | None] = [None] * len(tokens)
        places, sequences = [], []
        for place, (codes, prompt) in enumerate(zip(tokens, prompts)):
            codes = np.asarray(codes)
            problem = self._problem(codes, prompt)
            if problem is None:
                places.append(place)
                sequences.append(np.concatenate([prompt.tokens, codes]).astype(np.int64))
            else:
                speeches[place] = Speech(None, problem)
        mels = self._mels(sequences, [prompts[place] for place in places])
        for place, wav in zip(places, self._waves(mels)):
            if np.isfinite(wav).all():
                speeches[place] = Speech(wav)
            else:
                speeches[place] = Speech(None, f"the waveform is not finite (flow in {self.dtype})")
        return speeches

    def _problem(self, codes: np.ndarray, prompt: Prompt) -> str | None:
        """Why an item cannot be spoken, or None."""
        config = self.config.flow
        if codes.ndim != 1 or codes.size == 0:
            return f"tokens: found shape {list(codes.shape)}, expected at least one speech token"
        frames = config.token_mel_ratio * (len(prompt.tokens) + len(codes))
        if frames > MAX_FRAMES:
            return f"prompt and tokens: found {frames} mel frames, expected at most {MAX_FRAMES}"
        for name, ids in (("tokens", codes), ("prompt tokens", np.asarray(prompt.tokens))):
            if ids.size and ids.dtype.kind not in "iu":
                return f"{name}: found {ids.dtype}, expected whole numbers"
            strange = ids[(ids < 0) | (ids >= config.vocab_size)] if ids.size else ids
            if strange.size:
                return f"{name}: found id {int(strange[0])}, expected ids in [0, {config.vocab_size})"
        expected = (config.token_mel_ratio * len(prompt.tokens), config.output_size)
        if prompt.mel.shape != expected:
            return f"prompt mel: found shape {list(prompt.mel.shape)}, expected {list(expected)}"
        if prompt.embedding.shape != (config.spk_embed_dim,):
            found = list(prompt.embedding.shape)
            return f"prompt embedding: found shape {found}, expected [{config.spk_embed_dim}]"
        return None

    def _mels(self, sequences: list[np.ndarray], prompts: list[Prompt]) -> list[torch.Tensor]:
        """Mel [80, 2N] of each item, grouped by the length of prompt and answer together."""
        lengths = [len(sequence) for sequence in sequences]
        ratio, itemsize = self.config.flow.token_mel_ratio, self.dtype.itemsize
        mels: list[torch.Tensor | None] = [None] * len(sequences)
        for group in plan_groups(
            lengths,
            lambda rows, longest: flow_bytes(self.config.flow, rows, ratio * longest, itemsize),
            self._budget,
            self._max_rows,
            self.max_padding,
        ):
            ends = [lengths[i] for i in group]
            padded = max(ends)
            if self._multiple > 1 and (min(ends) < padded or self._multiple == 32):
                padded = -(-padded // self._multiple) * self._multiple
            batch = np.zeros((len(group), padded), np.int64)
            for row, i in enumerate(group):
                batch[row, : ends[row]] = sequences[i]
            voices = np.stack([prompts[i].embedding for i in group])
            made = self.flow.generate(
                torch.from_numpy(batch).to(self.device),
                ends,
                [torch.from_numpy(np.ascontiguousarray(prompts[i].mel)).to(self.device) for i in group],
                torch.from_numpy(voices).to(self.device),
                self._noise,
                self.n_steps,
                self.guidance,
            )
            for i, mel in zip(group, made):
                mels[i] = mel
        return mels

    def _waves(self, mels: list[torch.Tensor]) -> list[np.ndarray]:
        """Waveform of each mel, grouped by the length of the answer alone."""
        lengths = [mel.shape[1] for mel in mels]
        hop = self.config.hift.hop
        waves: list[np.ndarray | None] = [None] * len(mels)
        for group in plan_groups(
            lengths,
            lambda rows, longest: hift_bytes(self.config.hift, rows, longest),
            self._budget,
            self._max_rows,
            self.max_padding,
        ):
            longest = lengths[group[0]]
            batch = mels[group[0]].new_zeros(len(group), mels[group[0]].shape[0], longest)
            for row, i in enumerate(group):
                batch[row, :, : lengths[i]] = mels[i]
            noise = self._source_noise(hop * longest, self.device)
            made = self.hift(batch, noise, [lengths[i] for i in group]).cpu().numpy()
            for row, i in enumerate(group):
                waves[i] = made[row, : hop * lengths[i]].copy()
        return waves


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_tokens(path: str | Path) -> list[int]:
    """Speech codes of a text file: plain numbers, or ``<|s_12|>`` pieces as the language model writes."""
    text = Path(path).read_text(encoding="utf-8")
    rest = re.sub(r"<\|s_(\d+)\|>", r" \1 ", text)
    words = re.split(r"[\s,;\[\]]+", rest.strip())
    strange = [word for word in words if word and not word.isdecimal()]
    if strange:
        raise ValueError(f"{path}: found {strange[0]!r}, expected numbers or <|s_N|> pieces")
    return [int(word) for word in words if word]


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Speak a file of speech tokens to a WAV file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model-path", required=True, help="CosyVoice2 checkpoint folder")
    parser.add_argument("--tokens", required=True, help="text file of numbers or <|s_N|> pieces")
    parser.add_argument("--prompts", required=True, help="prompt recordings: a folder or a JSONL file")
    parser.add_argument("--prompt-key", help="which prompt; the first if not given")
    parser.add_argument("--output", required=True, help="WAV file to write (24 kHz, 16 bit)")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the flow")
    parser.add_argument("--n-steps", type=int, default=10, help="Euler steps")
    parser.add_argument("--guidance", type=float, help="guidance rate; the checkpoint's if not given")
    parser.add_argument("--noise-seed", type=int, default=0, help="seed of the noise tables")
    parser.add_argument("--compile", action="store_true", help="torch.compile the estimator")
    return parser


def main() -> None:
    args = get_parser().parse_args()
    import soundfile  # these two are needed here alone

    from cosyvoice.frontend import PromptBank

    codes = read_tokens(args.tokens)
    folder = CosyVoice2Folder(args.model_path)
    bank = PromptBank.load(args.prompts, folder)
    prompt = bank[args.prompt_key] if args.prompt_key else next(iter(bank))
    speak = Token2Wav(
        folder,
        args.device,
        DTYPES[args.dtype],
        n_steps=args.n_steps,
        guidance=args.guidance,
        noise_seed=args.noise_seed,
        compile=args.compile,
    )
    speech = speak([codes], [prompt])[0]
    if speech.error is not None:
        raise SystemExit(f"{args.tokens}: {speech.error}")
    output = Path(args.output)
    part = output.with_name(output.name + ".part")
    soundfile.write(part, speech.wav, speak.sample_rate, subtype="PCM_16", format="WAV")
    part.replace(output)
    print(f"{output}: {len(speech.wav) / speak.sample_rate:.2f} s from {len(codes)} tokens")


if __name__ == "__main__":
    main()
