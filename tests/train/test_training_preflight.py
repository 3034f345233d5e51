"""Checkpoint folders that are whole or not, and what is refused before veRL is started."""

import json
import logging
import re
import shutil

import pytest
import torch

from cosyvoice.training import checkpoints, preflight


def write_checkpoint(folder, step, world=1):
    """A folder with veRL's file names; the contents do not matter here but for being archives of torch."""
    path = folder / f"global_step_{step}"
    (path / "actor/huggingface").mkdir(parents=True)
    for part in ("model", "optim", "extra_state"):
        for rank in range(world):
            torch.save({"x": torch.zeros(100)}, path / f"actor/{part}_world_size_{world}_rank_{rank}.pt")
    torch.save({"x": 1}, path / "data.pt")
    for name in ("config.json", "tokenizer_config.json"):
        (path / "actor/huggingface" / name).write_text("{}")
    (folder / checkpoints.TRACKER).write_text(str(step))
    return path


@pytest.fixture
def run(tmp_path):
    """Overrides of a run that can be started."""
    (tmp_path / "train.parquet").write_bytes(b"rows")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "cosyvoice2"}')
    (tmp_path / "hf/model.safetensors").write_bytes(b"weights")
    return [
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"actor_rollout_ref.model.path={tmp_path / 'hf'}",
        f"trainer.default_local_dir={tmp_path / 'train'}",
        "trainer.n_gpus_per_node=1",
        "trainer.save_freq=10",
    ]


def test_a_complete_checkpoint_has_no_fault(tmp_path):
    assert checkpoints.fault(write_checkpoint(tmp_path, 5, world=2)) is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: shutil.rmtree(c / "actor"), "no model_world_size"),
        (lambda c: (c / "actor/model_world_size_2_rank_1.pt").unlink(), "model_world_size_2_rank_1.pt: no such file"),
        (lambda c: (c / "actor/optim_world_size_2_rank_0.pt").write_bytes(b""), r"rank_0.pt \(0 bytes\): cut short"),
        (lambda c: (c / "data.pt").unlink(), "data.pt: no such file"),
        (lambda c: (c / "actor/huggingface/config.json").unlink(), "config.json: no such file"),
    ],
)
def test_a_damaged_one_says_what_is_missing(tmp_path, damage, words):
    checkpoint = write_checkpoint(tmp_path, 5, world=2)
    damage(checkpoint)
    assert re.search(words, checkpoints.fault(checkpoint))


def test_a_file_cut_anywhere_is_noticed(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 5)
    shard = checkpoint / "actor/model_world_size_1_rank_0.pt"
    whole = shard.read_bytes()
    for keep in (1, len(whole) // 2, len(whole) - 30):
        shard.write_bytes(whole[:keep])
        assert "cut short" in checkpoints.fault(checkpoint)


def test_the_newest_complete_checkpoint_is_chosen(tmp_path, caplog):
    write_checkpoint(tmp_path, 9)
    write_checkpoint(tmp_path, 10)
    broken = write_checkpoint(tmp_path, 11)
    (broken / "data.pt").unlink()
    with caplog.at_level(logging.WARNING):
        chosen = checkpoints.point_to_latest_complete(tmp_path)
    assert chosen.name == "global_step_10"  # by number: "9" sorts behind "10" as text
    assert (tmp_path / checkpoints.TRACKER).read_text() == "10"
    assert "global_step_11 is not complete" in caplog.text
    assert broken.exists()  # nothing is deleted


def test_without_a_complete_one_the_run_starts_from_scratch(tmp_path, caplog):
    broken = write_checkpoint(tmp_path, 3)
    (broken / "data.pt").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.point_to_latest_complete(tmp_path) is None
    assert not (tmp_path / checkpoints.TRACKER).exists()  # veRL would follow it
    assert "moved aside" in caplog.text


def test_fingerprint_of_a_new_run_and_refusals(run, tmp_path):
    assert preflight.check(run) is None
    note = json.loads((tmp_path / "train/run.json").read_text())["fingerprint"]
    # sha256 of b"rows" and b"weights", from coreutils' sha256sum
    assert note["data/train.parquet"] == "bc51e9e65d79e1c90ba544ab2eae1044ccdf8c1af7a559ba375cba4276f7d99e"
    assert note["model/model.safetensors"] == "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    assert set(note) == {"data/train.parquet", "model/config.json", "model/model.safetensors"}
    # Without a checkpoint there is nothing that could be mixed up.
    (tmp_path / "train.parquet").write_bytes(b"other rows")
    assert preflight.check(run) is None
    checkpoint = write_checkpoint(tmp_path / "train", 10)
    assert preflight.check(run) == checkpoint

    (tmp_path / "train.parquet").write_bytes(b"rows again")
    with pytest.raises(preflight.PreflightError, match="data/train.parquet: the run began with"):
        preflight.check(run)
    (tmp_path / "train.parquet").write_bytes(b"other rows")
    (tmp_path / "hf/model.safetensors").write_bytes(b"other weights")
    with pytest.raises(preflight.PreflightError, match="model/model.safetensors"):
        preflight.check(run)


def test_another_number_of_processes_is_refused(run, tmp_path):
    preflight.check(run)
    write_checkpoint(tmp_path / "train", 10, world=2)
    with pytest.raises(preflight.PreflightError, match="written by 2 training processes, found 1"):
        preflight.check(run)
    assert preflight.check([*run, "trainer.nnodes=2"]).name == "global_step_10"
    with pytest.raises(preflight.PreflightError, match="would overwrite"):
        preflight.check([*run, "trainer.resume_mode=disable"])


def test_a_full_disk_is_a_sentence(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(preflight.PreflightError, match=r"a checkpoint needs about .* found 0.00 GiB free"):
        preflight.check(run)
    assert preflight.check([*run, "trainer.save_freq=-1"]) is None


def test_missing_inputs_are_named(run, tmp_path):
    (tmp_path / "hf/model.safetensors").unlink()
    with pytest.raises(preflight.PreflightError, match=r"hf: no \*.safetensors"):
        preflight.check(run)
    (tmp_path / "train.parquet").unlink()
    with pytest.raises(preflight.PreflightError, match="train.parquet: no such file"):
        preflight.check(run)
    with pytest.raises(preflight.PreflightError, match="data.train_files: not among the overrides"):
        preflight.check(run[1:])


def test_overrides_are_read_as_hydra_does():
    words = ["a.b=1", "+a.b=2", "++c='x=y'", "data.train_files=[/a b/1.parquet, '/c/2.parquet']", "flag"]
    values = preflight.parse_overrides(words)
    assert values["a.b"] == "2"
    assert values["c"] == "x=y"
    assert [str(path) for path in preflight.as_paths(values["data.train_files"])] == ["/a b/1.parquet", "/c/2.parquet"]


def test_fused_kernels_would_drop_the_heads_bias(run):
    with pytest.raises(preflight.PreflightError, match=r"use_fused_kernels: found True, expected False"):
        preflight.check([*run, "actor_rollout_ref.model.use_fused_kernels=True"])
    assert preflight.check([*run, "actor_rollout_ref.model.use_fused_kernels=False"]) is None
