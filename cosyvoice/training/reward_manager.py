"""The reward manager ``prime`` for veRL's reward loop.

veRL calls `PrimeRewardManager.run_single` for each rollout as soon as it ends, so scoring overlaps
generation. The manager bounds the calls in flight, gives each a time-out, waits for a server that is away,
and keeps apart what the *model* did wrong (it has a score) from what the *system* did wrong (it has none):
a rollout that cannot be scored raises, which makes veRL leave it out of its group, and is reported through
the TransferQueue partition `FAILURES`, where the replay buffer counts it and ends the run if the server is
gone for good (see `cosyvoice.training.replay_buffer`).

Chosen with ``reward.reward_manager.source=importlib``,
``.module.path=pkg://cosyvoice.training.reward_manager`` and ``.name=PrimeRewardManager``; the settings of
`Settings` are set as ``+reward.prime.<field>=<value>``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import transfer_queue as tq
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

logger = logging.getLogger(__name__)

FAILURES = "reward_failures"
"""TransferQueue partition; one tag for each rollout that could not be scored."""

SYSTEM_STATUSES = ("timeout", "server_error", "bad_reference", "bad_request")
WORTH_WAITING_FOR = ("timeout", "server_error")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be set under ``reward.prime``. Times in seconds, lengths in tokens.

    Attributes:
        max_in_flight: calls of the reward function that run at once in one reward worker.
        timeout_s: for one call; a call that takes longer is given up and tried again.
        patience_s: how long one rollout waits for a server that is away before it is left out.
        retry_s: pause before a call is tried again.
        max_failures: after so many failed rollouts in a row (none scored in between) the run ends.
        overlong_share: DAPO's soft length limit: a response that ends inside this last share of
            ``data.max_response_length`` loses up to ``overlong_penalty``. 0: off.
        overlong_penalty: what a response of the full length loses.
    """

    max_in_flight: int = 64
    timeout_s: float = 360.0
    patience_s: float = 600.0
    retry_s: float = 2.0
    max_failures: int = 32
    overlong_share: float = 0.0
    overlong_penalty: float = 1.0

    @classmethod
    def from_config(cls, values: Mapping[str, Any] | None) -> Settings:
        values = dict(values or {})
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"reward.prime: unknown setting {unknown[0]!r}, expected one of {sorted(known)}")
        return cls(**values)


class UnscoredRollout(RuntimeError):
    """The system could not score a rollout. veRL then leaves it out of its group."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def overlong_penalty(n_tokens: int, max_tokens: int, share: float, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), scaled by ``penalty``.

    0 up to ``(1 - share) * max_tokens``, then falls linearly to ``-penalty`` at ``max_tokens``.
    """
    buffer = share * max_tokens
    if buffer <= 0:
        return 0.0
    return -penalty * min(1.0, max(0.0, (n_tokens - (max_tokens - buffer)) / buffer))


def failure_status(error: BaseException) -> str:
    """The system status that an error stands for; ``exception``: a mistake in the reward function."""
    status = getattr(error, "status", None)
    if status is not None:
        return str(getattr(status, "value", status))
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "timeout"
    return "server_error" if isinstance(error, OSError) else "exception"


def describe(compute_score: Callable[..., Any]) -> str:
    """The reward function and its arguments, which hold the server's address, for an error message."""
    kwargs: Mapping[str, Any] = {}
    if isinstance(compute_score, functools.partial):  # veRL binds (function, reward_kwargs)
        compute_score, kwargs = compute_score.args[0], compute_score.args[1]
    shown = ", ".join(f"{key}={value}" for key, value in kwargs.items())
    return f"{getattr(compute_score, '__name__', compute_score)}({shown})"


class PrimeRewardManager(RewardManagerBase):
    """Scores rollouts through ``compute_score(data_source, solution_str, ground_truth, extra_info)``.

    ``solution_str`` keeps special tokens, unlike veRL's own managers: the end token is one, and without it
    nothing tells a finished utterance from one that ran into the length limit.

    The reward function returns a number, or a dictionary with ``score``, the same keys for every sample. It
    is told of a failure by an exception, or by a ``status`` that belongs to the system.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Callable[..., Any],
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.settings = Settings.from_config(config.reward.get("prime"))
        self.max_response_length = config.data.max_response_length
        self._in_flight = asyncio.Semaphore(self.settings.max_in_flight)
        self._is_async = inspect.iscoroutinefunction(
            compute_score.func if isinstance(compute_score, functools.partial) else compute_score
        )
        self._failures_in_a_row = 0
        self._last_success = time.monotonic()

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the last sequence of ``data``.

        Returns:
            ``reward_score`` and ``reward_extra_info``: the function's own keys and ``shaped_score``,
            ``reward_seconds`` (the whole wait) and ``reward_clock`` ("START END", a string because veRL
            averages every number of a validation).

        Raises:
            UnscoredRollout: the system failed; the failure has been reported.
        """
        item = data[-1:][0]
        response_ids = item.batch["responses"]
        n_tokens = int(item.batch["attention_mask"][-response_ids.shape[-1] :].sum())
        fields = item.non_tensor_batch
        arguments = {
            "data_source": fields["data_source"],
            "solution_str": self.tokenizer.decode(response_ids[:n_tokens], skip_special_tokens=False),
            "ground_truth": fields["reward_model"]["ground_truth"],
            "extra_info": {**fields.get("extra_info", {}), "uid": fields.get("uid")},
        }
        begin = time.time()
        async with self._in_flight:
            result = await self._score(arguments, step=fields.get("global_steps"))
        end = time.time()

        penalty = overlong_penalty(
            n_tokens, self.max_response_length, self.settings.overlong_share, self.settings.overlong_penalty
        )
        reward = float(result["score"]) + penalty
        extra = {
            **result,
            "shaped_score": reward,
            "reward_seconds": end - begin,
            "reward_clock": f"{begin:.3f} {end:.3f}",
        }
        return {"reward_score": reward, "reward_extra_info": extra}

    async def _score(self, arguments: dict[str, Any], step: Any) -> dict[str, Any]:
        """Call until there is a score, the failure is not worth waiting for, or patience ends."""
        begin = time.monotonic()
        while True:
            try:
                result = await self._call(arguments)
            except Exception as error:
                status, message = failure_status(error), f"{type(error).__name__}: {error}"
                waited = time.monotonic() - begin
                if status in WORTH_WAITING_FOR and waited + self.settings.retry_s < self.settings.patience_s:
                    logger.warning("%s: %s; trying again", describe(self.compute_score), message)
                    await asyncio.sleep(self.settings.retry_s)
                    continue
                await self._report(status, message, step)
                raise UnscoredRollout(status, message) from error
            self._failures_in_a_row = 0
            self._last_success = time.monotonic()
            return result

    async def _call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """One call within its time-out. A score of a failed system, or none at all, is an error."""
        if self._is_async:
            call = self.compute_score(**arguments)
        else:
            call = asyncio.get_running_loop().run_in_executor(None, lambda: self.compute_score(**arguments))
        try:
            result = await asyncio.wait_for(call, self.settings.timeout_s)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"no score after {self.settings.timeout_s:g} s") from error
        if not isinstance(result, Mapping):
            result = {"score": result}
        status = result.get("status")
        if str(getattr(status, "value", status)) in SYSTEM_STATUSES:
            raise UnscoredRollout(
                str(getattr(status, "value", status)),
                str(result.get("message") or "no message from the server"),
            )
        if result.get("score") is None or not abs(float(result["score"])) < float("inf"):
            raise ValueError(f"the reward function returned score={result.get('score')!r}, expected a finite number")
        return dict(result)

    async def _report(self, status: str, message: str, step: Any) -> None:
        """Tell the trainer that a rollout was left out, and whether there is any use in going on."""
        self._failures_in_a_row += 1
        silent_for = time.monotonic() - self._last_success
        gone = status in WORTH_WAITING_FOR and silent_for >= self.settings.patience_s - self.settings.retry_s
        tag = {
            "status": status,
            "step": None if step is None else int(step),
            "message": f"{describe(self.compute_score)}: {message}",
            "fatal": gone or self._failures_in_a_row >= self.settings.max_failures,
            "failures_in_a_row": self._failures_in_a_row,
            "silent_for_s": round(silent_for, 1),
        }
        tq.init()
        await tq.async_kv_put(key=uuid.uuid4().hex, partition_id=FAILURES, tag=tag)
