"""The transformers class against golden data, and what veRL computes from its logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cosyvoice.llm import CosyVoice2Config, CosyVoice2ForCausalLM
from cosyvoice.llm.config import MASKED_LOGIT
from cosyvoice.speech_tokens import VocabLayout

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASE = load_file(GOLDEN / "llm_case.safetensors")
RECORD = json.loads((GOLDEN / "llm_case.json").read_text())


@pytest.fixture(scope="module")
def model(golden_hf):
    return AutoModelForCausalLM.from_pretrained(golden_hf, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def layout(model):
    return model.config.vocab_layout()


@pytest.fixture(scope="module")
def logits(model):
    with torch.inference_mode():
        return model(input_ids=CASE["hf_input_ids"].long()).logits.clone()


def speech(logits, layout):
    return logits[..., layout.first_speech_id : layout.first_speech_id + layout.n_head]


def not_speech(logits, layout):
    first = layout.first_speech_id
    return torch.cat([logits[..., :first], logits[..., first + layout.n_head :]], dim=-1)


def test_the_class_is_found_by_its_model_type(model, golden_hf):
    assert type(model) is CosyVoice2ForCausalLM
    assert type(AutoConfig.from_pretrained(golden_hf)) is CosyVoice2Config
    assert json.loads((golden_hf / "config.json").read_text())["model_type"] == "cosyvoice2"


def test_the_head_is_compact_and_has_a_bias(model, layout):
    assert model.lm_head.weight.shape == (203, 32)
    assert model.lm_head.bias.shape == (203,)
    assert model.model.embed_tokens.weight.shape == (layout.padded_size, 32) == (512, 32)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_logits_and_hidden_states_are_the_recorded_ones(model, logits, layout):
    torch.testing.assert_close(speech(logits, layout), CASE["logits"], rtol=0, atol=1e-5)
    with torch.inference_mode():
        hidden = model.model(input_ids=CASE["hf_input_ids"].long()).last_hidden_state
    torch.testing.assert_close(hidden, CASE["hidden_last"], rtol=0, atol=1e-5)


def test_the_bias_is_what_a_stock_head_lacked(model, logits, layout):
    stock = speech(CASE["hf_logits_nobias"], layout)
    torch.testing.assert_close(speech(logits, layout) - model.lm_head.bias, stock, rtol=0, atol=1e-5)
    assert (not_speech(CASE["hf_logits_nobias"], layout) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_mass_outside_speech(logits, layout, dtype):
    assert (not_speech(logits, layout) == MASKED_LOGIT).all()
    probs = logits.to(dtype).softmax(dim=-1)
    assert (not_speech(probs, layout) == 0).all()


def test_greedy_tokens_are_the_recorded_ones(model, layout):
    prompt = torch.cat([CASE["hf_input_ids"][:, :12], CASE["speech_ids"][:, :4] + layout.first_speech_id], dim=1)
    n_text = CASE["text_ids"].shape[1]
    out = model.generate(
        input_ids=prompt.long(),
        attention_mask=torch.ones_like(prompt).long(),
        do_sample=False,
        top_p=None,
        top_k=None,
        temperature=None,
        min_new_tokens=1 * n_text,  # ratios of the recording
        max_new_tokens=3 * n_text,
    )
    assert (out[0, prompt.shape[1] :] - layout.first_speech_id).tolist() == RECORD["greedy"]
    assert RECORD["greedy"] == CASE["greedy_tokens"].tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_veRLs_log_probs_and_entropy_are_those_of_the_recorded_logits(logits, layout, dtype, temperature):
    """The full vocabulary, with veRL's functions, against 203 recorded logits, by definition in float64."""
    from verl.utils import torch_functional as verl_f

    full = logits[0].to(dtype) / temperature
    exact = (CASE["logits"][0].to(dtype) / temperature).double().log_softmax(dim=-1)
    labels = exact.argmin(dim=-1)
    got = verl_f.logprobs_from_logits(full.clone(), labels + layout.first_speech_id)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1  # bfloat16 has 8 bits: log-probs near -8 step by 1/32
    torch.testing.assert_close(
        got.double(), exact.gather(-1, labels[:, None])[:, 0], rtol=0, atol=tolerance, check_dtype=False
    )
    entropy = -(exact.exp() * exact).sum(dim=-1)
    for function in (verl_f.entropy_from_logits, verl_f.entropy_from_logits_with_chunking):
        got = function(full.clone())
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), entropy, rtol=0, atol=tolerance)


def test_minus_infinity_would_have_given_nan(logits, layout):
    """Why the constant is finite: the same entropy with -inf is not a number."""
    from verl.utils import torch_functional as verl_f

    masked = logits[0].masked_fill(logits[0] == MASKED_LOGIT, -torch.inf)
    assert verl_f.entropy_from_logits(masked).isnan().all()
    assert verl_f.entropy_from_logits(logits[0]).isfinite().all()


@pytest.mark.slow
def test_compiled_entropy_is_the_same(logits):
    from verl.utils import torch_functional as verl_f

    compiled = torch.compile(verl_f.entropy_from_logits, dynamic=True)
    torch.testing.assert_close(compiled(logits[0]), verl_f.entropy_from_logits(logits[0]), rtol=0, atol=1e-5)


def test_text_rows_learn_only_from_their_own_use_as_input(model, layout):
    """A policy loss moves the rows that were read and the head; no text piece gets a gradient from the softmax."""
    from verl.utils import torch_functional as verl_f

    ids = CASE["hf_input_ids"].long()
    try:
        out = model(input_ids=ids).logits
        loss = -verl_f.logprobs_from_logits(out[:, 11:-1], ids[:, 12:]).mean() - verl_f.entropy_from_logits(out).mean()
        loss.backward()
        moved = model.model.embed_tokens.weight.grad.abs().sum(dim=1).nonzero()[:, 0]
        assert set(moved.tolist()) == set(ids[0].tolist())
        assert model.lm_head.bias.grad.isfinite().all()
        assert model.lm_head.bias.grad.abs().min() > 0
    finally:
        model.zero_grad(set_to_none=True)


def test_save_and_reload(model, golden_hf, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(golden_hf)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert again.config.vocab_layout() == VocabLayout.from_tokenizer(AutoTokenizer.from_pretrained(tmp_path))
    assert again.generation_config.eos_token_id == [476, 477, 478]


def test_a_vocabulary_of_another_size_is_refused():
    with pytest.raises(ValueError, match="vocab_size: found 1000, expected 512"):
        CosyVoice2ForCausalLM(CosyVoice2Config(vocab_size=1000, first_speech_id=276, n_speech=200))
