"""RAS sampling: the 9 cases recorded from CosyVoice's own code, and draws that must follow them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cosyvoice.llm import CosyVoice2Config, CosyVoice2ForCausalLM, ras
from cosyvoice.speech_tokens import VocabLayout

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
RECORDED = json.loads((GOLDEN / "ras_cases.json").read_text())
CASES = {case["name"]: case for case in RECORDED["cases"]}
TENSORS = load_file(GOLDEN / "ras_cases.safetensors")


@pytest.fixture(params=sorted(CASES))
def case(request):
    return CASES[request.param]


def log_probs(case):
    return TENSORS[case["name"] + ".logp"]


def test_all_nine_cases_are_there_and_defaults_are_the_published_ones():
    assert len(CASES) == 9
    assert ras.RasConfig(**RECORDED["params"]) == ras.RasConfig()


def test_nucleus(case):
    ids, probs = ras.nucleus(log_probs(case))
    assert ids.tolist() == case["nucleus_ids"]
    torch.testing.assert_close(probs, TENSORS[case["name"] + ".nucleus_probs"], rtol=1e-6, atol=1e-7)


def test_when_a_second_draw_is_made(case):
    found = {str(i): ras.is_repeated(i, case["history"]) for i in case["nucleus_ids"]}
    assert found == case["fallback_if_first_draw_is"]


def test_probabilities_of_the_second_draw(case):
    repeated = [int(i) for i, again in case["fallback_if_first_draw_is"].items() if again]
    for drawn in repeated:
        expected = TENSORS[f"{case['name']}.fallback_probs.{drawn}"]
        torch.testing.assert_close(ras.probs_without(log_probs(case), drawn), expected, rtol=1e-6, atol=1e-7)
        assert expected[drawn] == 0


def test_draws_follow_the_recorded_distribution(case):
    """500 draws against the mixture that the recorded probabilities give: chi-square over pieces with mass."""
    name, n = case["name"], 500
    first = TENSORS[name + ".nucleus_probs"].double()
    first /= first.sum()
    expected = torch.zeros(64, dtype=torch.double)
    for piece, p in zip(case["nucleus_ids"], first):
        if case["fallback_if_first_draw_is"][str(piece)]:
            expected += p * TENSORS[f"{name}.fallback_probs.{piece}"].double()
        else:
            expected[piece] += p
    generator = torch.Generator().manual_seed(3)
    draws = torch.tensor([ras.ras_sample(log_probs(case), case["history"], generator=generator) for _ in range(n)])
    counts = torch.bincount(draws, minlength=64).double()
    assert counts[expected == 0].sum() == 0
    likely = expected * n >= 5
    statistic = ((counts - expected * n) ** 2 / (expected * n))[likely].sum()
    freedom = max(int(likely.sum()) - 1, 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations of a chi-square


def test_nothing_left_to_draw_is_an_error():
    only = torch.full((4,), -torch.inf)
    only[2] = 0.0
    assert ras.ras_sample(only, []) == 2
    with pytest.raises(ValueError, match="piece 2 repeated and no other"):
        ras.ras_sample(only, [2])
    with pytest.raises(ValueError, match="nan"):
        ras.ras_sample(torch.full((4,), -torch.inf), [])


@pytest.fixture(scope="module")
def model():
    layout = VocabLayout.build(first_speech_id=30, n_speech=12)
    config = CosyVoice2Config(
        vocab_size=layout.padded_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        first_speech_id=layout.first_speech_id,
        n_speech=layout.n_speech,
        tie_word_embeddings=False,
        eos_token_id=list(layout.end_ids),
    )
    torch.manual_seed(0)
    model = CosyVoice2ForCausalLM(config).eval()
    # Speech 5 is all but certain, so that plain sampling would repeat it; <|eos1|> is next.
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias.data.zero_()
    model.lm_head.bias.data[5] = 12.0
    model.lm_head.bias.data[layout.n_speech :] = torch.tensor([6.0, -30.0, -30.0])
    return model


def generate(model, min_new_tokens, n=12):
    layout = model.config.vocab_layout()
    prompt = torch.tensor([[layout.sos_id, 3, layout.task_id, layout.first_speech_id + 5]] * 2)
    sampler = ras.RasLogitsProcessor(
        layout, prompt.shape[1], min_new_tokens, generator=torch.Generator().manual_seed(0)
    )
    out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        logits_processor=[sampler],
        do_sample=False,
        max_new_tokens=n,
        pad_token_id=0,
    )
    return out[:, prompt.shape[1] :], layout


def test_generate_does_not_repeat_a_likely_piece_inside_the_window(model):
    rows, layout = generate(model, min_new_tokens=12)
    assert rows.shape == (2, 12)
    for row in rows.tolist():
        # The prompt ends in speech 5, yet 5 is drawn first: prompt speech is no part of the history.
        assert row[0] == layout.first_speech_id + 5
        assert layout.end_ids[0] not in row
        assert all(layout.first_speech_id <= piece < layout.first_speech_id + layout.n_speech for piece in row)
        # Inside the window of 10 it is drawn and refused; a second draw may repeat any other piece, but not it.
        assert layout.first_speech_id + 5 not in row[1:10]


def test_generate_stops_at_the_end_piece_once_it_may(model):
    rows, layout = generate(model, min_new_tokens=0)
    for row in rows.tolist():
        assert layout.end_ids[0] in row[:4]  # 5 is drawn again within the window, <|eos1|> holds nearly all the rest
