"""The shipped tiny checkpoint is whole: files, sizes, contracts of the networks, texts, and that it can be understood.

Outside truth: the published layout (file names, tensor names, network inputs), pypinyin's readings, the texts of the
prompt recordings (spoken by espeak-ng, not by the networks under test).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from cosyvoice.checkpoint import CosyVoice2Folder, load_tensors
from cosyvoice.frontend import load_audio, resample, whisper_log_mel

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "cosyvoice2-tiny"
LIMIT_BYTES = 25 * 2**20


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder() -> CosyVoice2Folder:
    return CosyVoice2Folder(ASSETS)


@pytest.fixture(scope="module")
def prompt_waves() -> list[tuple[str, np.ndarray]]:
    """Text and 16 kHz audio of every prompt."""
    entries = rows(ASSETS / "prompts" / "prompts.jsonl")
    return [(e["text"], load_audio(ASSETS / "prompts" / e["audio"], 16000)[0]) for e in entries]


def test_the_folder_is_small_enough():
    files = [p for p in ASSETS.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < LIMIT_BYTES
    assert not [p for p in files if p.suffix == ".tmp"]


def test_flow_and_hift_load_strictly(folder):
    assert set(folder.load_flow().state_dict()) == set(folder.flow_state())
    assert set(folder.load_hift().state_dict()) == set(folder.hift_state())


def test_hift_is_stored_with_weight_norm_as_published(folder):
    names = load_tensors(folder.hift_path)
    assert "conv_pre.parametrizations.weight.original0" in names
    assert "source_downs.0.weight" in names
    assert "conv_pre.weight" not in names


def test_language_model_has_the_published_tensors(folder):
    state = load_tensors(folder.llm_path)
    width = folder.config.llm_input_size
    assert state["speech_embedding.weight"].shape == (6564, width)
    assert state["llm_embedding.weight"].shape == (2, width)
    assert state["llm_decoder.weight"].shape == (6564, width)
    assert state["llm_decoder.bias"].shape == (6564,)
    assert torch.equal(state["llm.model.lm_head.weight"], state["llm.model.model.embed_tokens.weight"])
    rest = [n for n in state if not re.match(r"llm\.model\.model\.layers\.\d+\.", n)]
    assert len(rest) == 4 + 2 + 1  # the four above, text table and its tied copy, final norm
    assert all(torch.isfinite(v).all() for v in state.values())


def test_speech_tokenizer_gives_25_codes_a_second(folder, prompt_waves):
    session = onnxruntime.InferenceSession(str(folder.speech_tokenizer_path), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    for _, wave in prompt_waves:
        mel = np.asarray(whisper_log_mel(wave), np.float32).T[None]
        codes = session.run(None, {names[0]: mel, names[1]: np.array([mel.shape[2]], np.int32)})[0]
        assert codes.shape == (1, -(-mel.shape[2] // 4))
        assert abs(codes.shape[1] - 25 * len(wave) / 16000) < 1
        assert codes.min() >= 0
        assert codes.max() < 6561
        assert len(np.unique(codes)) > 5


def test_texts_do_not_overlap_and_are_read_as_they_were_spoken():
    from pypinyin import Style, lazy_pinyin

    from cosyvoice.reward.text import normalise

    texts = {name: [r["text"] for r in rows(ASSETS / "data" / f"{name}.jsonl")] for name in ("train", "dev", "test")}
    assert len(texts["test"]) >= 300
    flat = sum(texts.values(), [])
    assert len(set(flat)) == len(flat)
    prompts = [r["text"] for r in rows(ASSETS / "prompts" / "prompts.jsonl")]
    assert not set(prompts) & set(flat)
    single = {c: lazy_pinyin(c, style=Style.TONE3)[0] for c in set("".join(flat))}
    assert len(set(single.values())) == len(single), "two characters share a toned syllable"
    for text in flat:
        assert normalise(text) == text
        assert lazy_pinyin(text, style=Style.TONE3, tone_sandhi=True) == [single[c] for c in text]


def test_reward_recogniser_understands_the_prompts(prompt_waves):
    from cosyvoice.asr import SenseVoice

    heard = SenseVoice(ASSETS / "sensevoice", batch_size=16).transcribe([w for _, w in prompt_waves])
    right = sum(t.text == text for t, (text, _) in zip(heard, prompt_waves, strict=True))
    assert right >= len(prompt_waves) - 1


def test_judge_understands_the_prompts_through_sherpa_onnx(prompt_waves):
    from cosyvoice.evaluation.recognise import load_recogniser

    recogniser = load_recogniser(ASSETS / "judge")
    streams = []
    for _, wave in prompt_waves:
        streams.append(recogniser.create_stream())
        streams[-1].accept_waveform(16000, wave)
    recogniser.decode_streams(streams)
    # Its measured error on natural audio is a few per cent: a wrong syllable here and there, never a lost one.
    found = [s.result.text.strip() for s in streams]
    assert [len(f) for f in found] == [len(text) for text, _ in prompt_waves]
    wrong = sum(a != b for f, (text, _) in zip(found, prompt_waves, strict=True) for a, b in zip(f, text, strict=True))
    assert wrong <= 0.1 * sum(map(len, found))


def test_true_tokens_survive_the_decoder(folder, prompt_waves):
    """Tokens of one prompt, spoken with another as the prompt, are still understood by both recognisers' standard."""
    from cosyvoice.asr import SenseVoice
    from cosyvoice.frontend import PromptBank
    from cosyvoice.token2wav import Token2Wav

    prompts = list(PromptBank.load(ASSETS / "prompts", folder, progress=False))
    speeches = Token2Wav(folder, n_steps=5)([p.tokens for p in prompts], prompts[1:] + prompts[:1])
    waves = [resample(s.wav, 24000, 16000) for s in speeches]
    texts = [t.text for t in SenseVoice(ASSETS / "sensevoice", batch_size=16).transcribe(waves)]
    pairs = [(p.text.ljust(20), text.ljust(20)) for p, text in zip(prompts, texts, strict=True)]
    wrong = sum(a != b for said, heard in pairs for a, b in zip(said, heard, strict=True))
    assert wrong <= 0.2 * sum(len(p.text) for p in prompts)
