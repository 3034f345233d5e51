"""The sampler that veRL's trainer draws its training batches from, with an eye on the rewards.

veRL lets the trainer's replay buffer be replaced (``trainer.v1.sampler.custom_sampler``) and merges the
metrics that it returns into the step's log. That is the one place that sees every rollout of a step with
everything the reward manager said about it, in the trainer's process, before the update. So here

- the step's reward metrics are made, and written to a JSONL beside the checkpoints;
- rollouts that the system could not score are counted, and the run ends when the reward server is gone;
- groups that failures left with too few rollouts are dropped: veRL's GRPO would take the raw score of a
  lone rollout for its advantage;
- with several rewards (``algorithm.adv_estimator=multi_reward_grpo``) their values are handed to the
  estimator;
- a checkpoint that would not fit on the disk ends the run before it is half written.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from cosyvoice.training import advantages
from cosyvoice.training.reward_manager import FAILURES
from cosyvoice.training.step_metrics import MetricsFile, summarise


class RewardServerLost(RuntimeError):
    """The reward cannot be computed any more; the message names the server and its last error."""


class DiskFull(RuntimeError):
    """The next checkpoint does not fit on the disk."""


class SpeechReplayBuffer(ReplayBuffer):
    """Synchronous sampling as veRL does it, with reward metrics and guards.

    Its settings stand under ``trainer.v1.sampler.sampler_kwargs``:
        metrics_file: JSONL to append to.
        poll_s: how often finished rollouts are looked for (veRL: 2 s, which is most of a tiny step).
        min_group: a group with fewer scored rollouts is not trained on.
        filter_groups: ``algorithm.filter_groups``; veRL does not hand it to a sampler of one's own.
        train_batch_size: prompts per step.
        refill_failed_groups: ``trainer.v1.sampler.sync_refill_failed_groups``.
        checkpoints, save_freq: where and how often the trainer saves.
        reward_keys: components for ``multi_reward_grpo``; empty for a single reward.
    """

    def __init__(self, sampler_kwargs: Mapping[str, Any], **kwargs: Any) -> None:
        settings = dict(sampler_kwargs)
        filtering = settings.get("filter_groups") or {}
        enabled = bool(filtering.get("enable", False))
        super().__init__(
            sampler_kwargs=sampler_kwargs,
            poll_interval=float(settings.get("poll_s", 0.5)),
            filter_groups_metric=str(filtering["metric"]) if enabled else None,
            train_batch_size=int(settings["train_batch_size"]),
            gen_batch_size=1,
            max_inflight_gen_batches=int(filtering.get("max_inflight_gen_batches", 1)),
            sync_refill_failed_groups=bool(settings.get("refill_failed_groups", False)),
            **kwargs,
        )
        self.metrics_file = MetricsFile(settings["metrics_file"])
        self.min_group = int(settings.get("min_group", 2))
        self.reward_keys = list(settings.get("reward_keys") or [])
        self.checkpoints = Path(settings["checkpoints"])
        self.save_freq = int(settings.get("save_freq", -1))

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Wait for ``batch_size`` groups, check and describe them. See `ReplayBuffer.sample`."""
        started = time.time()
        if partition_id == "train":
            self._check_disk(global_steps)
        try:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
        except RuntimeError as error:
            self._raise_if_lost(any_failure=True, cause=error)
            raise
        failures = self._take_failures()
        if partition_id != "train":
            return batch, metrics

        batch, small = self._drop_small_groups(batch)
        samples = self._reward_info(batch)
        groups = [key.split("_")[0] for key in batch.keys]
        step_metrics = summarise(samples, groups, failures, started)
        step_metrics["reward/small_groups_dropped"] = float(small)
        self.metrics_file.append(global_steps, time.time(), step_metrics)
        if self.reward_keys:
            self._stage_components(batch, samples)
        return batch, {**metrics, **step_metrics}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self._raise_if_lost()
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _raise_if_lost(self, any_failure: bool = False, cause: BaseException | None = None) -> None:
        """End the run if a reward worker has given up (or, with ``any_failure``, if all rollouts failed)."""
        fatal = [failure for failure in self._reported().values() if failure["fatal"] or any_failure]
        if fatal:
            last = fatal[-1]
            raise RewardServerLost(
                f"the reward cannot be computed: {last['message']} "
                f"({last['status']}; {last['failures_in_a_row']} rollouts failed in a row, "
                f"no score for {last['silent_for_s']:g} s). Nothing of this step was trained on; "
                "once the server answers, the same command goes on from the last checkpoint."
            ) from cause

    def _reported(self) -> dict[str, dict[str, Any]]:
        """Failures in the last snapshot. The queue shows a key before it has its tag: such a one comes later."""
        return {key: tag for key, tag in self.partitions[FAILURES].items() if "fatal" in tag}

    def _take_failures(self) -> list[dict[str, Any]]:
        """The failures reported since the last step; they are removed from the queue."""
        self._sync_metadata_from_transfer_queue()
        failures = self._reported()
        if failures:
            tq.kv_clear(keys=list(failures), partition_id=FAILURES)
        return list(failures.values())

    def _drop_small_groups(self, batch: KVBatchMeta) -> tuple[KVBatchMeta, int]:
        sizes = Counter(key.split("_")[0] for key in batch.keys)
        small = {uid for uid, size in sizes.items() if size < self.min_group}
        if not small:
            return batch, 0
        keep = [i for i, key in enumerate(batch.keys) if key.split("_")[0] not in small]
        if not keep:
            self._raise_if_lost(any_failure=True)
            raise RuntimeError(f"no group of this step has {self.min_group} scored rollouts")
        dropped = [key for key in batch.keys if key.split("_")[0] in small]
        tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
        kept = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=[batch.keys[i] for i in keep],
            tags=[batch.tags[i] for i in keep],
        )
        return kept, len(small)

    @staticmethod
    def _reward_info(batch: KVBatchMeta) -> list[dict[str, Any]]:
        """What the reward manager returned for each row of the batch."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        rows = [getattr(fields, "data", fields) for fields in data["extra_fields"]]
        return [dict(fields.get("reward_extra_info", {})) for fields in rows]

    def _stage_components(self, batch: KVBatchMeta, samples: list[dict[str, Any]]) -> None:
        """Give the estimator each row's rewards.

        veRL passes an estimator nothing of a row but its ``uid`` and its total score, in an order of its own.
        So the rows' ``uid`` becomes their unique key, which begins with the group's.
        """
        advantages.stage(
            {key: advantages.pick(sample, self.reward_keys, key) for key, sample in zip(batch.keys, samples)}
        )
        fields = TensorDict({"uid": NonTensorStack(*batch.keys)}, batch_size=len(batch.keys))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _check_disk(self, step: int) -> None:
        """Before a step that will save: is there room for one more checkpoint like the newest?"""
        if self.save_freq <= 0 or step % self.save_freq or not self.checkpoints.is_dir():
            return
        earlier = sorted(self.checkpoints.glob("global_step_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
        if not earlier:
            return
        needed = sum(file.stat().st_size for file in earlier[-1].rglob("*") if file.is_file())
        free = shutil.disk_usage(self.checkpoints).free
        if free < needed:
            raise DiskFull(
                f"{self.checkpoints}: the checkpoint of step {step} needs {needed / 2**30:.2f} GiB, found "
                f"{free / 2**30:.2f} GiB free; make room (older global_step_* folders, for instance) and "
                f"start the same command again: it goes on from {earlier[-1].name}"
            )
