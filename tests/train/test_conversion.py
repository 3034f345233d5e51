"""llm.pt <-> Hugging Face form, at golden size."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

import huggingface_to_pretrained
import pretrained_to_huggingface
from cosyvoice.checkpoint import CheckpointError
from cosyvoice.llm import to_huggingface, to_pretrained
from cosyvoice.llm.config import MASKED_LOGIT
from cosyvoice.llm.stock_head import stock_head_loss
from cosyvoice.speech_tokens import VocabLayout

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASE = load_file(GOLDEN / "llm_case.safetensors")
ORIGINAL = load_file(GOLDEN / "llm_tiny_weights.safetensors")
RECORD = json.loads((GOLDEN / "llm_case.json").read_text())


def to_hf(source, target, dtype=torch.float32, head="speech"):
    to_huggingface.convert(source, target, dtype, head, progress=False)
    return target


def back(source, target, **options):
    to_pretrained.convert(source, target, progress=False, **options)
    return torch.load(target, weights_only=True)


def assert_same(got, expected, but=()):
    """Names, dtypes, shapes and bits."""
    assert got.keys() == expected.keys()
    for name in expected:
        if name not in but:
            assert got[name].dtype == expected[name].dtype, name
            assert torch.equal(got[name], expected[name]), name


@pytest.fixture(scope="module")
def stock_hf(golden_folder, tmp_path_factory):
    return to_hf(golden_folder, tmp_path_factory.mktemp("stock") / "hf", head="qwen2")


@pytest.fixture
def folder(golden_folder, tmp_path):
    """A copy of the golden CosyVoice2 folder, to be damaged."""
    return Path(shutil.copytree(golden_folder, tmp_path / "cosyvoice2"))


@pytest.fixture
def hf(golden_hf, tmp_path):
    """A copy of its Hugging Face form, to be damaged."""
    return Path(shutil.copytree(golden_hf, tmp_path / "hf"))


def change(path, **changes):
    """Rewrite a llm.pt with tensors replaced, added, or (None) taken out."""
    tensors = torch.load(path, weights_only=True) | changes
    torch.save({name: value for name, value in tensors.items() if value is not None}, path)


# ---- the round trip


def test_round_trip_is_bit_identical(golden_hf, tmp_path):
    got = back(golden_hf, tmp_path / "llm.pt")
    assert_same(got, ORIGINAL)
    assert list(got) == list(ORIGINAL)
    # The text head shares the text table's storage, as in the published file.
    assert got["llm.model.lm_head.weight"].data_ptr() == got["llm.model.model.embed_tokens.weight"].data_ptr()


def test_a_text_head_that_is_no_copy_survives(folder, tmp_path):
    other = torch.randn(384, 32)
    change(folder / "llm.pt", **{"llm.model.lm_head.weight": other})
    got = back(to_hf(folder, tmp_path / "hf"), tmp_path / "llm.pt")
    assert_same(got, ORIGINAL, but=["llm.model.lm_head.weight"])
    assert torch.equal(got["llm.model.lm_head.weight"], other)


def test_other_dtypes_survive(folder, tmp_path):
    tensors = {name: value.bfloat16() for name, value in ORIGINAL.items()}
    torch.save(tensors, folder / "llm.pt")
    assert_same(back(to_hf(folder, tmp_path / "hf"), tmp_path / "llm.pt"), tensors)


def test_training_is_not_rounded_to_a_half_precision_file(folder, tmp_path):
    torch.save({name: value.half() for name, value in ORIGINAL.items()}, folder / "llm.pt")
    hf = to_hf(folder, tmp_path / "hf")
    trained = load_file(hf / "model.safetensors")
    step = 1e-5  # far below float16's spacing
    for tensor in trained.values():
        tensor += step
    save_file(trained, hf / "model.safetensors", {"format": "pt"})
    got = back(hf, tmp_path / "llm.pt")
    for name, value in ORIGINAL.items():
        rows = 276 if name in ("llm.model.model.embed_tokens.weight", "llm.model.lm_head.weight") else None
        assert got[name].dtype == torch.float32, name
        assert torch.equal(got[name][:rows], (value.half().float() + step)[:rows]), name


def test_through_bfloat16_only_rounding_is_lost(golden_folder, tmp_path):
    got = back(to_hf(golden_folder, tmp_path / "hf", torch.bfloat16), tmp_path / "llm.pt")
    assert list(got) == list(ORIGINAL)
    for name, value in ORIGINAL.items():
        rounded = value.bfloat16().float()
        if name in ("llm.model.model.embed_tokens.weight", "llm.model.lm_head.weight"):
            rounded[276:] = value[276:]  # unused rows are kept beside the checkpoint, in full
        assert torch.equal(got[name], rounded), name


def test_a_trained_and_sharded_checkpoint_without_sidecar(golden_hf, tmp_path):
    """What a trainer saves: other weights, several files, config.json but not our sidecar."""
    model = AutoModelForCausalLM.from_pretrained(golden_hf, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    AutoTokenizer.from_pretrained(golden_hf).save_pretrained(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    got = back(tmp_path / "hf", tmp_path / "llm.pt")
    assert {k: v.shape for k, v in got.items()} == {k: v.shape for k, v in ORIGINAL.items()}
    state = model.state_dict()
    assert torch.equal(got["llm_decoder.bias"], state["lm_head.bias"])
    assert torch.equal(got["llm_decoder.weight"], state["lm_head.weight"])
    assert torch.equal(got["speech_embedding.weight"], state["model.embed_tokens.weight"][276:479])
    assert torch.equal(got["llm_embedding.weight"], state["model.embed_tokens.weight"][479:481])
    assert torch.equal(got["llm.model.model.norm.weight"], state["model.norm.weight"])


def test_unused_rows_are_zero_and_the_file_is_the_same_every_time(golden_folder, golden_hf, tmp_path):
    again = to_hf(golden_folder, tmp_path / "hf")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "conversion.json", "generation_config.json"):
        assert (again / name).read_bytes() == (golden_hf / name).read_bytes()
    table = load_file(golden_hf / "model.safetensors")["model.embed_tokens.weight"]
    assert (table[481:] == 0).all()
    assert torch.equal(table[:276], ORIGINAL["llm.model.model.embed_tokens.weight"][:276])


# ---- the original recipe's own outputs


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stock_layout_is_what_the_original_recipe_writes(golden_folder, tmp_path, dtype):
    expected = load_file(GOLDEN / f"llm_tiny_hf_{dtype}.safetensors")
    del expected["lm_head.bias"]  # transformers ignores it: --head qwen2 leaves it out
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    got = load_file(to_hf(golden_folder, tmp_path / "hf", kind, "qwen2") / "model.safetensors")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        rows = slice(481) if name == "model.embed_tokens.weight" else slice(None)  # the rest is random there, 0 here
        assert got[name].dtype == value.dtype == kind
        assert torch.equal(got[name][rows], value[rows]), name


def test_stock_config_is_the_original_recipes(stock_hf):
    got = json.loads((stock_hf / "config.json").read_text())
    expected = json.loads((GOLDEN / "llm_tiny_hf" / "config_fp32.json").read_text())
    for key in ("architectures", "model_type", "vocab_size", "eos_token_id", "tie_word_embeddings", "hidden_size"):
        assert got[key] == expected[key], key
    generation = json.loads((stock_hf / "generation_config.json").read_text())
    expected = json.loads((GOLDEN / "llm_tiny_hf" / "generation_config.json").read_text())
    assert {k: generation[k] for k in ("eos_token_id", "top_k", "top_p")} == {
        k: expected[k] for k in ("eos_token_id", "top_k", "top_p")
    }


def test_stock_layout_gives_the_recorded_logits_in_plain_qwen2(stock_hf):
    model, report = Qwen2ForCausalLM.from_pretrained(stock_hf, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    with torch.inference_mode():
        logits = model.eval()(input_ids=CASE["hf_input_ids"].long()).logits
    torch.testing.assert_close(logits, CASE["hf_logits_nobias"], rtol=0, atol=1e-5)


def test_stock_layout_reads_back_as_in_the_original_recipe(stock_hf, tmp_path):
    shutil.copytree(stock_hf, tmp_path / "hf")
    (tmp_path / "hf" / "pretrained_extra.pt").unlink()
    assert_same(back(tmp_path / "hf", tmp_path / "llm.pt"), load_file(GOLDEN / "llm_tiny_back_fp32.safetensors"))


def test_the_original_recipes_checkpoint_is_read(golden_hf, tmp_path):
    """Its file holds a bias that its own way back drops: here it is kept."""
    shutil.copy(GOLDEN / "llm_tiny_hf_fp32.safetensors", tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "llm_tiny_hf" / "config_fp32.json", tmp_path / "config.json")
    AutoTokenizer.from_pretrained(golden_hf).save_pretrained(tmp_path)
    got = back(tmp_path, tmp_path / "llm.pt", text_rows=384)
    assert_same(got, load_file(GOLDEN / "llm_tiny_back_fp32.safetensors"), but=["llm_decoder.bias"])
    assert torch.equal(got["llm_decoder.bias"], ORIGINAL["llm_decoder.bias"])


def test_what_a_stock_head_loses(golden_folder, stock_hf):
    loss = stock_head_loss(golden_folder / "llm.pt", stock_hf, n_speech_tokens=5, progress=False)
    assert loss.positions == 15
    # By plain Qwen2 on the recorded case the mass outside speech is of the same kind: 309 pieces at logit 0.
    recorded = 1 - CASE["hf_logits_nobias"].softmax(-1)[..., 276:479].sum(-1)
    assert float(recorded.min()) / 2 < loss.non_speech_mass < float(recorded.max()) * 1.2
    assert 0 < loss.argmax_changed <= 1


# ---- the tokenizer and the side files


def test_tokenizer_after_save_and_reload(golden_hf):
    tokenizer = AutoTokenizer.from_pretrained(golden_hf)
    layout = VocabLayout.from_tokenizer(tokenizer)
    recorded = RECORD["hf"]
    assert len(tokenizer) == recorded["tokenizer_len"]
    assert layout.first_speech_id == recorded["speech_start"]
    assert list(layout.end_ids) == recorded["eos"]
    assert (layout.sos_id, layout.task_id) == (recorded["sos"], recorded["task_id"])
    assert layout.padded_size == recorded["padded_vocab"]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<|s_3|>"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == RECORD["chat_template_render"]
    empty = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    assert tokenizer.apply_chat_template(empty, tokenize=False, add_generation_prompt=True) == "<|sos|>Hi<|task_id|>"


def test_text_is_tokenised_as_by_the_base(golden_folder, golden_hf):
    tokenizer = AutoTokenizer.from_pretrained(golden_hf)
    base = AutoTokenizer.from_pretrained(golden_folder / "CosyVoice-BlankEN")
    for text in ("Hi there", "你好，123 café", " two  spaces "):
        assert tokenizer(text).input_ids == base(text).input_ids
    assert tokenizer("Hi there").input_ids == CASE["text_ids"][0, :8].tolist()
    assert tokenizer("<|sos|>Hi<|task_id|>").input_ids == [479, 72, 105, 480]


def test_speech_pieces_survive_skip_special_tokens(golden_hf):
    tokenizer = AutoTokenizer.from_pretrained(golden_hf)
    ids = [276, 475, 476, 478]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|s_0|><|s_199|><|eos1|><|eos3|>"


def test_a_base_tokenizer_without_tokenizer_json(folder, golden_hf, tmp_path):
    """The published CosyVoice-BlankEN has vocab.json, merges.txt and tokenizer_config.json only."""
    for name in ("tokenizer.json", "added_tokens.json", "special_tokens_map.json"):
        (folder / "CosyVoice-BlankEN" / name).unlink()
    got = AutoTokenizer.from_pretrained(to_hf(folder, tmp_path / "hf"))
    expected = AutoTokenizer.from_pretrained(golden_hf)
    assert got.get_vocab() == expected.get_vocab()
    assert len(got) == 481


def test_generation_config(golden_hf):
    got = json.loads((golden_hf / "generation_config.json").read_text())
    expected = {"eos_token_id": [476, 477, 478], "temperature": 1.0, "top_p": 0.8, "top_k": 25}
    assert {key: got.get(key) for key in expected} == expected


def test_sidecar(golden_folder, golden_hf):
    import hashlib

    record = json.loads((golden_hf / "conversion.json").read_text())
    assert record["source"]["llm.pt"] == hashlib.sha256((golden_folder / "llm.pt").read_bytes()).hexdigest()
    assert (record["n_speech"], record["first_speech_id"], record["text_rows"]) == (200, 276, 384)
    assert record["versions"]["torch"] == torch.__version__


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llm_decoder.bias": None}, r"llm.pt: key 'llm_decoder.bias': found no such tensor \(1 missing\)"),
        ({"surplus": torch.zeros(1)}, r"key 'surplus': found a tensor \(1 left over\), expected none"),
        ({"llm_decoder.weight": torch.zeros(203, 31)}, r"'llm_decoder.weight': found shape \[203, 31\], expected"),
        (
            {"llm.model.model.layers.1.mlp.up_proj.weight": torch.zeros(65, 32)},
            r"layers.1.mlp.up_proj.weight': found shape \[65, 32\], expected \[64, 32\]",
        ),
        ({"llm_embedding.weight": None, "llm_decoder.bias": None}, "CosyVoice3"),
        ({"text_embedding.weight": torch.zeros(4, 4)}, "found the tensors of CosyVoice 1"),
        ({"speech_embedding.weight": None}, "'speech_embedding.weight': found no such tensor"),
    ],
)
def test_wrong_tensors_are_refused(folder, tmp_path, changes, message):
    change(folder / "llm.pt", **changes)
    with pytest.raises(CheckpointError, match=message):
        to_hf(folder, tmp_path / "out" / "hf")
    assert not (tmp_path / "out").exists()


def test_a_truncated_file_is_refused(folder, tmp_path):
    data = (folder / "llm.pt").read_bytes()
    (folder / "llm.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"llm.pt \(\d+ bytes\): cannot be read"):
        to_hf(folder, tmp_path / "hf")


def test_other_folders_are_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="llm.pt: no such file"):
        to_hf(tmp_path, tmp_path / "hf")
    (folder / "CosyVoice-BlankEN" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        to_hf(folder, tmp_path / "hf")


def test_a_tokenizer_that_already_speaks_is_refused(folder, golden_hf, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(golden_hf / name, folder / "CosyVoice-BlankEN" / name)
    with pytest.raises(CheckpointError, match=r"found '<\|s_0\|>' already"):
        to_hf(folder, tmp_path / "hf")


def test_a_full_disk_is_refused_before_anything_is_written(folder, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="GB free, expected at least"):
        to_hf(folder, tmp_path / "out" / "hf")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failure_while_writing_leaves_nothing(folder, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(to_huggingface, "_generation_config", fail)
    with pytest.raises(OSError, match="No space"):
        to_hf(folder, tmp_path / "out" / "hf")
    assert list((tmp_path / "out").iterdir()) == []


def test_existing_output_is_not_overwritten(golden_folder, hf, tmp_path):
    with pytest.raises(CheckpointError, match="not empty, expected a new folder"):
        to_hf(golden_folder, hf)
    target = tmp_path / "llm.pt"
    target.write_text("precious")
    with pytest.raises(CheckpointError, match="--force"):
        back(hf, target)
    assert target.read_text() == "precious"
    assert_same(back(hf, target, force=True), ORIGINAL)


def save(hf, **changes):
    tensors = load_file(hf / "model.safetensors") | changes
    tensors = {name: value for name, value in tensors.items() if value is not None}
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.bias": None}, "'lm_head.bias': found no such tensor"),
        ({"lm_head.weight": torch.zeros(512, 32)}, r"'lm_head.weight': found shape \[512, 32\], expected \[203, 32\]"),
        ({"value_head.weight": torch.zeros(1)}, "'value_head.weight': found a tensor"),
    ],
)
def test_wrong_hf_tensors_are_refused(hf, tmp_path, changes, message):
    save(hf, **changes)
    with pytest.raises(CheckpointError, match=message):
        back(hf, tmp_path / "out" / "llm.pt")
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_and_a_truncated_file_are_refused(hf, tmp_path):
    whole = (hf / "model.safetensors").read_bytes()
    (hf / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        back(hf, tmp_path / "llm.pt")
    (hf / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="found no model.safetensors and no index"):
        back(hf, tmp_path / "llm.pt")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors: no such file, expected a shard"):
        back(hf, tmp_path / "llm.pt")


def test_a_tokenizer_without_speech_is_refused(hf, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tiny_tokenizer" / name, hf / name)
    with pytest.raises(CheckpointError, match=r"found no piece '<\|s_0\|>'"):
        back(hf, tmp_path / "llm.pt")


def test_what_was_written_is_compared_with_its_source(hf, tmp_path, monkeypatch):
    """A way back that loses the bias, as the original recipe's does, is caught and its file removed."""
    honest = to_pretrained._to_pretrained

    def forgetful(*args):
        result = honest(*args)
        result["llm_decoder.bias"] = torch.zeros_like(result["llm_decoder.bias"])
        return result

    monkeypatch.setattr(to_pretrained, "_to_pretrained", forgetful)
    with pytest.raises(CheckpointError, match=r"found logits that differ by \d"):
        back(hf, tmp_path / "out" / "llm.pt")
    assert list((tmp_path / "out").iterdir()) == []


# ---- the command lines


def test_command_lines(golden_folder, tmp_path, monkeypatch, capsys):
    hf, pt = tmp_path / "hf", tmp_path / "llm.pt"
    arguments = ["x", "--pretrained-cosyvoice2-path", str(golden_folder), "--save-path", str(hf)]
    monkeypatch.setattr("sys.argv", [*arguments, "--dtype", "float32", "--head", "qwen2"])
    assert pretrained_to_huggingface.main() == 0
    assert "a stock head loses" in capsys.readouterr().out
    assert pretrained_to_huggingface.main() == 1
    assert "expected a new folder" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["x", "--hf-cosyvoice2-llm-path", str(hf), "--output-path", str(pt)])
    assert huggingface_to_pretrained.main() == 0
    assert f"{len(ORIGINAL)} tensors" in capsys.readouterr().out
    assert huggingface_to_pretrained.main() == 1
    assert "--force" in capsys.readouterr().err


def test_the_masked_constant_fits_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.tensor(MASKED_LOGIT, dtype=dtype).isfinite()
