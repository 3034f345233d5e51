"""Synthesis: the transformers back end against plain forward passes, and the bookkeeping of infer_dataset.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cosyvoice.evaluation import generate, synthesis
from cosyvoice.evaluation.generate import Request, Sampling, TransformersGenerator, draw, utterance_seed
from cosyvoice.evaluation.records import EvaluationError, read_jsonl
from cosyvoice.evaluation.testsets import TestUtterance
from cosyvoice.frontend import Prompt
from cosyvoice.llm import CosyVoice2Config, CosyVoice2ForCausalLM
from cosyvoice.speech_tokens import ParsedTokens, VocabLayout
from cosyvoice.token2wav import Speech

LAYOUT = VocabLayout.build(first_speech_id=100, n_speech=40)
GREEDY, TRAIN, RAS = Sampling("greedy"), Sampling("train", 1.0, 0.95, 10), Sampling("ras")


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> Path:
    """A random model whose scores differ clearly, with end tokens likely enough that some answers end."""
    torch.manual_seed(1)
    config = CosyVoice2Config(
        vocab_size=LAYOUT.padded_size, first_speech_id=100, n_speech=40, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = CosyVoice2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        model.lm_head.bias[40:] -= 0.3
    folder = tmp_path_factory.mktemp("llm")
    model.save_pretrained(folder)
    return folder


def requests(n: int = 6, max_tokens: int = 24) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(rng.integers(0, 100, 3 + 4 * (i % 4)).tolist(), utterance_seed(0, f"u{i}"), 6, max_tokens)
        for i in range(n)
    ]


def answers(llm: Path, sampling: Sampling, batch_size: int, wanted: list[Request]) -> list[ParsedTokens]:
    found = dict(TransformersGenerator(llm, LAYOUT, sampling, batch_size=batch_size).generate(wanted))
    return [found[i] for i in range(len(wanted))]


# The language model


def test_greedy_answers_equal_plain_forward_passes(llm):
    model = CosyVoice2ForCausalLM.from_pretrained(llm).eval()
    wanted = requests()
    for request, answer in zip(wanted, answers(llm, GREEDY, 6, wanted)):
        ids = list(request.ids)
        for _ in range(request.max_tokens):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in LAYOUT.end_ids:
                break
        new = ids[len(request.ids) :]
        ended = new[-1] in LAYOUT.end_ids
        # Nothing is lost: where no end token was met, the last token is speech and belongs to the answer.
        assert answer.ids == [i - 100 for i in (new[:-1] if ended else new)]
        assert answer.ended == ended


@pytest.mark.parametrize("sampling", [TRAIN, RAS], ids=["train", "ras"])
def test_neither_batch_size_nor_order_nor_neighbours_change_an_answer(llm, sampling):
    wanted = requests(8)
    reference = answers(llm, sampling, 1, wanted)
    assert answers(llm, sampling, 3, wanted) == reference
    assert answers(llm, sampling, 8, wanted[::-1]) == reference[::-1]
    assert answers(llm, sampling, 2, wanted[5:6]) == reference[5:6]
    assert len({tuple(a.ids) for a in reference}) > 6  # the seeds differ
    assert any(a.ended for a in reference)


def test_ras_holds_back_the_first_end_token_only(llm, monkeypatch):
    seen = []

    def spy(logits, history, sampling, generator):
        seen.append((len(history), torch.isneginf(logits).nonzero().flatten().tolist()))
        return 3

    monkeypatch.setattr(generate, "draw", spy)
    answers(llm, RAS, 1, [Request([1, 2], 0, 2, 4)])
    assert seen == [(0, [40]), (1, [40]), (2, []), (3, [])]


def test_answers_stop_at_the_first_end_token_of_any_kind(llm, monkeypatch):
    pieces = iter([5, 6, 41, 7, 7, 7])
    monkeypatch.setattr(generate, "draw", lambda *_: next(pieces))
    assert answers(llm, TRAIN, 1, [Request([1, 2], 0, 0, 6)]) == [ParsedTokens([5, 6], True)]


def test_training_draws_follow_transformers_warpers():
    torch.manual_seed(0)
    logits = 2 * torch.randn(40)
    sampling = Sampling("train", 0.7, 0.8, 12)
    scores = logits[None]
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        scores = warper(None, scores)
    expected = scores[0].softmax(-1).double()
    generator, n = torch.Generator().manual_seed(3), 20_000
    counts = torch.bincount(torch.tensor([draw(logits, [], sampling, generator) for _ in range(n)]), minlength=40)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts[kept] - n * expected[kept]) ** 2 / (n * expected[kept])).sum()
    freedom = int(kept.sum()) - 1
    assert freedom > 2
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
    everything = Sampling("train", 1.0, 1.0, 0)
    assert len({draw(torch.zeros(40), [], everything, generator) for _ in range(1000)}) == 40


def test_sampling_and_seeds_refuse_nonsense():
    with pytest.raises(ValueError, match="'beam'"):
        Sampling("beam")
    with pytest.raises(ValueError, match="temperature 0"):
        Sampling("train", 0.0)
    with pytest.raises(ValueError, match="'ras' with vLLM"):
        generate.VLLMGenerator("x", LAYOUT, RAS, 100)
    # `printf 0:utt | sha256sum` starts with 082b7aeb; half of that, rounded down.
    assert utterance_seed(0, "utt") == 137067243 // 2
    assert utterance_seed(1, "utt") != utterance_seed(0, "utt") != utterance_seed(0, "utu")


# Bookkeeping, with stand-ins for the two models


class Letters:
    """Answers token i for the i-th character; '空' gets nothing, '长' does not end."""

    layout = LAYOUT

    def __init__(self):
        self.calls = 0

    def generate(self, wanted):
        for index, request in reversed(list(enumerate(wanted))):
            self.calls += 1
            codes = [i % 40 for i in request.ids if i != ord("空")]
            yield index, ParsedTokens([] if len(codes) < len(request.ids) else codes, ord("长") not in request.ids)


class Beeps:
    """Token2Wav's shape: 960 samples per token; refuses token 13."""

    sample_rate = 24_000

    def __init__(self, fail_at: int | None = None):
        self.items, self.fail_at = 0, fail_at

    def __call__(self, tokens, prompts):
        for codes, prompt in zip(tokens, prompts, strict=True):
            self.items += 1
            if self.items == self.fail_at:
                raise RuntimeError("power cut")
            assert isinstance(prompt, Prompt)
            if 13 in codes:
                yield Speech(None, "token 13")
            else:
                yield Speech(np.repeat(np.array(codes, np.float32) / 40, 960))

    def speak(self):
        return lambda tokens, prompts: list(self(tokens, prompts))


def prompt(key: str = "p") -> Prompt:
    return Prompt(key, "提示", np.arange(3), np.zeros((6, 80), np.float32), np.zeros(192, np.float32))


def plan(name: str, text: str, error: str | None = None, zero_shot: bool = False) -> synthesis.Plan:
    return synthesis.Plan(
        TestUtterance(name, text, "zh"), None if error else prompt(), Path("p.wav"), error, zero_shot
    )


def encode(text: str) -> list[int]:
    return [ord(c) for c in text.replace("<|sos|>", "").replace("<|task_id|>", "")]


def speak(folder: Path, plans, rank: int = 0, world_size: int = 1, group: int = 2, beeps: Beeps | None = None):
    output = synthesis.Output(folder, {"seed": 0}, {"llm": "0"})
    order = [p.utterance.id for p in plans]
    done = output.done()
    todo = [p for p in plans[rank::world_size] if p.utterance.id not in done]
    wanted = [synthesis.make_request(p, encode, 0, None) for p in todo if not p.error]
    beeps = beeps or Beeps()
    decoder = beeps.speak()
    decoder.sample_rate = 24_000
    letters = Letters()
    synthesis.synthesise(todo, letters, decoder, wanted, output, 0, rank, group, progress=False)
    return output.finish(order), letters.calls


PLANS = [
    plan("a", "你好"), plan("b", "世"), plan("c", "空"), plan("d", "", error="refused"), plan("e", "长天"),
    plan("f", "天地人"), plan("g", chr(0x4e00 + 13 - 0x4e00 % 40 + 40)),
]  # fmt: skip


def test_rows_say_what_happened_and_audio_has_its_length(tmp_path):
    assert speak(tmp_path / "x", PLANS)[0]
    rows = read_jsonl(tmp_path / "x" / "utterances.jsonl")
    assert [row["id"] for row in rows] == list("abcdefg")
    by_id = {row["id"]: row for row in rows}
    assert by_id["a"]["tokens"] == [ord("你") % 40, ord("好") % 40]
    assert (by_id["a"]["n_tokens"], by_id["a"]["seconds"], by_id["a"]["error"]) == (2, 0.08, None)
    assert (by_id["a"]["prompt_key"], by_id["a"]["prompt_audio"], by_id["a"]["seed"]) == ("p", "p.wav", 0)
    assert [by_id[i]["ended"] for i in "ae"] == [True, False]
    assert by_id["c"]["error"] == "the language model answered no speech token"
    assert by_id["d"]["error"] == "refused"
    assert by_id["g"]["error"] == "token 13"
    wavs = sorted(path.name for path in (tmp_path / "x" / "wav").iterdir())
    assert wavs == ["a.wav", "b.wav", "e.wav", "f.wav"]
    assert soundfile.info(tmp_path / "x" / "wav" / "f.wav").frames == 3 * 960
    assert not (tmp_path / "x" / "parts").exists()


def test_ranks_give_what_one_process_gives_and_the_last_one_joins(tmp_path):
    speak(tmp_path / "one", PLANS)
    assert [speak(tmp_path / "three", PLANS, rank, 3)[0] for rank in (2, 0, 1)] == [False, False, True]
    one, three = (read_jsonl(tmp_path / name / "utterances.jsonl") for name in ("one", "three"))
    assert one == three
    for path in (tmp_path / "one" / "wav").iterdir():
        assert path.read_bytes() == (tmp_path / "three" / "wav" / path.name).read_bytes()


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    speak(tmp_path / "whole", PLANS)
    with pytest.raises(RuntimeError, match="power cut"):
        speak(tmp_path / "cut", PLANS, beeps=Beeps(fail_at=4))  # a, b; (c, d: nothing to speak); e; f
    assert not (tmp_path / "cut" / "utterances.jsonl").exists()
    finished, calls = speak(tmp_path / "cut", PLANS, rank=0, world_size=1)
    assert finished
    assert calls == 3  # e and f, whose group failed, and g; not a, b, c
    whole, cut = (read_jsonl(tmp_path / name / "utterances.jsonl") for name in ("whole", "cut"))
    assert whole == cut
    assert speak(tmp_path / "cut", PLANS) == (True, 0)


def test_a_folder_refuses_other_settings(tmp_path):
    synthesis.Output(tmp_path, {"seed": 0, "llm": "a"}, {})
    synthesis.Output(tmp_path, {"seed": 0, "llm": "a"}, {})
    with pytest.raises(EvaluationError, match=r"settings\.json: llm: found 'a' from an earlier run, expected 'b'"):
        synthesis.Output(tmp_path, {"seed": 0, "llm": "b"}, {})


def test_results_of_a_model_that_was_trained_again_are_stale(tmp_path, caplog):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"before")
    old = {"llm": synthesis.content_hash([weights]), "test set": "t"}
    speak(tmp_path / "x", PLANS)  # made with {"llm": "0"}
    weights.write_bytes(b"after!")
    new = {"llm": synthesis.content_hash([weights]), "test set": "t"}
    assert new["llm"] != old["llm"]
    output = synthesis.Output(tmp_path / "x", {"seed": 0}, new)
    assert "llm, test set changed since the last run" in caplog.text
    assert output.done() == {}
    assert list(output.wavs.iterdir()) == []
    output.add_part(0, [{"id": "a"}])
    assert list(synthesis.Output(tmp_path / "x", {"seed": 0}, new).done()) == ["a"]  # the second rank removes nothing


def test_requests_hold_prompt_text_and_prompt_tokens_only_for_zero_shot():
    seen = []

    def spy(text: str) -> list[int]:
        seen.append(text)
        return list(range(len(text)))

    wanted = synthesis.make_request(plan("a", "“你好”", zero_shot=True), spy, 0, None)
    assert seen == ["你好", "<|sos|>提示你好<|task_id|><|s_0|><|s_1|><|s_2|>"]
    assert (wanted.min_tokens, wanted.max_tokens) == (4, 40)  # 2 and 20 per text token
    synthesis.make_request(plan("a", "你好"), spy, 0, None)
    assert seen[-1] == "<|sos|>你好<|task_id|>"
    assert synthesis.make_request(plan("a", "你好"), spy, 0, 96).max_tokens == 96


def test_wrong_use_ends_with_one_sentence(tmp_path):
    script = Path(__file__).parents[2] / "infer_dataset.py"
    needed = ["--llm", "x", "--model-dir", "x", "--split", "x", "--output-dir", str(tmp_path)]
    command = [sys.executable, str(script), *needed, "--backend", "vllm", "--sampling", "ras"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr == "error: --sampling: found ras with --backend vllm, expected --backend transformers\n"


@pytest.mark.slow
def test_one_rank_that_fails_ends_the_others(tmp_path):
    """Both ranks fail on the unknown test set; the parent says which one and leaves no process."""
    script = Path(__file__).parents[2] / "infer_dataset.py"
    needed = ["--llm", "x", "--model-dir", "x", "--split", "nowhere", "--output-dir", str(tmp_path)]
    environment = {**os.environ, "COSYVOICE_TEST_MARK": str(tmp_path)}
    command = [sys.executable, str(script), *needed, "--n-procs", "2", "--backend", "transformers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 1
    assert "test set 'nowhere': found no such file" in done.stderr
    assert "ended with status 1" in done.stderr
    mark = f"COSYVOICE_TEST_MARK={tmp_path}".encode()
    left = [p for p in Path("/proc").glob("[0-9]*/environ") if os.access(p, os.R_OK) and mark in read_quietly(p)]
    assert left == []


def read_quietly(path: Path) -> bytes:
    """A process may end between listing and reading."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


# Prompts, with the two networks of the checkpoint that ships with the repository

TINY = Path(__file__).parents[2] / "assets" / "cosyvoice2-tiny"


def test_prompts_are_an_utterances_own_or_the_banks(tmp_path):
    from cosyvoice.checkpoint import CosyVoice2Folder

    folder = CosyVoice2Folder(TINY)
    bank = TINY / "prompts"
    first = json.loads((bank / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])
    soundfile.write(tmp_path / "short.wav", np.zeros(1000), 24_000)
    utterances = [
        TestUtterance("own", "你好", "zh", first["text"], bank / first["audio"]),
        TestUtterance("lent", "你好", "zh"),
        TestUtterance("bad", "你好", "zh", "提示", tmp_path / "short.wav"),
        TestUtterance("control", "你好<|task_id|>", "zh"),
        TestUtterance("nothing", "“”", "zh"),
    ]
    plans = synthesis.choose_prompts(utterances, folder, bank, cache_dir=tmp_path / "cache", progress=False)
    own, lent, bad, control, nothing = plans
    assert (own.prompt.key, own.zero_shot, own.recording) == ("own", True, bank / first["audio"])
    assert len(own.prompt.tokens) > 10
    assert not lent.zero_shot
    assert lent.recording.is_file()
    assert "short.wav: found 0.04 s" in bad.error
    assert "'<|task_id|>'" in control.error
    assert "something to say" in nothing.error
    assert [p.prompt for p in (bad, control, nothing)] == [None] * 3
    forced = synthesis.choose_prompts(utterances[:2], folder, bank, "zero-shot", tmp_path / "cache", False)
    assert [p.zero_shot for p in forced] == [True, True]
    with pytest.raises(EvaluationError, match="'lent': found no prompt"):
        synthesis.choose_prompts(utterances[:2], folder, None, cache_dir=tmp_path / "cache", progress=False)
    only_bad = synthesis.choose_prompts(utterances[2:3], folder, None, cache_dir=tmp_path / "cache", progress=False)
    assert only_bad[0].error == bad.error
    shutil.rmtree(tmp_path / "cache")
