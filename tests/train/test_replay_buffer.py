"""The sampler's guards and metrics, with a stand-in for the TransferQueue (the real one: test_training_run.py)."""

import json
import shutil
import types

import pytest
from transfer_queue import KVBatchMeta

from cosyvoice.training import replay_buffer
from cosyvoice.training.reward_manager import FAILURES


class Queue:
    """partition -> key -> tag, and the rows' extra fields."""

    def __init__(self):
        self.tags, self.rows = {"train": {}, FAILURES: {}}, {}

    def add_group(self, uid, scores, status="finished", **extra):
        self.tags["train"][uid] = {"is_prompt": True, "status": status, "global_steps": 1}
        for i, score in enumerate(scores):
            key = f"{uid}_{i}_0"
            self.tags["train"][key] = {"status": "success", "global_steps": 1}
            row = {"score": score, "wer": 1 - score, "status": "ok", **extra}
            self.rows[key] = {"reward_extra_info": row}

    def kv_list(self, partition_id=None):
        return {partition: dict(tags) for partition, tags in self.tags.items()}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.tags[partition_id].pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields):
        return {"extra_fields": [self.rows[key] for key in keys]}

    def kv_batch_put(self, keys, partition_id, fields):
        self.put = dict(zip(keys, fields["uid"]))


@pytest.fixture
def queue(monkeypatch):
    import verl.trainer.ppo.v1.replay_buffer as upstream

    queue = Queue()
    monkeypatch.setattr(replay_buffer, "tq", queue)
    monkeypatch.setattr(upstream, "tq", queue)
    return queue


def buffer(tmp_path, **settings):
    settings = {
        "metrics_file": str(tmp_path / "metrics.jsonl"),
        "checkpoints": str(tmp_path),
        "train_batch_size": 2,
        "poll_s": 0.01,
        **settings,
    }
    return replay_buffer.SpeechReplayBuffer(
        settings, trainer_mode="sync", trainer_config={}, max_off_policy_threshold=8,
        max_off_policy_strategy="drop", refill_fn=lambda n: None,
    )  # fmt: skip


def failure(fatal=False, message="compute_score(urls=http://a:8000): ConnectionError: refused"):
    return {"status": "server_error", "step": 1, "message": message, "fatal": fatal, "failures_in_a_row": 3,
            "silent_for_s": 61.0}  # fmt: skip


def test_a_step_is_described_and_written(queue, tmp_path):
    queue.add_group("a", [1.0, 0.0])
    queue.add_group("b", [0.5, 0.5, 0.5], status="failure")
    queue.tags[FAILURES]["x"] = failure()
    queue.tags[FAILURES]["y"] = {}  # the queue shows a key before it has its tag
    batch, metrics = buffer(tmp_path).sample(5, "train", 2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "b_2_0"]
    assert metrics["reward/score/mean"] == pytest.approx(0.5)
    assert metrics["reward/zero_variance_share"] == 0.5
    assert metrics["reward/failed/server_error"] == 1
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["step"] == 5
    assert line["reward/n"] == 5
    assert queue.tags[FAILURES] == {"y": {}}  # x is counted once, y when its tag is there


def test_a_group_of_one_is_not_trained_on(queue, tmp_path):
    queue.add_group("a", [1.0, 0.0])
    queue.add_group("b", [0.7], status="failure")
    batch, metrics = buffer(tmp_path).sample(1, "train", 2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0"]
    assert len(batch.tags) == 2
    assert metrics["reward/small_groups_dropped"] == 1
    assert metrics["reward/n"] == 2
    assert "b_0_0" not in queue.tags["train"]


def test_a_server_that_is_gone_ends_the_run_with_its_name(queue, tmp_path):
    queue.add_group("a", [1.0, 0.0])
    queue.tags["train"]["b"] = {"is_prompt": True, "status": "running", "global_steps": 1}
    queue.tags[FAILURES]["x"] = failure(fatal=True)
    with pytest.raises(replay_buffer.RewardServerLost, match="http://a:8000.*refused.*61 s"):
        buffer(tmp_path).sample(1, "train", 2)


def test_a_step_of_nothing_but_failures_says_why(queue, tmp_path):
    for uid in ("a", "b"):
        queue.add_group(uid, [], status="failure")
    queue.tags[FAILURES]["x"] = failure(message="compute_score(): KeyError: 'text'")
    with pytest.raises(replay_buffer.RewardServerLost, match="KeyError: 'text'"):
        buffer(tmp_path).sample(1, "train", 2)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_dynamic_sampling_judges_the_outcome_and_not_the_score(queue, tmp_path):
    """A group with one error rate gives no signal, whatever shaping does to its scores (DAPO)."""
    queue.add_group("a", [1.0, 0.0])
    queue.add_group("b", [0.2, 0.9], wer=0.5)
    refilled = []

    def refill(n):
        refilled.append(n)
        queue.add_group("c", [0.1, 0.2])

    one = buffer(tmp_path, filter_groups={"enable": True, "metric": "wer", "max_inflight_gen_batches": 1})
    one.refill_fn = refill
    batch, metrics = one.sample(1, "train", 2)
    assert sorted({key.split("_")[0] for key in batch.keys}) == ["a", "c"]
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert refilled


def test_validation_passes_through(queue, tmp_path):
    queue.tags["val"] = {"v": {"is_prompt": True, "status": "finished", "global_steps": 1},
                         "v_0_0": {"status": "success", "global_steps": 1}}  # fmt: skip
    batch, metrics = buffer(tmp_path).sample(1, "val", 1)
    assert batch == KVBatchMeta(partition_id="val", keys=["v_0_0"], tags=[queue.tags["val"]["v_0_0"]])
    assert metrics == {}
    assert not (tmp_path / "metrics.jsonl").exists()


def test_several_rewards_are_staged_under_the_rows_key(queue, tmp_path):
    queue.add_group("a", [1.0, 0.0], pause=0.25)
    one = buffer(tmp_path, reward_keys=["score", "pause"])
    one.sample(1, "train", 1)
    assert replay_buffer.advantages._staged == {"a_0_0": [1.0, 0.25], "a_1_0": [0.0, 0.25]}
    assert queue.put == {"a_0_0": "a_0_0", "a_1_0": "a_1_0"}


def test_no_step_is_begun_that_could_not_be_saved(queue, tmp_path, monkeypatch):
    (tmp_path / "global_step_9").mkdir()
    (tmp_path / "global_step_9/model.pt").write_bytes(b"x" * 1000)
    (tmp_path / "global_step_10").mkdir()
    (tmp_path / "global_step_10/model.pt").write_bytes(b"x" * 2000)
    one = buffer(tmp_path, save_freq=5)
    monkeypatch.setattr(replay_buffer.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1999))
    queue.add_group("a", [1.0, 0.0])
    with pytest.raises(replay_buffer.DiskFull, match="checkpoint of step 15 .* goes on from global_step_10"):
        one.sample(15, "train", 1)
    one.sample(14, "train", 1)  # does not save
    shutil.rmtree(tmp_path / "global_step_10")
    queue.add_group("a", [1.0, 0.0])
    one.sample(15, "train", 1)  # 1000 bytes are enough
