"""Stage 0: veRL's rows, refusals with their place, nothing half written, and veRL's own loader."""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cosyvoice.data_prep import BATCH_ROWS

ROOT = Path(__file__).parents[2]


def load(script):
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PREPARE, SPLIT = load("prepare_data.py"), load("scripts/split_jsonl.py")


@dataclass
class Done:
    returncode: int
    stderr: str


def run(module, *args):
    """The script's main() on its arguments; what it logs is its stderr."""
    words = io.StringIO()
    handler = logging.StreamHandler(words)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    try:
        with contextlib.redirect_stderr(words):
            status = module.main([str(arg) for arg in args])
    except SystemExit as stop:  # sys.exit("sentence") prints it and gives status 1
        status = 1
        words.write(str(stop.code))
    finally:
        logging.getLogger().removeHandler(handler)
    return Done(status, words.getvalue())


def prepare(folder, train, test, *options):
    """Writes both inputs (bytes, or a list of JSON values) and runs prepare_data.py on them."""
    paths = []
    for name, content in (("train.jsonl", train), ("test.jsonl", test)):
        if isinstance(content, list):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content).encode()
        (folder / name).write_bytes(content)
        paths.append(folder / name)
    inputs = ("--train_file", paths[0], "--test_file", paths[1])
    return run(PREPARE, *inputs, "--local_dir", folder / "out", *options)


def test_rows_are_those_of_the_original_recipe(tmp_path):
    done = prepare(
        tmp_path, [{"text": "今天天气很好。", "speaker": 3}, {"text": " Hello wifi 世界"}], [{"text": "你好"}]
    )
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    source = f"{tmp_path}/train.jsonl_{tmp_path}/test.jsonl"
    assert rows == [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": text}, {"role": "assistant", "content": ""}],
            "ability": "text-to-speech",
            "reward_model": {"style": "rule", "ground_truth": text},
            "extra_info": {"split": "train", "index": index, "text": text},
        }
        for index, text in enumerate(["今天天气很好。", " Hello wifi 世界"])
    ]
    (test_row,) = pq.read_table(tmp_path / "out/test.parquet").to_pylist()
    assert test_row["extra_info"] == {"split": "test", "index": 0, "text": "你好"}


def test_json_array_gives_the_same_rows_as_jsonl(tmp_path):
    rows = [{"text": f"第{i}句"} for i in range(5)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    options = ("--data_source", "x")
    assert prepare(tmp_path / "a", rows, rows[:1], *options).returncode == 0
    array = b"\xef\xbb\xbf \n" + json.dumps(rows, ensure_ascii=False, indent=1).encode()
    assert prepare(tmp_path / "b", array, rows[:1], *options).returncode == 0
    assert (tmp_path / "a/out/train.parquet").read_bytes() == (tmp_path / "b/out/train.parquet").read_bytes()


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b'{"txt": "a"}', "no text", "no key \"text\", found ['txt']"),
        (b'["a"]', "no object", "found list"),
        (b'{"text": 5}', "not a string", "is int"),
        (b'{"text": null}', "not a string", "is NoneType"),
        ('{"text": " \u3000\\n"}'.encode(), "empty", "is empty"),
        (b'{"text": "a<|sos|>b"}', "control tokens", "<|sos|>"),
        (b'{"text": "<|task_id|>"}', "control tokens", "<|task_id|>"),
        ('{"text": "你好<|s_12|>"}'.encode(), "control tokens", "<|s_12|>"),
        (b'{"text": "<|eos1|>"}', "control tokens", "<|eos1|>"),
        (b'{"text": "\\ud83d"}', "broken UTF-8", "surrogate"),
        (b'{"text": "\xff"}', "broken UTF-8", "byte 11 of the line is not UTF-8"),
        (b'{"text": "a"', "broken JSON", "not JSON"),
        (b'{"text": "123456789"}', "too long", "has 9 characters, expected at most 8"),
    ],
)
def test_bad_row_is_refused_with_its_place_or_left_out_and_counted(tmp_path, line, reason, words):
    train = b'{"text": "12345678"}\n\n' + line + b'\n{"text": "good"}\n'
    test = [{"text": "other"}]
    done = prepare(tmp_path, train, test, "--max_chars", 8)
    assert done.returncode == 1
    assert f"{tmp_path}/train.jsonl:3: " in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []  # neither results nor half of one

    done = prepare(tmp_path, train, test, "--max_chars", 8, "--on_bad_row", "skip")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["train"]["refused"] == {reason: 1}
    assert manifest["train"]["rows"] == 2
    texts = [row["extra_info"] for row in pq.read_table(tmp_path / "out/train.parquet").to_pylist()]
    assert texts == [
        {"split": "train", "index": 0, "text": "12345678"},
        {"split": "train", "index": 1, "text": "good"},
    ]


@pytest.mark.parametrize("content", [b"", b"\n \n", b'[{"text": "a"}, {"text": ', b"[]"])
def test_file_without_a_usable_row_is_an_error(tmp_path, content):
    done = prepare(tmp_path, content, [{"text": "a"}], "--on_bad_row", "skip")
    assert done.returncode == 1
    assert f"{tmp_path}/train.jsonl: " in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failure_leaves_earlier_results_as_they_were(tmp_path):
    assert prepare(tmp_path, [{"text": "a"}], [{"text": "b"}]).returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(before) == {"train.parquet", "test.parquet", "manifest.json"}
    assert prepare(tmp_path, [{"text": "c"}, {"text": ""}], [{"text": "b"}]).returncode == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_manifest_states_hashes_options_and_texts_in_both_files(tmp_path):
    done = prepare(
        tmp_path,
        [{"text": "一"}, {"text": "二"}, {"text": "一"}],
        [{"text": "一"}, {"text": "三"}],
        "--data_source",
        "mine",
    )
    assert done.returncode == 0
    assert "2 training rows have a text that is also a test text" in done.stderr
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["train_rows_with_a_test_text"] == 2
    assert manifest["options"] == {"data_source": "mine", "max_chars": 300, "on_bad_row": "error"}
    for split, rows in (("train", 3), ("test", 2)):
        part = manifest[split]
        assert part["rows"] == rows
        assert part["input_sha256"] == hashlib.sha256((tmp_path / f"{split}.jsonl").read_bytes()).hexdigest()
        assert part["output_sha256"] == hashlib.sha256((tmp_path / f"out/{split}.parquet").read_bytes()).hexdigest()


def test_missing_file_is_one_sentence(tmp_path):
    done = run(PREPARE, "--train_file", "none.jsonl", "--test_file", "no.jsonl", "--local_dir", tmp_path)
    assert done.returncode == 1
    assert "no.jsonl: no such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_results_are_copied_to_any_fsspec_url(tmp_path):
    url = f"file://{tmp_path}/remote/data"
    assert prepare(tmp_path, [{"text": "a"}], [{"text": "b"}], "--hdfs_dir", url).returncode == 0
    local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "remote/data").iterdir()} == local
    assert len(local) == 3


@pytest.mark.slow  # importing veRL takes most of it
def test_aishell3_sized_file_in_batches_loads_with_verl(tmp_path):
    """88,035 rows, the size of AISHELL-3's metadata, through veRL's own data set class."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    n = 88_035
    train = "".join(f'{{"index": "SSB{i:08d}", "text": "第{i}句话说得很清楚"}}\n' for i in range(n)).encode()
    assert prepare(tmp_path, train, [{"text": "你好"}], "--data_source", "aishell-3").returncode == 0
    table = pq.ParquetFile(tmp_path / "out/train.parquet")
    assert table.metadata.num_rows == n
    assert table.metadata.num_row_groups == -(-n // BATCH_ROWS)  # written as it was read, not at once

    config = OmegaConf.create({"cache_dir": str(tmp_path / "cache"), "filter_overlong_prompts": False})
    dataset = RLHFDataset(str(tmp_path / "out/train.parquet"), tokenizer=None, config=config)
    assert len(dataset) == n
    row = dataset[n - 1]
    assert row["raw_prompt"] == [
        {"role": "user", "content": f"第{n - 1}句话说得很清楚"},
        {"role": "assistant", "content": ""},
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": f"第{n - 1}句话说得很清楚"}
    assert row["index"] == n - 1
    assert row["data_source"] == "aishell-3"


def split(tmp_path, *options):
    lines = [json.dumps({"text": f"句{i}"}, ensure_ascii=False) for i in range(10)]
    # a blank line within, no newline at the end
    (tmp_path / "all.jsonl").write_text("\n".join(lines[:5]) + "\n\n" + "\n".join(lines[5:]))
    done = run(
        SPLIT, "--input", tmp_path / "all.jsonl", "--train-file", tmp_path / "a/train.jsonl",
        "--test-file", tmp_path / "a/test.jsonl", *options,
    )  # fmt: skip
    if done.returncode:
        return done, None, None
    texts = [
        [json.loads(line)["text"] for line in (tmp_path / f"a/{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    ]
    return done, *texts


def test_split_takes_the_first_and_the_last_lines(tmp_path):
    _, train, test = split(tmp_path, "--n-train", 7, "--n-test", 2)
    assert train == [f"句{i}" for i in range(7)]
    assert test == ["句8", "句9"]


def test_split_shuffles_by_seed(tmp_path):
    _, train, test = split(tmp_path, "--n-train", 8, "--n-test", 2, "--shuffle-seed", 1)
    assert sorted(train + test) == [f"句{i}" for i in range(10)]
    assert train + test != [f"句{i}" for i in range(10)]
    assert split(tmp_path, "--n-train", 8, "--n-test", 2, "--shuffle-seed", 1)[1:] == (train, test)
    assert split(tmp_path, "--n-train", 8, "--n-test", 2, "--shuffle-seed", 2)[1:] != (train, test)


def test_split_refuses_more_lines_than_there_are(tmp_path):
    done, _, _ = split(tmp_path, "--n-train", 9, "--n-test", 2)
    assert done.returncode == 1
    assert "has 10 lines" in done.stderr
    assert not (tmp_path / "a").exists()
