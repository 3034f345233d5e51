"""The vLLM class: the golden logits, and agreement with the transformers class.

vLLM's CPU attention takes heads of 32 channels and more; the golden model has 8. It is widened without changing what
it computes: every new channel is 0, and the numbers that depend on the width are scaled by powers of two.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cosyvoice.llm import CosyVoice2Config, CosyVoice2ForCausalLM

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASE = load_file(GOLDEN / "llm_case.safetensors")
WIDER = 4  # 32 -> 128 channels, heads of 8 -> 32

pytestmark = pytest.mark.slow


def widen(narrow):
    """The same function with ``WIDER`` times the channels and the same number of heads."""
    config = CosyVoice2Config.from_dict(narrow.config.to_dict())
    config.hidden_size = narrow.config.hidden_size * WIDER
    # mean(x^2) falls by WIDER when zeros are appended: so must eps, and the gain by its square root.
    config.rms_norm_eps = narrow.config.rms_norm_eps / WIDER
    d = narrow.config.hidden_size // narrow.config.num_attention_heads
    # Rotary frequencies are theta^(-2i/d): pair i of d channels turns like pair WIDER*i of WIDER*d channels.
    old = torch.arange(d)
    new = old % (d // 2) * WIDER + old // (d // 2) * (d // 2) * WIDER

    def heads(weight, scale=1.0):
        """[heads * d, ...] -> [heads * WIDER * d, ...]."""
        parts = weight.unflatten(0, (-1, d)) * scale
        wide = parts.new_zeros(parts.shape[0], WIDER * d, *parts.shape[2:])
        wide[:, new] = parts
        return wide.flatten(0, 1)

    def channels(weight, dim):
        shape = list(weight.shape)
        shape[dim] = config.hidden_size - shape[dim]
        return torch.cat([weight, weight.new_zeros(shape)], dim=dim)

    state = {}
    for name, value in narrow.state_dict().items():
        if "q_proj" in name:  # scores are divided by the root of the head's width
            value = heads(value, WIDER**0.5)
        elif "k_proj" in name or "v_proj" in name:
            value = heads(value)
        elif "o_proj" in name:
            value = heads(value.T).T
        if "norm" in name:
            value = channels(value / WIDER**0.5, 0)
        elif name.endswith("weight"):
            value = channels(value, 0 if "o_proj" in name or "down_proj" in name else 1)
        state[name] = value.contiguous()
    wide = CosyVoice2ForCausalLM(config).eval()
    wide.load_state_dict(state)
    wide.generation_config = narrow.generation_config
    return wide


@pytest.fixture(scope="module")
def models(golden_hf, tmp_path_factory):
    """Folder and model: the golden one, widened, and another one with other weights in every tensor."""
    from transformers import AutoTokenizer

    wide = widen(AutoModelForCausalLM.from_pretrained(golden_hf, dtype=torch.float32).eval())
    torch.manual_seed(1)
    other = CosyVoice2ForCausalLM(wide.config).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    other.lm_head.bias.data[200:] += 1.0  # so that some answers end
    folders = []
    for name, model in (("golden", wide), ("other", other)):
        folder = tmp_path_factory.mktemp("vllm") / name
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(golden_hf).save_pretrained(folder)
        folders.append((folder, model))
    return folders


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(5)
    random = [
        [479, *torch.randint(0, 259, (n,), generator=generator).tolist(), 480]
        + torch.randint(276, 476, (n // 2,), generator=generator).tolist()
        for n in (1, 7, 16, 40)
    ]
    return [CASE["hf_input_ids"][0].tolist(), *random]


@pytest.fixture(scope="module")
def vllm(models, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "prompts.json").write_text(json.dumps(prompts))
    script = Path(__file__).with_name("run_vllm.py")
    command = [sys.executable, script, models[0][0], models[1][0], folder / "prompts.json", folder / "out.pt"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=900)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "log").read_text()[-4000:]
    return torch.load(folder / "out.pt", weights_only=True)


@torch.inference_mode()
def hf_logits(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0]


def test_the_widened_model_is_the_golden_one(models):
    got = hf_logits(models[0][1], CASE["hf_input_ids"][0].tolist())[:, 276:479]
    torch.testing.assert_close(got, CASE["logits"][0], rtol=0, atol=1e-5)


def test_golden_logits(vllm):
    # vLLM scores position i by the logits of position i - 1.
    torch.testing.assert_close(vllm["first"][0][:, 276:479], CASE["logits"][0, :-1], rtol=0, atol=1e-4)


def test_logits_of_random_prompts_over_the_whole_vocabulary(vllm, models, prompts):
    for got, ids in zip(vllm["first"], prompts):
        torch.testing.assert_close(got, hf_logits(models[0][1], ids)[:-1], rtol=0, atol=1e-4)


def test_only_speech_and_end_pieces_are_generated(vllm):
    pieces = {piece for answers in vllm["sampled"] for answer in answers for piece in answer}
    assert pieces <= set(range(276, 479))
    assert len(pieces) > 50  # it did sample


def test_generation_stops_at_the_end_pieces(vllm):
    """The ids come from generation_config.json."""
    for answers, reasons in zip(vllm["sampled"], vllm["finish"]):
        for answer, (reason, _) in zip(answers, reasons):
            assert not set(answer[:-1]) & {476, 477, 478}
            assert (answer[-1] in (476, 477, 478)) == (reason == "stop")
            assert reason == "stop" or len(answer) == 40


def test_sampled_log_probs_are_the_trainers(vllm, models, prompts):
    from verl.utils.torch_functional import logprobs_from_logits

    for ids, answers, rows in zip(prompts, vllm["sampled"], vllm["sampled_logits"]):
        for answer, logits in zip(answers, rows):
            labels = torch.tensor(answer)
            rollout = logits.log_softmax(dim=-1).gather(-1, labels[:, None])[:, 0]
            trainer = logprobs_from_logits(hf_logits(models[0][1], ids + answer)[len(ids) - 1 : -1], labels)
            torch.testing.assert_close(rollout, trainer, rtol=0, atol=1e-4)


def test_weights_can_be_loaded_again_and_again(vllm, models, prompts):
    for name, (_, model) in (("second", models[1]), ("third", models[0]), ("fourth", models[1])):
        for got, ids in zip(vllm[name], prompts):
            torch.testing.assert_close(got, hf_logits(model, ids)[:-1], rtol=0, atol=1e-4)
    assert (vllm["second"][0] - vllm["first"][0]).abs().max() > 0.1


def test_tensor_parallelism_is_refused(monkeypatch):
    from types import SimpleNamespace

    from cosyvoice.llm import vllm_model

    monkeypatch.setattr(vllm_model, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(vllm_model, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    with pytest.raises(ValueError, match="tensor_parallel_size: found 2, expected 1"):
        vllm_model.CosyVoice2ForCausalLM(vllm_config=None)


def test_a_vllm_without_the_function_to_replace_is_reported(monkeypatch):
    from vllm.model_executor.layers import utils

    from cosyvoice.llm import vllm_plugin

    monkeypatch.delattr(utils, "dispatch_cpu_unquantized_gemm")
    with pytest.raises(RuntimeError, match="found no dispatch_cpu_unquantized_gemm"):
        vllm_plugin._keep_cpu_weights_unpacked()
